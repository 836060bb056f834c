"""Plan of a hand-over: what moves, what stays until when, what is impossible, and what the new broker lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import DelayLimits
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import BrokerError, UnsupportedError
from mqtemplate.handover import plan as module
from mqtemplate.handover.plan import HandOverPlan, create_plan
from mqtemplate.message import Message, Property
from mqtemplate.topics import RETRY_TOPIC_PREFIX

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
THREE_DAYS = EmbeddedSettings(timer_max_delay_sec=3 * 86_400)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    monkeypatch.setenv("TZ", "UTC")
    return VirtualClock(1_764_547_200_000)  # 2025-12-01T00:00Z


@pytest.fixture
def old(clock: VirtualClock) -> Iterator[Broker]:
    with EmbeddedBroker(clock=clock) as broker:
        yield broker


@pytest.fixture
def new(clock: VirtualClock) -> Iterator[Broker]:
    with EmbeddedBroker(settings=THREE_DAYS, clock=clock) as broker:
        yield broker


def delayed(broker: Broker, topic: str, delay_ms: int, **properties: str) -> None:
    broker.sends.send(Message(topic, b"x", {Property.TIMER_DELAY_MS: str(delay_ms)} | properties))


def plan(old: Broker, new: Broker, rate: float = 100.0, **arguments: Any) -> HandOverPlan:
    return create_plan(old, new, source="embedded:./data", target="mq1:9876", rate=rate, **arguments)


def test_pending_messages_are_counted_by_their_future(old: Broker, new: Broker) -> None:
    """The new broker takes three days: what is due later moves when it comes into range."""
    for hours in (1, 2, 30):
        delayed(old, "reminders", hours * HOUR_MS)
    delayed(old, "orders", 10 * DAY_MS)
    old.sends.send(Message(f"{RETRY_TOPIC_PREFIX}billing", b"x", {Property.DELAY: "18"}))

    found = plan(old, new)

    assert found.moves.topics == {"reminders": 3}
    assert found.moves.days == {"2025-12-01": 2, "2025-12-02": 1}
    assert (found.later.count, found.later.days) == (1, {"2025-12-11": 1})
    assert found.in_range_ms == 1_764_547_200_000 + 7 * DAY_MS
    assert (found.retries.count, found.stays.count, found.pending) == (1, 0, 5)


def test_the_time_is_estimated_from_the_rate(old: Broker, new: Broker) -> None:
    for _ in range(50):
        delayed(old, "reminders", HOUR_MS)

    assert plan(old, new, rate=10).move_ms == 5_000


def test_topics_and_groups_are_compared(old: Broker, new: Broker) -> None:
    old.create_topic("orders", 6)
    old.create_topic("reminders", 2)
    new.create_topic("orders", 4)
    new.create_topic("reminders", 8)
    queue = old.queues("orders")[0]
    for _ in range(5):
        old.sends.send(Message("orders", b"x"), queue)
    old.groups.commit_offset("billing", queue, 2)
    old.groups.commit_offset("audit", queue, 4)
    new.groups.commit_offset("audit", new.queues("orders")[0], 0)

    found = plan(old, new)

    topics = {each.name: each for each in found.topics}
    assert (topics["orders"].queue_count, topics["orders"].existing, topics["orders"].is_missing) == (6, 4, True)
    assert topics["orders"].rights == "read, write"
    assert not topics["reminders"].is_missing
    assert topics["orders"].ready == found.ready == 3
    groups = {each.name: (each.topics, each.old_lag, each.new_lag) for each in found.groups}
    assert groups == {"audit": (("orders",), 1, 0), "billing": (("orders",), 3, None)}


def test_a_broker_without_timers_takes_no_pending_messages(
    old: Broker, new: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed(old, "reminders", HOUR_MS)
    limits = DelayLimits(max_delay_ms=0, levels_ms=(1_000,))
    monkeypatch.setattr(new, "delay_limits", lambda: limits)

    found = plan(old, new)

    assert (found.stays.count, found.moves.count) == (1, 0)
    assert "the new broker has no timers" in "\n".join(found.lines())


def test_the_precision_of_the_new_broker_is_named(old: Broker, new: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(old, "reminders", HOUR_MS)
    delayed(old, "reminders", HOUR_MS + 250)
    old.sends.send(Message("reminders", b"x", {Property.DELAY: "18"}))
    limits = replace(new.delay_limits(), precision_ms=1_000)
    monkeypatch.setattr(new, "delay_limits", lambda: limits)

    found = plan(old, new)

    late, levels = found.notes
    assert late == "1 message may be delivered up to 1s late: the new broker has this precision"
    assert levels == "1 message with a delay level: each moves as a timer with the same deliver time"


def test_a_broker_that_does_not_tell_its_limits_is_said_to(
    old: Broker, new: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise UnsupportedError("it does not say")

    monkeypatch.setattr(new, "delay_limits", refuse)

    assert "does not tell its limits" in "\n".join(plan(old, new).lines())


def test_what_is_impossible_is_said(old: Broker, new: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BODY", 0)
    delayed(old, "reminders", HOUR_MS)

    found = plan(old, new, open_transactions=2)

    assert len(found.impossible) == 2
    assert "raise maxMessageSize there" in found.impossible[0]
    assert "2 transactions have not ended at the old broker" in found.impossible[1]
    assert "mqtemplate.hand-over.from" in found.impossible[1]


def test_a_cluster_without_brokers_is_an_error(old: Broker, new: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server answers before the first broker has registered."""
    monkeypatch.setattr(new, "is_embedded", False)
    monkeypatch.setattr(type(new.admin()), "topic_settings", lambda _: {})

    with pytest.raises(BrokerError, match=r"no broker of the new cluster is registered.*start it, wait"):
        plan(old, new)


def test_the_plan_is_a_document_and_a_text(old: Broker, new: Broker) -> None:
    delayed(old, "reminders", HOUR_MS)
    delayed(old, "reminders", 10 * DAY_MS)

    found = plan(old, new)

    document = found.document()
    assert (document["pending"], document["moves"]["count"], document["later"]["count"]) == (2, 1, 1)
    assert document["limits"]["max_delay_ms"] == 3 * DAY_MS
    text = "\n".join(found.lines())
    assert "from embedded:./data to mq1:9876" in text
    assert "takes delays up to 3d" in text
    assert "1 move now, in about" in text
    assert "by topic: reminders 1" in text
    assert "stay until they come into the range of the new broker, the last one on 2025-12-08" in text
