"""Copies that RocketMQ released without a link to the delayed record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from mqtemplate.delay.replay import ForeignCopies
from mqtemplate.record.codec import RecordDraft, StoredRecord, parse_record
from mqtemplate.record.properties import encode_properties
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

LEVEL = {"UNIQ_KEY": "A1", "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "2", "KEYS": "4466"}
TIMER = {"UNIQ_KEY": "A1", "TIMER_OUT_MS": "5000", "REAL_TOPIC": "orders", "REAL_QID": "2"}

_offsets: Iterator[int] = count(0, 10_000)


def stored(topic: str, properties: dict[str, str], **changes: int) -> StoredRecord:
    """Return a record as it is read from the log, each with its own offset and store time."""
    offset = next(_offsets)
    draft = RecordDraft(topic, 2, b"body", encode_properties(properties), born_timestamp=77)
    for name, value in changes.items():
        setattr(draft, name, value)
    return parse_record(draft.encode(0, offset, offset, bytes(8)))


@pytest.mark.feature("D8", "D9")
@pytest.mark.parametrize(("source_topic", "properties"), [(SCHEDULE_TOPIC, LEVEL), (TIMER_TOPIC, TIMER)])
def test_a_released_copy_is_matched_to_the_delayed_record(source_topic: str, properties: dict[str, str]) -> None:
    """RocketMQ keeps body and properties, in any order, and adds its own times."""
    copies = ForeignCopies()
    copies.replay(stored("orders", dict(reversed(properties.items())) | {"TIMER_DEQUEUE_MS": "6001"}))

    assert copies.contains(stored(source_topic, properties))


@pytest.mark.parametrize(
    "other",
    [
        {"UNIQ_KEY": "A2"},
        {"DELAY": "4"},
        {"REAL_TOPIC": "%RETRY%billing"},
        {"REAL_QID": "3"},
        {"reconsume_times": 1},
        {"born_timestamp": 78},
        {"body_crc": 1},
    ],
)
def test_a_message_that_differs_in_any_kept_field_is_still_pending(other: dict[str, str | int]) -> None:
    """A retry has the id of the message that it repeats, but other fields."""
    copies = ForeignCopies()
    copies.replay(stored("orders", LEVEL))

    texts = {name: value for name, value in other.items() if isinstance(value, str)}
    numbers = {name: value for name, value in other.items() if isinstance(value, int)}
    record = stored(SCHEDULE_TOPIC, LEVEL | texts)._replace(**numbers)

    assert not copies.contains(record)


@pytest.mark.parametrize(
    "record",
    [
        stored("orders", {"KEYS": "4466", "UNIQ_KEY": "A1"}),
        stored("orders", LEVEL, prepared_transaction_offset=8),
        stored(SCHEDULE_TOPIC, LEVEL),
        stored("payroll", LEVEL),
        stored("orders", {name: value for name, value in LEVEL.items() if name != "DELAY"}),
    ],
    ids=["never delayed", "ours, linked", "still pending", "another topic", "without a delay"],
)
def test_other_records_are_not_copies(record: StoredRecord) -> None:
    copies = ForeignCopies()
    copies.replay(record)

    assert len(copies) == 0
    assert not copies.contains(stored(SCHEDULE_TOPIC, LEVEL))
    assert copies.last_timestamp == -1


def test_last_timestamp_is_the_store_time_of_the_newest_copy() -> None:
    copies = ForeignCopies()
    first, second = stored("orders", LEVEL), stored("orders", TIMER)
    copies.replay(second)
    copies.replay(first)

    assert copies.last_timestamp == second.store_timestamp


def test_a_copy_may_be_replayed_twice_and_after_a_lookup() -> None:
    copies = ForeignCopies()
    first = stored("orders", LEVEL)
    copies.replay(first)
    copies.replay(first)
    assert copies.contains(stored(SCHEDULE_TOPIC, LEVEL))
    copies.replay(stored("orders", TIMER))

    assert copies.contains(stored(TIMER_TOPIC, TIMER))
    assert copies.contains(stored(SCHEDULE_TOPIC, LEVEL))


def test_a_rolled_timer_replaces_the_record_with_one_roll_less() -> None:
    """Both are in the timer topic, and differ in the number of rolls."""
    copies = ForeignCopies()
    rolled = stored(TIMER_TOPIC, TIMER | {"TIMER_ROLL_TIMES": "2"})
    before = [stored(TIMER_TOPIC, TIMER | {"TIMER_ROLL_TIMES": str(rolls)}) for rolls in (0, 1, 2)]
    copies.replay(rolled)

    assert copies.rolls_end == rolled.physical_offset + 1
    assert copies.last_timestamp == -1
    earlier = [record._replace(physical_offset=rolled.physical_offset - 1) for record in before]
    assert [copies.contains(record) for record in earlier] == [False, True, False]
    assert not copies.contains(before[1]), "it is after the rolled record"
