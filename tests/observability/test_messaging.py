"""Metrics of sends and handlers, and of the state of listeners."""

from __future__ import annotations

import threading
from asyncio import sleep as virtual_sleep

import pytest

from mqtemplate import MessageRequestMode, RetryLater, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.calls.handling import HandlerCall
from mqtemplate.calls.send import SendCall, SendKind
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MessageError
from mqtemplate.message import Message, MessageExt
from mqtemplate.metrics import OTHER, HistogramSnapshot
from mqtemplate.observability import Observability, ObservabilitySettings
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.observability import ClockSkew, Operations, measured_handling, measured_sends
from mqtemplate.observability.settings import MetricsSettings, TracingSettings
from mqtemplate.template import RocketMQTemplate
from tests.calls.listeners import listener_info
from tests.waiting import eventually

from .conftest import Observe


@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    if order == "bad":
        raise ValueError(order)
    if order == "later":
        raise RetryLater("10s")


@pytest.mark.feature("14.3")
def test_sends_are_counted_and_timed_by_topic(observe: Observe) -> None:
    observed = observe()
    template = observed.app.template
    template.sync_send("orders:paid", "x")
    template.sync_send("orders", ["x", "y", "z"])
    template.send_one_way("orders", "x")
    template.async_send("audit", "x").result()

    assert observed.samples("client.send.messages") == {("audit",): 1, ("orders",): 5}
    durations = observed.samples("client.send.duration_ns")
    counts = {key: each.count for key, each in durations.items() if isinstance(each, HistogramSnapshot)}
    assert counts == {("audit",): 1, ("orders",): 3}


def test_a_send_that_fails_is_counted_with_its_error(observe: Observe) -> None:
    observed = observe()
    with pytest.raises(MessageError):
        observed.app.template.sync_send("orders", b"x" * (5 << 20))

    assert observed.samples("client.send.messages") == {("orders",): 1}
    assert observed.samples("client.send.errors") == {("MessageError", "orders"): 1}


@pytest.mark.feature("14.3")
def test_handlers_are_counted_and_timed(observe: Observe) -> None:
    observed = observe(bill)
    for order in ("good", "good", "bad", "later"):
        observed.app.template.sync_send("orders", order)
    observed.harness.advance("1s")

    [listener] = [container.endpoint.id for container in observed.app.containers]
    labels = ("billing", listener, "orders")
    assert observed.samples("listener.handle.messages") == {labels: 4}
    assert observed.samples("listener.handle.errors") == {
        ("ValueError", *labels): 1,
        ("RetryLater", *labels): 1,
    }
    failed = observed.samples("listener.failed")
    assert failed == {
        ("billing", listener, step): 2 if step == "redelivery" else 0
        for step in ("redelivery", "retry_in_place", "dead_letter", "dropped", "hanging")
    }
    [duration] = observed.samples("listener.handle.duration_ns").values()
    assert isinstance(duration, HistogramSnapshot)
    assert duration.count == 4


def test_lag_and_state_of_listeners_are_read(observe: Observe) -> None:
    observed = observe(bill)
    [container] = observed.app.containers
    listener = container.endpoint.id
    container.pause()
    for _ in range(7):
        observed.app.template.sync_send("orders", "x", hash_key="same")
    observed.harness.advance("1s")

    lags = observed.samples("group.lag")
    assert sum(value for value in lags.values() if isinstance(value, int)) == 7
    assert set(observed.samples("group.committed").values()) <= {0}
    assert observed.samples("listener.paused") == {("billing", listener): 1}
    assert observed.samples("listener.running") == {("billing", listener): 1}
    assert observed.samples("listener.concurrency") == {("billing", listener): 20}
    container.resume()
    observed.harness.advance("1s")
    assert set(observed.samples("group.lag").values()) == {0}
    assert 7 in observed.samples("group.committed").values()


def test_pending_messages_are_counted_by_horizon_topic_and_level(observe: Observe) -> None:
    observed = observe(management__metrics__pending_interval_ms=0)
    for delay in ("30s", "50m", "50m", "10d"):
        observed.app.template.sync_send("orders", "x", delay=delay)
    observed.app.template.sync_send("orders", "x", delay_level=3)
    observed.harness.advance("1ms")

    pending = observed.samples("delay.pending")
    assert {key[0]: count for key, count in pending.items() if count} == {"1m": 2, "1h": 2, "later": 1}
    assert observed.samples("delay.pending_timers") == {("orders",): 4}
    assert observed.samples("delay.pending_levels") == {("3",): 1}


def test_pending_messages_are_not_counted_at_each_scrape(observe: Observe) -> None:
    observed = observe(management__metrics__pending_interval_ms="30s")
    assert observed.samples("delay.pending")["1h",] == 0
    observed.app.template.sync_send("orders", "x", delay="50m")
    observed.harness.advance("10s")
    assert observed.samples("delay.pending")["1h",] == 0
    observed.harness.advance("20s")
    assert observed.samples("delay.pending")["1h",] == 1


def test_a_batch_is_one_call_with_many_messages(observe: Observe) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    def bill_all(orders: list[str]) -> None: ...

    observed = observe(bill_all)
    observed.app.template.sync_send("orders", ["x", "y", "z"])
    observed.harness.advance("1s")

    [messages] = observed.samples("listener.handle.messages").values()
    [duration] = observed.samples("listener.handle.duration_ns").values()
    assert isinstance(duration, HistogramSnapshot)
    assert (messages, duration.count) == (3, 1)


