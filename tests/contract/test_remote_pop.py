"""Listeners by POP over the remoting protocol, as an application runs them: with our server and with RocketMQ 5.5.0."""

from __future__ import annotations

import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqtemplate import (
    ConsumeMode,
    MessageExt,
    MessageRequestMode,
    MQApplication,
    RetryLater,
    RocketMQTemplate,
    message_listener,
)
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.contract.test_remote_rocketmq import cluster
from tests.contract.test_remote_server import OurServer
from tests.waiting import eventually

POP = MessageRequestMode.POP


@contextmanager
def our_server(folder: Path) -> Iterator[str]:
    server = OurServer(folder)
    try:
        yield str(server.address)
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["ours", pytest.param("rocketmq", marks=pytest.mark.conformance)])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    with our_server(folder) if request.param == "ours" else cluster(folder, "5.5.0") as address:
        yield address


@pytest.fixture
def topic(address: str) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    with RemoteBroker(RemoteSettings(name_servers=(address,), request_timeout_ms=30_000)) as broker:
        broker.create_topic(name, 2)
    return name


def application(address: str, *listeners: object) -> MQApplication:
    settings = {"rocketmq.name-server": address, "rocketmq.producer.send-message-timeout": 30_000}
    return MQApplication(*listeners, settings=settings, environment={})


def test_each_message_is_handled_and_failures_are_retried_or_dead_letters(address: str, topic: str) -> None:
    """More members than queues have work: four handlers of two queues wait for each other."""
    group, handled = f"billing-{topic}", Counter[tuple[str, int]]()
    together = threading.Barrier(4)

    @message_listener(
        topic, group, selector_expression="paid", max_reconsume_times=1, request_mode=POP, consume_thread_number=4
    )
    def bill(order: str, message: MessageExt) -> None:
        if order.startswith("together"):
            together.wait(60)
        handled[order, message.reconsume_times] += 1
        if order == "poison" or (order == "hard" and message.reconsume_times == 0):
            raise RetryLater(delay="1s")

    orders = [f"together {number}" for number in range(4)] + ["good", "hard", "poison"]
    with application(address, bill) as app:
        template = app.get(RocketMQTemplate)
        for order in orders:
            template.sync_send(f"{topic}:paid", order)
        template.sync_send(f"{topic}:open", "open")
        eventually(lambda: handled.total() >= 9, "all orders are handled", timeout_s=120)
        broker = app.broker
        eventually(lambda: len(broker.queues(f"{DLQ_TOPIC_PREFIX}{group}")) > 0, "the dead letters have a topic")
        dead = broker.queues(f"{DLQ_TOPIC_PREFIX}{group}")
        eventually(lambda: sum(map(broker.reader.max_offset, dead)) == 1, "the poison is with the dead letters")

    first = {(order, 0): 1 for order in orders}
    assert handled == Counter(first | {("hard", 1): 1, ("poison", 1): 1})


def test_messages_of_one_key_are_handled_in_order(address: str, topic: str, request: pytest.FixtureRequest) -> None:
    """The second message of a key fails once, and the later ones of the key wait for it."""
    is_ours = "ours" in request.node.name
    handled: dict[str, list[int]] = defaultdict(list)
    lock = threading.Lock()

    @message_listener(topic, f"billing-{topic}", consume_mode=ConsumeMode.ORDERLY, request_mode=POP, retry=["100ms"])
    def bill(order: str) -> None:
        key, number = order.split()
        with lock:
            handled[key].append(int(number))
            is_first = handled[key] == [0, 1]
        if is_first:
            raise ValueError("once")

    keys = ("tea", "coffee", "milk", "sugar")
    with application(address, bill) as app:
        template = app.get(RocketMQTemplate)
        for number in range(6):
            for key in keys:
                template.sync_send(topic, f"{key} {number}", hash_key=key)
        eventually(lambda: all(5 in handled[key] for key in keys), "all orders are handled", timeout_s=120)

    if is_ours:
        assert dict(handled) == {key: [0, 1, 1, 2, 3, 4, 5] for key in keys}
    # RocketMQ reads a queue again from a failed message on, those that were acknowledged after it too.
    assert {key: list(dict.fromkeys(numbers)) for key, numbers in handled.items()} == {
        key: [0, 1, 2, 3, 4, 5] for key in keys
    }


def test_a_message_that_arrives_while_a_member_stops_is_for_the_others(address: str, topic: str) -> None:
    """The broker may have given it to a pop of the member that stops."""
    group, handled = f"billing-{topic}", Counter[str]()

    def member(name: str) -> object:
        @message_listener(topic, group, id=name, request_mode=POP, invisible_duration="10s")
        def bill(order: str) -> None:
            handled[order] += 1

        return bill

    with application(address, member("stays")) as app:
        template = app.get(RocketMQTemplate)
        for number in range(3):
            with application(address, member(f"leaves {number}")) as other:
                [leaving] = other.containers
                template.sync_send(topic, f"before {number}")
                stop = threading.Thread(target=leaving.stop)
                stop.start()
                template.sync_send(topic, f"while {number}")
                stop.join()
        eventually(lambda: handled.total() >= 6, "all orders are handled", timeout_s=120)

    assert handled == Counter([f"{when} {number}" for number in range(3) for when in ("before", "while")])
