"""With and without the fast path a server stores the same records and gives the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.message import Message
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, decode_command, encode_command
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.messages import decode_messages, encode_batch
from mqtemplate.server import Account, AclSettings, Right
from mqtemplate.store.settings import FlushDiskType
from tests.server.fast_path.fast_serving import (
    MAX_OFFSET,
    answers,
    in_one_turn,
    known_producer,
    pull,
    records,
    send,
    serving,
)

SECRET = "a secret that is never shown"
KEY = "shop-owner"
ACL = AclSettings(
    accounts=(
        Account(
            access_key=KEY,
            secret_key=SECRET,
            default_group_perm=Right.SUB,
            topic_perms={"orders": Right.PUB | Right.SUB, "other": Right.SUB},
        ),
    )
)
BATCH, OWN, COMMIT = RequestCode.SEND_BATCH_MESSAGE, PullSysFlag.SUBSCRIPTION, PullSysFlag.COMMIT_OFFSET


class Request(NamedTuple):
    """A request of one kind; its queue, and a number that chooses sizes, values and what is wrong with it."""

    kind: str
    queue_id: int
    number: int


def batch(opaque: int, request: Request, size: int, *, grows: int = 0, **properties: str) -> bytes:
    """Return a batch whose messages have one size, or *grows* more bytes each. Its length is one of several."""
    count = (1, 3, 8, 12, 40, 70)[request.number % 6]
    messages = [
        Message("orders", bytes(size + grows * each), {"UNIQ_KEY": f"B{opaque:04}{each:03}", **properties})
        for each in range(count)
    ]
    code = BATCH if request.number % 2 else RequestCode.SEND_MESSAGE_V2
    return send(opaque, encode_batch(messages), queue_id=request.queue_id, batch=True, code=code)


KINDS: dict[str, Callable[[int, Request], bytes]] = {
    "send": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id),
    "keys": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, properties={"KEYS": f"order-{o} o"}),
    "tag": lambda o, r: send(o, queue_id=r.queue_id, properties={"TAGS": "ab"[r.number % 2]}),
    "property": lambda o, r: send(o, queue_id=r.queue_id, properties={"city": str(o)}),
    "text": lambda o, r: send(o, queue_id=r.queue_id, properties={"city": ("Zürich", '"', "a\\b", "")[r.number % 4]}),
    "level": lambda o, r: send(o, queue_id=r.queue_id, properties={"DELAY": str(r.number % 20)}),
    "timer": lambda o, r: send(o, queue_id=r.queue_id, properties={"TIMER_DELAY_MS": ("500", "soon")[r.number % 2]}),
    "half": lambda o, r: send(o, queue_id=r.queue_id, properties={"TRAN_MSG": "true", "PGROUP": "producers"}),
    "internal": lambda o, r: send(o, queue_id=r.queue_id, properties={"REAL_TOPIC": "else", "CLUSTER": "mine"}),
    "one-way": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, one_way=True),
    "no queue": lambda o, r: send(o, queue_id=(9, -2)[r.number % 2]),
    "topic": lambda o, r: send(o, topic=("other", "SCHEDULE_TOPIC_XXXX", "bad topic")[r.number % 3]),
    "retry": lambda o, r: send(o, topic="%RETRY%billing", queue_id=0),
    "large": lambda o, r: send(o, bytes(9_000), queue_id=r.queue_id),
    "batch": lambda o, r: batch(o, r, r.number % 3 * 50),
    "tagged batch": lambda o, r: batch(o, r, 8, TAGS="a", KEYS="one two"),
    "growing batch": lambda o, r: batch(o, r, 3, grows=1),
    "delayed batch": lambda o, r: batch(o, r, 3, DELAY="2"),
    "bad batch": lambda o, r: send(o, bytes(r.number), queue_id=r.queue_id, batch=True, code=BATCH),
    "command": lambda o, r: encode_command((replace(MAX_OFFSET, opaque=o), RemotingCommand(999, o))[r.number % 2]),
    "pull": lambda o, r: pull(o, r.number, queue_id=r.queue_id, sys_flag=OWN | COMMIT, commit=r.number),
    "pull again": lambda o, r: pull(o, 0, queue_id=r.queue_id),
    "pull tag": lambda o, r: pull(o, r.number, subscription="a", expression_type="TAG"),
    "pull sql": lambda o, r: pull(o, 0, subscription=("TAGS = 'a'", "TAGS =")[r.number % 2], expression_type="SQL92"),
    "pull far": lambda o, r: pull(o, (-1, 1 << 40)[r.number % 2], queue_id=r.queue_id),
    "pull no queue": lambda o, r: pull(o, queue_id=(-1, 9)[r.number % 2]),
    "pull topic": lambda o, r: pull(o, topic=("missing", "orders", "other")[r.number % 3], sys_flag=0),
    "pull limits": lambda o, r: pull(o, max_msg_nums=(0, 3, 1_000)[r.number % 3], max_msg_bytes=500),
    "pull group": lambda o, r: pull(o, consumer_group="auditing", sys_flag=OWN | COMMIT, commit=r.number),
}
SENDS = [kind for kind in KINDS if not kind.startswith("pull")]
REQUESTS = st.lists(
    st.builds(Request, st.sampled_from(sorted(KINDS)), st.integers(0, 3), st.integers(0, 60)), max_size=40
)


@pytest.fixture(autouse=True, scope="module")
def _one_turn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        in_one_turn(patch)
        yield


class Results(NamedTuple):
    """All that requests leave behind, to compare; *accepted* counts requests that the fast path answered."""

    answers: dict[int, RemotingCommand]
    messages: dict[int, Any]
    units: list[Any]
    committed: list[int | None]
    records: list[Any]


def results_of(
    requests: Sequence[Request],
    *,
    fast_path: bool,
    flush: FlushDiskType = FlushDiskType.ASYNC_FLUSH,
    acl: AclSettings | None = None,
    **limits: int,
) -> Results:
    """Send requests at once to a server, and return what they leave behind.

    A queue that is negative is chosen at random, so each server draws the same numbers.
    """
    frames = [KINDS[request.kind](10 + number, request) for number, request in enumerate(requests)]
    learned = [Request("batch", 0, each) for each in (3, 3, 2, 2)] + [Request("pull again", 0, 0)] * 2
    signed = list if acl is None else _signed
    random.seed(0)
    with serving(flush, fast_path=fast_path, acl=acl, max_message_size=8_000, **limits) as server:
        with known_producer(server, signed) as peer:
            for opaque, request in enumerate(learned, start=5):
                peer.invoke_frame(*signed([KINDS[request.kind](opaque, request)]))
            peer.send(b"".join(signed([*frames, encode_command(replace(MAX_OFFSET, opaque=9_999))])))
            one_ways = sum(request.kind == "one-way" for request in requests)
            found = answers(peer, len(frames) - one_ways + 1)
        store, offset = server.engine.store, server.engine.engine.offsets.offset
        queues = [store.consume_queue("orders", queue_id) for queue_id in range(4)]
        return Results(
            {opaque: replace(response, body=b"") for opaque, response in found.items()},
            {opaque: _messages_of(response) for opaque, response in found.items()},
            [queue.unit_tuples(0, queue.max_offset) for queue in queues],
            [offset(group, "orders", queue_id) for group in ("billing", "auditing") for queue_id in range(4)],
            records(server),
        )


def _signed(frames: Sequence[bytes]) -> list[bytes]:
    commands = [decode_command(frame) for frame in frames]
    for command in commands:
        sign_command(command, KEY, SECRET)
    return [encode_command(command) for command in commands]


def _messages_of(response: RemotingCommand) -> list[Any]:
    """Return the messages of a pull, without the port of the producer."""
    found = decode_messages(response.body, "broker-a")
    return [replace(message, born_host=message.born_host._replace(port=0)) for message in found]


def assert_equal_results(requests: Sequence[Request], **options: Any) -> Results:
    fast, slow = (results_of(requests, fast_path=fast_path, **options) for fast_path in (True, False))
    for with_fast_path, without in zip(fast, slow, strict=True):
        assert with_fast_path == without
    return fast


@settings(max_examples=25, deadline=None)
@given(REQUESTS)
def test_any_requests_leave_the_same_records_and_answers(requests: list[Request]) -> None:
    assert_equal_results(requests)


@settings(max_examples=10, deadline=None)
@given(REQUESTS)
def test_any_signed_requests_leave_the_same_records_and_answers(requests: list[Request]) -> None:
    """With access control each request is a command, but properties, batches and records are still read quickly."""
    assert_equal_results(requests, acl=ACL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flush", FlushDiskType)
def test_a_pipeline_stores_and_answers_as_commands_do(
    seed: int, flush: FlushDiskType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests, most of them frequent ones. With SYNC_FLUSH the flush decides when a pull finds a message."""
    chance, counts = random.Random(seed), list[int]()
    kinds = [*SENDS, *["send", "keys", "batch"] * 12, "tag"]
    if flush is FlushDiskType.ASYNC_FLUSH:
        kinds += [kind for kind in KINDS if kind not in SENDS] + ["pull", "pull again"] * 10
    requests = [Request(chance.choice(kinds), chance.randrange(4), chance.randrange(60)) for _ in range(250)]
    reply = Connection.reply_together

    def noted(self: Connection, opaques: Sequence[int], parts: Sequence[bytes]) -> None:
        counts.append(len(opaques))
        reply(self, opaques, parts)

    monkeypatch.setattr(Connection, "reply_together", noted)

    found = assert_equal_results(requests, flush=flush)

    assert sum(counts) > 100, "the pipeline answers most of the frequent requests"
    assert max(counts) > 3
    assert len(found.records) > 500


@pytest.mark.parametrize("seed", range(3))
def test_batches_at_the_ends_of_files_leave_the_same_records_and_answers(seed: int) -> None:
    """Some do not fit into the rest of a file of the log."""
    chance = random.Random(seed)
    kinds = ["batch", "batch", "tagged batch", "growing batch", "delayed batch"]
    requests = [Request(chance.choice(kinds), chance.randrange(4), chance.randrange(60)) for _ in range(60)]

    found = assert_equal_results(requests, mapped_file_size_commit_log=40_000)

    assert len(found.records) > 500
