"""Values that no option takes, or hardly any: for tests that an option takes or refuses them."""

from __future__ import annotations

import enum
import uuid
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

from mqtemplate import Message, MessageQueue
from mqtemplate.errors import MQTemplateError, UnitWarning

__all__ = ["FIRST", "HOSTILE", "LAST", "ZONES", "Kind", "Silent", "Zone", "takes_or_refuses"]


class Zone(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        raise RuntimeError("no offset")


class Silent:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Kind(enum.Enum):
    PAID = "paid"


ZONES = (UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-12)))
FIRST, LAST = datetime.min, datetime.max  # noqa: DTZ901 (a time without a zone is a hostile value too)
_TIMES = [
    *(time.replace(tzinfo=zone) for time in (LAST, FIRST) for zone in ZONES),
    *(LAST, FIRST, datetime(2030, 1, 1, tzinfo=Zone())),
    *(timedelta.max, timedelta.min, timedelta(microseconds=1)),
]
_NUMBERS = [
    *(10**400, -(10**400), 10**5_000, 2**63, 2**63 - 1, 2**31, -1, 0, 1),
    *(float("inf"), float("-inf"), float("nan"), 1e308, 5e-324, -0.0, 0.5),
    *(Decimal("NaN"), Decimal("1e999999"), Decimal(-1), Fraction(1, 3), 1j, True, False),
]
_TEXTS = [
    *("", " ", "a b", "a\tb", "a\u00a0b", "a\n", "\x00", "\x01", "\x02", "\x1b[2J", "\ud800", "\udcff", "\U0001f600"),
    *("9" * 5_000, "1" * 99 + "d", "1e9h", "-1s", "٣s", "*", "a,b", "a||b", "a&&b", "x" * 100_000, "%RETRY%x", "a:b:c"),
    *("MQ==", "5-5", "5--3", "[" * 3_000, "9/a/b", "a" * 127, "a" * 128, "a\r\nb: c"),
]
_OBJECTS = [
    *(None, (), [], {}, set(), object(), object, print, Silent(), Kind.PAID, uuid.UUID(int=1), range(3)),
    *(b"", b"\xff", bytearray(b"x"), memoryview(b"x"), [None], [b"x"], ["a b"], [[]], {"a": 1}),
    *({"\ud800": 1}, {"a": "\ud800"}, {"a": 10**5_000}, {"a": Silent()}, {1: 2}, {"": 1}, {"x" * 40_000: 1}),
    *({"FLAG": 10**5_000}, {"FLAG": Silent()}, {"DELAY": "9" * 5_000}, {"TAGS": "a,b"}, {"KEYS": "\ud800"}),
    *({"rocketmq_KEYS": [1, 2]}, {"TIMER_DELIVER_MS": 2**63}, {"WAIT": Silent()}, {"a": "x" * 40_000}),
    *(MessageQueue("orders", "broker-a", each) for each in (10**400, -1, "0", None)),
    *(MessageQueue("orders", "\ud800", 0), MessageQueue("orders", "another", 1)),
    *(Message("orders", b"x", {"a\ud800": "b"}), Message("orders", b"x", {"DELAY": "9" * 5_000})),
    *(Message("x", b""), Message("orders", "text"), Message("orders", b"x", {}, 10**400), Message(None, b"x", None)),
]  # fmt: skip
HOSTILE: list[Any] = [*_TIMES, *_NUMBERS, *_TEXTS, *_OBJECTS]


def takes_or_refuses(call: Callable[[], object]) -> None:
    """Make a call that succeeds, or raises an error of the library whose text can be printed and read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnitWarning)
            call()
    except MQTemplateError as exc:
        text = str(exc)
        assert text.encode()
        assert len(text) < 1_000
        assert "\x1b" not in text
