"""The ``mqadmin`` of RocketMQ 4.9.7, unmodified, against our server; it asks some things otherwise than 5.5.0's."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.peer.jvm import command_line, why_not
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.results import SendResult
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool

pytestmark = pytest.mark.conformance

TOPIC, GROUP = "orders", "billing"
MAIN = "org.apache.rocketmq.tools.command.MQAdminStartup"

RunTool = Callable[..., str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    address = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    with LocalCluster(engine, BrokerServerSettings(listen=address), ANY_PORT) as cluster, Tool(address) as member:
        engine.create_topic(TOPIC, 2)
        member.consume(GROUP, TOPIC, f"%RETRY%{GROUP}", client_id="python@1")
        yield cluster


@pytest.fixture(scope="module")
def sent(cluster: LocalCluster) -> SendResult:
    """One message of two, of which the group has done the first."""
    queue = MessageQueue(TOPIC, "broker-a", 0)
    cluster.engine.send(Message(TOPIC, b"first"), queue)
    cluster.engine.commit_offset(GROUP, queue, 1)
    return cluster.engine.send(Message(TOPIC, b"second", {"KEYS": "A-2"}), queue)


@pytest.fixture
def mqadmin(cluster: LocalCluster, tmp_path: Path) -> RunTool:
    logging = tmp_path / "conf" / "logback_tools.xml"
    logging.parent.mkdir()
    logging.write_text("<configuration/>")

    def run(command: str, *arguments: str) -> str:
        names = str(cluster.name_server_address)
        line = command_line("4.9.7", tmp_path, MAIN, command, "-n", names, *arguments, heap_mib=128)
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path).stdout

    return run


def test_cluster_list(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert re.search(rf"DefaultCluster\s+broker-a\s+0\s+{cluster.address}\s+V5_3_3", mqadmin("clusterList"))


def test_topic_list(sent: SendResult, mqadmin: RunTool) -> None:
    assert {TOPIC, "TBW102", f"%RETRY%{GROUP}"} <= set(mqadmin("topicList").split())


def test_topic_status(sent: SendResult, mqadmin: RunTool) -> None:
    assert re.search(r"broker-a\s+0\s+0\s+2\s+\d{4}-", mqadmin("topicStatus", "-t", TOPIC))


def test_topic_route(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert f'"brokerAddrs":{{0:"{cluster.address}"' in "".join(mqadmin("topicRoute", "-t", TOPIC).split())


def test_a_topic_is_made(cluster: LocalCluster, mqadmin: RunTool) -> None:
    mqadmin("updateTopic", "-c", "DefaultCluster", "-t", "made", "-r", "3", "-w", "3")

    assert len(cluster.engine.queues("made")) == 3


def test_consumer_progress(sent: SendResult, mqadmin: RunTool) -> None:
    printed = mqadmin("consumerProgress", "-g", GROUP)

    assert re.search(rf"{TOPIC}\s+broker-a\s+0\s+2\s+1\s", printed)
    assert "Diff Total: 1" in printed


def test_a_message_by_the_brokers_id(sent: SendResult, mqadmin: RunTool) -> None:
    assert sent.msg_id in mqadmin("queryMsgById", "-i", sent.offset_msg_id)


def test_a_message_by_its_key(sent: SendResult, mqadmin: RunTool) -> None:
    assert sent.msg_id in mqadmin("queryMsgByKey", "-t", TOPIC, "-k", "A-2")


def test_a_message_by_its_senders_id(sent: SendResult, mqadmin: RunTool) -> None:
    assert "A-2" in mqadmin("queryMsgByUniqueKey", "-t", TOPIC, "-i", sent.msg_id)


def test_broker_status(cluster: LocalCluster, mqadmin: RunTool) -> None:
    assert re.search(r"putTps\s*: [\d.]+ [\d.]+ [\d.]+", mqadmin("brokerStatus", "-b", str(cluster.address)))


def test_a_group_goes_to_the_end(cluster: LocalCluster, sent: SendResult, mqadmin: RunTool) -> None:
    cluster.broker.groups.ensure("moved")

    mqadmin("resetOffsetByTime", "-g", "moved", "-t", TOPIC, "-s", "-1")

    assert cluster.engine.committed_offset("moved", MessageQueue(TOPIC, "broker-a", 0)) == 2
