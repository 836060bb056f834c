"""Decision of where a delayed message is stored."""

from __future__ import annotations

import pytest

from mqtemplate.delay.divert import Diverted, TimerLimits, divert, strip_broker_properties
from mqtemplate.delay.settings import DelayLevels, slot_of
from mqtemplate.errors import DelayError
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

NOW = 1_767_225_600_500
DAY = 86_400_000


def diverted_or_none(limits: TimerLimits | None = None, **properties: object) -> Diverted | None:
    texts = {name: str(value) for name, value in properties.items()}
    return divert(texts, "orders", 3, NOW, DelayLevels.parse(), limits or TimerLimits())


def timer(**properties: object) -> Diverted:
    diverted = diverted_or_none(**properties)
    assert diverted is not None
    assert diverted.topic == TIMER_TOPIC
    return diverted


def due_ms(**properties: object) -> int:
    return int(timer(**properties).properties["TIMER_DELIVER_MS"])


# --- levels -----------------------------------------------------------------------------------------


def test_a_message_without_a_delay_is_not_diverted() -> None:
    assert diverted_or_none(TAGS="paid", KEYS="4466") is None


@pytest.mark.feature("F2", "F3", "G7", "G8")
def test_a_message_with_a_level_is_stored_in_the_schedule_topic() -> None:
    """The queue is level - 1. Properties have the real topic and queue."""
    assert diverted_or_none(DELAY=3, TAGS="paid") == Diverted(
        topic=SCHEDULE_TOPIC,
        queue_id=2,
        properties={"TAGS": "paid", "DELAY": "3", "__DELAY_MS": "10000", "REAL_TOPIC": "orders", "REAL_QID": "3"},
        delay_ms=10_000,
    )
    assert SCHEDULE_TOPIC == "SCHEDULE_TOPIC_XXXX"


@pytest.mark.feature("G6")
def test_a_level_above_the_highest_is_stored_as_the_highest() -> None:
    """It is limited, not refused."""
    diverted = diverted_or_none(DELAY=99)

    assert diverted is not None
    assert (diverted.queue_id, diverted.properties["DELAY"], diverted.delay_ms) == (17, "18", 7_200_000)


def test_level_zero_means_no_delay() -> None:
    assert diverted_or_none(DELAY=0) is None


def test_a_level_wins_over_every_time() -> None:
    """The times are removed, so that the released message is not delayed again."""
    times = {"TIMER_DELAY_SEC": 9, "TIMER_DELAY_MS": 9, "TIMER_DELIVER_MS": NOW + 9, "__STARTDELIVERTIME": NOW + 9}
    diverted = diverted_or_none(DELAY=1, **times)

    assert diverted is not None
    assert diverted.topic == SCHEDULE_TOPIC
    assert diverted.properties == {"DELAY": "1", "__DELAY_MS": "1000", "REAL_TOPIC": "orders", "REAL_QID": "3"}


@pytest.mark.feature("X11")
def test_the_delay_of_the_level_is_stored_in_the_message() -> None:
    """A queue may be rebuilt after the table has changed. A delay that a producer copied is ignored."""
    diverted = diverted_or_none(DELAY=2, __DELAY_MS=77)

    assert diverted is not None
    assert diverted.properties["__DELAY_MS"] == str(diverted.delay_ms) == "5000"


def test_a_time_beside_level_zero_is_used() -> None:
    assert due_ms(DELAY=0, TIMER_DELAY_MS=9) == NOW + 9


def test_a_level_below_zero_is_refused_with_the_table() -> None:
    with pytest.raises(DelayError, match=r"must be 0\.\.18 \(1=1s 2=5s .* 18=2h\), got -1"):
        diverted_or_none(DELAY=-1)


# --- times ------------------------------------------------------------------------------------------


@pytest.mark.feature("A1", "A2", "A17", "G2", "G4")
@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": 10},
        {"TIMER_DELAY_MS": 10_000},
        {"TIMER_DELIVER_MS": NOW + 10_000},
        {"__STARTDELIVERTIME": NOW + 10_000},
    ],
)
def test_all_delay_properties_lead_to_the_same_due_time(properties: dict[str, int]) -> None:
    """A relative delay is added to the current time."""
    assert due_ms(**properties) == NOW + 10_000


@pytest.mark.feature("A18")
def test_a_relative_delay_counts_from_the_brokers_clock() -> None:
    """The producer's clock does not matter for it. An absolute time is used unchanged."""
    assert due_ms(TIMER_DELAY_MS=700) == NOW + 700
    assert due_ms(TIMER_DELIVER_MS=NOW + 1) == NOW + 1


