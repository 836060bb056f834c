"""Table of delay levels: the delay of each level number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mqtemplate.durations import format_ms
from mqtemplate.errors import ConfigurationError
from mqtemplate.hashes import tags_code
from mqtemplate.record.properties import (
    DELAY,
    LEVEL_DELAY_MS,
    NAME_VALUE_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    find_property,
    property_format,
)
from mqtemplate.topics import SCHEDULE_TOPIC

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
    """

    delays_ms: tuple[int, ...]
    text: str

    _UNKNOWN_LEVEL_MS = 1_000  # RocketMQ: ScheduleMessageService.computeDeliverTimestamp

    @classmethod
    def parse(cls, text: str = DEFAULT_DELAY_LEVELS) -> DelayLevels:
        """Parse a table such as ``"1s 5s 10m 2h 1d"``; entries are separated by any number of blanks.

        Raises:
            ConfigurationError: There is no entry, or an entry is not a whole number and one of the units.
        """
        tokens = text.split()
        if not tokens:
            raise ConfigurationError(
                "message-delay-level is empty; give delays such as '1s 5s 10m 2h 1d', level 1 first"
            )
        return cls(tuple(_parse_token(token, level) for level, token in enumerate(tokens, start=1)), " ".join(tokens))

    @property
    def max_level(self) -> int:
        """Highest level of the table."""
        return len(self.delays_ms)

    def clamp(self, level: int) -> int:
        """Limit *level* to the highest level. Source: ``HookUtils.transformDelayLevelMessage``."""
        return min(level, self.max_level)

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
    return tags_code(find_property(properties, TAGS))
