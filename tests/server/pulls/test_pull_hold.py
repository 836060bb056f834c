"""Held pulls: races, and what they leave behind. `held_pulls.script` has the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.messages import decode_messages
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

    assert [message.body for message in decode_messages(reader.replies[0].body, "broker-a")] == [b"in between"]


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
