"""Brokers with messages, groups, delayed messages and dead letters, and their administration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.peer.rocketmq import free_port
from mqtemplate.broker import Broker, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.message import HostAddress, Message, MessageExt, Property
from mqtemplate.operations import BrokerAccess, StoreAccess
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster

HOUR_MS = 3_600_000
KINDS = ("memory", "folder", "server")
PATIENCE_MS = 600_000
"""Timeout of requests. On a slow disk one may take longer than the usual three seconds."""
CAUSE = {
    "dead_letter_exception": "shop.CardRefusedError",
    "dead_letter_message": "card 4466 expired",
    "dead_letter_listener": "shop.bill",
    "dead_letter_attempts": "17",
    "dead_letter_failed_at": "2026-01-01T00:00:00.000Z",
    "dead_letter_stack": "File shop.py, line 7",
}


def free_address() -> HostAddress:
    return HostAddress("127.0.0.1", free_port())


def fill(broker: Broker) -> None:
    """Store what the tests of this folder read."""
    broker.create_topic("orders", 2)
    queues = broker.queues("orders")
    for number in range(10):
        properties = {Property.KEYS: f"order-{number}", Property.TAGS: "paid" if number % 2 else "open"}
        message = Message("orders", b'{"number": %d}' % number, properties)
        broker.sends.send(message, queues[number % 2], timeout_ms=PATIENCE_MS)
    for hours in (1, 2, 30):
        due = {Property.TIMER_DELAY_MS: str(hours * HOUR_MS), Property.KEYS: f"due-{hours}", Property.TAGS: "reminder"}
        broker.sends.send(Message("reminders", b"in %d hours" % hours, due), timeout_ms=PATIENCE_MS)
    by_level = Message("reminders", b"by level", {Property.DELAY: "18", Property.KEYS: "due-level"})
    broker.sends.send(by_level, timeout_ms=PATIENCE_MS)


def create_dead_letters(broker: Broker, group: str = "billing", count: int = 3) -> None:
    """Have *group* read the topic orders, and fail for the first messages."""
    consumer = broker.groups.subscribe(ConsumerSpec(group=group, subscriptions={"orders": TagSelector()}))
    messages: list[MessageExt] = []
    while len(messages) < 10:
        messages += consumer.poll(32, 200)
    messages.sort(key=lambda message: message.keys or "")
    for message in messages[:count]:
        consumer.send_back(message, -1, properties=CAUSE)
    for queue in broker.queues("orders"):
        consumer.commit(queue, 3)
    consumer.close()


@contextmanager
def access_of(kind: str, folder: Path) -> Iterator[BrokerAccess]:
    """Yield the administration of a broker that `fill` and `create_dead_letters` have filled."""
    with ExitStack() as stack:
        if kind == "folder":
            with EmbeddedBroker(folder / "store") as owner:
                fill(owner)
                create_dead_letters(owner)
            access: BrokerAccess = StoreAccess(folder / "store")
        elif kind == "memory":
            broker = stack.enter_context(EmbeddedBroker())
            fill(broker)
            create_dead_letters(broker)
            access = BrokerAccess(broker)
        else:
            client = stack.enter_context(RemoteBroker(stack.enter_context(server(folder))))
            fill(client)
            create_dead_letters(client)
            access = BrokerAccess(client)
        with access:
            yield access


@contextmanager
def server(folder: Path) -> Iterator[RemoteSettings]:
    """Run a server with a store directory in this process; yield the settings of its clients."""
    address = free_address()
    engine = EmbeddedBroker(folder / "store", EmbeddedSettings(listen_host=address))
    cluster = LocalCluster(engine, BrokerServerSettings(listen=address))
    cluster.start()
    try:
        offsets = folder / "offsets"
        yield RemoteSettings(name_servers=(str(address),), offset_path=offsets, request_timeout_ms=PATIENCE_MS)
    finally:
        cluster.stop()
