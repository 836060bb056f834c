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


@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        ("clusterList", r"DefaultCluster\s+broker-a\s+0\s+<address>\s+V5_3_3"),
        ("topicList", r"(?s)(?=.*^TBW102$)(?=.*^orders$)(?=.*^%RETRY%billing$)"),
        ("topicStatus -t orders", r"broker-a\s+0\s+0\s+2\s+\d{4}-"),
        ("topicRoute -t orders", r'"brokerAddrs":\s*{\s*0:\s*"<address>"'),
        ("consumerProgress -g billing", r"(?s)orders\s+broker-a\s+0\s+2\s+1\s.*Diff Total: 1"),
        ("queryMsgById -i <offset id>", "<id>"),
        ("queryMsgByKey -t orders -k A-2", "<id>"),
        ("queryMsgByUniqueKey -t orders -i <id>", "A-2"),
        ("brokerStatus -b <address>", r"putTps\s*: [\d.]+ [\d.]+ [\d.]+"),
    ],
)
def test_a_tool_prints(cluster: LocalCluster, sent: SendResult, mqadmin: RunTool, command: str, pattern: str) -> None:
    values = {"<address>": str(cluster.address), "<offset id>": sent.offset_msg_id, "<id>": sent.msg_id}
    for name, value in values.items():
        command, pattern = command.replace(name, value), pattern.replace(name, value)

    assert re.search(pattern, mqadmin(*command.split()), re.MULTILINE)


def test_update_topic_creates_a_topic(cluster: LocalCluster, mqadmin: RunTool) -> None:
    mqadmin("updateTopic", "-c", "DefaultCluster", "-t", "created", "-r", "3", "-w", "3")

    assert len(cluster.engine.queues("created")) == 3


def test_reset_offset_moves_a_group_to_the_end(cluster: LocalCluster, sent: SendResult, mqadmin: RunTool) -> None:
    cluster.broker.groups.ensure("moved")

    mqadmin("resetOffsetByTime", "-g", "moved", "-t", TOPIC, "-s", "-1")

    assert cluster.engine.groups.committed_offset("moved", MessageQueue(TOPIC, "broker-a", 0)) == 2
