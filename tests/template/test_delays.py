"""Delay options: every option on every verb."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message
from mqtemplate.template import RocketMQTemplate
from mqtemplate.template.delays import delay_properties
from mqtemplate.testing import messages_in
from tests.kit import Kit

NOW_MS = VirtualClock().now_ms()
NOW = datetime.fromtimestamp(NOW_MS / 1_000, UTC)

Send = Callable[..., object]

VERBS: dict[str, Callable[[RocketMQTemplate], Send]] = {
    "sync_send": lambda template: template.sync_send,
    "async_send": lambda template: template.async_send,
    "send_one_way": lambda template: template.send_one_way,
}
FORMS: dict[str, tuple[object, dict[str, Any], int]] = {
    "single": (b"body", {}, 1),
    "ordered": (b"body", {"hash_key": "customer-1"}, 1),
    "batch": ([b"one", b"two"], {}, 2),
    "ordered batch": ([b"one", b"two"], {"hash_key": "customer-1"}, 2),
    "finished message": (Message("orders", b"body"), {}, 1),
}
TEN_SECONDS: dict[str, dict[str, Any]] = {
    "level": {"delay_level": 3},
    "timedelta": {"delay": timedelta(seconds=10)},
    "text": {"delay": "10s"},
    "datetime": {"deliver_at": NOW + timedelta(seconds=10)},
    "epoch milliseconds": {"deliver_at": NOW_MS + 10_000},
    "header DELAY": {"headers": {"DELAY": 3}},
    "header TIMER_DELAY_SEC": {"headers": {"rocketmq_TIMER_DELAY_SEC": "10"}},
    "header TIMER_DELAY_MS": {"headers": {"TIMER_DELAY_MS": 10_000}},
    "header TIMER_DELIVER_MS": {"headers": {"TIMER_DELIVER_MS": NOW_MS + 10_000}},
    "header __STARTDELIVERTIME": {"headers": {"__STARTDELIVERTIME": str(NOW_MS + 10_000)}},
}


@pytest.mark.feature("X13", "A4", "A17", "A19")
@pytest.mark.parametrize("kind", TEN_SECONDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_delay_works_on_every_verb(kit: Kit, verb: str, form: str, kind: str) -> None:
    """All of them mean the same time: ten seconds from now, to the millisecond."""
    payload, options, count = FORMS[form]

    VERBS[verb](kit.template)("orders:paid", payload, **options, **TEN_SECONDS[kind])

    kit.harness.advance("9999ms")
    assert messages_in(kit.broker, "orders") == []
    kit.harness.advance("1ms")
    delivered = messages_in(kit.broker, "orders")
    assert [message.store_timestamp for message in delivered] == [NOW_MS + 10_000] * count
    assert {message.tags for message in delivered} == {"paid"}


# --- time zones and limits --------------------------------------------------------------------------


class SummerTime(tzinfo):
    """A time zone with summer time that needs no time zone files."""

    def utcoffset(self, at: datetime | None) -> timedelta:
        return timedelta(hours=2 if at is not None and 4 <= at.month <= 9 else 1)

    def tzname(self, at: datetime | None) -> str:
        return "summer time"

    def dst(self, at: datetime | None) -> timedelta:
        return self.utcoffset(at) - timedelta(hours=1)


@pytest.mark.parametrize("month", [1, 7])
def test_a_deliver_time_is_the_same_in_every_time_zone(month: int) -> None:
    """The difference of two local times of one zone would be wrong by an hour in summer."""
    instant = datetime(2026, month, 15, 12, tzinfo=UTC)

    for zone in (UTC, SummerTime(), timezone(timedelta(hours=5, minutes=30))):
        written = delay_properties(0, None, instant.astimezone(zone), NOW_MS)
        assert written == {"TIMER_DELIVER_MS": str(int(instant.timestamp()) * 1_000)}
