"""Transactions: sends, local transactions and transaction checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from mqtemplate import TransactionState, transaction_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.engine.checkers import GroupChecker
from mqtemplate.errors import ConfigurationError, DelayError, ListenerError, MessageError, UnsupportedError
from mqtemplate.message import Message, MessageExt
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit
from tests.listener.hostile import KINDS

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


class Order(BaseModel):
    id: int


@transaction_listener()
class Ledger:
    """A listener that returns the states of the test, and records the calls."""

    def __init__(self, execute: object = COMMIT, check: object = COMMIT) -> None:
        self.execute, self.check = execute, check
        self.executed: list[tuple[Message, object]] = []
        self.checked: list[MessageExt] = []

    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        self.executed.append((message, arg))
        return self._answer(self.execute)

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.checked.append(message)
        return self._answer(self.check)

    def _answer(self, answer: object) -> TransactionState:
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[return-value]


def bodies(template: RocketMQTemplate) -> list[bytes]:
    return [message.body for message in messages_in(template.broker, "orders")]


def test_a_message_is_delivered_when_its_transaction_commits(mqtemplate_template: RecordingTemplate) -> None:
    ledger = Ledger()
    mqtemplate_template.add_transaction_listener(ledger)

    result = mqtemplate_template.send_in_transaction("orders:paid", b"order", arg=4466, keys="k-1")

    [(executed, arg)] = ledger.executed
    [delivered] = messages_in(mqtemplate_template.broker, "orders")
    assert result.local_transaction_state is COMMIT
    assert (executed.topic, executed.tags, executed.keys, executed.body, arg) == (
        "orders",
        "paid",
        "k-1",
        b"order",
        4466,
    )
    assert result.transaction_id == result.msg_id == executed.transaction_id == delivered.transaction_id
    assert [sent.verb for sent in mqtemplate_template.sent] == ["send_in_transaction"]


def test_a_message_is_dropped_when_its_transaction_rolls_back(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(Ledger(ROLLBACK))

    result = mqtemplate_template.send_in_transaction("orders", b"order")

    assert result.local_transaction_state is ROLLBACK
    assert bodies(mqtemplate_template) == []


@pytest.mark.parametrize("answer", [UNKNOWN, None, "yes", ValueError("no database")], ids=repr)
def test_a_transaction_without_a_state_is_checked(kit: Kit, answer: object) -> None:
    """As in rocketmq-spring: after an exception or an invalid result the state is unknown."""
    ledger = Ledger(answer)
    kit.template.add_transaction_listener(ledger)

    result = kit.template.send_in_transaction("orders", b"order")
    before = bodies(kit.template)
    kit.harness.advance("6s")

    assert result.local_transaction_state is UNKNOWN
    assert (before, bodies(kit.template)) == ([], [b"order"])
    assert [message.msg_id for message in ledger.checked] == [result.msg_id]


def test_an_exception_in_a_local_transaction_is_logged(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(Ledger(ValueError("no database")))

    with capture_logs() as logs:
        mqtemplate_template.send_in_transaction("orders:paid", b"order")

    [entry] = [entry for entry in logs if entry["event"] == "transaction.execute_failed"]
    assert (entry["listener"], entry["topic"], entry["tag"]) == ("Ledger", "orders", "paid")


def test_an_interrupted_transaction_is_checked(kit: Kit) -> None:
    kit.template.add_transaction_listener(Ledger(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        kit.template.send_in_transaction("orders", b"order")
    kit.harness.advance("6s")

    assert bodies(kit.template) == [b"order"]


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


@pytest.mark.feature("U9")
@pytest.mark.parametrize(
    ("options", "delay"),
    [
        ({"delay_level": 3}, "10s"),
        ({"delay": timedelta(minutes=5)}, "5m"),
        ({"delay": 7.5}, "7500ms"),
        ({"headers": {"DELAY": 2}}, "5s"),
    ],
    ids=str,
)
def test_every_delay_counts_from_the_commit(kit: Kit, options: dict[str, object], delay: str) -> None:
    """Other clients lose the delay silently. Here the check commits the message, and the delay counts from then."""
    kit.template.add_transaction_listener(Ledger(UNKNOWN, COMMIT))
    kit.template.send_in_transaction("orders", b"order", **options)  # type: ignore[arg-type]

    kit.harness.advance("6s")
    at_commit = bodies(kit.template)
    committed_ms = kit.harness.clock.now_ms()
    kit.harness.advance(delay)

    [message] = messages_in(kit.template.broker, "orders")
    assert at_commit == []
    assert message.store_timestamp == kit.harness.clock.now_ms()
    assert kit.harness.clock.now_ms() > committed_ms


def test_a_committed_pending_message_can_be_cancelled(kit: Kit) -> None:
    kit.template.add_transaction_listener(Ledger())
    kit.template.send_in_transaction("orders", b"order", delay=60, keys="4466")

    answer = kit.template.cancel(key="4466")
    kit.harness.advance("2m")

    assert answer.count == 1
    assert bodies(kit.template) == []


def test_the_hash_key_selects_the_queue_of_a_transaction(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(Ledger())

    queues = {
        mqtemplate_template.send_in_transaction("orders", b"order", hash_key="4466").message_queue for _ in range(5)
    }

    assert len(queues) == 1
    assert {message.message_queue for message in messages_in(mqtemplate_template.broker, "orders")} == queues


def test_the_spring_name_works(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(ledger := Ledger())

    result = mqtemplate_template.sendMessageInTransaction("orders:paid", b"order", 4466)

    assert result.local_transaction_state is COMMIT
    assert ledger.executed[0][1] == 4466


# --- errors ----------------------------------------------------------------------------------------


def test_a_batch_is_refused(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(MessageError, match="a transaction has one message, got a list"):
        mqtemplate_template.send_in_transaction("orders", [b"1", b"2"])


def test_an_invalid_delay_is_refused_before_the_local_transaction(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(ledger := Ledger())

    with pytest.raises(DelayError):
        mqtemplate_template.send_in_transaction("orders", b"order", delay=timedelta(days=400))

    assert ledger.executed == []


def test_a_transaction_without_a_listener_is_not_sent(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(ListenerError, match=r"no transaction listener handles 'orders:paid'; mark a class"):
        mqtemplate_template.send_in_transaction("orders:paid", b"order")


def test_a_transaction_listener_needs_a_producer_group(mqtemplate_broker: EmbeddedBroker) -> None:
    template = RocketMQTemplate(mqtemplate_broker)

    with pytest.raises(ConfigurationError, match=r"rocketmq\.producer\.group"):
        template.add_transaction_listener(Ledger())


def test_two_listeners_with_one_destination_are_refused(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.add_transaction_listener(Ledger())

    with pytest.raises(ListenerError, match="'all topics' have a listener already, Ledger; give Ledger a destination"):
        mqtemplate_template.add_transaction_listener(Ledger())


def test_an_object_without_the_decorator_is_refused(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(ListenerError, match="dict is not a transaction listener; decorate the class"):
        mqtemplate_template.add_transaction_listener({})


def test_a_local_transaction_cannot_take_a_message_ext(mqtemplate_template: RecordingTemplate) -> None:
    @transaction_listener()
    class Early(Ledger):
        def execute_local_transaction(self, message: MessageExt, arg: object) -> TransactionState:  # type: ignore[override]
            return COMMIT

    with pytest.raises(ListenerError, match="which does not exist before the message is delivered; take a Message"):
        mqtemplate_template.add_transaction_listener(Early())


def decorate_a_function() -> None:
    transaction_listener()(lambda: None)  # type: ignore[type-var]


def decorate_half_a_listener() -> None:
    transaction_listener()(type("Half", (), {"execute_local_transaction": print}))


def decorate_a_coroutine() -> None:
    async def check(self: object, message: Message) -> TransactionState:
        return COMMIT

    transaction_listener()(type("Async", (), {"execute_local_transaction": print, "check_local_transaction": check}))


@pytest.mark.parametrize(
    ("declare", "kind", "sentence"),
    [
        (decorate_a_function, ListenerError, "is not a class; decorate a class with execute_local_transaction"),
        (decorate_half_a_listener, ListenerError, "class Half has no method check_local_transaction"),
        (decorate_a_coroutine, ListenerError, "is 'async def', and the caller needs"),
        (lambda: transaction_listener(core_pool_size=0), ListenerError, "core_pool_size must be .* from 1 to 1000"),
        (
            lambda: transaction_listener(core_pool_size=4),
            ListenerError,
            "maximum_pool_size must be a whole number from 4 to 1000, got 1",
        ),
        (lambda: transaction_listener(blocking_queue_size=0), ListenerError, "blocking_queue_size"),
        (lambda: transaction_listener(keep_alive_time=5), UnsupportedError, "keep_alive_time is not supported"),
        (lambda: transaction_listener("orders:a || b"), MessageError, "a message has one tag"),
    ],
)
def test_an_invalid_declaration_is_refused(declare: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        declare()


def test_a_closed_template_answers_no_checks(kit: Kit) -> None:
    template = RocketMQTemplate(kit.broker, producer_group="shop")
    template.add_transaction_listener(ledger := Ledger(UNKNOWN))
    template.send_in_transaction("orders", b"order")

    template.close()
    kit.harness.advance("1h")

    assert ledger.checked == []
    assert bodies(template) == []


def test_the_most_demanding_listener_sets_the_threads_for_checks(mqtemplate_template: RecordingTemplate) -> None:
    """A group has one checker, which all listeners of the template share."""

    @transaction_listener("orders", core_pool_size=2, maximum_pool_size=8, blocking_queue_size=10)
    class Demanding(Ledger): ...

    mqtemplate_template.add_transaction_listener(Ledger())
    mqtemplate_template.add_transaction_listener(Demanding())

    assert (mqtemplate_template._transactions._threads, mqtemplate_template._transactions._max_waiting) == (8, 2_000)
    assert threading.active_count() < 100


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
    message: Any = SimpleNamespace(topic="orders", msg_id="1")
    for _ in range(3):
        checker.submit(message, lambda *answer: answers.put(answer))

    for _ in range(3):
        state, remark = answers.get(timeout=30)
        assert (state, str(remark)[:34]) == (UNKNOWN, "checkLocalTransactionState raised ")
    checker.close()
