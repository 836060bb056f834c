"""The level table: which number of a delay level means how long."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mqtemplate.errors import ConfigurationError
from mqtemplate.java_hash import tags_code
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
"""The 18 levels everybody knows. Source: ``MessageStoreConfig.messageDelayLevel``."""

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TOKEN = re.compile(r"(\d+)([smhd])")
_LONGEST_MS = 100 * 365 * _UNIT_MS["d"]  # beyond a century somebody mistyped

_PROMISE = re.compile(
    property_format(LEVEL_DELAY_MS, rb"(\d{1,18})")
    + property_format(REAL_TOPIC, rb"[^\x02]+")
    + property_format(REAL_QID, rb"\d+")
    + rb"?\Z"
)
"""How the properties of our own messages end, see `divert`. Upstream, which may copy the delay to a retry of another
level, writes what else stands there in the order of a hash map, and that is never this one."""


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Delays by level, counted from 1 by their place in the table; they need not ascend.

    Attributes:
        delays_ms: The delay of level 1, of level 2, …
        text: The table as it was written.
    """

    delays_ms: tuple[int, ...]
    text: str

    _UNKNOWN_LEVEL_MS = 1_000  # upstream's answer for a level that the table does not have

    @classmethod
    def parse(cls, text: str = DEFAULT_DELAY_LEVELS) -> DelayLevels:
        """Read a table such as ``"1s 5s 10m 2h 1d"``; any number of blanks may stand between entries.

        Raises:
            ConfigurationError: An entry is not a whole number and one of the units, or there is none.
        """
        tokens = text.split()
        if not tokens:
            raise ConfigurationError(
                "message-delay-level is empty; give delays such as '1s 5s 10m 2h 1d', level 1 first"
            )
        return cls(tuple(_parse_token(token, level) for level, token in enumerate(tokens, start=1)), " ".join(tokens))

    @property
    def max_level(self) -> int:
        return len(self.delays_ms)

    def clamp(self, level: int) -> int:
        """A level above the highest is the highest. Source: ``HookUtils.transformDelayLevelMessage``."""
        return min(level, self.max_level)

    def delay_ms(self, level: int) -> int:
        """How long *level* waits. One that the table does not have waits a second, as upstream's do."""
        return self.delays_ms[level - 1] if 1 <= level <= self.max_level else self._UNKNOWN_LEVEL_MS

    def describe(self) -> str:
        """The table for people: ``1=1s 2=5s …``."""
        return " ".join(f"{level}={token}" for level, token in enumerate(self.text.split(), start=1))


def _parse_token(token: str, level: int) -> int:
    found = _TOKEN.fullmatch(token)
    delay_ms = int(found[1]) * _UNIT_MS[found[2]] if found else -1
    if not 0 <= delay_ms <= _LONGEST_MS:
        raise ConfigurationError(
            f"message-delay-level: entry {level} is {token!r}; "
            "allowed is a whole number and a unit, s, m, h or d, such as '30s' or '2h', up to 36500d"
        )
    return delay_ms


def tags_code_of(topic: str, properties: bytes, store_timestamp: int, levels: DelayLevels) -> int:
    """What a consume queue keeps beside a record that is dispatched again: in the schedule topic its due time.

    Our records tell their level's delay as it was when they were sent. Of others the table of now has to tell it, as
    upstream's does. Source: ``CommitLog``, where it computes the tags code.
    """
    if topic == SCHEDULE_TOPIC:
        level = find_property(properties, DELAY) or ""
        if level.isascii() and level.isdecimal() and len(level) < 10 and int(level) > 0:
            promised = _PROMISE.match(properties, properties.rfind(LEVEL_DELAY_MS + NAME_VALUE_SEPARATOR))
            delay_ms = levels.delay_ms(levels.clamp(int(level))) if promised is None else int(promised[1])
            return store_timestamp + delay_ms
    return tags_code(find_property(properties, TAGS))