def test_a_clock_that_is_set_back_does_not_lower_the_sums() -> None:
    clock = SettableClock()
    with EmbeddedBroker() as broker:
        queue = broker.sends.send(Message("orders", b"x")).message_queue
        [message] = broker.reader.pull(queue, 0).messages
    operations, listener = Operations("send", {}, 10), listener_info("bill", clock)
    lateness, skew = LatenessRecorder(clock, 10_000), ClockSkew(clock)

    def set_back(call: object) -> tuple[()]:
        clock.now -= 1_000
        return ()

    measured_sends(operations, clock)(set_back)(SendCall(SendKind.SEND, [message], None, 1, clock))
    measured_handling(listener, operations, lateness, skew)(set_back)(HandlerCall(listener, [message]))

    durations = next(each.value for each in operations.samples() if each.name == "send.duration_ns")
    assert durations == HistogramSnapshot(2, 0, {1: 2})


class SettableClock(VirtualClock):
    """A clock of a machine that somebody sets."""

    now = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.now


@pytest.mark.feature("14.3")
def test_many_topics_do_not_make_many_series() -> None:
    settings = ObservabilitySettings(metrics=MetricsSettings(max_series=10))
    with EmbeddedBroker() as broker:
        observed = Observability(broker, settings)
        template = RocketMQTemplate(broker, observation=observed)
        for number in range(30):
            template.sync_send(f"topic-{number}", "x")

        sent = {sample.labels["topic"]: sample.value for sample in observed.metrics.samples()
                if sample.name == "client.send.messages"}  # fmt: skip

    assert len(sent) == 10
    assert sent[OTHER] == 21


def test_nothing_is_wrapped_while_the_metrics_are_off() -> None:
    """Neither the template nor a handler pays for what is off."""
    off, no_tracing = ObservabilitySettings(metrics=MetricsSettings(enabled=False)), TracingSettings(enabled=False)
    with EmbeddedBroker() as broker:
        observed = Observability(broker, ObservabilitySettings(metrics=off.metrics, tracing=no_tracing))

        assert observed.sends(broker.clock)(broker.sends.send) == broker.sends.send
        assert observed.handling(listener_info("bill", broker.clock))(print) is print


def test_messages_of_producers_with_another_clock_show_the_skew(observe: Observe) -> None:
    seen: list[MessageExt] = []

    @message_listener(topic="orders", consumer_group="billing")
    def note(message: MessageExt) -> None:
        seen.append(message)

    observed = observe(note)
    broker = observed.app.broker
    assert isinstance(broker, EmbeddedBroker)
    observed.app.template.sync_send("orders", "x")
    observed.harness.advance("1s")
    assert observed.samples("clock.ahead_ms") == {(): 0}

    info = listener_info(observed.app.containers[0].endpoint.id, broker.clock)
    handler = observed.observability.handling(info)(lambda call: ())
    ahead = seen[0]
    ahead.born_timestamp = ahead.store_timestamp + 2_500
    handler(HandlerCall(info, [ahead]))
    assert observed.samples("clock.ahead_ms") == {(): 2_500}
    ahead.store_timestamp = broker.clock.now_ms() + 700
    handler(HandlerCall(info, [ahead]))
    assert observed.samples("clock.behind_ms") == {(): 700}
    # The repair: the clock of this process is set, here by an hour.
    assert isinstance(broker.clock, VirtualClock)
    broker.clock.step_ms(-3_600_000)
    observed.harness.advance("2m")
    assert observed.samples("clock.ahead_ms") == observed.samples("clock.behind_ms") == {(): 0}


def test_threads_lose_no_count() -> None:
    """Four threads send, and the listener handles with several threads."""
    from mqtemplate import MQApplication

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=4)
    def handle(order: str) -> None: ...

    settings = {"mqtemplate.management.enabled": True, "rocketmq.name-server": "embedded:memory"}
    with MQApplication(handle, settings=settings) as app:

        def work() -> None:
            for _ in range(500):
                app.template.sync_send("orders", "x")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = app.get(Observability).metrics

        def number(name: str) -> object:
            return next((each.value for each in metrics.samples() if each.name == name), None)

        assert number("client.send.messages") == 2_000
        eventually(lambda: number("listener.handle.messages") == 2_000, "2,000 messages handled")


def test_a_message_of_the_broker_directly_is_not_counted(observe: Observe) -> None:
    observed = observe()
    observed.app.broker.sends.send(Message("orders", b"x"))

    assert observed.samples("client.send.messages") == {}


def test_renewals_and_expired_invisible_times_are_counted(observe: Observe) -> None:
    """Both are 0 from the start of the listener on. A listener that pulls has neither."""

    @message_listener("videos", "encoders", id="encode", request_mode=MessageRequestMode.POP)
    async def encode(video: str) -> None:
        await virtual_sleep(180)

    observed = observe(encode, bill)
    key = ("encoders", "encode")
    assert observed.samples("listener.renewed") == observed.samples("listener.expired") == {key: 0}
    observed.app.template.sync_send("videos", "a")
    observed.harness.advance("2m")

    assert observed.samples("listener.renewed") == {key: 4}
    assert observed.samples("listener.in_flight")[key] == 1
    observed.app.broker.clock.move_ms(120_000)  # type: ignore[attr-defined]
    observed.harness.advance("1h")
    assert observed.samples("listener.expired") == {key: 1}
