"""Held pulls: answered by a message or at their deadline, removed with their connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving

HOLD = PullSysFlag.SUSPEND | PullSysFlag.SUBSCRIPTION


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        serving.send("orders", b"first")
        yield serving


@pytest.fixture
def reader() -> RecordingConnection:
    return RecordingConnection()


def content(response: RemotingCommand) -> tuple[int, int, list[bytes]]:
    """Return the code, the next offset and the bodies."""
    next_offset = response.header(PullMessageResponseHeader).next_begin_offset
    return response.code, next_offset, [message.body for message in decode_messages(response.body, "broker-a")]


def test_a_pull_at_the_end_is_held_until_the_next_message(serving: Serving, reader: RecordingConnection) -> None:
    assert serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader) is None
    serving.step()
    assert reader.replies == []

    serving.send("orders", b"second")
    serving.step()

    assert [content(response) for response in reader.replies] == [(ResponseCode.SUCCESS, 2, [b"second"])]
    assert reader.replies[0].opaque == 7
    assert len(serving.server.hold) == 0


def test_a_pull_that_may_not_be_held_is_answered_at_once(serving: Serving, reader: RecordingConnection) -> None:
    without_flag = serving.pull("group", "orders", 1, sys_flag=PullSysFlag.SUBSCRIPTION, over=reader)
    without_time = serving.pull("group", "orders", 1, sys_flag=HOLD, suspend_timeout_millis=0, over=reader)

    assert content(without_flag) == content(without_time) == (ResponseCode.PULL_NOT_FOUND, 1, [])


def test_a_message_in_another_queue_does_not_answer_the_pull(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)

    serving.send("orders", b"elsewhere", queue_id=1)
    serving.step()

    assert reader.replies == []


def test_at_the_deadline_the_response_has_the_requested_offset(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, suspend_timeout_millis=15_000, over=reader)

    serving.advance(14_999)
    assert reader.replies == []
    serving.advance(1)

    assert [content(response) for response in reader.replies] == [(ResponseCode.PULL_NOT_FOUND, 1, [])]


def test_each_pull_has_its_own_deadline(serving: Serving) -> None:
    soon, late = RecordingConnection(), RecordingConnection()
    serving.pull("group", "orders", 1, sys_flag=HOLD, suspend_timeout_millis=9_000, over=late)
    serving.pull("group", "orders", 1, sys_flag=HOLD, suspend_timeout_millis=3_000, over=soon)

    serving.advance(3_000)

    assert (len(soon.replies), len(late.replies)) == (1, 0)


def test_the_response_at_the_deadline_has_the_offset_after_messages_that_did_not_match(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, subscription="paid", over=reader)

    for _ in range(3):
        serving.send("orders", properties={"TAGS": "open"})
        serving.step()
    assert reader.replies == []
    serving.advance(15_000)

    assert [content(response) for response in reader.replies] == [(ResponseCode.PULL_RETRY_IMMEDIATELY, 4, [])]


def test_a_stream_of_messages_that_do_not_match_does_not_delay_the_deadline(
    serving: Serving, reader: RecordingConnection
) -> None:
    """While the service reads one message, the next one arrives."""
    pull_raw = serving.server.hold._raw.pull

    def pull_while_a_message_arrives(*arguments):
        serving.send("orders", properties={"TAGS": "open"})
        return pull_raw(*arguments)

    serving.pull("group", "orders", 1, sys_flag=HOLD, subscription="paid", over=reader)
    serving.send("orders", properties={"TAGS": "open"})
    serving.server.hold._raw.pull = pull_while_a_message_arrives  # type: ignore[method-assign]

    assert serving.server.hold.step() == serving.clock.now_ms()  # More messages remain, so the step is due again.
    serving.clock.move_ms(15_000)
    serving.server.hold.step()

    assert [response.code for response in reader.replies] == [ResponseCode.PULL_RETRY_IMMEDIATELY]


def test_a_matching_message_after_others_answers_the_pull(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, subscription="price > 10", expression_type="SQL92", over=reader)

    serving.send("orders", b"cheap", {"price": "1"})
    serving.send("orders", b"dear", {"price": "100"})
    serving.step()

    assert [content(response) for response in reader.replies] == [(ResponseCode.SUCCESS, 3, [b"dear"])]


def test_pulls_of_several_groups_are_held_for_one_queue(serving: Serving) -> None:
    readers = [RecordingConnection() for _ in range(3)]
    for number, reader in enumerate(readers):
        serving.pull(f"group-{number}", "orders", 1, sys_flag=HOLD, over=reader)

    serving.send("orders", b"second")
    serving.step()

    assert [[content(response) for response in reader.replies] for reader in readers] == [
        [(ResponseCode.SUCCESS, 2, [b"second"])]
    ] * 3


def test_a_delayed_message_answers_the_pull_when_it_is_due(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)

    serving.send("orders", b"later", {"DELAY": "1"})
    serving.step()
    assert reader.replies == []
    serving.advance(1_000)

    assert [content(response)[2] for response in reader.replies] == [[b"later"]]


def test_a_message_that_arrives_between_the_pull_and_the_hold_is_not_missed(
    serving: Serving, reader: RecordingConnection
) -> None:
    """The store reported the message before the hold watched the topic."""
    pull_raw = serving.server.hold._raw.pull

    def pull_before_a_message_arrives(*arguments):
        found = pull_raw(*arguments)
        if found.max_offset == 1:
            serving.send("orders", b"in between")
        return found

    serving.server.hold._raw.pull = pull_before_a_message_arrives  # type: ignore[method-assign]

    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)
    serving.step()

    assert [content(response)[2] for response in reader.replies] == [[b"in between"]]


def test_a_closed_connection_removes_its_pulls(serving: Serving, reader: RecordingConnection) -> None:
    """A later message answers the pulls of other connections."""
    other = RecordingConnection()
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=other)

    reader.is_open = False
    serving.server.hold.forget(reader)  # type: ignore[arg-type]
    serving.send("orders", b"second")
    serving.step()
    serving.advance(20_000)

    assert (len(reader.replies), len(other.replies), len(serving.server.hold)) == (0, 1, 0)


def test_a_pull_from_a_closed_connection_is_not_held(serving: Serving, reader: RecordingConnection) -> None:
    reader.is_open = False

    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)

    assert len(serving.server.hold) == 0


def test_a_pull_above_the_maximum_is_refused() -> None:
    with Serving(BrokerServerSettings(max_held_pulls=1)) as serving:
        serving.send("orders")
        serving.pull("group", "orders", 1, sys_flag=HOLD)

        response = serving.pull("group", "orders", 1, sys_flag=HOLD)

    assert response.code == ResponseCode.SYSTEM_BUSY
    assert response.remark == (
        "the address 127.0.0.1 may have 1 held pulls at one time, and this request would exceed that; let the client "
        "have fewer, or raise max-held-pulls, max-held-pulls-per-connection or max-address-share"
    )


def test_when_the_server_stops_held_pulls_are_answered_and_others_refused(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)

    serving.server.hold.close(10)
    late = serving.pull("group", "orders", 1, sys_flag=HOLD)

    assert [content(response) for response in reader.replies] == [(ResponseCode.PULL_NOT_FOUND, 1, [])]
    assert late.code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_the_deadlines_of_answered_pulls_are_removed(serving: Serving, reader: RecordingConnection) -> None:
    """The deadlines are far in the future: for a busy queue they would accumulate."""
    for offset in range(1, 3_001):
        serving.pull("group", "orders", offset, sys_flag=HOLD, over=reader)
        serving.send("orders")
        serving.server.hold.step()

    assert len(reader.replies) == 3_000
    assert len(serving.server.hold._deadlines) < 1_100


def test_metrics_count_held_pulls_and_pulled_messages(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 0, sys_flag=HOLD, over=reader)
    serving.pull("group", "orders", 1, sys_flag=HOLD, over=reader)

    snapshot = serving.engine.metrics.snapshot()

    assert (snapshot["server.pulls_held"], snapshot["server.pulled"]) == (1, 1)


def test_every_metric_of_a_server_is_documented(serving: Serving) -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")

    names = {name.partition("{")[0] for name in serving.engine.metrics.snapshot()}  # without labels
    assert [name for name in sorted(names) if f"| `{name}` |" not in page] == []
