"""Messages of a consumer group as an asynchronous iterator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from mqtemplate.broker import Broker, Consumer
from mqtemplate.clock import VirtualClock
from mqtemplate.converter import MessageConverter, TypeChecks
from mqtemplate.errors import BrokerClosedError, UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.template.background import Background
from mqtemplate.template.lite_pull import BodyConversion, PullSettings
from mqtemplate.topics import RETRY_TOPIC_PREFIX

T = TypeVar("T")

_FETCH_COUNT = 32
_FETCH_WAIT_MS = 15_000
_YEAR_MS = 366 * 86_400_000


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
                self._consumer = self._broker.subscribe(self._settings.spec())
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
        """Return the queue of a message; that of a retry belongs to the retry topic of the group."""
        is_retry: Any = message.properties.get(Property.RETRY_TOPIC) == message.topic
        topic = f"{RETRY_TOPIC_PREFIX}{self._settings.group}" if is_retry else message.topic
        return MessageQueue(topic, message.broker_name, message.queue_id)
