"""Messages made by hand, and a small world: a broker in memory, listeners over it, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerContainer, ListenerRegistry
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.services import Service

MakeMessage = Callable[..., MessageExt]


@pytest.fixture
def make_message() -> MakeMessage:
    def make(body: bytes = b"hello", *, topic: str = "orders", offset: int = 0, **changes: Any) -> MessageExt:
        facts: dict[str, Any] = {
            "properties": {},
            "broker_name": "broker-a",
            "queue_id": 0,
            "queue_offset": offset,
            "physical_offset": offset * 100,
            "store_size": 100,
            "sys_flag": 0,
            "body_crc": 0,
            "born_timestamp": 1_700_000_000_000,
            "born_host": HostAddress("127.0.0.1", 1),
            "store_timestamp": 1_700_000_000_001,
            "store_host": HostAddress("127.0.0.1", 10911),
            "reconsume_times": 0,
            "prepared_transaction_offset": 0,
        }
        return MessageExt(topic, body, **(facts | changes))

    return make


class World:
    """A broker in memory with listeners. On a virtual clock, time passes only in `advance`."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.registry = ListenerRegistry(broker, JsonMessageConverter())

    def listen(self, *targets: object) -> ListenerContainer:
        """Register and start; returns the last container."""
        container = [self.registry.register(target) for target in targets][-1][-1]
        self.registry.start()
        return container

    def send(self, topic: str, *bodies: str, tag: str | None = None, queue_id: int = 0) -> list[SendResult]:
        """Put messages into one queue, so that their order is known."""
        properties = {"TAGS": tag} if tag else {}
        queue = MessageQueue(topic, self.broker.name, queue_id)
        self.broker.queues(topic)
        return [self.broker.send(Message(topic, body.encode(), dict(properties)), queue) for body in bodies]

    def confirm(self) -> None:
        """Let everything happen that is due now."""
        self.advance(0)

    def advance(self, milliseconds: int) -> None:
        clock = self.broker.clock
        assert isinstance(clock, VirtualClock)
        target = clock.now_ms() + milliseconds
        while True:
            services: list[Service] = [*self.broker.services(), *self.registry.containers]
            dues = [due for service in services if (due := service.step()) is not None]
            next_ms = min(dues, default=target + 1)
            if next_ms <= clock.now_ms():
                continue
            if next_ms > target:
                break
            clock.set_ms(next_ms)
        clock.set_ms(target)

    def committed(self, group: str, topic: str = "orders", queue_id: int = 0) -> int | None:
        return self.broker.committed_offset(group, MessageQueue(topic, self.broker.name, queue_id))

    def bodies(self, topic: str, queue_id: int = 0) -> list[str]:
        """Everything that stands in one queue, read without a group."""
        queue = MessageQueue(topic, self.broker.name, queue_id)
        return [message.body.decode() for message in self.broker.pull(queue, 0, 1_000).messages]


@pytest.fixture
def world() -> Iterator[World]:
    """On a virtual clock: no threads, the same result each time."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        world = World(broker)
        yield world
        world.registry.stop()


@pytest.fixture
def real_world() -> Iterator[World]:
    """On the machine's clock, with threads; tests wait for events."""
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        world = World(broker)
        yield world
        world.registry.stop()
