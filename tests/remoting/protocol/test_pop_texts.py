"""The texts in the fields of a response to a pop are what RocketMQ's `ExtraInfoUtil` writes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.protocol.headers.pop import (
    PopMessageResponseHeader,
    PoppedQueue,
    msg_offset_info,
    order_count_info,
    parse_queues,
    start_offset_info,
)
from tests.remoting.protocol.golden_file import golden


def test_the_texts_are_rocketmqs() -> None:
    """A topic, its retry topic, and the retry topic with the second form of the name."""
    popped = PoppedQueue(0, 3, 17, [17, 19], {17: 2, 19: 1})
    retried = PoppedQueue(1, 0, 0, [0])

    assert (
        start_offset_info([popped, retried, PoppedQueue(2, 1, 9_000_000_000, [])]) == golden("pop")["startOffsetInfo"]
    )
    assert msg_offset_info([popped, retried]) == golden("pop")["msgOffsetInfo"]
    assert order_count_info([popped, retried]) == golden("pop")["orderCountInfo"]


def test_without_queues_each_text_is_empty() -> None:
    assert (start_offset_info([]), msg_offset_info([]), order_count_info([])) == ("", "", "")


_offsets = st.lists(st.integers(0, 1 << 62), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def _queues(draw: st.DrawFn) -> list[PoppedQueue]:
    keys = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=4, unique=True))
    queues = []
    for kind, queue_id in keys:
        offsets = draw(_offsets)
        counts = {offset: draw(st.integers(0, 16)) for offset in offsets} if draw(st.booleans()) else {}
        queues.append(PoppedQueue(kind, queue_id, offsets[0], offsets, counts))
    return queues


@given(queues=_queues())
def test_a_client_reads_what_was_written(queues: list[PoppedQueue]) -> None:
    header = PopMessageResponseHeader(
        pop_time=1,
        invisible_time=2,
        revive_qid=0,
        rest_num=0,
        start_offset_info=start_offset_info(queues),
        msg_offset_info=msg_offset_info(queues),
        order_count_info=order_count_info(queues),
    )

    assert parse_queues(header) == queues
