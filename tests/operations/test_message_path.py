"""The path of one message, from the records that a broker has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import UnknownNameError
from mqtemplate.message import Message, Property
from mqtemplate.operations import BrokerAccess
from mqtemplate.operations.dead_letters import DeadLetters, LetterFilter
from mqtemplate.operations.message_path import StepKind, message_path
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing import Harness

pytestmark = pytest.mark.feature("14.2")
S_MS = 1_000


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def broker(clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=clock) as broker:
        yield broker


def consumer_of(broker: EmbeddedBroker, retries: int = 1) -> Consumer:
    first = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    subscriptions = {"orders": TagSelector()}
    return broker.groups.subscribe(
        ConsumerSpec(
            group="billing", subscriptions=subscriptions, consume_from_where=first, max_reconsume_times=retries
        )
    )


def kinds(broker: EmbeddedBroker, msg_id: str) -> list[str]:
    return [step.kind.value for step in message_path(BrokerAccess(broker), msg_id, "orders").steps]


def test_a_delayed_message_that_fails_goes_through_its_retries_to_the_dead_letters(broker: EmbeddedBroker) -> None:
    harness = Harness(broker)
    sent = broker.sends.send(Message("orders", b"x", {Property.TIMER_DELAY_MS: "5000"}))
    consumer = consumer_of(broker)
    harness.advance("6s")
    for _ in range(2):
        [message] = consumer.poll(10)
        consumer.send_back(message)
        consumer.commit(message.message_queue, message.queue_offset + 1)
        harness.advance("1m")

    path = message_path(BrokerAccess(broker), sent.msg_id, "orders")

    assert [(step.kind, step.group) for step in path.steps] == [
        (StepKind.SENT, None),
        (StepKind.DELAYED, None),
        (StepKind.DELIVERED, None),
        (StepKind.RETRY_DELAYED, "billing"),
        (StepKind.RETRY_DELIVERED, "billing"),
        (StepKind.DEAD_LETTER, "billing"),
    ]
    start_ms = path.steps[0].time_ms
    assert [step.time_ms - start_ms for step in path.steps[1:3]] == [0, 5 * S_MS]
    assert [step.late_ms for step in path.steps] == [None, None, 0, None, 0, None]


def test_a_pending_message_has_its_deliver_time_last(broker: EmbeddedBroker) -> None:
    sent = broker.sends.send(Message("orders", b"x", {Property.TIMER_DELAY_MS: "5000"}))

    *_, last = message_path(BrokerAccess(broker), sent.msg_id, "orders").steps

    assert (last.kind, last.handle) == (StepKind.PENDING, sent.handle)
    assert last.due_ms == broker.clock.now_ms() + 5 * S_MS
    assert kinds(broker, sent.msg_id) == ["sent", "delayed", "pending"]


@pytest.mark.parametrize("delay", [{Property.TIMER_DELAY_MS: "60000"}, {Property.DELAY: "5"}])
def test_a_reschedule_and_a_cancel_are_steps(broker: EmbeddedBroker, delay: dict[str, str]) -> None:
    first = broker.sends.send(Message("orders", b"x", dict(delay)))
    second = broker.sends.send(Message("orders", b"x", dict(delay)))
    assert first.handle is not None
    assert second.handle is not None

    broker.delayed.reschedule(first.handle, broker.clock.now_ms() + 90 * S_MS)
    broker.delayed.cancel(second.handle)
    Harness(broker).advance("2m")

    assert kinds(broker, first.msg_id) == ["sent", "delayed", "rescheduled", "delivered"]
    assert kinds(broker, second.msg_id) == ["sent", "delayed", "cancelled"]


def test_a_message_without_a_delay_is_stored_and_read_by_groups(broker: EmbeddedBroker) -> None:
    sent = broker.sends.send(Message("orders", b"x"))
    consumer = consumer_of(broker)
    [message] = consumer.poll(10)
    access = BrokerAccess(broker)

    before = message_path(access, sent.msg_id, "orders")
    consumer.commit(message.message_queue, message.queue_offset + 1)
    after = message_path(access, sent.msg_id, "orders")

    assert [step.kind for step in before.steps] == [StepKind.SENT, StepKind.STORED]
    assert [(each.group, each.is_consumed) for each in before.readings] == [("billing", False)]
    assert [(each.group, each.is_consumed) for each in after.readings] == [("billing", True)]


def test_a_message_that_was_sent_again_has_both_deliveries(broker: EmbeddedBroker) -> None:
    sent = broker.sends.send(Message("orders", b"x"))
    consumer = consumer_of(broker)
    [message] = consumer.poll(10)
    consumer.send_back(message, -1)
    letters = DeadLetters(BrokerAccess(broker))

    letters.resend(letters.find("billing", LetterFilter()))

    assert kinds(broker, sent.msg_id) == ["sent", "stored", "dead letter", "sent again"]


def test_a_message_without_records_is_an_error(broker: EmbeddedBroker) -> None:
    with pytest.raises(UnknownNameError, match="message 'lost' of topic 'orders' has no record; retention deleted it"):
        message_path(BrokerAccess(broker), "lost", "orders")


def test_each_kind_of_broker_has_the_path(access: BrokerAccess) -> None:
    """In memory, a snapshot of a directory, and a server."""
    [letter, *_] = DeadLetters(access).find("billing")
    pending = access.broker.delayed.pending(_due("due-2")).messages[0]

    failed = message_path(access, letter.message.msg_id, "orders")
    due = message_path(access, pending.msg_id, "reminders")

    assert [step.kind.value for step in failed.steps] == ["sent", "stored", "dead letter"]
    assert [step.kind.value for step in due.steps] == ["sent", "delayed", "pending"]


def _due(key: str):  # type: ignore[no-untyped-def]
    from mqtemplate.pending import PendingQuery

    return PendingQuery(key=key)
