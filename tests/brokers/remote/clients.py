"""Servers, clients and members for the tests of the remote broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqtemplate.broker import ConsumeFromWhere, Consumer, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.clock import Clock
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.waiting import PATIENCE_S, eventually

ANYWHERE = HostAddress("127.0.0.1", 0)


@contextmanager
def server(*, clamp_delay_level: bool = False, **settings: Any) -> Iterator[LocalCluster]:
    """Start our own server in this process, with its messages in memory."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE, clamp_delay_level=clamp_delay_level))
    with LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE), **settings) as cluster:
        yield cluster


@contextmanager
def client(address: object, folder: Path, **settings: Any) -> Iterator[RemoteBroker]:
    """Start a remote broker."""
    with RemoteBroker(RemoteSettings(name_servers=(str(address),), offset_path=folder, **settings)) as broker:
        yield broker


def remote(cluster: ScriptedBroker, *, clock: Clock | None = None, **settings: Any) -> RemoteBroker:
    """Return a client of a scripted broker, which is not started yet. A busy machine does not let its requests fail."""
    patient = {"request_timeout_ms": PATIENCE_S * 1_000, **settings}
    return RemoteBroker(RemoteSettings(name_servers=(cluster.address,), **patient), clock)


def group_spec(group: str, topic: str, selector: Selector | None = None) -> ConsumerSpec:
    """Return the spec of a clustering group that starts at the first offset."""
    return ConsumerSpec(
        group=group,
        subscriptions={topic: selector or TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )


def join(broker: RemoteBroker, topic: str, group: str = "billing", selector: Selector | None = None) -> Consumer:
    return broker.groups.subscribe(group_spec(group, topic, selector))


def assign_again(member: Consumer, share: set[MessageQueue]) -> None:
    """Take all queues from a member, then give it *share*; a rebalance in another thread waits meanwhile."""
    assert isinstance(member, RemoteConsumer)
    with member._assigning:
        member._assign(set())
        member._assign(share)


def give_up_all(member: RemoteConsumer) -> None:
    """Take all queues from a member, as a rebalance does when others have joined."""
    with member._assigning:
        member._assign(set())


def one_queue(broker: RemoteBroker, topic: str = "orders") -> MessageQueue:
    """Create a topic with one queue, and return it."""
    broker.create_topic(topic, 1)
    [queue] = broker.queues(topic)
    return queue


def send_numbers(broker: RemoteBroker, count: int) -> None:
    """Send messages with the bodies 0, 1, 2, … to ``orders``."""
    for number in range(count):
        broker.sends.send(Message("orders", b"%d" % number))


def take(member: Consumer, count: int) -> list[MessageExt]:
    """Poll until *count* messages have arrived."""
    taken: list[MessageExt] = []

    def is_complete() -> bool:
        taken.extend(member.poll(32, 50))
        return len(taken) >= count

    eventually(is_complete, f"{count} messages were polled")
    return taken


def bodies(messages: list[MessageExt]) -> list[bytes]:
    return [message.body for message in messages]


def message_ext(topic: str = "orders", body: bytes = b"x", **fields: Any) -> MessageExt:
    """Return a stored message; *fields* are those that the test is about."""
    host = HostAddress("127.0.0.1", 10911)
    defaults: dict[str, Any] = {
        "broker_name": "broker-a", "queue_id": 0, "queue_offset": 0, "physical_offset": 0, "store_size": 1,
        "sys_flag": 0, "body_crc": 0, "born_timestamp": 0, "born_host": host, "store_timestamp": 0,
        "store_host": host, "reconsume_times": 0, "prepared_transaction_offset": 0,
    }  # fmt: skip
    return MessageExt(topic, body, **defaults | fields)
