"""Messages built by hand, and a broker in memory with listeners whose clock the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import SystemClock, VirtualClock
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.listener import ListenerContainer, ListenerRegistry, message_listener
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.testing import Harness
from tests.waiting import PATIENCE_S

MakeMessage = Callable[..., MessageExt]


@pytest.fixture
def make_message() -> MakeMessage:
    def make(body: bytes = b"hello", *, topic: str = "orders", offset: int = 0, **changes: Any) -> MessageExt:
        fields: dict[str, Any] = {
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
        return MessageExt(topic, body, **(fields | changes))

    return make


class App:
    """Broker in memory with listeners. On a virtual clock, time passes only in `advance`."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.registry = ListenerRegistry(broker, JsonMessageConverter())

    @property
    def brokers(self) -> Mapping[str, Broker]:
        return {"broker": self.broker}

    @property
    def containers(self) -> Sequence[ListenerContainer]:
        return self.registry.containers

    @cached_property
    def harness(self) -> Harness:
        return Harness(self, raise_handler_errors=False)  # these tests study failures

    def listen(self, *targets: object, consume_timeout_ms: int | None = None) -> ListenerContainer:
        """Register and start listeners. Return the last container.

        Args:
            consume_timeout_ms: Of the last one; the decorator takes no less than a minute.
        """
        container = [self.registry.register(target) for target in targets][-1][-1]
        if consume_timeout_ms is not None:
            settings = replace(container.endpoint.settings, consume_timeout=consume_timeout_ms / 60_000)
            container.endpoint = replace(container.endpoint, settings=settings)
        self.registry.start()
        return container

    def send(
        self, topic: str, *bodies: str, tag: str | None = None, queue_id: int = 0, keys: str | None = None
    ) -> list[SendResult]:
        """Send messages to one queue, so that their order is fixed."""
        properties = {name: text for name, text in (("TAGS", tag), ("KEYS", keys)) if text}
        queue = MessageQueue(topic, self.broker.name, queue_id)
        self.broker.queues(topic)
        return [self.broker.sends.send(Message(topic, body.encode(), dict(properties)), queue) for body in bodies]

    def run_until_idle(self) -> None:
        """Do everything that is due now."""
        self.harness.run_until_idle()

    def advance(self, span: str) -> None:
        self.harness.advance(span)

    def committed(self, group: str, topic: str = "orders", queue_id: int = 0) -> int | None:
        return self.broker.groups.committed_offset(group, MessageQueue(topic, self.broker.name, queue_id))

    def bodies(self, topic: str, queue_id: int = 0) -> list[str]:
        """Return the bodies of all messages in one queue, read without a group."""
        queue = MessageQueue(topic, self.broker.name, queue_id)
        return [message.body.decode() for message in self.broker.reader.pull(queue, 0, 1_000).messages]


class Gate:
    """Handler of text that notes its start and waits for *proceed*. Several messages may pass at once after it."""

    def __init__(self) -> None:
        self.started, self.proceed = Event(), Event()
        self._started: SimpleQueue[str] = SimpleQueue()
        self._received: SimpleQueue[str] = SimpleQueue()

    def __call__(self, body: str) -> None:
        self._started.put(body)
        self.started.set()
        assert self.proceed.wait(PATIENCE_S)
        self._received.put(body)

    def opened(self) -> Gate:
        """Let all messages pass at once."""
        self.proceed.set()
        return self

    def listener(self, *, is_async: bool = False, **attributes: Any) -> Any:
        """Return the gate as a listener of ``orders``; an async one waits in a thread."""

        async def handle(body: str) -> None:
            await asyncio.to_thread(self, body)

        return message_listener("orders", "billing", **attributes)(handle if is_async else self)

    def take(self, count: int = 1) -> list[str]:
        """Wait for the next messages that are handled."""
        return [self._received.get(timeout=PATIENCE_S) for _ in range(count)]

    def await_started(self, count: int) -> list[str]:
        """Wait until handlers have started with the next messages."""
        return [self._started.get(timeout=PATIENCE_S) for _ in range(count)]

    @property
    def is_empty(self) -> bool:
        return self._received.empty()


@pytest.fixture
def app() -> Iterator[App]:
    """On a virtual clock: no threads, the same result each time."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        app = App(broker)
        yield app
        app.registry.stop()


@pytest.fixture
def threaded_app() -> Iterator[App]:
    """On the real clock, with threads; tests wait for events."""
    with EmbeddedBroker(None, clock=SystemClock()) as broker:
        app = App(broker)
        yield app
        app.registry.stop()
