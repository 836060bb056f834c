"""The table of delay levels."""

from __future__ import annotations

import pytest

from mqtemplate.delay.schedule_message_service import level_of_queue
from mqtemplate.delay.settings import DelayLevels, tags_code_of
from mqtemplate.errors import ConfigurationError
from mqtemplate.record.codec import RecordDraft
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
    """Level 3 is the third entry, 10 s. Its queue is number 2."""
    assert DelayLevels.parse().delay_ms(3) == 10 * SECOND
    assert level_of_queue(2) == 3


@pytest.mark.feature("B3")
def test_all_four_units_are_read() -> None:
    assert DelayLevels.parse("7s 7m 7h 7d").delays_ms == (7 * SECOND, 7 * MINUTE, 7 * HOUR, 7 * DAY)


@pytest.mark.feature("B2")
def test_an_appended_day_is_level_19() -> None:
    levels = DelayLevels.parse(DelayLevels.parse().text + " 1d")

    assert levels.delay_ms(19) == DAY


@pytest.mark.feature("E10")
def test_a_level_is_a_position_in_the_table_whatever_its_delay() -> None:
    """The first level may be 90 s and the second 5 s. The table is not sorted."""
    levels = DelayLevels.parse("90s 5s 10s")

    assert [levels.delay_ms(level) for level in (1, 2, 3)] == [90 * SECOND, 5 * SECOND, 10 * SECOND]


def test_entries_are_separated_by_any_number_of_blanks() -> None:
    """RocketMQ does not start with a double blank. It is not ambiguous, so we accept it."""
    assert DelayLevels.parse("  1s   5s\t10s\n") == DelayLevels.parse("1s 5s 10s")


@pytest.mark.feature("G6")
def test_a_level_above_the_highest_is_the_highest() -> None:
    assert DelayLevels.parse().clamp(99) == 18


@pytest.mark.feature("F7")
def test_a_level_that_the_table_does_not_have_means_one_second() -> None:
    assert DelayLevels.parse("30s").delay_ms(2) == SECOND


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


@pytest.mark.feature("B6")
def test_a_rebuilt_queue_has_the_same_due_times(engine: DelayEngine) -> None:
    """The recovery computes the tags code of each record: in the schedule topic, store time plus delay."""
    engine.send(b"late", DELAY=2, TAGS="paid")
    engine.send(b"plain", TAGS="paid")

    [late], [plain] = engine.delayed_records(queue_id=1), engine.delayed_records("orders")

    assert (
        tags_code_of(late.topic, late.properties_bytes, late.store_timestamp, engine.levels)
        == late.store_timestamp + 5 * SECOND
    )
    assert (
        tags_code_of(plain.topic, plain.properties_bytes, plain.store_timestamp, engine.levels) == 3433164
    )  # "paid".hashCode() in Java


@pytest.mark.feature("X11", "D11")
def test_a_rebuilt_queue_keeps_the_delays_of_an_earlier_table(engine: DelayEngine) -> None:
    """The message contains the delay that its level had when it was sent."""
    engine.send(b"", DELAY=2)
    [record] = engine.delayed_records(queue_id=1)

    assert (
        tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, DelayLevels.parse("1m"))
        == record.store_timestamp + 5 * SECOND
    )


def test_the_current_table_gives_the_delay_of_rocketmqs_messages(engine: DelayEngine) -> None:
    """A level above the highest counts as the highest, as in RocketMQ."""
    engine.put(foreign_level_message(b"", 2, 5 * SECOND))
    [record] = engine.delayed_records(queue_id=1)

    assert (
        tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, DelayLevels.parse("1m 2m 3m"))
        == record.store_timestamp + 2 * MINUTE
    )
    assert (
        tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, DelayLevels.parse("1m"))
        == record.store_timestamp + 1 * MINUTE
    )


def test_a_delay_that_rocketmq_copied_to_a_retry_is_ignored(engine: DelayEngine) -> None:
    """RocketMQ keeps all properties of a message that a consumer sends back, and sets another level."""
    properties = {"__DELAY_MS": "1000", "REAL_TOPIC": "%RETRY%billing", "DELAY": "3", "REAL_QID": "0"}
    engine.put(ForeignDraft(SCHEDULE_TOPIC, 2, b"", encode_properties(properties), delay_ms=10 * SECOND))
    [record] = engine.delayed_records(queue_id=2)

    assert (
        tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, engine.levels)
        == record.store_timestamp + 10 * SECOND
    )


@pytest.mark.feature("D13")
@pytest.mark.parametrize("level", ["", "x", "-1", "0", "9" * 5_000])
def test_a_message_without_a_valid_level_has_the_code_of_its_tag(engine: DelayEngine, level: str) -> None:
    """It is due at once, and goes to the dead-letter topic."""
    engine.put(RecordDraft(SCHEDULE_TOPIC, 0, b"", encode_properties({"DELAY": level, "TAGS": "paid"})))
    [record] = engine.delayed_records()

    assert tags_code_of(record.topic, record.properties_bytes, record.store_timestamp, engine.levels) == 3433164
