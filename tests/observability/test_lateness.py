"""Lateness of deliveries, split into its causes: each fault is injected and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate import MQApplication, message_listener
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.settings import TopicShape
from mqtemplate.message import Message
from mqtemplate.metrics import HistogramSnapshot
from mqtemplate.observability import Cause, LateDelivery, Observability
from mqtemplate.testing import Harness

from .conftest import Observe

SECOND = 1_000


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None: ...


def causes_of(deliveries: list[LateDelivery]) -> dict[Cause, int]:
    """Return the sums of all causes."""
    totals: dict[Cause, int] = {}
    for delivery in deliveries:
        assert sum(delivery.causes.values()) == delivery.late_ms
        for cause, part_ms in delivery.causes.items():
            totals[cause] = totals.get(cause, 0) + part_ms
    return totals


def test_a_delivery_on_time_is_not_late(observe: Observe) -> None:
    observed = observe(bill, management__lateness__threshold_ms=1)
    observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("10s")

    [late] = observed.samples("lateness.delivery_ms").values()
    assert isinstance(late, HistogramSnapshot)
    assert (late.count, late.total) == (1, 0)
    assert observed.observability.lateness.recent() == []


@pytest.mark.feature("14.4")
def test_a_stopped_broker_is_found(tmp_path: Path) -> None:
    """Due one second after the broker stopped, which was away for a minute."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as broker:
        broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_MS": "1000"}))
    clock.move_ms(60 * SECOND)

    settings = {"mqtemplate.management.enabled": True}
    broker = EmbeddedBroker(tmp_path, clock=clock)
    with broker, MQApplication(bill, broker, settings=settings, clock=clock) as app:
        Harness(app).advance("1s")
        recent = app.get(Observability).lateness.recent()

    assert causes_of(recent) == {Cause.BROKER_STOPPED: 59 * SECOND}
    assert [delivery.main_cause for delivery in recent] == [Cause.BROKER_STOPPED]


@pytest.mark.feature("14.4")
def test_a_backlog_of_the_broker_is_found(observe: Observe) -> None:
    """The broker runs, but its delay services are not stepped for 30 seconds: as if they had too much to do."""
    clock = VirtualClock()
    observed = observe(bill, clock=clock)
    observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("1s")
    clock.move_ms(34 * SECOND)
    observed.harness.advance("1s")

    assert causes_of(observed.observability.lateness.recent()) == {Cause.BACKLOG: 30 * SECOND}


@pytest.mark.feature("14.4")
def test_a_rate_limit_is_found(observe: Observe) -> None:
    """One message a second: the last of twenty leaves 19 seconds late."""
    clock = VirtualClock()
    broker = EmbeddedBroker(None, EmbeddedSettings(topic_shapes={"orders": TopicShape(max_rate=1)}), clock)
    with broker:
        observed = observe(bill, broker, clock=clock, management__lateness__threshold_ms=0)
        for _ in range(20):
            observed.app.template.sync_send("orders", "x", delay="5s")
        observed.harness.advance("40s")
        recent = observed.observability.lateness.recent()

    assert causes_of(recent) == {Cause.RATE_LIMIT: sum(range(20)) * SECOND}


@pytest.mark.feature("14.4")
def test_a_consumer_that_does_not_fetch_is_found(observe: Observe) -> None:
    """The listener is paused for half a minute after the message was due."""
    observed = observe(bill)
    [container] = observed.app.containers
    observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("1s")
    container.pause()
    observed.harness.advance("34s")
    container.resume()
    observed.harness.advance("1s")

    assert causes_of(observed.observability.lateness.recent()) == {Cause.CONSUMER_LAG: 30 * SECOND}


@pytest.mark.feature("14.4")
def test_a_slow_handler_is_found(observe: Observe) -> None:
    """Ten messages for one instant, and the handler takes three seconds for each: the others wait for it."""
    clock = VirtualClock()

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=1)
    def slow(order: str) -> None:
        clock.move_ms(3 * SECOND)

    observed = observe(slow, clock=clock)
    for _ in range(10):
        observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("60s")
    recent = observed.observability.lateness.recent()

    assert causes_of(recent) == {Cause.SLOW_HANDLER: sum(3 * SECOND * n for n in range(4, 10))}  # from 10 s on
    assert {delivery.handled_ms - delivery.started_ms for delivery in recent} == {3 * SECOND}
    assert observed.samples("lateness.caused_ms") == {
        ("slow_handler", "billing", observed.app.containers[0].endpoint.id): sum(3 * SECOND * n for n in range(10))
    }


@pytest.mark.feature("14.4")
def test_several_causes_of_one_delivery_are_found(tmp_path: Path) -> None:
    """The broker is away from 1 s to 61 s, and the listener paused until 71 s."""
    clock = VirtualClock()
    with EmbeddedBroker(tmp_path, clock=clock) as broker:
        broker.sends.send(Message("orders", b"x", {"TIMER_DELAY_MS": "1000"}))
    clock.move_ms(61 * SECOND)

    broker = EmbeddedBroker(tmp_path, clock=clock)
    settings = {"mqtemplate.management.enabled": True}
    with broker, MQApplication(bill, broker, settings=settings, clock=clock) as app:
        app.containers[0].pause()
        harness = Harness(app)
        harness.advance("10s")
        app.containers[0].resume()
        harness.advance("1s")
        recent = app.get(Observability).lateness.recent()

    assert causes_of(recent) == {Cause.BROKER_STOPPED: 60 * SECOND, Cause.CONSUMER_LAG: 10 * SECOND}


def test_a_late_delivery_is_logged_with_its_causes(observe: Observe, caplog: pytest.LogCaptureFixture) -> None:
    observed = observe(bill, management__lateness__threshold_ms="20s")
    [container] = observed.app.containers
    container.pause()
    for delay in ("5s", "25s"):
        observed.app.template.sync_send("orders", "x", delay=delay)
    observed.harness.advance("30s")
    container.resume()
    observed.harness.advance("1s")

    [event] = [vars(record) for record in caplog.records if "delivery.late" in record.msg]
    assert (event["late_ms"], event["cause"], event["consumer_lag_ms"]) == (25 * SECOND, "consumer_lag", 25 * SECOND)
    assert (event["group"], event["topic"], event["levelname"]) == ("billing", "orders", "WARNING")


def test_the_worst_lateness_is_that_of_the_last_minutes(observe: Observe) -> None:
    observed = observe(bill)
    [container] = observed.app.containers
    container.pause()
    observed.app.template.sync_send("orders", "x", delay="1s")
    observed.harness.advance("31s")
    container.resume()
    observed.harness.advance("1s")
    lateness = observed.observability.lateness

    assert (lateness.worst_ms(), lateness.worst_ms("billing"), lateness.worst_ms("others")) == (30_000, 30_000, 0)
    observed.harness.advance("5m")
    assert lateness.worst_ms() == 0


def test_a_batch_handler_records_each_message(observe: Observe) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def bill_all(orders: list[str]) -> None: ...

    observed = observe(bill_all)
    for _ in range(3):
        observed.app.template.sync_send("orders", "x", delay="5s")
    observed.harness.advance("10s")

    [late] = observed.samples("lateness.delivery_ms").values()
    assert isinstance(late, HistogramSnapshot)
    assert late.count == 3
