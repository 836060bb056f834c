"""The table of delay levels."""

from __future__ import annotations

import pytest

from mqtemplate.delay.schedule_message_service import level_of_queue
from mqtemplate.delay.settings import DelayLevels, tags_code_of
from mqtemplate.errors import ConfigurationError, DelayError
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import encode_properties
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import ForeignDraft, foreign_level_message

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


@pytest.mark.feature("A7", "F13", "G3")
def test_the_default_table_has_rocketmqs_18_levels() -> None:
    """1s 5s 10s 30s, the minutes 1 to 10, 20m 30m 1h 2h, in the order of the levels."""
    levels = DelayLevels.parse()

    minutes = [minute * MINUTE for minute in range(1, 11)]
    expected = [SECOND, 5 * SECOND, 10 * SECOND, 30 * SECOND, *minutes, 20 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR]
    assert list(levels.delays_ms) == expected
    assert levels.max_level == 18


@pytest.mark.feature("B1", "F6")
def test_levels_are_numbered_from_one() -> None:
    """The first level is in queue number 0."""
    assert level_of_queue(2) == 3


@pytest.mark.feature("B1", "B2", "B3", "E10", "F6", "F7")
@pytest.mark.parametrize(
    ("text", "level", "delay_ms"),
    [
        (DelayLevels.parse().text, 3, 10 * SECOND),
        (DelayLevels.parse().text + " 1d", 19, DAY),  # an appended day
        *(("7s 7m 7h 7d", level, 7 * unit_ms) for level, unit_ms in enumerate([SECOND, MINUTE, HOUR, DAY], start=1)),
        *(("90s 5s 10s", level, s * SECOND) for level, s in enumerate([90, 5, 10], start=1)),  # it is not sorted
        ("30s", 2, SECOND),  # the table does not have it
    ],
)
def test_a_level_is_a_position_in_the_table_whatever_its_delay(text: str, level: int, delay_ms: int) -> None:
    assert DelayLevels.parse(text).delay_ms(level) == delay_ms


def test_entries_are_separated_by_any_number_of_blanks() -> None:
    """RocketMQ does not start with a double blank. It is not ambiguous, so we accept it."""
    assert DelayLevels.parse("  1s   5s\t10s\n") == DelayLevels.parse("1s 5s 10s")


# --- levels of messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("topic", ["orders", "%RETRY%billing"])
def test_a_level_of_the_table_is_read(topic: str) -> None:
    assert [DelayLevels.parse().read(text, topic) for text in ("0", "1", "18")] == [0, 1, 18]


@pytest.mark.parametrize("level", ["4", "99", "9" * 18])
def test_the_error_for_a_level_that_the_table_does_not_have_says_what_to_do(level: str) -> None:
    with pytest.raises(DelayError) as refused:
        DelayLevels.parse("1s 10s 2h").read(level, "orders")

    assert str(refused.value) == (
        f"the delay level must be 0..3 (1=1s 2=10s 3=2h), got {level}; 0 means no delay, for other delays pass delay= "
        "or deliver_at=, for a longer table set mqtemplate.broker.message-delay-level, and for RocketMQ's rule, which "
        "takes the highest level instead, mqtemplate.broker.clamp-delay-level=true"
    )


@pytest.mark.parametrize("is_clamping", [False, True])
@pytest.mark.parametrize("topic", ["orders", "%RETRY%billing"])
def test_a_negative_level_and_a_text_that_is_no_number_are_always_refused(topic: str, is_clamping: bool) -> None:
    levels = DelayLevels.parse("1s 10s", is_clamping=is_clamping)

    with pytest.raises(DelayError) as refused:
        levels.read("-1", topic)
    assert str(refused.value) == (
        "the delay level must be 0..2 (1=1s 2=10s), got -1; 0 means no delay, for other delays pass delay= or "
        "deliver_at="
    )
    with pytest.raises(DelayError, match="property DELAY is 'soon', expected a whole number"):
        levels.read("soon", topic)


