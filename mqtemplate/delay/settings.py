"""Settings of delayed messages: the table of delay levels, the timers and their slots, and the shapes of topics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from annotated_types import Ge, Gt, Le

from mqtemplate.durations import format_ms
from mqtemplate.errors import ConfigurationError, DelayError
from mqtemplate.hashes import tags_code
from mqtemplate.message import FAIR_BY_HASH_KEY, Property, delay_number
from mqtemplate.record.properties import (
    DELAY,
    LEVEL_DELAY_MS,
    NAME_VALUE_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    SHARDING_KEY,
    TAGS,
    find_property,
    property_format,
)
from mqtemplate.topics import RETRY_TOPIC_PREFIX, SCHEDULE_TOPIC

if TYPE_CHECKING:
    import numpy as np


DEFAULT_DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""RocketMQ's 18 levels. Source: ``MessageStoreConfig.messageDelayLevel``."""

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TOKEN = re.compile(r"(\d+)([smhd])")
_MAX_MS = 100 * 365 * _UNIT_MS["d"]  # a delay of more than a century is a typing error

_STORED_DELAY = re.compile(
    property_format(LEVEL_DELAY_MS, rb"(\d{1,18})")
    + property_format(REAL_TOPIC, rb"[^\x02]+")
    + property_format(REAL_QID, rb"\d+")
    + rb"?\Z"
)
"""The end of the properties of a message that `divert` wrote.

RocketMQ may copy ``__DELAY_MS`` to a retry that has another level. It writes properties in the order of a hash map,
which never ends like this, so the stale delay is ignored."""


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays by level. Levels are numbered from 1 in the order of the table; delays need not ascend.

    Attributes:
        delays_ms: The delay of level 1, of level 2, …
        text: The table as the user wrote it.
        is_clamping: True if a message with a higher level gets the highest one, as in RocketMQ; else it is refused.
    """

    delays_ms: tuple[int, ...]
    text: str
    is_clamping: bool = False

    _UNKNOWN_LEVEL_MS = 1_000  # RocketMQ: ScheduleMessageService.computeDeliverTimestamp

    @classmethod
    def parse(cls, text: str = DEFAULT_DELAY_LEVELS, *, is_clamping: bool = False) -> DelayLevels:
        """Parse a table such as ``"1s 5s 10m 2h 1d"``; entries are separated by any number of blanks.

        Raises:
            ConfigurationError: There is no entry, or an entry is not a whole number and one of the units.
        """
        tokens = text.split()
        if not tokens:
            raise ConfigurationError(
                "message-delay-level is empty; give delays such as '1s 5s 10m 2h 1d', level 1 first"
            )
        delays_ms = tuple(_parse_token(token, level) for level, token in enumerate(tokens, start=1))
        return cls(delays_ms, " ".join(tokens), is_clamping)

    @property
    def max_level(self) -> int:
        """Highest level of the table."""
        return len(self.delays_ms)

    def clamp(self, level: int) -> int:
        """Limit *level* to the highest level. Source: ``HookUtils.transformDelayLevelMessage``."""
        return min(level, self.max_level)

    def read(self, text: str, topic: str) -> int:
        """Return the level of a message for *topic*, from its property ``DELAY``; 0 is no delay.

        The level of a retry follows from the number of retries, so for a retry topic a higher one is always limited.

        Raises:
            DelayError: It is not a number, or the table does not have it.
        """
        level = delay_number(Property.DELAY, text)
        if 0 <= level <= self.max_level:
            return level
        if level > 0 and (self.is_clamping or topic.startswith(RETRY_TOPIC_PREFIX)):
            return self.max_level
        longer = (
            ", for a longer table set mqtemplate.broker.message-delay-level, and for RocketMQ's rule, which takes the "
            "highest level instead, mqtemplate.broker.clamp-delay-level=true"
        )
        raise DelayError(
            f"the delay level must be 0..{self.max_level} ({self.describe()}), got {level}; 0 means no delay, "
            f"for other delays pass delay= or deliver_at={longer if level > 0 else ''}"
        )

    def delay_ms(self, level: int) -> int:
        """Return the delay of *level*; a second for a level that the table does not have, as in RocketMQ."""
        return self.delays_ms[level - 1] if 1 <= level <= self.max_level else self._UNKNOWN_LEVEL_MS

    def name(self, level: int) -> str:
        """Return a level with its delay, for logs: ``5 (1m)``."""
        return f"{level} ({format_ms(self.delay_ms(level))})"

    def describe(self) -> str:
        """Return the table for messages to users: ``1=1s 2=5s …``."""
        return " ".join(f"{level}={token}" for level, token in enumerate(self.text.split(), start=1))


def _parse_token(token: str, level: int) -> int:
    found = _TOKEN.fullmatch(token)
    delay_ms = int(found[1]) * _UNIT_MS[found[2]] if found else -1
    if not 0 <= delay_ms <= _MAX_MS:
        raise ConfigurationError.of_value(
            "message-delay-level",
            f"entry {level} is {token!r}; allowed is a whole number and a unit, s, m, h or d, such as '30s' or '2h', "
            "up to 36500d",
        )
    return delay_ms


def tags_code_of(topic: str, properties: bytes, store_timestamp: int, levels: DelayLevels) -> int:
    """Return the tags code of a record for a rebuilt consume queue: in the schedule topic, its due time.

    Our records contain the delay that their level had when they were sent. For RocketMQ's records the current table
    gives the delay, as in RocketMQ. Source: ``CommitLog.checkMessageAndReturnSize``, where it computes the tags code.
    """
    if topic == SCHEDULE_TOPIC:
        level = find_property(properties, DELAY) or ""
        if level.isascii() and level.isdecimal() and len(level) < 10 and int(level) > 0:
            stored = _STORED_DELAY.match(properties, properties.rfind(LEVEL_DELAY_MS + NAME_VALUE_SEPARATOR))
            delay_ms = levels.delay_ms(levels.clamp(int(level))) if stored is None else int(stored[1])
            return store_timestamp + delay_ms
    return tags_code(find_property(properties, TAGS)) if TAGS in properties else 0


_Times = TypeVar("_Times", int, "np.ndarray")


def slot_of(deliver_ms: _Times, precision_ms: int) -> _Times:
    """Return the slot of a deliver time, or of each: the last multiple of the precision *before* it.

    A time that is a multiple belongs to the slot before. That slot is complete when the time has come.
    """
    return (deliver_ms - 1) // precision_ms * precision_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerSettings:
    """Sizes of the timer files. A store directory keeps its settings for life.

    Attributes:
        precision_ms: Length of a slot. Delivery is exact to the millisecond all the same.
        slots_total: Slots in the window; the wheel has twice as many.
        roll_window_slots: A message due more than this many slots ahead is parked in a nearer slot, and rolled there.
        log_file_size: Bytes of each timer log file; None for the size that the store directory has.
    """

    precision_ms: int = 1_000
    slots_total: int = 7 * 86_400  # seven days of seconds: RocketMQ's TimerMessageStore.TIMER_WHEEL_TTL_DAY
    roll_window_slots: int = 2 * 86_400  # RocketMQ's MessageStoreConfig.timerRollWindowSlot
    log_file_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.precision_ms <= 10_000:
            raise ConfigurationError(f"timer-precision-ms must be 1..10000, got {self.precision_ms}")
        if not 2 <= self.roll_window_slots <= self.slots_total - 60:
            raise ConfigurationError(
                f"timer-roll-window-slot must be 2..{self.slots_total - 60}, got {self.roll_window_slots}"
            )
        # A unit of the timer log has four signed bytes for the delay, see `TimerUnit.delay_ms`.
        if self.roll_window_slots * self.precision_ms >= 1 << 31:
            raise ConfigurationError(
                f"timer-roll-window-slot times timer-precision-ms must be below 2147483648 ms, got "
                f"{self.roll_window_slots} * {self.precision_ms}: the timer log has four bytes for it"
            )

    @property
    def window_ms(self) -> int:
        """Length of the roll window in ms."""
        return self.roll_window_slots * self.precision_ms

    @property
    def lap_ms(self) -> int:
        """Length of one lap of the wheel in ms: two times this far apart use the same slot."""
        return 2 * self.slots_total * self.precision_ms

    def slot_at(self, time_ms: int) -> int:
        """Return the slot that a clock time is in: the last multiple of the precision that is not after it."""
        return time_ms // self.precision_ms * self.precision_ms


GRID_MS = 10
"""Held messages are released each 10 ms. Five messages each millisecond would cost a flush each."""

HEAD_START_MS = 1_000
"""Lead of one step of priority."""

_DAY = timedelta(days=1)
_MILLISECOND = timedelta(milliseconds=1)
_MAX_NAME_LENGTH = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicShape:
    """Release of the delayed messages of one topic. A message is never released before it is due."""

    # Read by pydantic where the shape is a part of a configuration: an unknown key is an error.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    max_rate: Annotated[float, Gt(0), Le(10_000_000)] | None = None
    """Most messages released in a second; the others follow in the order of their deliver times. Without it there is no
    limit."""

    fair_by: str | None = None
    """Name of a property, or ``hash_key`` for the key of an ordered send: what is due leaves round robin over its
    values, so a key with a million messages delays a message of another key by one round at most. Messages without the
    property are one key."""

    max_rate_per_key: Annotated[float, Gt(0), Le(10_000_000)] | None = None
    """Most messages of one key released in a second; needs ``fair-by``."""

    message_priority: bool = False
    """Of what may be released at the same time, messages with a higher ``_SYS_MSG_PRIORITY_`` (0 to 2147483647) go
    first; with ``fair-by`` within their key."""

    jitter: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Each message is released up to this much later, by chance: messages for one instant arrive apart."""

    spread: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Messages for one instant are released evenly over this time."""

    priority: Annotated[int, Ge(0), Le(9)] = 0
    """While more is due than can be released: each step counts as if the messages had been due a second earlier. So a
    higher priority goes first, and a lower one waits at most nine seconds longer than its turn."""

    @property
    def is_fair(self) -> bool:
        """True if what is due is chosen by keys or by priorities of messages."""
        return self.fair_by is not None or self.message_priority

    @property
    def fair_property(self) -> bytes:
        """Name of the property whose values are the keys; empty without one."""
        return SHARDING_KEY if self.fair_by == FAIR_BY_HASH_KEY else (self.fair_by or "").encode()

    def describe(self) -> str:
        """Return the shape for a reader, with the names of the settings: ``max-rate 500/s, fair-by tenant``."""
        parts = [
            ("max-rate", None if self.max_rate is None else f"{self.max_rate:g}/s"),
            ("fair-by", self.fair_by),
            ("max-rate-per-key", None if self.max_rate_per_key is None else f"{self.max_rate_per_key:g}/s"),
            ("message-priority", "on" if self.message_priority else None),
            ("jitter", format_ms(self.jitter // _MILLISECOND) if self.jitter else None),
            ("spread", format_ms(self.spread // _MILLISECOND) if self.spread else None),
            ("priority", str(self.priority) if self.priority else None),
        ]
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)

    def check(self, topic: str) -> None:
        """Check what belongs together.

        Raises:
            ConfigurationError: ``max-rate-per-key`` has no ``fair-by``, or ``fair-by`` is not the name of a property.
        """
        if self.max_rate_per_key is not None and self.fair_by is None:
            raise ConfigurationError(
                f"topic-shapes.{topic}: max-rate-per-key is {self.max_rate_per_key:g}, but there is no key; add "
                f"fair-by with the name of a property, or {FAIR_BY_HASH_KEY}"
            )
        check_fair_by(f"topic-shapes.{topic}.fair-by", self.fair_by)


def check_fair_by(name: str, value: str | None) -> None:
    """Check the name of the property by which messages are fair.

    Raises:
        ConfigurationError: No message can have such a property.
    """
    if value is not None and (not value or "\x01" in value or "\x02" in value or len(value) > _MAX_NAME_LENGTH):
        raise ConfigurationError(
            f"{name} must be the name of a property of messages, 1..{_MAX_NAME_LENGTH} characters, or "
            f"{FAIR_BY_HASH_KEY} for the key of ordered sends, got {value[:40]!r}"
        )
