"""The broker that the contract is held against, and how time passes for it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pytest

from mqtemplate.broker import Broker, Capability, ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.results import SendResult
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.testing.harness import Harness

_GLANCE_MS = 100
_Answer = TypeVar("_Answer")


def _wait(milliseconds: int) -> None:
    threading.Event().wait(milliseconds / 1_000)


@dataclass(kw_only=True)
class BrokerUnderTest:
    """A started broker, with what a test needs to know of its surroundings.

    Attributes:
        pass_time: Lets so many milliseconds go by for the broker; on a virtual clock by stepping it.
        restart: Ends the broker and opens it again over the same data; None if it keeps none.
        patience_ms: How long a test waits for what a broker does in its own time, such as sharing queues out anew.
        early_ms: How much too early a timer message may be; 0 for every broker of this project.
        max_message_bytes: The largest body that the broker was set to take.
        asks_within_ms: How long it takes until the broker asks for a transaction that has not ended, and asks again.
        longest_delay_ms: The longest delay that it was set to keep.
    """

    broker: Broker
    pass_time: Callable[[int], None]
    restart: Callable[[], Broker] | None = None
    patience_ms: int = 1_000
    early_ms: int = 0
    max_message_bytes: int = 4 * 1024 * 1024
    longest_delay_ms: int = 40 * 86_400_000
    asks_within_ms: int = 40_000
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @classmethod
    def on_virtual_clock(cls, broker: Broker, **settings: Any) -> Self:
        """For a broker on a `VirtualClock`, whose work a harness does."""
        return cls(broker=broker, pass_time=Harness(broker).advance, **settings)

    @classmethod
    def on_real_clock(cls, broker: Broker, **settings: Any) -> Self:
        """For a broker that lives by the machine's clock: time passes by waiting."""
        return cls(broker=broker, pass_time=_wait, **{"patience_ms": 10_000, **settings})

    # --- names: a broker that outlives a test must not meet them again ---------------------------

    def name(self, stem: str) -> str:
        return f"{stem}-{self._mark}"

    def topic(self, queue_count: int = 4, stem: str = "orders") -> str:
        topic = self.name(stem)
        self.broker.create_topic(topic, queue_count)
        return topic

    # --- what not every broker has ---------------------------------------------------------------

    def needs(self, capability: Capability) -> None:
        if capability not in self.broker.capabilities:
            pytest.skip(f"this broker has no {capability.value}")

    def needs_real_time(self) -> None:
        if self.broker.clock.is_virtual:
            pytest.skip("on a virtual clock nobody waits")

    def needs_virtual_time(self) -> None:
        if not self.broker.clock.is_virtual:
            pytest.skip("would take hours of real time")

    def reopen(self) -> None:
        if self.restart is None:
            pytest.skip("this broker keeps nothing over its end")
        self.broker = self.restart()
        if self.broker.clock.is_virtual:
            self.pass_time = Harness(self.broker).advance

    # --- short forms -----------------------------------------------------------------------------

    def now_ms(self) -> int:
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
        tagged = {Property.TAGS: tag} if tag is not None else {}
        return self.broker.send(Message(topic, body.encode(), {**tagged, **(properties or {})}), queue)

    def join(self, group: str, topic: str, selector: Selector | str = "*", **settings: Any) -> Consumer:
        """A member of *group* that begins, if the group is new, at the first offset. A text selects by tags."""
        settings.setdefault("consume_from_where", ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        wanted = TagSelector(selector) if isinstance(selector, str) else selector
        spec = ConsumerSpec(group=self.name(group), subscriptions={topic: wanted}, **settings)
        return self.broker.subscribe(spec)

    def until(self, happened: Callable[[], bool], what: str, patience_ms: int = 0) -> None:
        """Let time pass until something happened that a broker does in its own time."""
        patience_ms = patience_ms or self.patience_ms
        for _ in range(max(1, patience_ms // _GLANCE_MS)):
            if happened():
                return
            self.pass_time(_GLANCE_MS)
        assert happened(), f"after {patience_ms} ms still not: {what}"

    def answer(self, future: Future[_Answer]) -> _Answer:
        """The result of what is asynchronous; on a virtual clock it comes when the broker is stepped."""
        self.until(future.done, "the answer is there")
        return future.result()

    def take(self, consumer: Consumer, count: int, *, batch: int = 32) -> list[MessageExt]:
        """Poll until *count* messages came; fails if they do not."""
        taken: list[MessageExt] = []

        def enough() -> bool:
            taken.extend(consumer.poll(batch, 0 if self.broker.clock.is_virtual else _GLANCE_MS))
            return len(taken) >= count

        self.until(enough, f"{count} messages")
        assert len(taken) == count
        return taken

    def take_one(self, consumer: Consumer) -> MessageExt:
        [message] = self.take(consumer, 1)
        return message

    def takes_nothing(self, consumer: Consumer) -> bool:
        """Whether there is nothing for this member now."""
        return consumer.poll(32, 0 if self.broker.clock.is_virtual else 2 * _GLANCE_MS) == []

    def commit_all(self, consumer: Consumer) -> None:
        for queue in consumer.assignment():
            consumer.commit(queue, consumer.position(queue))