@pytest.mark.feature("G7")
def test_the_exact_time_and_its_slot_are_stored_in_the_message() -> None:
    """The producer's property is kept. The millisecond is stored beside the slot."""
    assert timer(TIMER_DELAY_MS=1_234).properties == {
        "TIMER_DELAY_MS": "1234",
        "TIMER_DELIVER_MS": str(NOW + 1_234),
        "TIMER_OUT_MS": str(NOW - 500 + 1_000),
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
    }


def test_seconds_win_over_milliseconds_and_these_over_absolute_times() -> None:
    assert due_ms(__STARTDELIVERTIME=NOW + 4, TIMER_DELIVER_MS=NOW + 3) == NOW + 3
    assert due_ms(TIMER_DELIVER_MS=NOW + 3, TIMER_DELAY_MS=2) == NOW + 2
    assert due_ms(TIMER_DELAY_MS=2, TIMER_DELAY_SEC=1) == NOW + 1_000


@pytest.mark.parametrize(("deliver_ms", "slot_ms"), [(5_001, 5_000), (5_999, 5_000), (6_000, 5_000), (6_001, 6_000)])
def test_a_time_on_a_multiple_belongs_to_the_slot_before(deliver_ms: int, slot_ms: int) -> None:
    """That slot is complete when the time has come."""
    assert slot_of(deliver_ms, 1_000) == slot_ms


@pytest.mark.parametrize("past", [{"TIMER_DELAY_MS": 0}, {"TIMER_DELAY_SEC": -5}, {"TIMER_DELIVER_MS": NOW}])
def test_a_time_in_the_past_means_no_delay(past: dict[str, int]) -> None:
    assert diverted_or_none(**past) is None


@pytest.mark.feature("A3")
def test_forty_days_are_accepted_and_a_millisecond_more_is_refused() -> None:
    """The limit is configured, and counted from now."""
    assert due_ms(TIMER_DELAY_MS=40 * DAY) == NOW + 40 * DAY
    with pytest.raises(DelayError, match="is 40d 1ms from now, allowed are 40d; raise"):
        diverted_or_none(TIMER_DELAY_MS=40 * DAY + 1)
    with pytest.raises(DelayError, match="allowed are 1d; raise"):
        diverted_or_none(TimerLimits(max_delay_ms=DAY), TIMER_DELAY_MS=DAY + 1)


@pytest.mark.parametrize(
    "name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME"]
)
@pytest.mark.parametrize("text", ["soon", "1.5", "", "0x10", "١٢", "9" * 19])
def test_the_error_for_a_text_that_is_not_a_number_names_the_property(name: str, text: str) -> None:
    with pytest.raises(DelayError, match=f"property {name} is '.*', expected a whole number"):
        diverted_or_none(**{name: text})


def test_without_timers_a_time_is_refused() -> None:
    with pytest.raises(DelayError, match=r"has no timers; set mqtemplate\.broker\.timer-wheel-enable to true"):
        diverted_or_none(TimerLimits(enabled=False), TIMER_DELAY_MS=5)


def test_a_delete_marker_for_a_due_message_is_refused() -> None:
    with pytest.raises(DelayError, match="was due 5ms ago; only a pending message can be cancelled"):
        diverted_or_none(TIMER_DELIVER_MS=NOW - 5, TIMER_DEL_UNIQKEY="key")


# --- forged properties ----------------------------------------------------------------------------------------


@pytest.mark.feature("G9")
def test_a_producer_cannot_set_the_brokers_properties() -> None:
    """A copied TIMER_OUT_MS does not cancel the delay. A forged REAL_TOPIC does not change the topic."""
    diverted = timer(TIMER_DELAY_MS=5, TIMER_OUT_MS=1, TIMER_ROLL_TIMES=7, REAL_TOPIC="payroll", REAL_QID=9)

    assert diverted.properties["REAL_TOPIC"] == "orders"
    assert diverted.properties["REAL_QID"] == "3"
    assert diverted.properties["TIMER_OUT_MS"] == str(NOW - 500)
    assert "TIMER_ROLL_TIMES" not in diverted.properties


@pytest.mark.feature("G9")
def test_the_brokers_properties_are_removed_from_a_message_without_a_delay() -> None:
    plain = {"TAGS": "paid"}

    assert strip_broker_properties(plain) is plain
    assert strip_broker_properties(plain | {"REAL_TOPIC": "payroll", "TIMER_DEQUEUE_MS": "1"}) == plain
