"""Receiving on request: ``template.receive``, and the messages of a group as an asynchronous iterator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mqtemplate.broker import Broker, ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.converter import INVALID_BODY_ERRORS, MessageConverter, TypeChecks, payload_of
from mqtemplate.errors import BrokerClosedError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.processes import call_after_fork
from mqtemplate.record.dead_letter import dead_letter_properties
from mqtemplate.selectors.sql92 import make_selector
from mqtemplate.selectors.tags import SelectorType
from mqtemplate.template.asynchronous import Background
from mqtemplate.topics import RETRY_TOPIC_PREFIX, check_given_topic

T = TypeVar("T")

_log = get_logger("mqtemplate.template")

_STRAIGHT_TO_DEAD_LETTERS = -1  # see `Consumer.send_back`
_FETCH_COUNT = 32
_FETCH_WAIT_MS = 15_000
_YEAR_MS = 366 * 86_400_000


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
            self._consumer = self._broker.groups.subscribe(self._settings.spec())
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
                cause = dead_letter_properties(self.verb, message, exc, self.clock.now_ms())
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


class Subscription(Generic[T]):
    """A member of a consumer group, as an asynchronous iterator of payloads.

    ::

        async with template.subscribe("orders", Order, consumer_group="billing") as orders:
            async for order in orders:
                await bill(order)

    - Delivery is at least once: a message is committed when the loop takes the next one, or when ``async with`` ends
      without an error. After an exception the group receives the current message again.
    - It joins the group with the first message, and leaves it at the end of ``async with``, with `aclose`, or when the
      template is closed. A loop that waits then ends.
    - One loop at a time. To handle messages side by side, or to retry failures later, use a listener.

    Args:
        target_type: Type of each payload; `MessageExt` for the whole message. A body that cannot be converted goes to
            the group's dead-letter topic.
        on_close: Called when it is closed.
    """

    def __init__(
        self,
        broker: Broker,
        settings: PullSettings,
        target_type: type[T],
        converter: MessageConverter,
        on_close: Callable[[Subscription[T]], object],
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._target_type = target_type
        TypeChecks(converter).check(target_type)
        self._bodies = BodyConversion("subscribe", settings, converter, broker.clock)
        self._on_close = on_close
        self._thread = Background(is_virtual=broker.clock.is_virtual)
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None
        self._fetched: deque[MessageExt] = deque()
        self._fetching: AwaitableFuture[list[MessageExt]] | None = None
        self._current: MessageExt | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._commit_current()
        while not self._closed:
            while self._fetched:
                message = self._fetched.popleft()
                for payload in self._bodies.convert(self._member(), message, self._target_type):
                    self._current = message
                    result: T = payload
                    return result
            await self._fetch()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None:
            self._commit_current()
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the group; the current message stays uncommitted."""
        self.close()

    def close(self) -> None:
        """Do the same as `aclose`; any thread may call it."""
        with self._lock:
            consumer, self._consumer, self._closed = self._consumer, None, True
        if consumer is not None:
            consumer.wake()
            consumer.close()
        self._thread.close()
        self._on_close(self)

    async def _fetch(self) -> None:
        """Wait for messages. If the waiting task is cancelled, the next call gets the messages of the same fetch."""
        clock = self._broker.clock
        if isinstance(clock, VirtualClock):
            self._fetch_in_virtual_time(clock)
            return
        if self._fetching is None or self._fetching.cancelled():
            self._fetching = self._thread.run(lambda: self._poll(_FETCH_WAIT_MS), AwaitableFuture())
        messages = await self._fetching
        self._fetching = None
        self._fetched.extend(messages)

    def _fetch_in_virtual_time(self, clock: VirtualClock) -> None:
        def has_fetched() -> bool:
            self._fetched.extend(self._poll(0))
            return bool(self._fetched)

        if not clock.wait_for(has_fetched, clock.now_ms() + _YEAR_MS):
            raise UnsupportedError(
                f"the subscription of {self._settings.group!r} waits for messages of {self._settings.topic!r}, and on "
                "the virtual clock none is due within a year; send one, or make a Harness that lets time pass"
            )

    def _poll(self, wait_ms: int) -> list[MessageExt]:
        try:
            return self._member().poll(_FETCH_COUNT, wait_ms)
        except BrokerClosedError:
            if self._closed:
                return []
            raise

    def _member(self) -> Consumer:
        with self._lock:
            if self._closed:
                raise BrokerClosedError("the subscription was closed; it receives no more")
            if self._consumer is None:
                self._consumer = self._broker.groups.subscribe(self._settings.spec())
            return self._consumer

    def _commit_current(self) -> None:
        message, self._current = self._current, None
        consumer = self._consumer
        if message is None or consumer is None:
            return
        queue = self._queue_of(message)
        if queue in consumer.assignment():  # the new owner of a reassigned queue receives the message again
            consumer.commit(queue, message.queue_offset + 1)

    def _queue_of(self, message: MessageExt) -> MessageQueue:
        """Return the queue of a message; the queue of a retry belongs to the retry topic of the group."""
        is_retry: Any = message.properties.get(Property.RETRY_TOPIC) == message.topic
        topic = f"{RETRY_TOPIC_PREFIX}{self._settings.group}" if is_retry else message.topic
        return MessageQueue(topic, message.broker_name, message.queue_id)
