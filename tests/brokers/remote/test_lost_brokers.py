"""Brokers that are away: until when they are looked for."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.cluster.outages import FOLLOW_MS, LostBrokers
from mqtemplate.clock import VirtualClock

A, B, MOVED = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.9:10911"
BROKERS = {"broker-a": {0: A}, "broker-b": {0: B}}
WITHOUT_A = {"broker-b": {0: B}}
NONE: frozenset[str] = frozenset()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def lost(clock: VirtualClock) -> LostBrokers:
    return LostBrokers(clock)


def test_a_broker_is_away_until_it_has_answered_a_heartbeat(lost: LostBrokers) -> None:
    assert lost.add(A, BROKERS) == "broker-a"

    lost.update(BROKERS, frozenset({B}))
    is_away = not lost.is_empty
    lost.update(BROKERS, frozenset({A, B}))

    assert (is_away, lost.is_empty) == (True, True)


def test_a_loss_is_reported_once(lost: LostBrokers) -> None:
    assert [lost.add(A, BROKERS) for _ in range(3)] == ["broker-a", None, None]


def test_an_address_without_a_broker_is_ignored(lost: LostBrokers) -> None:
    """A name server is none."""
    assert lost.add(MOVED, BROKERS) is None
    assert lost.is_empty


def test_a_broker_that_left_the_routes_is_looked_for_some_minutes(lost: LostBrokers, clock: VirtualClock) -> None:
    lost.add(A, BROKERS)
    clock.move_ms(FOLLOW_MS - 1)
    lost.update(WITHOUT_A, NONE)
    is_away = not lost.is_empty

    clock.move_ms(1)
    lost.update(WITHOUT_A, NONE)

    assert (is_away, lost.is_empty) == (True, True)


def test_a_broker_that_has_another_address_is_not_looked_for_at_the_old_one(lost: LostBrokers) -> None:
    lost.add(A, BROKERS)

    lost.update({"broker-a": {0: MOVED}}, NONE)

    assert lost.is_empty
