"""Transactions: their listeners, and transaction checks. The scripts have the sends."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from mqtemplate import TransactionState, transaction_listener
from mqtemplate.broker.group_checker import GroupChecker
from mqtemplate.errors import ListenerError
from mqtemplate.message import MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit
from tests.listener.hostile import KINDS
from tests.template.ledger import Ledger

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


class Order(BaseModel):
    id: int


def bodies(template: RocketMQTemplate) -> list[bytes]:
    return [message.body for message in messages_in(template.broker, "orders")]


def test_a_listener_gets_the_payload_in_its_annotated_type(kit: Kit) -> None:
    seen: list[object] = []

    @transaction_listener()
    class Typed:
        def execute_local_transaction(self, order: Order, arg: object) -> TransactionState:
            seen.append(order)
            return UNKNOWN

        def check_local_transaction(self, order: Order) -> TransactionState:
            seen.append(order)
            return COMMIT

    kit.template.add_transaction_listener(Typed())
    kit.template.send_in_transaction("orders", Order(id=7))
    kit.harness.advance("6s")

    assert seen == [Order(id=7), Order(id=7)]


@pytest.mark.feature("U17")
def test_the_most_specific_listener_handles_a_transaction(kit: Kit) -> None:
    """Listeners of one template are distinguished by topic and tag, in checks too."""

    @transaction_listener("orders")
    class OfTopic(Ledger): ...

    @transaction_listener("orders:paid")
    class OfTag(Ledger): ...

    of_all, of_topic, of_tag = Ledger(UNKNOWN), OfTopic(UNKNOWN), OfTag(UNKNOWN)
    for ledger in (of_all, of_topic, of_tag):
        kit.template.add_transaction_listener(ledger)

    for destination in ("bills", "orders", "orders:open", "orders:paid"):
        kit.template.send_in_transaction(destination, destination.encode())
    kit.harness.advance("6s")

    for ledger, expected in (
        (of_all, [b"bills"]),
        (of_topic, [b"orders", b"orders:open"]),
        (of_tag, [b"orders:paid"]),
    ):
        assert [message.body for message, _ in ledger.executed] == expected
        assert [message.body for message in ledger.checked] == expected


# --- errors ----------------------------------------------------------------------------------------


def test_a_local_transaction_cannot_take_a_message_ext(mqtemplate_template: RecordingTemplate) -> None:
    @transaction_listener()
    class Early(Ledger):
        def execute_local_transaction(self, message: MessageExt, arg: object) -> TransactionState:  # type: ignore[override]
            return COMMIT

    with pytest.raises(ListenerError, match="which does not exist before the message is delivered; take a Message"):
        mqtemplate_template.add_transaction_listener(Early())


def test_the_most_demanding_listener_sets_the_threads_for_checks(mqtemplate_template: RecordingTemplate) -> None:
    """A group has one checker, which all listeners of the template share."""

    @transaction_listener("orders", core_pool_size=2, maximum_pool_size=8, blocking_queue_size=10)
    class Demanding(Ledger): ...

    threads = set(threading.enumerate())
    mqtemplate_template.add_transaction_listener(Ledger())
    mqtemplate_template.add_transaction_listener(Demanding())

    assert (mqtemplate_template._transactions._threads, mqtemplate_template._transactions._max_waiting) == (8, 2_000)
    assert set(threading.enumerate()) <= threads, "a thread starts with the first check that needs it"


@pytest.mark.parametrize("kind", ["panic", "exit", "interrupt", "without anything", "of a kind"])
def test_whatever_a_check_raises_the_broker_checks_again(kit: Kit, kind: str) -> None:
    """The state stays unknown, and the checker goes on with this transaction and with others."""
    answers = iter([KINDS[kind], lambda: COMMIT])

    class Hostile(Ledger):
        def check_local_transaction(self, message: MessageExt) -> TransactionState:
            return next(answers)()  # type: ignore[return-value]

    kit.template.add_transaction_listener(transaction_listener()(Hostile)(UNKNOWN))
    kit.template.send_in_transaction("orders", b"order")
    kit.harness.advance("6s")
    before = bodies(kit.template)
    kit.harness.advance("60s")

    assert (before, bodies(kit.template)) == ([], [b"order"])


@pytest.mark.parametrize("kind", ["panic", "exit", "generator exit"])
def test_the_threads_of_a_checker_outlive_what_a_check_raises(kind: str) -> None:
    answers: SimpleQueue[tuple[TransactionState, str | None]] = SimpleQueue()

    def check(_: MessageExt) -> Any:
        return KINDS[kind]()

    checker = GroupChecker("shop", check, 1, 10, lambda _: None)
    for number in range(3):
        message: Any = SimpleNamespace(topic="orders", msg_id=str(number))
        checker.submit(message, lambda *answer: answers.put(answer))

    for _ in range(3):
        state, remark = answers.get(timeout=30)
        assert (state, str(remark)[:34]) == (UNKNOWN, "checkLocalTransactionState raised ")
    checker.close()
