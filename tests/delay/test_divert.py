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
    """With RocketMQ's rule, and for a retry."""
    for topic, levels in (("orders", DelayLevels.parse(is_clamping=True)), ("%RETRY%billing", DelayLevels.parse())):
        diverted = divert({"DELAY": "99"}, topic, 3, NOW, levels, TimerLimits())

        assert diverted is not None
        assert (diverted.queue_id, diverted.properties["DELAY"], diverted.delay_ms) == (17, "18", 7_200_000)


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


# --- times ------------------------------------------------------------------------------------------


@pytest.mark.feature("A1", "A2", "A17", "A18", "G2", "G4")
@pytest.mark.parametrize(
    ("properties", "after_ms"),
    [
        # a relative delay counts from the broker's clock; the producer's clock does not matter
        ({"TIMER_DELAY_SEC": 10}, 10_000),
        ({"TIMER_DELAY_MS": 10_000}, 10_000),
        ({"TIMER_DELIVER_MS": NOW + 10_000}, 10_000),
        ({"__STARTDELIVERTIME": NOW + 10_000}, 10_000),
        ({"TIMER_DELIVER_MS": NOW + 1}, 1),
        ({"DELAY": 0, "TIMER_DELAY_MS": 9}, 9),  # level zero means no delay
        # seconds win over milliseconds, and these over absolute times
        ({"__STARTDELIVERTIME": NOW + 4, "TIMER_DELIVER_MS": NOW + 3}, 3),
        ({"TIMER_DELIVER_MS": NOW + 3, "TIMER_DELAY_MS": 2}, 2),
        ({"TIMER_DELAY_MS": 2, "TIMER_DELAY_SEC": 1}, 1_000),
    ],
)
def test_all_delay_properties_lead_to_one_due_time(properties: dict[str, int], after_ms: int) -> None:
    assert due_ms(**properties) == NOW + after_ms


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


@pytest.mark.parametrize(("deliver_ms", "slot_ms"), [(5_001, 5_000), (5_999, 5_000), (6_000, 5_000), (6_001, 6_000)])
def test_a_time_on_a_multiple_belongs_to_the_slot_before(deliver_ms: int, slot_ms: int) -> None:
    """That slot is complete when the time has come."""
    assert slot_of(deliver_ms, 1_000) == slot_ms


@pytest.mark.parametrize(
    "properties",
    [
        {"TAGS": "paid", "KEYS": "4466"},
        {"DELAY": 0},
        {"TIMER_DELAY_MS": 0},
        {"TIMER_DELAY_SEC": -5},
        {"TIMER_DELIVER_MS": NOW},
    ],
)
def test_no_delay_level_zero_and_a_time_in_the_past_mean_that_a_message_is_not_diverted(
    properties: dict[str, object],
) -> None:
    assert diverted_or_none(**properties) is None


@pytest.mark.feature("A3")
def test_forty_days_are_accepted_and_a_millisecond_more_is_refused() -> None:
    """The limit is configured, and counted from now."""
    assert due_ms(TIMER_DELAY_MS=40 * DAY) == NOW + 40 * DAY
    with pytest.raises(DelayError, match="is 40d 1ms from now, allowed are 40d; raise"):
        diverted_or_none(TIMER_DELAY_MS=40 * DAY + 1)
    with pytest.raises(DelayError, match="allowed are 1d; raise"):
        diverted_or_none(TimerLimits(max_delay_ms=DAY), TIMER_DELAY_MS=DAY + 1)


@pytest.mark.parametrize(
    ("limits", "properties", "reason"),
    [
        *(
            (TimerLimits(), {name: text}, f"property {name} is '.*', expected a whole number")
            for name in ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME")
            for text in ("soon", "1.5", "", "0x10", "١٢", "9" * 19)
        ),
        (TimerLimits(), {"DELAY": -1}, r"must be 0\.\.18 \(1=1s 2=5s .* 18=2h\), got -1"),
        (
            TimerLimits(enabled=False),
            {"TIMER_DELAY_MS": 5},
            r"has no timers; set mqtemplate\.broker\.timer-wheel-enable to true",
        ),
        (
            TimerLimits(),
            {"TIMER_DELIVER_MS": NOW - 5, "TIMER_DEL_UNIQKEY": "key"},
            "was due 5ms ago; only a pending message can be cancelled",
        ),
    ],
)
def test_the_error_for_an_invalid_delay_says_what_is_allowed(
    limits: TimerLimits, properties: dict[str, object], reason: str
) -> None:
    with pytest.raises(DelayError, match=reason):
        diverted_or_none(limits, **properties)


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
