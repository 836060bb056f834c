"""Pulls that wait: woken by what they want, ended by their time, dropped with their connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageResponseHeader
from mqtemplate.remoting.protocol.messages import decode_messages
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import RecordingConnection, Serving

WAIT = PullSysFlag.SUSPEND | PullSysFlag.SUBSCRIPTION


@pytest.fixture
def serving():
    with Serving() as serving:
        serving.send("orders", b"first")
        yield serving


@pytest.fixture
def reader() -> RecordingConnection:
    return RecordingConnection()


def told(answer: RemotingCommand) -> tuple[int, int, list[bytes]]:
    """Code, where to go on, bodies."""
    next_offset = answer.header(PullMessageResponseHeader).next_begin_offset
    return answer.code, next_offset, [message.body for message in decode_messages(answer.body, "broker-a")]


def test_a_pull_at_the_end_waits_and_is_answered_by_the_next_message(
    serving: Serving, reader: RecordingConnection
) -> None:
    assert serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader) is None
    serving.step()
    assert reader.replies == []

    serving.send("orders", b"second")
    serving.step()

    assert [told(answer) for answer in reader.replies] == [(ResponseCode.SUCCESS, 2, [b"second"])]
    assert reader.replies[0].opaque == 7
    assert len(serving.server.hold) == 0


def test_a_pull_that_may_not_wait_is_answered_at_once(serving: Serving, reader: RecordingConnection) -> None:
    bit_is_clear = serving.pull("group", "orders", 1, sys_flag=PullSysFlag.SUBSCRIPTION, over=reader)
    no_time = serving.pull("group", "orders", 1, sys_flag=WAIT, suspend_timeout_millis=0, over=reader)

    assert told(bit_is_clear) == told(no_time) == (ResponseCode.PULL_NOT_FOUND, 1, [])


def test_a_message_in_another_queue_wakes_nobody(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)

    serving.send("orders", b"elsewhere", queue_id=1)
    serving.step()

    assert reader.replies == []


def test_its_time_ends_it_with_the_offset_it_had(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, suspend_timeout_millis=15_000, over=reader)

    serving.advance(14_999)
    assert reader.replies == []
    serving.advance(1)

    assert [told(answer) for answer in reader.replies] == [(ResponseCode.PULL_NOT_FOUND, 1, [])]


def test_each_pull_ends_at_its_own_time(serving: Serving) -> None:
    soon, late = RecordingConnection(), RecordingConnection()
    serving.pull("group", "orders", 1, sys_flag=WAIT, suspend_timeout_millis=9_000, over=late)
    serving.pull("group", "orders", 1, sys_flag=WAIT, suspend_timeout_millis=3_000, over=soon)

    serving.advance(3_000)

    assert (len(soon.replies), len(late.replies)) == (1, 0)


def test_messages_that_are_not_wanted_let_it_wait_and_its_end_leads_past_them(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, subscription="paid", over=reader)

    for _ in range(3):
        serving.send("orders", properties={"TAGS": "open"})
        serving.step()
    assert reader.replies == []
    serving.advance(15_000)

    assert [told(answer) for answer in reader.replies] == [(ResponseCode.PULL_RETRY_IMMEDIATELY, 4, [])]


def test_a_stream_of_messages_that_are_not_wanted_does_not_put_off_the_end(
    serving: Serving, reader: RecordingConnection
) -> None:
    """While it looks at one, the next one comes."""
    pull_raw = serving.server.hold._raw.pull

    def meanwhile_another_comes(*asked):
        serving.send("orders", properties={"TAGS": "open"})
        return pull_raw(*asked)

    serving.pull("group", "orders", 1, sys_flag=WAIT, subscription="paid", over=reader)
    serving.send("orders", properties={"TAGS": "open"})
    serving.server.hold._raw.pull = meanwhile_another_comes  # type: ignore[method-assign]

    assert serving.server.hold.step() == serving.clock.now_ms()  # there is more, and it is not done
    serving.clock.move_ms(15_000)
    serving.server.hold.step()

    assert [answer.code for answer in reader.replies] == [ResponseCode.PULL_RETRY_IMMEDIATELY]


def test_it_is_woken_by_the_one_it_wants_behind_those_it_does_not(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, subscription="price > 10", expression_type="SQL92", over=reader)

    serving.send("orders", b"cheap", {"price": "1"})
    serving.send("orders", b"dear", {"price": "100"})
    serving.step()

    assert [told(answer) for answer in reader.replies] == [(ResponseCode.SUCCESS, 3, [b"dear"])]


def test_several_groups_may_wait_at_one_queue(serving: Serving) -> None:
    readers = [RecordingConnection() for _ in range(3)]
    for number, reader in enumerate(readers):
        serving.pull(f"group-{number}", "orders", 1, sys_flag=WAIT, over=reader)

    serving.send("orders", b"second")
    serving.step()

    assert [[told(answer) for answer in reader.replies] for reader in readers] == [
        [(ResponseCode.SUCCESS, 2, [b"second"])]
    ] * 3


def test_a_delayed_message_wakes_it_when_it_is_due(serving: Serving, reader: RecordingConnection) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)

    serving.send("orders", b"later", {"DELAY": "1"})
    serving.step()
    assert reader.replies == []
    serving.advance(1_000)

    assert [told(answer)[2] for answer in reader.replies] == [[b"later"]]


def test_a_message_that_comes_between_the_look_and_the_hold_is_not_missed(
    serving: Serving, reader: RecordingConnection
) -> None:
    """The store rang for it while nobody was listening yet."""
    pull_raw = serving.server.hold._raw.pull

    def then_a_message_comes(*asked):
        found = pull_raw(*asked)
        if found.max_offset == 1:
            serving.send("orders", b"in between")
        return found

    serving.server.hold._raw.pull = then_a_message_comes  # type: ignore[method-assign]

    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)
    serving.step()

    assert [told(answer)[2] for answer in reader.replies] == [[b"in between"]]


def test_a_connection_that_ends_takes_its_pulls_with_it(serving: Serving, reader: RecordingConnection) -> None:
    """Trap 40: and a message that comes later harms nobody."""
    other = RecordingConnection()
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=other)

    reader.is_open = False
    serving.server.hold.forget(reader)  # type: ignore[arg-type]
    serving.send("orders", b"second")
    serving.step()
    serving.advance(20_000)

    assert (len(reader.replies), len(other.replies), len(serving.server.hold)) == (0, 1, 0)


def test_a_pull_over_a_connection_that_ended_meanwhile_is_not_kept(
    serving: Serving, reader: RecordingConnection
) -> None:
    reader.is_open = False

    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)

    assert len(serving.server.hold) == 0


def test_one_pull_too_many_is_told_that_the_broker_is_busy() -> None:
    with Serving(BrokerServerSettings(max_held_pulls=1)) as serving:
        serving.send("orders")
        serving.pull("group", "orders", 1, sys_flag=WAIT)

        answer = serving.pull("group", "orders", 1, sys_flag=WAIT)

    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert "1 pulls wait for messages already" in answer.remark


def test_the_end_of_the_server_answers_what_waits_and_takes_no_more(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)

    serving.server.hold.close()
    late = serving.pull("group", "orders", 1, sys_flag=WAIT)

    assert [told(answer) for answer in reader.replies] == [(ResponseCode.PULL_NOT_FOUND, 1, [])]
    assert late.code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_pulls_that_were_answered_leave_nothing_behind(serving: Serving, reader: RecordingConnection) -> None:
    """Their deadlines are far: a busy queue would pile them up."""
    for offset in range(1, 3_001):
        serving.pull("group", "orders", offset, sys_flag=WAIT, over=reader)
        serving.send("orders")
        serving.server.hold.step()

    assert len(reader.replies) == 3_000
    assert len(serving.server.hold._deadlines) < 1_100


def test_the_metrics_tell_how_many_wait_and_how_many_messages_were_given(
    serving: Serving, reader: RecordingConnection
) -> None:
    serving.pull("group", "orders", 0, sys_flag=WAIT, over=reader)
    serving.pull("group", "orders", 1, sys_flag=WAIT, over=reader)

    snapshot = serving.engine.metrics.snapshot()

    assert (snapshot["server.pulls_held"], snapshot["server.pulled"]) == (1, 1)


def test_every_metric_of_a_server_is_described(serving: Serving) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert [name for name in serving.engine.metrics.snapshot() if f"| `{name}` |" not in page] == []
