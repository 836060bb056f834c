"""Why a message is late: each cause in words, with its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import UnknownNameError
from mqtemplate.message import Message, Property
from mqtemplate.operations import BrokerAccess
from mqtemplate.operations.audit import AuditLog
from mqtemplate.operations.message_path import message_path
from mqtemplate.operations.search import messages_named
from mqtemplate.operations.why_late import (
    DeliveryLateness,
    ListenerReport,
    RateOf,
    delivery_lateness,
    measured_rate,
    unknown_rate,
    why_late,
)
from mqtemplate.testing import Harness
from tests.operations.test_message_path import consumer_of

pytestmark = pytest.mark.feature("14.2")
DAY = "2026-01-01"
ALONE = ListenerReport()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def broker(clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=clock) as broker:
        broker.create_topic("orders", 1)
        yield broker


def listener(state: str = "running", **more: Any) -> dict[str, Any]:
    return {"id": "shop.bill", "group": "billing", "state": state, "inFlight": 0, "hanging": 0} | more


def send(broker: EmbeddedBroker, key: str, **properties: str) -> Any:
    return broker.sends.send(Message("orders", b"x", {Property.KEYS: key, **properties}))


def texts(
    broker: EmbeddedBroker,
    name: str,
    application: ListenerReport = ALONE,
    rate_of: RateOf = unknown_rate,
) -> list[str]:
    access = BrokerAccess(broker)
    hit = messages_named(access, name)[0]
    path = message_path(access, hit.msg_id, hit.topic)
    return [each.text for each in why_late(access, path, application, rate_of)]


@pytest.mark.parametrize("kind", ["key", "id", "handle"])
def test_a_message_that_is_not_due_is_pending(broker: EmbeddedBroker, kind: str) -> None:
    """It is found by each of its names."""
    sent = send(broker, "late", **{Property.TIMER_DELAY_MS: "10800000"})

    found = texts(broker, {"key": "late", "id": sent.msg_id, "handle": sent.handle or ""}[kind])

    assert found == [f"still pending, due in 3h, at {DAY} 03:00:00"]


def test_the_time_of_a_backlog_comes_from_the_rate_of_its_group(broker: EmbeddedBroker) -> None:
    """1,240 messages of others are before it, at three per second."""
    consumer_of(broker)
    for number in range(1_240):
        send(broker, f"before-{number}")
    send(broker, "late", **{Property.TIMER_DELAY_MS: "5000"})
    Harness(broker).advance("6s")

    found = texts(broker, "late", rate_of=lambda group: 3.0)

    assert found == [
        f"delivered to the topic on time, at {DAY} 00:00:05",
        "group billing has 1,240 messages before it, and handles 3 per second: about 6m 53s",
    ]
    assert texts(broker, "late", rate_of=lambda group: 0.0)[1].endswith("before it, and handles none at present")


def test_a_rate_is_measured_from_two_readings_of_the_offsets() -> None:
    """The group handles six messages in the two seconds between."""

    class Working(VirtualClock):
        def wait_for(self, condition: Callable[[], bool], until_ms: int | None = None) -> bool:
            consumer.commit(queue, 7)
            return True

    with EmbeddedBroker(clock=Working()) as broker:
        broker.create_topic("orders", 1)
        [queue] = broker.queues("orders")
        consumer = consumer_of(broker)
        for number in range(8):
            send(broker, f"order-{number}")
        consumer.commit(queue, 1)

        assert measured_rate(BrokerAccess(broker))("billing") == 3.0


def test_a_paused_listener_is_named_with_the_author_of_the_pause(broker: EmbeddedBroker, clock: VirtualClock) -> None:
    consumer_of(broker)
    send(broker, "stands")
    audit = AuditLog(None, clock)
    with audit.change("listener.pause", "127.0.0.1", listener="shop.bill") as entry:
        pass
    clock.set_ms(clock.now_ms() + 3_600_000)
    documents = {"listeners": {"listeners": [listener("paused")]}, "lateness": {"deliveries": []}}

    found = texts(broker, "stands", ListenerReport.read(documents.get, audit))

    assert found == [
        f"it was sent without a delay, and stored in topic orders at {DAY} 00:00:00",
        f"the listener shop.bill is paused since {DAY} 00:00:00 by 127.0.0.1 (change {entry.id})",
    ]


def test_a_pause_in_the_log_of_the_application_counts_if_it_is_newer(clock: VirtualClock) -> None:
    """The log of the dashboard knows the user; the application knows the dashboard only."""
    own = AuditLog(None, clock)
    with own.change("listener.pause", "10.0.0.7", listener="bill"):
        pass
    pause = {"action": "listener.pause", "facts": {"listener": "bill"}, "author": "this process", "id": "copy"}
    authors = []
    for time in ("2026-01-01T00:00:01+00:00", "2026-01-01T01:00:00+00:00"):
        documents = {"changes": {"changes": [pause | {"time": time}]}}
        found = ListenerReport.read(documents.get, own).pause_of("bill")
        authors.append(found and found.author)

    assert authors == ["10.0.0.7", "this process"]


def test_a_delivery_that_was_handled_late_has_the_parts_of_its_lateness(broker: EmbeddedBroker) -> None:
    consumer = consumer_of(broker)
    sent = send(broker, "late", **{Property.TIMER_DELAY_MS: "5000"})
    Harness(broker).advance("6s")
    [message] = consumer.poll(10)
    consumer.commit(message.message_queue, 1)
    late = {"msgId": sent.msg_id, "group": "billing", "listener": "shop.bill", "lateMs": 12_000}
    late |= {"startedMs": 17_000, "handledMs": 19_000, "causes": {"consumer_lag": 1_000, "slow_handler": 11_000}}

    found = texts(broker, "late", ListenerReport([listener()], [late]))

    assert found[1] == (
        "listener shop.bill handled it 12s late: its handlers were busy for 11s with the messages before; "
        "the listener fetched it 1s late: it was stopped, paused, or far behind; then it took 2s itself"
    )
    assert texts(broker, "late")[1] == "group billing has handled it"


def test_a_message_that_fails_waits_for_its_retry_and_becomes_a_dead_letter(broker: EmbeddedBroker) -> None:
    harness = Harness(broker)
    consumer = consumer_of(broker)
    send(broker, "bad")
    found = []
    for _ in range(2):
        [message] = consumer.poll(10)
        consumer.send_back(message, properties={"dead_letter_exception": "ValueError", "dead_letter_message": "no"})
        consumer.commit(message.message_queue, message.queue_offset + 1)
        found.append(texts(broker, "bad")[1])
        harness.advance("1m")

    assert found == [
        f"the handler of group billing has failed; its next retry is due at {DAY} 00:00:10",
        f"the handler of group billing failed each time; a dead letter since {DAY} 00:01:00: ValueError: no",
    ]


def test_a_group_without_members_and_a_busy_handler_are_named(broker: EmbeddedBroker) -> None:
    consumer = consumer_of(broker)
    send(broker, "order")
    busy = texts(broker, "order", ListenerReport([listener(inFlight=2, hanging=1)]))
    consumer.poll(10)
    consumer.commit(broker.queues("orders")[0], 0)
    consumer.close()

    assert busy[1] == (
        "group billing has no message before it: the handler of shop.bill runs for it, or for one beside it "
        "(2 running, 1 of them hanging)"
    )
    assert "group billing has no connected member" in texts(broker, "order")


def test_a_cancelled_message_says_so(broker: EmbeddedBroker) -> None:
    sent = send(broker, "gone", **{Property.TIMER_DELAY_MS: "5000"})
    broker.delayed.cancel(sent.handle or "")

    assert texts(broker, sent.msg_id) == [f"it was cancelled at {DAY} 00:00:00, so it is not delivered"]


def test_a_name_that_no_message_has_is_an_error(broker: EmbeddedBroker) -> None:
    with pytest.raises(UnknownNameError) as raised:
        messages_named(BrokerAccess(broker), "nobody")

    assert str(raised.value) == (
        "no message with the id, handle or key 'nobody' is in any topic, or pending; retention deleted it, or the "
        "name is another one"
    )


# --- late deliveries ------------------------------------------------------------------------------


def test_late_deliveries_of_a_topic_are_those_after_their_due_times(
    broker: EmbeddedBroker, clock: VirtualClock
) -> None:
    """Four timers and a level; the broker is suspended for 20 seconds, in which three of them are due."""
    start_ms = clock.now_ms()
    for delay_ms in (1_000, 2_000, 5_000, 15_000):
        send(broker, "timer", **{Property.TIMER_DELAY_MS: str(delay_ms)})
    send(broker, "level", **{Property.DELAY: "3"})  # 10 seconds
    send(broker, "not delayed")
    harness = Harness(broker)
    harness.advance("3s")
    clock.move_ms(20_000)
    harness.advance("1s")

    found = delivery_lateness(BrokerAccess(broker), "orders")

    first_ms, last_ms = start_ms + 1_000, start_ms + 23_000
    assert (found.count, found.late, found.first_ms, found.last_ms) == (5, 3, first_ms, last_ms)
    assert (found.median_ms, found.p99_ms, found.max_ms) == (8_000, 18_000, 18_000)


def test_a_topic_without_delayed_messages_has_no_lateness(broker: EmbeddedBroker) -> None:
    send(broker, "not delayed")

    assert delivery_lateness(BrokerAccess(broker), "orders") == DeliveryLateness()


def test_late_deliveries_are_looked_for_among_the_newest_messages(broker: EmbeddedBroker, clock: VirtualClock) -> None:
    """A broker that was late once must not be reported forever."""
    harness = Harness(broker)
    send(broker, "late", **{Property.TIMER_DELAY_MS: "1000"})
    clock.move_ms(60_000)
    harness.advance("1s")
    late = delivery_lateness(BrokerAccess(broker), "orders")
    for _ in range(500):
        send(broker, "on time", **{Property.TIMER_DELAY_MS: "1000"})
    harness.advance("2s")
    later = delivery_lateness(BrokerAccess(broker), "orders")

    assert (late.count, late.late) == (1, 1)
    assert (later.count, later.late, later.max_ms) == (500, 0, 0)


def test_lateness_of_an_unknown_topic_is_an_error_that_names_it(broker: EmbeddedBroker) -> None:
    with pytest.raises(UnknownNameError, match="nowhere"):
        delivery_lateness(BrokerAccess(broker), "nowhere")
