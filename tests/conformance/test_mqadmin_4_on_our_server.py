"""The unmodified ``mqadmin`` of RocketMQ 4.9.7 uses the server. Some requests differ from 5.5.0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from bench.peer.java_client import OlderTools
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool

pytestmark = pytest.mark.conformance

TOPIC, GROUP = "orders", "billing"

RunTool = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(rocketmq: None) -> Iterator[LocalCluster]:
    address = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    with LocalCluster(engine, BrokerServerSettings(listen=address), ANY_PORT) as cluster, Tool(address) as member:
        engine.create_topic(TOPIC, 2)
        member.consume(GROUP, TOPIC, f"%RETRY%{GROUP}", client_id="python@1")
        yield cluster


@pytest.fixture(scope="module")
def sent(cluster: LocalCluster) -> SendResult:
    """The second of two messages. The group has consumed the first."""
    queue = MessageQueue(TOPIC, "broker-a", 0)
    cluster.engine.sends.send(Message(TOPIC, b"first"), queue)
    cluster.engine.groups.commit_offset(GROUP, queue, 1)
    return cluster.engine.sends.send(Message(TOPIC, b"second", {"KEYS": "A-2"}), queue)


@pytest.fixture(scope="module")
def mqadmin(cluster: LocalCluster) -> Iterator[RunTool]:
    """One JVM that runs the commands."""
    with OlderTools() as tools:
        address = str(cluster.name_server_address)
        yield lambda command, *arguments: tools.mqadmin(command, "-n", address, *arguments)


def test_cluster_list(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert re.search(rf"DefaultCluster\s+broker-a\s+0\s+{cluster.address}\s+V5_3_3", mqadmin("clusterList"))


def test_topic_list(sent: SendResult, mqadmin: RunTool) -> None:
    assert {TOPIC, "TBW102", f"%RETRY%{GROUP}"} <= set(mqadmin("topicList").split())


def test_topic_status(sent: SendResult, mqadmin: RunTool) -> None:
    assert re.search(r"broker-a\s+0\s+0\s+2\s+\d{4}-", mqadmin("topicStatus", "-t", TOPIC))


def test_topic_route(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert f'"brokerAddrs":{{0:"{cluster.address}"' in "".join(mqadmin("topicRoute", "-t", TOPIC).split())


def test_update_topic_creates_a_topic(cluster: LocalCluster, mqadmin: RunTool) -> None:
    mqadmin("updateTopic", "-c", "DefaultCluster", "-t", "created", "-r", "3", "-w", "3")

    assert len(cluster.engine.queues("created")) == 3


def test_consumer_progress(sent: SendResult, mqadmin: RunTool) -> None:
    printed = mqadmin("consumerProgress", "-g", GROUP)

    assert re.search(rf"{TOPIC}\s+broker-a\s+0\s+2\s+1\s", printed)
    assert "Diff Total: 1" in printed


def test_a_message_by_its_offset_message_id(sent: SendResult, mqadmin: RunTool) -> None:
    assert sent.msg_id in mqadmin("queryMsgById", "-i", sent.offset_msg_id)


def test_a_message_by_its_key(sent: SendResult, mqadmin: RunTool) -> None:
    assert sent.msg_id in mqadmin("queryMsgByKey", "-t", TOPIC, "-k", "A-2")


def test_a_message_by_its_message_id(sent: SendResult, mqadmin: RunTool) -> None:
    assert "A-2" in mqadmin("queryMsgByUniqueKey", "-t", TOPIC, "-i", sent.msg_id)


def test_broker_status(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert re.search(r"putTps\s*: [\d.]+ [\d.]+ [\d.]+", mqadmin("brokerStatus", "-b", str(cluster.address)))


def test_reset_offset_moves_a_group_to_the_end(cluster: LocalCluster, sent: SendResult, mqadmin: RunTool) -> None:
    cluster.broker.groups.ensure("moved")

    mqadmin("resetOffsetByTime", "-g", "moved", "-t", TOPIC, "-s", "-1")

    assert cluster.engine.groups.committed_offset("moved", MessageQueue(TOPIC, "broker-a", 0)) == 2
