"""Records of the timer topic: the newest of each timer counts, and a mark deletes the timers of its slot."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.delayed.backlog import TimerId, TimerRecords
from mqtemplate.message import MessageExt, Property
from mqtemplate.topics import TIMER_TOPIC
from tests.brokers.remote.clients import message_ext


def record(msg_id: str, slot_ms: int, at: int = 0, broker_name: str = "broker-a", **properties: str) -> MessageExt:
    given = {
        Property.UNIQ_KEY: msg_id,
        Property.TIMER_OUT_MS: str(slot_ms),
        Property.REAL_TOPIC: "orders",
        **properties,
    }
    return message_ext(
        TIMER_TOPIC, b"%d" % at, properties=given, broker_name=broker_name, queue_offset=at, physical_offset=at
    )


def remaining(*records: MessageExt) -> dict[TimerId, bytes]:
    timers = TimerRecords[bytes](lambda each: each.body)
    for each in records:
        timers.add(each)
    return timers.remaining()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_newest_record_of_a_timer_counts(order: tuple[int, int]) -> None:
    assert list(remaining(*(record("A", 5_000, at) for at in order)).values()) == [b"2"]


@pytest.mark.parametrize("name", ["A", "orders+A"])
def test_a_mark_deletes_the_timer_in_both_forms_of_its_name(name: str) -> None:
    """RocketMQ 5.5 names the id; 5.3 names topic and id."""
    mark = record("A", 5_000, 1, TIMER_DEL_UNIQKEY=name)

    assert remaining(record("A", 5_000), mark, record("B", 5_000)).keys() == {TimerId("broker-a", "B", 5_000)}


def test_a_mark_deletes_timers_that_are_stored_after_it() -> None:
    assert remaining(record("A", 5_000, 0, TIMER_DEL_UNIQKEY="A"), record("A", 5_000, 1)) == {}


def test_a_mark_deletes_no_timer_of_another_slot_or_broker() -> None:
    mark = record("A", 5_000, 1, TIMER_DEL_UNIQKEY="A")

    assert len(remaining(record("A", 6_000), record("A", 5_000, broker_name="broker-b"), mark)) == 2
