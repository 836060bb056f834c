"""A listener whose concurrency is changed while it handles messages, for the tests over several brokers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mqtemplate import ConsumeMode, MessageModel, MQApplication, message_listener
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.listener import ListenerContainer
from tests.waiting import PATIENCE_S, eventually


class Counted:
    """Handlers that wait for `proceed`. They count how many of them run, and what they have handled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._may_proceed = threading.Semaphore(0)
        self.running = 0
        self.started = 0
        self.handled: Counter[str] = Counter()
        self.order: list[str] = []

    def listener(self, *, is_async: bool = False, **attributes: object) -> object:
        """Return a listener of ``orders``."""

        def handle(body: str) -> None:
            self._enter()
            assert self._may_proceed.acquire(timeout=PATIENCE_S)
            self._leave(body)

        async def handle_async(body: str) -> None:
            self._enter()
            assert await asyncio.to_thread(self._may_proceed.acquire, timeout=PATIENCE_S)
            self._leave(body)

        given = {"topic": "orders", "consumer_group": "billing", "id": "bill"} | attributes
        given |= {"consume_from_where": "CONSUME_FROM_FIRST_OFFSET"}
        return message_listener(**given)(handle_async if is_async else handle)  # type: ignore[arg-type]

    def _enter(self) -> None:
        with self._lock:
            self.running += 1
            self.started += 1

    def _leave(self, body: str) -> None:
        with self._lock:
            self.running -= 1
            self.handled[body] += 1
            self.order.append(body)

    def proceed(self, count: int) -> None:
        """Let this many handlers end."""
        self._may_proceed.release(count)

    def until_running(self, count: int) -> None:
        eventually(lambda: self.running == count, f"{count} handlers run")


def check_changes(
    counted: Counted, container: ListenerContainer, send: Callable[[str], object], *, at_most: int = 64
) -> None:
    """Change the concurrency while messages are handled: each is handled once, and never by more than allowed.

    Args:
        at_most: Number of handlers that can run at a time, such as the queues of an orderly listener.
    """
    bodies = [f"order-{number}" for number in range(60)]
    container.set_concurrency(2)
    for body in bodies:
        send(body)
    counted.until_running(2)

    container.set_concurrency(6)
    counted.until_running(min(6, at_most))
    before = counted.started
    container.set_concurrency(1)
    counted.proceed(min(6, at_most) - 1)
    counted.until_running(1)
    assert counted.started == before  # none started while more than one ran

    counted.proceed(5)
    eventually(lambda: counted.started == before + 5, "the next ones run one by one")
    container.set_concurrency(3)
    counted.until_running(min(3, at_most))
    counted.proceed(1_000)
    eventually(lambda: counted.handled.total() >= 60, "all are handled")
    eventually(lambda: container.in_flight == 0, "all are finished")

    assert counted.handled == Counter(bodies)
    assert container.concurrency == 3


def check_application(address: str, case: Mapping[str, Any]) -> None:
    """Run `check_changes` on an application whose broker is at *address*, with a topic of its own."""
    counted = Counted()
    topic = f"orders-{len(case)}"
    listener = counted.listener(topic=topic, consumer_group=f"billing-{len(case)}", **case)
    with RemoteBroker(RemoteSettings(name_servers=(address,))) as broker:
        broker.create_topic(topic, 4)
    with MQApplication(listener, settings={"rocketmq.name-server": address}, environment={}) as app:
        [container] = app.containers
        eventually(lambda: len(container.positions()) >= 4, "the queues are assigned")
        check_changes(
            counted,
            container,
            lambda body: app.template.sync_send(topic, body, hash_key=body),
            at_most=4 if container.endpoint.settings.is_orderly else 64,
        )


CASES: list[dict[str, Any]] = [
    {},
    {"is_async": True},
    {"consume_mode": ConsumeMode.ORDERLY},
    {"consume_mode": ConsumeMode.ORDERLY, "is_async": True},
    {"message_model": MessageModel.BROADCASTING},
]
