"""Where a message goes that asks for a delay: nowhere else, to a level's queue, or to the timer topic.

Pure: properties in, a decision out. The broker asks at its front door, for whatever clients send and for retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.delay.levels.table import DelayLevels
from mqtemplate.errors import DelayError
from mqtemplate.message import BROKER_PROPERTIES, Property
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerLimits:
    """What the timers of a broker can keep.

    Attributes:
        precision_ms: Length of a wheel slot. Delivery is exact to the millisecond all the same.
        max_delay_ms: The farthest deliver time, counted from now; a message exactly there is accepted.
        enabled: Whether there are timers at all.
    """

    precision_ms: int = 1_000
    max_delay_ms: int = 40 * 86_400_000
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Diverted:
    """A message that waits: how it is stored until it is due.

    Attributes:
        topic: The system topic it waits in.
        properties: All it had, and what brings it to its real topic later.
        delay_ms: For a level: goes into `RecordDraft.delay_ms`. -1 for a timer.
        deliver_ms: For a timer: when it is due. -1 for a level, which counts from the time of storing.
        slot_ms: For a timer: its slot of the wheel, which covers ``slot_ms < deliver_ms <= slot_ms + precision``.
    """

    topic: str
    queue_id: int
    properties: dict[str, str]
    delay_ms: int = -1
    deliver_ms: int = -1
    slot_ms: int = -1


_TIMES = (
    # name, what one unit of it is in ms, whether it counts from now; the first that is there decides
    (Property.TIMER_DELAY_SEC, 1_000, True),
    (Property.TIMER_DELAY_MS, 1, True),
    (Property.TIMER_DELIVER_MS, 1, False),
    (Property.START_DELIVER_TIME, 1, False),
)
_TIME_NAMES = frozenset(name for name, _, _ in _TIMES)


def strip_broker_properties(properties: Mapping[str, str]) -> Mapping[str, str]:
    """*properties* without those that only the broker may write; the same object where there are none.

    A client that copies the properties of a delayed message it received must neither lose the delay it asks
    for nor send the message elsewhere.
    """
    if BROKER_PROPERTIES.isdisjoint(properties):
        return properties
    return {name: value for name, value in properties.items() if name not in BROKER_PROPERTIES}


def divert(
    properties: Mapping[str, str], topic: str, queue_id: int, now_ms: int, levels: DelayLevels, limits: TimerLimits
) -> Diverted | None:
    """Decide where a message waits; None: nowhere, it is stored as it is.

    A level wins over every time. Source: ``HookUtils.handleScheduleMessage``. Ask only for messages of no
    transaction, or of one that commits.

    Raises:
        DelayError: The level or the time cannot be read, or is one that the broker cannot keep.
    """
    if Property.DELAY in properties:
        level = levels.clamp(_read_level(properties[Property.DELAY], levels))
        if level > 0:
            return _to_level(properties, topic, queue_id, level, levels)
    for name, unit_ms, from_now in _TIMES:
        if name in properties:
            deliver_ms = _read_number(name, properties[name]) * unit_ms + (now_ms if from_now else 0)
            return _to_timer(properties, topic, queue_id, now_ms, deliver_ms, limits)
    return None


def slot_of(deliver_ms: int, precision_ms: int) -> int:
    """The slot that a deliver time belongs to: the last multiple of the precision *before* it.

    A time on a multiple belongs to the slot before, which is full when that time has come.
    """
    return (deliver_ms - 1) // precision_ms * precision_ms


def _to_level(properties: Mapping[str, str], topic: str, queue_id: int, level: int, levels: DelayLevels) -> Diverted:
    kept = _kept(properties, without_times=True)
    delay_ms = levels.delay_ms(level)
    kept |= {
        Property.DELAY: str(level),
        # what was promised: a queue that is rebuilt may meet another table. `tags_code_of` looks for it here
        Property.LEVEL_DELAY_MS: str(delay_ms),
        Property.REAL_TOPIC: topic,
        Property.REAL_QID: str(queue_id),
    }
    return Diverted(SCHEDULE_TOPIC, level - 1, kept, delay_ms=delay_ms)


def _to_timer(
    properties: Mapping[str, str], topic: str, queue_id: int, now_ms: int, deliver_ms: int, limits: TimerLimits
) -> Diverted | None:
    if deliver_ms <= now_ms:
        if Property.TIMER_DEL_UNIQKEY in properties:
            raise DelayError(
                f"the message to cancel was due {now_ms - deliver_ms} ms ago; only one that waits can be cancelled"
            )
        return None
    if not limits.enabled:
        raise DelayError(
            "this broker keeps no timers; set mqtemplate.broker.timer-wheel-enable to true, or use a delay level"
        )
    if deliver_ms - now_ms > limits.max_delay_ms:
        raise DelayError(
            f"the deliver time is {deliver_ms - now_ms} ms from now, allowed are {limits.max_delay_ms} ms "
            f"({limits.max_delay_ms / 86_400_000:g} days); raise mqtemplate.broker.timer-max-delay-sec or send later"
        )
    slot_ms = slot_of(deliver_ms, limits.precision_ms)
    kept = _kept(properties, without_times=False)
    kept |= {
        Property.TIMER_DELIVER_MS: str(deliver_ms),  # the slot alone would forget the millisecond
        Property.TIMER_OUT_MS: str(slot_ms),
        Property.REAL_TOPIC: topic,
        Property.REAL_QID: str(queue_id),
    }
    return Diverted(TIMER_TOPIC, 0, kept, deliver_ms=deliver_ms, slot_ms=slot_ms)


def _kept(properties: Mapping[str, str], *, without_times: bool) -> dict[str, str]:
    left_out = BROKER_PROPERTIES | _TIME_NAMES if without_times else BROKER_PROPERTIES
    return {name: value for name, value in properties.items() if name not in left_out}


def _read_level(text: str, levels: DelayLevels) -> int:
    level = _read_number(Property.DELAY, text)
    if level < 0:
        raise DelayError(
            f"the delay level must be 0..{levels.max_level} ({levels.describe()}), got {level}; 0 means no delay, "
            "for other delays give a time"
        )
    return level


def _read_number(name: str, text: str) -> int:
    """A whole number as Java's ``Long.parseLong`` takes it."""
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise DelayError(f"property {name} is {text!r}, expected a whole number of at most 18 digits")
    return int(text)
