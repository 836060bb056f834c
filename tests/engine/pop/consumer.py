"""A broker in memory on a virtual clock, and a consumer of one group that reads it by POP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.pop.pop import PoppedMessage, PopRequest, PopResult, PopService, ReceiptHandle
from mqtemplate.message import Message
from mqtemplate.testing import Harness

TOPIC, GROUP = "orders", "billing"


def ignore(error: Exception | None) -> None:
    """Take the result of a change, which must have succeeded."""
    assert error is None


class Shop:
    """A broker with a topic of one queue, and one group.

    Args:
        path: Store directory; None for memory.
    """

    def __init__(self, path: Path | None = None, clock: VirtualClock | None = None, **settings: Any) -> None:
        clock = clock or VirtualClock()
        settings = {"default_topic_queue_nums": 1, **settings}
        self._use(EmbeddedBroker(path, EmbeddedSettings(**settings), clock), clock)

    def _use(self, broker: EmbeddedBroker, clock: VirtualClock) -> None:
        self.broker, self.clock = broker, clock
        broker.start()
        self.harness = Harness(broker)
        broker.engine.routes.queues(TOPIC)

    @classmethod
    def of(cls, broker: EmbeddedBroker, clock: VirtualClock) -> Shop:
        """Start a broker that a test has created."""
        shop = cls.__new__(cls)
        shop._use(broker, clock)
        return shop

    @property
    def pop_service(self) -> PopService:
        return self.broker.engine.pop

    def send(self, *bodies: str, **properties: str) -> None:
        for body in bodies:
            self.broker.sends.send(Message(TOPIC, body.encode(), dict(properties)))

    def request(self, **options: Any) -> PopRequest:
        return PopRequest(**{"group": GROUP, "topic": TOPIC, "invisible_ms": 30_000, "from_last": False, **options})

    def pop(self, **options: Any) -> Sequence[PoppedMessage]:
        return self.pop_service.pop(self.request(**options)).messages

    def hold(self, wait_ms: int, results: list[PopResult], **options: Any) -> Callable[[], None]:
        return self.pop_service.hold(self.request(**options), wait_ms, results.append).cancel

    def ack(self, *messages: PoppedMessage) -> list[bool]:
        return [self.pop_service.ack(GROUP, TOPIC, message.handle, ignore) for message in messages]

    def change(self, message: PoppedMessage, invisible_ms: int, **options: bool) -> ReceiptHandle | None:
        return self.pop_service.change_invisible(GROUP, TOPIC, message.handle, invisible_ms, ignore, **options)

    def committed(self, topic: str = TOPIC) -> int | None:
        return self.broker.engine.offsets.offset(GROUP, topic, 0)

    def number(self, name: str) -> float:
        value = self.broker.metrics.snapshot()[name]
        assert isinstance(value, int | float)
        return value


def bodies(messages: Sequence[PoppedMessage]) -> list[str]:
    return [message.record.body.decode() for message in messages]