@pytest.mark.feature("G6")
def test_with_rocketmqs_rule_a_level_above_the_highest_is_the_highest() -> None:
    assert DelayLevels.parse("1s 10s", is_clamping=True).read("99", "orders") == 2


def test_the_level_of_a_retry_is_limited_in_any_case() -> None:
    """It follows from the number of retries, and the application does not choose it."""
    assert DelayLevels.parse("1s 10s").read("19", "%RETRY%billing") == 2


@pytest.mark.feature("F11")
@pytest.mark.parametrize("token", ["10", "10x", "s", "-5s", "1.5h", "10S", "5 m", "99999999999d"])
def test_the_error_for_a_bad_entry_names_it_and_the_allowed_form(token: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"entry 2 is '\S+'; allowed is a whole number and a unit, s, m, h or d"
    ):
        DelayLevels.parse(f"1s {token}")


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="message-delay-level is empty; give delays such as"):
        DelayLevels.parse("  ")


def test_the_table_is_described_with_level_numbers() -> None:
    assert DelayLevels.parse("90s 5s").describe() == "1=90s 2=5s"


def code_of(record: StoredRecord, levels: DelayLevels) -> int:
    return tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, levels)


@pytest.mark.feature("B6")
def test_a_rebuilt_queue_has_the_same_due_times(engine: DelayEngine) -> None:
    """The recovery computes the tags code of each record: in the schedule topic, store time plus delay."""
    engine.send(b"late", DELAY=2, TAGS="paid")
    engine.send(b"plain", TAGS="paid")

    [late], [plain] = engine.delayed_records(queue_id=1), engine.delayed_records("orders")

    assert code_of(late, engine.levels) == late.store_timestamp + 5 * SECOND
    assert code_of(plain, engine.levels) == 3433164  # "paid".hashCode() in Java


@pytest.mark.feature("X11", "D11")
def test_a_rebuilt_queue_keeps_the_delays_of_an_earlier_table(engine: DelayEngine) -> None:
    """The message contains the delay that its level had when it was sent."""
    engine.send(b"", DELAY=2)
    [record] = engine.delayed_records(queue_id=1)

    assert code_of(record, DelayLevels.parse("1m")) == record.store_timestamp + 5 * SECOND


def test_the_current_table_gives_the_delay_of_rocketmqs_messages(engine: DelayEngine) -> None:
    """A level above the highest counts as the highest, as in RocketMQ."""
    engine.put(foreign_level_message(b"", 2, 5 * SECOND))
    [record] = engine.delayed_records(queue_id=1)

    assert code_of(record, DelayLevels.parse("1m 2m 3m")) == record.store_timestamp + 2 * MINUTE
    assert code_of(record, DelayLevels.parse("1m")) == record.store_timestamp + 1 * MINUTE


def test_a_delay_that_rocketmq_copied_to_a_retry_is_ignored(engine: DelayEngine) -> None:
    """RocketMQ keeps all properties of a message that a consumer sends back, and sets another level."""
    properties = {"__DELAY_MS": "1000", "REAL_TOPIC": "%RETRY%billing", "DELAY": "3", "REAL_QID": "0"}
    engine.put(ForeignDraft(SCHEDULE_TOPIC, 2, b"", encode_properties(properties), delay_ms=10 * SECOND))
    [record] = engine.delayed_records(queue_id=2)

    assert code_of(record, engine.levels) == record.store_timestamp + 10 * SECOND


@pytest.mark.feature("D13")
@pytest.mark.parametrize("level", ["", "x", "-1", "0", "9" * 5_000])
def test_a_message_without_a_valid_level_has_the_code_of_its_tag(engine: DelayEngine, level: str) -> None:
    """It is due at once, and goes to the dead-letter topic."""
    engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"", encode_properties({"DELAY": level, "TAGS": "paid"})))
    [record] = engine.delayed_records()

    assert code_of(record, engine.levels) == 3433164
