"""The consumer behind ``template.receive``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from mqtemplate.broker import Broker, ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.clock import Clock
from mqtemplate.converter import INVALID_BODY_ERRORS, MessageConverter, TypeChecks, payload_of
from mqtemplate.errors import BrokerClosedError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.processes import call_after_fork
from mqtemplate.record.dead_letter import dead_letter_properties
from mqtemplate.selectors.creation import make_selector
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.topics import check_given_topic

_log = get_logger("mqtemplate.template")

_STRAIGHT_TO_DEAD_LETTERS = -1  # see `Consumer.send_back`


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Consumer group and subscription of ``template.receive``: one topic. See ``rocketmq.pull-consumer.*``.

    Attributes:
        consume_from_where: Start of a new group. The default is the first offset: a program that receives from time to
            time would otherwise miss the messages before its first call.
    """

    group: str
    topic: str
    selector_type: SelectorType = SelectorType.TAG
    selector_expression: str = "*"
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

    def spec(self) -> ConsumerSpec:
        """Return the subscription as the broker takes it."""
        return ConsumerSpec(
            group=check_given_topic(self.group),
            subscriptions={check_given_topic(self.topic): make_selector(self.selector_type, self.selector_expression)},
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
        )


T = TypeVar("T")


class Receipt:
    """Read positions before and after one ``receive``. The next one commits them, unless the caller gave up."""

    __slots__ = ("_given_up", "after", "before")

    def __init__(self) -> None:
        self.before: dict[MessageQueue, int] = {}
        self.after: dict[MessageQueue, int] = {}
        self._given_up = False

    def give_up(self) -> None:
        """Note that the caller does not get the messages."""
        self._given_up = True

    def was_given_up(self) -> bool:
        """Return True if the messages are to be received again."""
        return self._given_up


class ReceiveFuture(AwaitableFuture[T]):
    """Future of an ``async_receive``.

    Args:
        abandon: Called if the task that awaits it is cancelled, even after the messages arrived.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        super().__init__()
        self._abandon = abandon

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except BaseException:
            self._abandon()
            raise


class LitePullConsumer:
    """A member of a consumer group that polls when the application calls ``receive``.

    - Delivery is at least once: the messages of one ``receive`` are committed by the next one, or by `close`. If the
      process dies before that, the group receives them again.
    - Threads may share it, but a call commits what another thread received before. To process messages in several
      threads use a listener.
    - It joins the group with the first ``receive``.
    """

    def __init__(self, broker: Broker, settings: PullSettings, converter: MessageConverter) -> None:
        self._broker = broker
        self._settings = settings
        self._bodies = BodyConversion("receive", settings, converter, broker.clock)
        self._types = TypeChecks(converter)
        self._consumer: Consumer | None = None
        self._last = Receipt()
        self._lock = threading.Lock()
        self._closed = False
        call_after_fork(self)

    def after_fork(self) -> None:
        """Leave the progress to the parent process. See `UsedByOneProcess`."""
        self._lock = threading.Lock()  # a thread that is missing here may hold the other one
        self._last = Receipt()

    def receive(self, target_type: Any, max_count: int, timeout_ms: int, receipt: Receipt | None = None) -> list[Any]:
        """Return up to *max_count* messages, each as *target_type*; empty if none arrives within *timeout_ms*.

        A message that cannot be converted goes to ``%DLQ%group`` and into the log: a retry would fail too, and it must
        not block the other messages. (A broadcasting group has no dead-letter topic, only the log.)

        Args:
            receipt: What `abandon` takes, if the caller may give up.

        Raises:
            ConversionError: No body can become *target_type*; no message was taken.
        """
        receipt = Receipt() if receipt is None else receipt
        self._types.check(target_type)  # before a message is taken, which would become a dead letter
        with self._lock:
            consumer = self._open()
            self._settle(consumer)
            if receipt.was_given_up():
                return []
            self._last = receipt
            receipt.before = _positions(consumer)
            messages = consumer.poll(max_count, timeout_ms)
            receipt.after = _positions(consumer)
            if receipt.was_given_up():
                return []
            return [payload for message in messages for payload in self._bodies.convert(consumer, message, target_type)]

    def abandon(self, receipt: Receipt) -> None:
        """Let the next ``receive`` return the messages of this one again; its caller did not get them."""
        receipt.give_up()
        consumer = self._consumer
        if consumer is not None and self._last is receipt and not receipt.after:
            consumer.wake()

    def close(self) -> None:
        """Commit what was received, and leave the group. A ``receive`` that waits in another thread ends."""
        self._closed = True
        polling = self._consumer
        if polling is not None:
            polling.wake()  # before the lock: a waiting `receive` holds it
        with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                self._settle(consumer)
                consumer.close()

    def _open(self) -> Consumer:
        if self._closed:
            raise BrokerClosedError("the template was closed; it receives no more")
        if self._consumer is None:
            self._consumer = self._broker.subscribe(self._settings.spec())
        return self._consumer

    def _settle(self, consumer: Consumer) -> None:
        """Commit what the last call returned, or go back if its caller gave up.

        The new owner of a reassigned queue reads on from the last commit.
        """
        last, self._last = self._last, Receipt()
        for queue in last.after.keys() & consumer.assignment():
            if not last.was_given_up():
                consumer.commit(queue, last.after[queue])
            elif (begin := last.before.get(queue, consumer.committed(queue))) is not None:
                consumer.seek(queue, begin)


@dataclass(frozen=True, slots=True)
class BodyConversion:
    """Bodies of the messages that a method of the template receives, as the type that its caller requests.

    Attributes:
        verb: Name of the method, for dead letters.
    """

    verb: str
    settings: PullSettings
    converter: MessageConverter
    clock: Clock

    def convert(self, consumer: Consumer, message: MessageExt, target_type: Any) -> list[Any]:
        """Return the body as *target_type*, or nothing if that is impossible: it is a dead letter, with the cause."""
        if target_type is MessageExt or target_type is Message:
            return [message]
        try:
            return [payload_of(message, target_type, self.converter)]
        except INVALID_BODY_ERRORS as exc:
            if self.settings.message_model is MessageModel.CLUSTERING:
                cause = dead_letter_properties(self.verb, message, exc, self.clock.now_ms(), has_stack=False)
                consumer.send_back(message, _STRAIGHT_TO_DEAD_LETTERS, properties=cause)
            _log.error(
                "receive.conversion_failed",
                topic=message.topic,
                tag=message.tags,
                group=self.settings.group,
                msg_id=message.msg_id,
                queue=message.queue_id,
                offset=message.queue_offset,
                reason=str(exc),
            )
            return []


def _positions(consumer: Consumer) -> dict[MessageQueue, int]:
    return {queue: consumer.position(queue) for queue in consumer.assignment()}
