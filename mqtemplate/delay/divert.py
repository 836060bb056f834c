"""Decision of where a delayed message is stored: at once in its topic, in a level's queue, or in the timer topic.

Pure functions: properties in, a decision out. The broker calls them for every message that clients send, and for
retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.delay.settings import DelayLevels, slot_of
from mqtemplate.durations import format_ms
from mqtemplate.errors import DelayError
from mqtemplate.message import BROKER_PROPERTIES, Property, delay_number
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerLimits:
    """Limits of a broker's timers.

    Attributes:
        precision_ms: Length of a wheel slot. Delivery is exact to the millisecond all the same.
        max_delay_ms: The longest delay, counted from now, that is accepted.
        enabled: False if the broker has no timers.
        shaped: Topics whose releases have a shape. Their messages are timers, also those with a level.
    """

    precision_ms: int = 1_000
    max_delay_ms: int = 40 * 86_400_000
    enabled: bool = True
    shaped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Diverted:
    """A delayed message as it is stored until it is due.

    Attributes:
        topic: System topic that stores it.
        properties: The message's properties, and the ones that lead it to its real topic later.
        delay_ms: For a level: the value for `RecordDraft.delay_ms`, counted from the store time. -1 for a timer.
    """

    topic: str
    queue_id: int
    properties: dict[str, str]
    delay_ms: int = -1


_TIMES = (
    # name, length of its unit in ms, True if it counts from now; the first one that is present decides
    (Property.TIMER_DELAY_SEC, 1_000, True),
    (Property.TIMER_DELAY_MS, 1, True),
    (Property.TIMER_DELIVER_MS, 1, False),
    (Property.START_DELIVER_TIME, 1, False),
)
_TIME_NAMES = frozenset(name for name, _, _ in _TIMES)
_TIMER_PROPERTIES = BROKER_PROPERTIES | {Property.TIMER_DELIVER_MS}


def strip_broker_properties(properties: Mapping[str, str]) -> Mapping[str, str]:
    """Return *properties* without the names that only the broker may write; the same object without such names.

    A client may copy the properties of a delayed message that it received. This must neither cancel the new message's
    delay nor send it to another topic.
    """
    if BROKER_PROPERTIES.isdisjoint(properties):
        return properties
    return {name: value for name, value in properties.items() if name not in BROKER_PROPERTIES}


def divert(
    properties: Mapping[str, str], topic: str, queue_id: int, now_ms: int, levels: DelayLevels, limits: TimerLimits
) -> Diverted | None:
    """Return how a delayed message is stored; None for a message without a delay.

    A level wins over every time. Source: ``HookUtils.handleScheduleMessage``. Call it for messages outside a
    transaction, and when a transaction commits.

    Raises:
        DelayError: The level or the time is not a number, or is not allowed.
    """
    if Property.DELAY in properties:
        level = levels.read(properties[Property.DELAY], topic)
        if level > 0 and topic in limits.shaped:
            # Without the level: a broker that releases the timer must not delay it again.
            kept = _kept(properties, _TIME_NAMES | {Property.DELAY})
            # The delay shows that the time counts from the send, see `ClockCorrection`.
            kept[Property.TIMER_DELAY_MS] = str(levels.delay_ms(level))
            return divert_to_timer(kept, topic, queue_id, now_ms, now_ms + levels.delay_ms(level), limits)
        if level > 0:
            return _to_level(properties, topic, queue_id, level, levels)
    for name, unit_ms, from_now in _TIMES:
        if name in properties:
            deliver_ms = delay_number(name, properties[name]) * unit_ms + (now_ms if from_now else 0)
            return divert_to_timer(properties, topic, queue_id, now_ms, deliver_ms, limits)
    return None


def _to_level(properties: Mapping[str, str], topic: str, queue_id: int, level: int, levels: DelayLevels) -> Diverted:
    kept = _kept(properties, BROKER_PROPERTIES | _TIME_NAMES)
    delay_ms = levels.delay_ms(level)
    # `tags_code_of` and `released_draft` rely on this order: delay, real topic, real queue, all at the end.
    kept |= {
        Property.DELAY: str(level),
        # The delay of now: the queue may be rebuilt after the level table has changed.
        Property.LEVEL_DELAY_MS: str(delay_ms),
        Property.REAL_TOPIC: topic,
        Property.REAL_QID: str(queue_id),
    }
    return Diverted(SCHEDULE_TOPIC, level - 1, kept, delay_ms=delay_ms)


def divert_to_timer(
    properties: Mapping[str, str], topic: str, queue_id: int, now_ms: int, deliver_ms: int, limits: TimerLimits
) -> Diverted | None:
    """Return how a message is stored that is due at *deliver_ms*; None if that time has come.

    Raises:
        DelayError: The time is too far away, or the broker has no timers.
    """
    if deliver_ms <= now_ms:
        if Property.TIMER_DEL_UNIQKEY in properties:
            raise DelayError(
                f"the message to cancel was due {format_ms(now_ms - deliver_ms)} ago; "
                "only a pending message can be cancelled"
            )
        return None
    if not limits.enabled:
        raise DelayError(
            "this broker has no timers; set mqtemplate.broker.timer-wheel-enable to true, or use a delay level"
        )
    if deliver_ms - now_ms > limits.max_delay_ms:
        raise DelayError(
            f"the deliver time is {format_ms(deliver_ms - now_ms)} from now, allowed are "
            f"{format_ms(limits.max_delay_ms)}; raise mqtemplate.broker.timer-max-delay-sec or send later"
        )
    kept = _kept(properties, _TIMER_PROPERTIES)
    kept |= {  # in this order, at the end: `pending_keys` relies on it
        Property.TIMER_DELIVER_MS: str(deliver_ms),  # RocketMQ's slot alone would lose the millisecond
        Property.TIMER_OUT_MS: str(slot_of(deliver_ms, limits.precision_ms)),
        Property.REAL_TOPIC: topic,
        Property.REAL_QID: str(queue_id),
    }
    return Diverted(TIMER_TOPIC, 0, kept)


def delivered_at_once(properties: Mapping[str, str], topic: str, queue_id: int) -> dict[str, str]:
    """Return the properties of a message with a pending key that was due when it arrived.

    They are those of a message that was pending and is delivered, so the next one under its key finds it. It was not
    late, so no time is among them.
    """
    kept = _kept(properties, _TIME_NAMES | {Property.DELAY})
    return kept | {Property.REAL_TOPIC: topic, Property.REAL_QID: str(queue_id)}


def _kept(properties: Mapping[str, str], left_out: frozenset[str]) -> dict[str, str]:
    return {name: value for name, value in properties.items() if name not in left_out}
