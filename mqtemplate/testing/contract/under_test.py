"""Broker under test: what a contract test needs besides the broker, and short forms for common steps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pytest

from mqtemplate.broker import Broker, Capability, ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.results import HalfMessage, SendResult
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.testing.harness import Harness

_STEP_MS = 100  # on a virtual clock
_POLL_MS = 10  # on a real clock
_NOTHING_MS = 200  # on a real clock, the time in which no message may arrive
TIMER_PROPERTIES = frozenset(
    {Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS, Property.START_DELIVER_TIME}
)
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


def _stepping(broker: Broker) -> Callable[[int], None]:
    """Return a function that lets milliseconds pass on the virtual clock of a broker."""
    harness = Harness(broker, raise_handler_errors=False)
    return lambda milliseconds: harness.advance(f"{milliseconds}ms")


def _sleep(milliseconds: int) -> None:
    time.sleep(milliseconds / 1_000)


@dataclass(kw_only=True)
class BrokerUnderTest:
    """A started broker and its properties that contract tests depend on.

    Attributes:
        pass_time: Function that lets milliseconds pass for the broker; on a virtual clock it steps the broker.
        restart: Function that closes the broker and opens it again over the same data; None if it stores none.
        timeout_ms: Time for work that the broker does on its own, such as assigning queues.
        early_ms: Maximum time that a timer message may be early; 0 for every broker of this project.
        max_message_bytes: Configured maximum of a body.
        checks_within_ms: Maximum time before a transaction check, and between two checks.
        longest_delay_ms: Configured maximum of a delay.
    """

    broker: Broker
    pass_time: Callable[[int], None]
    restart: Callable[[], Broker] | None = None
    timeout_ms: int = 1_000
    early_ms: int = 0
    max_message_bytes: int = 4 * 1024 * 1024
    longest_delay_ms: int = 40 * 86_400_000
    checks_within_ms: int = 40_000
    _suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @classmethod
    def on_virtual_clock(cls, broker: Broker, **settings: Any) -> Self:
        """Return it for a broker on a `VirtualClock`; a harness steps the broker."""
        return cls(broker=broker, pass_time=_stepping(broker), **settings)

    @classmethod
    def on_real_clock(cls, broker: Broker, **settings: Any) -> Self:
        """Return it for a broker on the real clock; a test sleeps to let time pass."""
        return cls(broker=broker, pass_time=_sleep, **{"timeout_ms": 10_000, **settings})

    # --- names: unique for each test, since a broker may survive the test ------------------------

    def name(self, stem: str) -> str:
        """Return a unique name for a topic or a group."""
        return f"{stem}-{self._suffix}"

    def topic(self, queue_count: int = 4, stem: str = "orders") -> str:
        """Create a topic and return its name."""
        topic = self.name(stem)
        self.broker.create_topic(topic, queue_count)
        return topic

    def queue(self, queue_id: int = 0, of: int = 1) -> MessageQueue:
        """Create a topic with so many queues, and return one of them."""
        return self.broker.queues(self.topic(queue_count=of))[queue_id]

    # --- capabilities: a test that needs a missing one is skipped --------------------------------

    def needs(self, *capabilities: Capability) -> None:
        """Skip the test if the broker does not have these capabilities."""
        for capability in capabilities:
            if capability not in self.broker.capabilities:
                pytest.skip(f"this broker has no {capability.value}")

    def needs_real_time(self) -> None:
        """Skip the test on a virtual clock."""
        if self.broker.clock.is_virtual:
            pytest.skip("on a virtual clock no call waits")

    def needs_virtual_time(self) -> None:
        """Skip the test on a real clock."""
        if not self.broker.clock.is_virtual:
            pytest.skip("would take hours of real time")

    def reopen(self) -> None:
        """Restart the broker; skip the test if the broker stores nothing."""
        if self.restart is None:
            pytest.skip("this broker stores nothing")
        self.broker = self.restart()
        if self.broker.clock.is_virtual:
            self.pass_time = _stepping(self.broker)

    # --- short forms -----------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return the broker's time."""
        return self.broker.clock.now_ms()

    def send(
        self,
        topic: str,
        body: str,
        queue: MessageQueue | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        tag: str | None = None,
    ) -> SendResult:
        """Send a message. Skip the test if the properties need a capability that the broker does not have."""
        tagged = {Property.TAGS: tag} if tag is not None else {}
        message = Message(topic, body.encode(), {**tagged, **(properties or {})})
        if Property.DELAY in message.properties:
            self.needs(Capability.DELAY_LEVEL)
        if TIMER_PROPERTIES & message.properties.keys():
            self.needs(Capability.TIMER)
        return self.broker.sends.send(message, queue)

    def send_half(self, topic: str, body: str, properties: Mapping[str, str] | None = None) -> HalfMessage:
        """Send a message in a transaction. Skip the test if the broker has no transactions."""
        self.needs(Capability.TRANSACTION)
        return self.broker.sends.send_half(Message(topic, body.encode(), dict(properties or {})), self.name("shop"))

    def join(self, group: str, topic: str, selector: Selector | str = "*", **settings: Any) -> Consumer:
        """Join *group*; a new group starts at the first offset. A text as selector means tags."""
        settings.setdefault("consume_from_where", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        selector = TagSelector(selector) if isinstance(selector, str) else selector
        return self.broker.groups.subscribe(
            ConsumerSpec(group=self.name(group), subscriptions={topic: selector}, **settings)
        )

    def joined(self, group: str = "billing", queue_count: int = 4) -> tuple[str, Consumer]:
        """Create a topic and join *group*. Return the topic and the member."""
        topic = self.topic(queue_count)
        return topic, self.join(group, topic)

    def filled(self, *messages: str) -> MessageQueue:
        """Create a topic with one queue, send these messages, and return the queue; ``"body#tag"`` has a tag."""
        queue = self.queue()
        for text in messages:
            body, _, tag = text.partition("#")
            self.send(queue.topic, body, tag=tag or None)
        self._wait_until_stored(queue, len(messages))
        return queue

    def stored(self, queue: MessageQueue, count: int) -> list[MessageExt]:
        """Return the messages of a queue when it has *count* of them."""
        self._wait_until_stored(queue, count)
        return self.broker.reader.pull(queue, 0).messages

    def _wait_until_stored(self, queue: MessageQueue, count: int) -> None:
        # A broker may dispatch messages to their queue a moment after it has acknowledged them.
        self.until(lambda: self.broker.reader.max_offset(queue) >= count, "the messages are in their queue")

    def until(self, happened: Callable[[], bool], what: str, timeout_ms: int = 0) -> None:
        """Let time pass until the broker has done something on its own."""
        timeout_ms = timeout_ms or self.timeout_ms
        deadline_ms = self.now_ms() + timeout_ms
        while not happened():
            assert self.now_ms() < deadline_ms, f"not within {timeout_ms} ms: {what}"
            self.pass_time(_STEP_MS if self.broker.clock.is_virtual else _POLL_MS)

    def result(self, future: Future[_Result]) -> _Result:
        """Wait for the result of an asynchronous call; on a virtual clock the broker is stepped."""
        self.until(future.done, "the future is done")
        return future.result()

    def gather(self, receive: Callable[[int], Sequence[_Item]], count: int) -> list[_Item]:
        """Call *receive* with the number of missing messages until *count* have arrived."""
        taken: list[_Item] = []

        def has_all() -> bool:
            taken.extend(receive(count - len(taken)))
            return len(taken) >= count

        self.until(has_all, f"{count} messages")
        assert len(taken) == count
        return taken

    def take(self, consumer: Consumer, count: int) -> list[MessageExt]:
        """Poll until *count* messages have arrived."""
        return self.gather(lambda _: consumer.poll(32, 0 if self.broker.clock.is_virtual else _STEP_MS), count)

    def take_one(self, consumer: Consumer) -> MessageExt:
        """Poll until one message has arrived."""
        [message] = self.take(consumer, 1)
        return message

    def take_one_after(self, consumer: Consumer, milliseconds: int) -> MessageExt:
        """Take one message that arrives after this time, and not a millisecond earlier; on a virtual clock only."""
        self.pass_time(milliseconds - 1)
        assert self.takes_nothing(consumer), f"a message arrived before {milliseconds} ms had passed"
        self.pass_time(1)
        return self.take_one(consumer)

    def takes_nothing(self, consumer: Consumer) -> bool:
        """Return True if no message for this member is ready now."""
        return consumer.poll(32, 0 if self.broker.clock.is_virtual else _NOTHING_MS) == []

    def commit_all(self, consumer: Consumer) -> None:
        """Commit all messages that the member has polled."""
        for queue in consumer.assignment():
            consumer.commit(queue, consumer.position(queue))


def bodies(messages: Sequence[MessageExt]) -> list[str]:
    """Return the bodies as text, in the order of the messages."""
    return [message.body.decode() for message in messages]
