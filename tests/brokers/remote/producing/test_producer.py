"""Sending to a cluster: whom a message is tried on, for how long, and what the error says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.errors import DestinationError, SendError, SendTimeoutError, UnsupportedError
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.remoting.protocol import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.results import SendStatus
from mqtemplate.topics import AUTO_CREATE_TOPIC
from tests.brokers.remote.scripted_cluster import ScriptedBroker

SEND = RequestCode.SEND_MESSAGE_V2
MESSAGE = Message("orders", b"x")


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic("orders")
        yield broker


@contextmanager
def client_of(cluster: ScriptedBroker, **settings: Any) -> Iterator[RemoteBroker]:
    with RemoteBroker(RemoteSettings(name_servers=(cluster.address,), **settings)) as broker:
        yield broker


@pytest.mark.parametrize(
    "code",
    [
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
    ],
)
def test_another_queue_is_tried_after_a_refusal_that_may_pass(cluster: ScriptedBroker, code: int) -> None:
    cluster.refuse(SEND, code, "not now")

    with client_of(cluster) as broker, pytest.raises(SendError, match=f"answered {int(code)} .*not now"):
        broker.send(MESSAGE)

    assert cluster.count(SEND) == 3


def test_a_refusal_that_stays_is_told_at_once(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.FLOW_CONTROL)

    with client_of(cluster) as broker, pytest.raises(SendError, match="FLOW_CONTROL"):
        broker.send(MESSAGE)

    assert cluster.count(SEND) == 1


def test_a_message_for_one_queue_is_not_sent_elsewhere(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with client_of(cluster) as broker, pytest.raises(SendError):
        broker.send(MESSAGE, MessageQueue("orders", "broker-a", 1))

    assert cluster.count(SEND) == 1


def test_the_number_of_tries_is_a_setting_for_either_verb(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with client_of(cluster, retry_times_when_send_failed=0, retry_times_when_send_async_failed=1) as broker:
        with pytest.raises(SendError):
            broker.send(MESSAGE)
        once = cluster.count(SEND)
        with pytest.raises(SendError):
            broker.send_async([MESSAGE]).result(10)

    assert (once, cluster.count(SEND)) == (1, 3)


def test_a_broker_that_failed_is_passed_over_for_another() -> None:
    with ScriptedBroker("broker-a") as good, ScriptedBroker("broker-b") as bad:
        good.others = [bad]
        good.topic("orders")
        bad.refuse(SEND, ResponseCode.SYSTEM_BUSY)

        with client_of(good) as broker:
            brokers = [broker.send(MESSAGE).message_queue.broker_name for _ in range(20)]

        assert set(brokers) == {"broker-a"}
        assert bad.count(SEND) == 1


def test_a_broker_that_is_gone_is_passed_over_too() -> None:
    with ScriptedBroker("broker-a") as good:
        with ScriptedBroker("broker-b") as gone:
            good.others = [gone]
            good.topic("orders")

        with client_of(good) as broker:
            sync = [broker.send(MESSAGE).message_queue.broker_name for _ in range(10)]
            later = [broker.send_async([MESSAGE]).result(10).message_queue.broker_name for _ in range(10)]

        assert set(sync + later) == {"broker-a"}


def test_time_over_is_told_with_the_number_of_tries(cluster: ScriptedBroker) -> None:
    cluster.script(SEND, lambda request: None)

    with (
        client_of(cluster) as broker,
        pytest.raises(SendTimeoutError, match=r"send message \w+ to 'orders': tried once within 200 ms"),
    ):
        broker.send(MESSAGE, timeout_ms=200)


def test_a_message_that_is_less_safe_than_promised_says_so(cluster: ScriptedBroker) -> None:
    def not_flushed(request: Any) -> Any:
        response = cluster.take(request)
        response.code = ResponseCode.FLUSH_DISK_TIMEOUT
        return response

    cluster.script(SEND, not_flushed)

    with client_of(cluster) as broker:
        assert broker.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 1
    with client_of(cluster, retry_next_server=True) as broker:
        assert broker.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 4


def test_the_first_message_of_a_topic_finds_its_real_queues_afterwards(cluster: ScriptedBroker) -> None:
    cluster.topic(AUTO_CREATE_TOPIC, queues=8, perm=Perm.READ | Perm.WRITE | Perm.INHERIT)

    with client_of(cluster) as broker:
        broker.send(Message("new", b"x"))
        cluster.topic("new", queues=2)
        broker.send(Message("new", b"x"))

        assert len(broker.queues("new")) == 2


def test_a_topic_without_a_writable_queue_is_told(cluster: ScriptedBroker) -> None:
    cluster.topic("archive", perm=Perm.READ)

    with client_of(cluster) as broker, pytest.raises(SendError, match=r"'archive' has no queue that accepts messages"):
        broker.send(Message("archive", b"x"))


def test_a_queue_that_is_none_of_the_topic_is_refused(cluster: ScriptedBroker) -> None:
    with client_of(cluster) as broker, pytest.raises(DestinationError, match=r"is no queue of the topic; there are 4"):
        broker.send(MESSAGE, MessageQueue("orders", "broker-a", 9))


def test_a_cluster_without_automatic_topics_says_so(cluster: ScriptedBroker) -> None:
    with (
        client_of(cluster) as broker,
        pytest.raises(SendError, match=r"no route for 'new'.*autoCreateTopicEnable=true"),
    ):
        broker.send(Message("new", b"x"))


@pytest.mark.parametrize("name", [Property.TIMER_DELAY_SEC, Property.START_DELIVER_TIME])
def test_a_broker_of_4_is_not_given_timers_which_it_would_deliver_at_once(name: str) -> None:
    with ScriptedBroker(version=Version.V4_9_7) as cluster:
        cluster.topic("orders")
        timer = Message("orders", b"x", {name: "1767225600000"})

        with client_of(cluster) as broker:
            with pytest.raises(UnsupportedError, match=r"older than RocketMQ 5\.0 and has no timers.*timerWheelEnable"):
                broker.send(timer)
            with pytest.raises(UnsupportedError):
                broker.send_async([timer]).result(10)
            with pytest.raises(UnsupportedError):
                broker.send_one_way(timer)

        assert cluster.count(SEND) == 0
