"""Python and Java clients on the real RocketMQ: they share groups, and read each other's messages."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.broker import Consumer
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.results import TransactionState
from tests.brokers.remote.clients import join, take
from tests.contract.test_remote_rocketmq import REQUEST_TIMEOUT_MS, until_registered
from tests.waiting import eventually

pytestmark = pytest.mark.conformance

TIMEOUT_MS = 40_000
QUEUES = 4


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServer]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with NameServer() as names, RocketMQ(tmp_path_factory.mktemp("rocketmq"), names):
        until_registered(names.address)
        yield names


@pytest.fixture
def broker(name_server: NameServer, tmp_path: Path) -> Iterator[RemoteBroker]:
    settings = RemoteSettings(
        name_servers=(name_server.address,), offset_path=tmp_path, request_timeout_ms=REQUEST_TIMEOUT_MS
    )
    with RemoteBroker(settings) as broker:
        yield broker


@pytest.fixture(scope="module")
def java_process(name_server: NameServer) -> Iterator[JavaClient]:
    with JavaClient(name_server) as client:
        yield client


@pytest.fixture
def java(java_process: JavaClient) -> JavaClient:
    java_process.connect()  # its members of the test before end
    return java_process


@pytest.fixture
def topic(broker: RemoteBroker) -> str:
    topic = f"shared-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, QUEUES)
    return topic


def queues_of(member: Consumer, topic: str) -> set[int]:
    return {queue.queue_id for queue in member.assignment() if queue.topic == topic}


def poll_distinct(member: Consumer, count: int) -> dict[bytes, MessageExt]:
    """Poll *count* messages with different bodies; a rebalance may deliver a message twice."""
    polled: dict[bytes, MessageExt] = {}

    def is_complete() -> bool:
        polled.update({message.body: message for message in member.poll(32, 100)})
        return len(polled) >= count

    eventually(is_complete, f"{count} messages were polled")
    return polled


def send_to_each(broker: RemoteBroker, topic: str) -> set[bytes]:
    bodies = {b"%d" % queue.queue_id: queue for queue in broker.queues(topic)}
    for body, queue in bodies.items():
        broker.sends.send(Message(topic, body), queue)
    return set(bodies)


def test_python_and_java_share_the_queues_and_the_messages(broker: RemoteBroker, java: JavaClient, topic: str) -> None:
    ours = join(broker, topic, f"g-{topic}")
    theirs = java.join(f"g-{topic}", topic)

    java_queues = set(java.assigned(theirs, topic, 2, TIMEOUT_MS))
    eventually(lambda: len(queues_of(ours, topic)) == 2, "the Python member has given two queues up")
    sent = send_to_each(broker, topic)
    handled_by_java = {message.body for message in java.handled(theirs, 2, TIMEOUT_MS)}
    handled_by_us = poll_distinct(ours, 2).keys()

    assert queues_of(ours, topic) | java_queues == set(range(QUEUES))
    assert queues_of(ours, topic).isdisjoint(java_queues)
    assert handled_by_us | handled_by_java == sent
    assert handled_by_us.isdisjoint(handled_by_java)


def test_python_takes_over_when_the_java_process_is_killed(
    name_server: NameServer, broker: RemoteBroker, topic: str
) -> None:
    ours = join(broker, topic, f"g-{topic}")
    with JavaClient(name_server) as java:
        java.connect()
        theirs = java.join(f"g-{topic}", topic)
        java.assigned(theirs, topic, 2, TIMEOUT_MS)
        eventually(lambda: len(queues_of(ours, topic)) == 2, "each has two queues")

        java.kill()

    eventually(lambda: len(queues_of(ours, topic)) == QUEUES, "the Python member has all queues")
    sent = send_to_each(broker, topic)

    assert poll_distinct(ours, QUEUES).keys() == sent


def test_java_takes_over_when_the_python_process_is_killed(
    name_server: NameServer, broker: RemoteBroker, java: JavaClient, topic: str
) -> None:
    """The messages that the killed member has polled and not committed are delivered again: at least once."""
    theirs = java.join(f"g-{topic}", topic)
    java.assigned(theirs, topic, QUEUES, TIMEOUT_MS)
    command = [sys.executable, "-m", "tests.brokers.remote.member_process", name_server.address, f"g-{topic}", topic]
    ours = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert ours.stdout is not None
        assert any(line == "joined\n" for line in ours.stdout)
        eventually(lambda: len(java.assigned(theirs, topic, 2, 100)) == 2, "each has two queues")
        sent = send_to_each(broker, topic)
        given = {next(line for line in ours.stdout if line[0].isdigit()).strip() for _ in range(2)}
    finally:
        ours.kill()
        ours.communicate()

    assert len(java.assigned(theirs, topic, QUEUES, TIMEOUT_MS)) == QUEUES
    handled = {message.body for message in java.handled(theirs, QUEUES, TIMEOUT_MS)}
    assert len(given) == 2
    assert handled == sent


# --- messages of the other client -----------------------------------------------------------------


def test_java_reads_messages_of_python_compressed_or_not(broker: RemoteBroker, java: JavaClient, topic: str) -> None:
    properties = {Property.TAGS: "paid", Property.KEYS: "4466 4467", "region": "EU-ß"}
    large, small = b"again and again; " * 1_000, b"\x00small\xff"

    sent = [broker.sends.send(Message(topic, body, properties, flag=7)) for body in (large, small)]
    batch = broker.sends.send_batch([Message(topic, b"first", {Property.KEYS: "a"}), Message(topic, b"second")])

    found = {message.body: message for message in java.read(topic, 4, TIMEOUT_MS)}
    assert found.keys() == {large, small, b"first", b"second"}
    for body, result in zip((large, small), sent, strict=True):
        message = found[body]
        assert (message.msg_id, message.tags, message.keys, message.flag) == (result.msg_id, "paid", "4466 4467", 7)
        assert message.properties["region"] == "EU-ß"
    assert [found[body].msg_id for body in (b"first", b"second")] == batch.msg_id.split(",")
    assert found[b"first"].keys == "a"


def test_python_reads_messages_of_java_compressed_or_not(broker: RemoteBroker, java: JavaClient, topic: str) -> None:
    member = join(broker, topic, f"g-{topic}")
    large = b"again and again; " * 1_000

    java.send({"topic": topic, "body": large, "tags": "paid", "keys": "4466"}, {"topic": topic, "body": b"small"})
    found = poll_distinct(member, 2)

    assert found.keys() == {large, b"small"}
    assert (found[large].tags, found[large].keys) == ("paid", "4466")


def test_java_replies_to_python_and_python_to_java(broker: RemoteBroker, java: JavaClient, topic: str) -> None:
    answering = java.join(f"g-{topic}", topic, reply="java says ")
    java.assigned(answering, topic, QUEUES, TIMEOUT_MS)
    reply = broker.requests.request(Message(topic, b"hello"), None, TIMEOUT_MS).result(TIMEOUT_MS / 1_000)
    java.leave(answering)
    member = join(broker, topic, f"g-{topic}")

    with ThreadPoolExecutor(1) as other:
        answer = other.submit(java.request, {"topic": topic, "body": b"hello"}, TIMEOUT_MS)
        [request] = take(member, 1)
        broker.requests.reply(request, b"python says " + request.body)

        assert answer.result(TIMEOUT_MS / 1_000) == b"python says hello"
    assert reply.body == b"java says hello"


def test_java_reads_a_message_of_python_after_the_commit_of_its_transaction(
    broker: RemoteBroker, java: JavaClient, topic: str
) -> None:
    dropped, kept = (broker.sends.send_half(Message(topic, body), "shop") for body in (b"dropped", b"kept"))

    broker.transactions.end_transaction(dropped, TransactionState.ROLLBACK)
    broker.transactions.end_transaction(kept, TransactionState.COMMIT)

    assert [message.body for message in java.consume(f"g-{topic}", topic, 1, TIMEOUT_MS, linger=True)] == [b"kept"]


def test_both_clients_share_the_committed_offsets_of_a_group(
    broker: RemoteBroker, java: JavaClient, topic: str
) -> None:
    """Java continues at the offset that Python has committed."""
    [queue, *_] = broker.queues(topic)
    for number in range(4):
        broker.sends.send(Message(topic, b"%d" % number), queue)
    member = join(broker, topic, f"g-{topic}")
    eventually(lambda: queue in member.assignment(), "the queue is assigned")
    member.commit(queue, 2)
    member.close()

    handled = java.consume(f"g-{topic}", topic, 2, TIMEOUT_MS, linger=True)

    assert sorted(message.body for message in handled) == [b"2", b"3"]
