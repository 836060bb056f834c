"""Messages to a topic that is not in the cluster: a typing error would create a topic that no listener reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate import MQApplication, RocketMQTemplate, message_listener, service
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.errors import DestinationError, SendError
from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.route import TopicList
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.brokers.remote.clients import ANYWHERE, client, join, server
from tests.brokers.remote.scripted_cluster import ScriptedBroker


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with server() as cluster:
        cluster.engine.create_topic("orders", 1)
        yield cluster


def test_an_unknown_topic_is_refused_with_the_nearest_of_the_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    """This client has used none of the topics of the cluster before."""
    with client(cluster.address, tmp_path, auto_create_topic_enable=False) as broker:
        broker.sends.send(Message("orders", b"1"))
        with pytest.raises(DestinationError) as refused:
            broker.sends.send(Message("ordres", b"1"))
        with pytest.raises(DestinationError, match="did you mean 'orders'"):
            broker.sends.send_async([Message("ordres", b"1")]).result()
        with pytest.raises(DestinationError, match="topic 'zzz' does not exist"):
            broker.queues("zzz")

    assert str(refused.value) == (
        "topic 'ordres' does not exist, no listener of the application reads it, and "
        "mqtemplate.broker.auto-create-topic-enable is false; did you mean 'orders'? Add it to "
        "mqtemplate.broker.topics, or create it by Broker.create_topic"
    )
    assert cluster.engine.topics.queue_count("ordres") == 0


def test_known_topics_and_retries_work(cluster: LocalCluster, tmp_path: Path) -> None:
    with client(cluster.address, tmp_path, auto_create_topic_enable=False, topics=("audit",)) as broker:
        broker.create_topic("reports", 1)
        join(broker, "bills")
        for topic in ("audit", "reports", "bills"):
            broker.sends.send(Message(topic, b"1"))


def test_in_a_namespace_the_nearest_topic_is_one_of_it(cluster: LocalCluster, tmp_path: Path) -> None:
    with (
        client(cluster.address, tmp_path, namespace="prod", auto_create_topic_enable=False) as broker,
        pytest.raises(DestinationError, match="is false; Add it"),
    ):
        broker.sends.send(Message("ordres", b"1"))


def test_the_first_message_to_an_unknown_topic_is_logged_once(cluster: LocalCluster, tmp_path: Path) -> None:
    with capture_logs() as logs, client(cluster.address, tmp_path, topics=("audit",)) as broker:
        join(broker, "bills")
        for topic in ("ordres", "ordres", "audit", "bills"):
            broker.sends.send(Message(topic, b"1"))

    created = [event for event in logs if event["event"] == "topic.created"]
    assert [(event["log_level"], event["topic"], event.get("nearest")) for event in created] == [
        ("info", "ordres", "orders")
    ]


def test_an_application_refuses_topics_that_no_listener_reads(cluster: LocalCluster) -> None:
    refused: list[str] = []

    @service
    class Opening:
        def __init__(self, template: RocketMQTemplate) -> None:
            self._template = template

        def on_start(self) -> None:
            self._template.sync_send("payments", "first")
            with pytest.raises(DestinationError) as error:
                self._template.sync_send("paymnets", "first")
            refused.append(str(error.value))

    @message_listener(topic="payments", consumer_group="billing")
    def bill(message: str) -> None: ...

    settings = {"rocketmq.name-server": str(cluster.address), "mqtemplate.broker.auto-create-topic-enable": False}
    with MQApplication(Opening, bill, settings=settings):
        assert "did you mean 'payments'?" in refused[0]


def test_a_server_creates_no_topics_if_its_broker_does_not(tmp_path: Path) -> None:
    """``mqtemplate.broker.auto-create-topic-enable`` acts on the server, too, for clients of any language."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=ANYWHERE, auto_create_topic_enable=False, topics=("a",)))
    with (
        LocalCluster(engine, BrokerServerSettings(listen=ANYWHERE)) as cluster,
        client(cluster.address, tmp_path) as broker,
    ):
        broker.sends.send(Message("a", b"1"))
        broker.create_topic("orders", 1)
        with pytest.raises(SendError, match=r"'ordres' is not in the cluster.*did you mean 'orders'\? Else create"):
            broker.sends.send(Message("ordres", b"1"), None, 300)


def test_a_cluster_that_hides_its_topics_is_searched_in_the_topics_in_use(tmp_path: Path) -> None:
    """Access control may forbid the request for all topics."""
    with ScriptedBroker() as scripted:
        scripted.topic("orders")
        scripted.refuse(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ResponseCode.NO_PERMISSION)
        with client(scripted.address, tmp_path) as broker:
            broker.sends.send(Message("orders", b"1"))
            with pytest.raises(SendError, match=r"did you mean 'orders'\?"):
                broker.sends.send(Message("ordres", b"1"), None, 300)


def test_the_nearest_topic_is_never_the_missing_one(tmp_path: Path) -> None:
    """Name servers may list a topic that has no route yet."""
    with ScriptedBroker() as scripted:
        scripted.script(
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            lambda request: request.response(body=TopicList(topic_list=["orders", "orders2"]).encode()),
        )
        with (
            client(scripted.address, tmp_path) as broker,
            pytest.raises(SendError, match=r"'orders' is not in the cluster.*did you mean 'orders2'\?"),
        ):
            broker.sends.send(Message("orders", b"1"), None, 300)
