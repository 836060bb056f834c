"""Sends to a cluster: the attempts, their time limit, and the errors."""

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
def test_another_queue_is_tried_after_a_temporary_refusal(cluster: ScriptedBroker, code: int) -> None:
    cluster.refuse(SEND, code, "not now")

    with client_of(cluster) as broker, pytest.raises(SendError, match=f"answered {int(code)} .*not now"):
        broker.send(MESSAGE)

    assert cluster.count(SEND) == 3


def test_a_permanent_refusal_is_not_retried(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.FLOW_CONTROL)

    with client_of(cluster) as broker, pytest.raises(SendError, match="FLOW_CONTROL"):
        broker.send(MESSAGE)

    assert cluster.count(SEND) == 1


def test_a_message_for_one_queue_has_one_attempt(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with client_of(cluster) as broker, pytest.raises(SendError):
        broker.send(MESSAGE, MessageQueue("orders", "broker-a", 1))

    assert cluster.count(SEND) == 1


def test_the_numbers_of_retries_are_settings(cluster: ScriptedBroker) -> None:
    cluster.refuse(SEND, ResponseCode.SYSTEM_BUSY)

    with client_of(cluster, retry_times_when_send_failed=0, retry_times_when_send_async_failed=1) as broker:
        with pytest.raises(SendError):
            broker.send(MESSAGE)
        once = cluster.count(SEND)
        with pytest.raises(SendError):
            broker.send_async([MESSAGE]).result(10)

    assert (once, cluster.count(SEND)) == (1, 3)


def test_another_broker_is_preferred_after_a_failure() -> None:
    with ScriptedBroker("broker-a") as good, ScriptedBroker("broker-b") as bad:
        good.others = [bad]
        good.topic("orders")
        bad.refuse(SEND, ResponseCode.SYSTEM_BUSY)

        with client_of(good) as broker:
            brokers = [broker.send(MESSAGE).message_queue.broker_name for _ in range(20)]

        assert set(brokers) == {"broker-a"}
        assert bad.count(SEND) == 1


def test_another_broker_is_preferred_when_one_is_unreachable() -> None:
    with ScriptedBroker("broker-a") as good:
        with ScriptedBroker("broker-b") as gone:
            good.others = [gone]
            good.topic("orders")

        with client_of(good) as broker:
            sync = [broker.send(MESSAGE).message_queue.broker_name for _ in range(10)]
            later = [broker.send_async([MESSAGE]).result(10).message_queue.broker_name for _ in range(10)]

        assert set(sync + later) == {"broker-a"}


def test_the_timeout_error_has_the_number_of_attempts(cluster: ScriptedBroker) -> None:
    cluster.script(SEND, lambda request: None)

    with (
        client_of(cluster) as broker,
        pytest.raises(SendTimeoutError, match=r"send message \w+ to 'orders': tried once within 200ms"),
    ):
        broker.send(MESSAGE, timeout_ms=200)


def test_the_send_status_reports_a_message_that_was_not_flushed(cluster: ScriptedBroker) -> None:
    def not_flushed(request: Any) -> Any:
        response = cluster.accept(request)
        response.code = ResponseCode.FLUSH_DISK_TIMEOUT
        return response

    cluster.script(SEND, not_flushed)

    with client_of(cluster) as broker:
        assert broker.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 1
    with client_of(cluster, retry_next_server=True) as broker:
        assert broker.send(MESSAGE).send_status is SendStatus.FLUSH_DISK_TIMEOUT
        assert cluster.count(SEND) == 4


def test_the_queues_of_a_topic_are_looked_up_after_its_first_message(cluster: ScriptedBroker) -> None:
    cluster.topic(AUTO_CREATE_TOPIC, queues=8, perm=Perm.READ | Perm.WRITE | Perm.INHERIT)

    with client_of(cluster) as broker:
        broker.send(Message("new", b"x"))
        cluster.topic("new", queues=2)
        broker.send(Message("new", b"x"))

        assert len(broker.queues("new")) == 2


def test_a_topic_without_a_writable_queue_is_an_error(cluster: ScriptedBroker) -> None:
    cluster.topic("archive", perm=Perm.READ)

    with client_of(cluster) as broker, pytest.raises(SendError, match=r"'archive' has no queue that accepts messages"):
        broker.send(Message("archive", b"x"))


def test_a_queue_of_another_topic_is_refused(cluster: ScriptedBroker) -> None:
    with client_of(cluster) as broker, pytest.raises(DestinationError, match=r"is no queue of the topic; there are 4"):
        broker.send(MESSAGE, MessageQueue("orders", "broker-a", 9))


def test_a_missing_topic_is_an_error_if_brokers_create_none(cluster: ScriptedBroker) -> None:
    with (
        client_of(cluster) as broker,
        pytest.raises(SendError, match=r"no route for 'new'.*autoCreateTopicEnable=true"),
    ):
        broker.send(Message("new", b"x"))


@pytest.mark.parametrize("name", [Property.TIMER_DELAY_SEC, Property.START_DELIVER_TIME])
def test_a_timer_is_refused_for_a_broker_of_4_which_would_deliver_it_at_once(name: str) -> None:
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
