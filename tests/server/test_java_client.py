"""RocketMQ's unmodified Java client uses the server. It confirms what the other tests assume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import unavailable_reason
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, SerializeType
from mqtemplate.server import BrokerServer, BrokerServerSettings

pytestmark = pytest.mark.conformance

ANY_PORT = HostAddress("127.0.0.1", 0)
LONG = 40_000


@dataclass(frozen=True)
class NameServerAddress:
    """The name server of a `JavaClient`."""

    address: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("server")
    engine_settings = EmbeddedSettings(listen_host=ANY_PORT, message_delay_level="1s 2s 1s")
    server_settings = BrokerServerSettings(listen=ANY_PORT)
    with EmbeddedBroker(folder, engine_settings) as engine, BrokerServer(engine, server_settings) as server:
        yield server


@pytest.fixture(scope="module")
def java(server: BrokerServer) -> Iterator[JavaClient]:
    with JavaClient(NameServerAddress(str(server.address))) as client:  # type: ignore[arg-type]
        client.connect()
        yield client


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_it_sends_to_a_new_topic_and_reads_it(java: JavaClient) -> None:
    sent = java.send(
        {"topic": "orders", "body": b"paid", "tags": "t", "keys": "k", "flag": 3, "properties": {"own": "x"}},
        {"topic": "orders", "body": b"big " * 5_000},
    )

    found = {message.body: message for message in java.read("orders", 2, LONG)}

    assert len(sent) == 2
    assert found.keys() == {b"paid", b"big " * 5_000}
    message = found[b"paid"]
    assert (message.tags, message.keys, message.flag) == ("t", "k", 3)
    assert message.properties["own"] == "x"
    assert message.properties["CLUSTER"] == "DefaultCluster"
    assert not [name for name in message.properties if name.startswith("__CRC")]


def test_it_sends_a_batch(java: JavaClient) -> None:
    java.send_batch(*[{"topic": "batches", "body": b"%d" % number} for number in range(5)])

    assert sorted(message.body for message in java.read("batches", 5, LONG)) == [b"%d" % number for number in range(5)]


def test_it_consumes_with_a_retry_and_commits(java: JavaClient, server: BrokerServer) -> None:
    java.send(*[{"topic": "jobs", "body": b"job %d" % number} for number in range(4)])

    handled = java.consume("workers", "jobs", 4, LONG, fail=[b"job 2"])  # without the failed attempt

    assert {message.body: message.reconsume_times for message in handled} == {
        b"job 0": 0,
        b"job 1": 0,
        b"job 2": 1,
        b"job 3": 0,
    }
    assert sum(java.committed("workers", "jobs").values()) == 4
    assert server.groups.find("workers") is not None


def test_delayed_messages_are_delivered_and_never_early(java: JavaClient) -> None:
    start = now_ms()
    java.send(
        {"topic": "delays", "body": b"level", "level": 2},
        {"topic": "delays", "body": b"timer", "delay_ms": 1_500},
        {"topic": "delays", "body": b"now"},
    )

    found = {message.body: message for message in java.read("delays", 3, LONG)}

    assert found[b"level"].store_timestamp >= start + 2_000
    assert found[b"timer"].store_timestamp >= start + 1_500
    assert found[b"now"].store_timestamp < start + 1_500


def test_it_reads_messages_of_the_embedded_broker(java: JavaClient, server: BrokerServer) -> None:
    server.engine.sends.send(Message("mixed", b"from here", {"TAGS": "t"}))

    (message,) = java.read("mixed", 1, LONG)

    assert (message.body, message.tags) == (b"from here", "t")


def test_it_selects_by_tag_and_by_sql92(java: JavaClient) -> None:
    java.send(
        {"topic": "prices", "body": b"cheap", "tags": "a", "properties": {"price": "5"}},
        {"topic": "prices", "body": b"dear", "tags": "b", "properties": {"price": "500"}},
        {"topic": "prices", "body": b"untagged", "properties": {"price": "501"}},
    )

    by_tag = java.join("by-tag", "prices", tags="b || c")
    by_sql = java.join("by-sql", "prices", sql="price > 10")
    found = {
        name: {message.body for message in java.handled(name, count, LONG)}
        for name, count in ((by_tag, 1), (by_sql, 2))
    }
    java.leave(by_tag)
    java.leave(by_sql)

    assert found == {by_tag: {b"dear"}, by_sql: {b"dear", b"untagged"}}


def test_its_members_rebalance_when_members_join_and_leave(java: JavaClient) -> None:
    """They rebalance because of a notification (code 40), not because of their interval."""
    java.send({"topic": "shared", "body": b"first"})
    one = java.join("sharers", "shared")
    alone = java.assigned(one, "shared", 4, LONG)
    two = java.join("sharers", "shared")
    halves = java.assigned(one, "shared", 2, LONG) + java.assigned(two, "shared", 2, LONG)
    java.leave(two)
    again = java.assigned(one, "shared", 4, LONG)
    java.leave(one)

    assert (sorted(alone), sorted(halves), sorted(again)) == ([0, 1, 2, 3],) * 3


def test_a_message_that_an_ordered_group_cannot_handle_is_a_dead_letter(java: JavaClient, server: BrokerServer) -> None:
    bodies = [b"step %d" % number for number in range(4)]
    java.send(*[{"topic": "steps", "body": body, "hash_key": "one queue"} for body in bodies])

    member = java.join("in-order", "steps", orderly=True, max_reconsume_times=1, fail_always=[bodies[1]])
    handled = [message.body for message in java.handled(member, 3, LONG)]
    dead = java.read("%DLQ%in-order", 1, LONG)
    java.leave(member)

    assert handled == [bodies[0], bodies[2], bodies[3]]
    assert [message.body for message in dead] == [bodies[1]]


def test_it_can_write_its_headers_in_binary(server: BrokerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SERIALIZE_TYPE", "ROCKETMQ")
    # The client of the other tests may be connected too, and sends heartbeats in JSON.
    others = {connection.id for connection in server.remoting.connections()}
    seen: set[SerializeType] = set()

    def note(connection: Connection, request: RemotingCommand) -> None:
        if connection.id not in others:
            seen.add(request.serialize_type)

    monkeypatch.setattr(server.remoting, "_guard", note)

    with JavaClient(NameServerAddress(str(server.address))) as java:  # type: ignore[arg-type]
        java.connect()
        java.send({"topic": "binary", "body": b"short headers", "tags": "t"})
        handled = java.consume("binary-readers", "binary", 1, LONG)

    assert [(message.body, message.tags) for message in handled] == [(b"short headers", "t")]
    assert seen == {SerializeType.ROCKETMQ}
