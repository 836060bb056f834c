"""The unmodified ``mqadmin`` of RocketMQ 5.5.0 uses the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import free_port
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.record.codec import parse_record
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerRunningInfo
from mqtemplate.results import SendResult
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster
from tests.remoting.protocol.other_side import ConsumeMessageDirectlyResult
from tests.server.tool import ANY_PORT, Tool

pytestmark = pytest.mark.conformance

TOPIC = "orders"
GROUP = "billing"


class Served:
    """A server, a member of a group, and a JVM with the tools.

    Attributes:
        java: The JVM that runs the tools.
        sent: The messages of queue 0 of ``orders``. The group has consumed the first two.
    """

    def __init__(self, cluster: LocalCluster, java: JavaClient, member: Tool) -> None:
        self.cluster, self.java, self.member = cluster, java, member
        self.name_server_address = str(cluster.name_server_address)
        self.broker = str(cluster.address)
        self.sent: list[SendResult] = []

    def mqadmin(self, command: str, *arguments: str) -> str:
        """Return the output of a command."""
        return self.java.mqadmin(command, "-n", self.name_server_address, *arguments)

    def filled_in(self, text: str) -> str:
        """Return *text* with the address of the broker and the ids of the messages."""
        ids, offset_ids = ([getattr(each, name) for each in self.sent] for name in ("msg_id", "offset_msg_id"))
        return re.sub(
            r"\{(broker|(?:offset_)?ids\[\d\])\}",
            lambda found: f"{{{found[1]}}}".format(broker=self.broker, ids=ids, offset_ids=offset_ids),
            text,
        )


@pytest.fixture(scope="module")
def served(rocketmq: None) -> Iterator[Served]:
    address = HostAddress("127.0.0.1", free_port())
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    with LocalCluster(engine, BrokerServerSettings(listen=address), ANY_PORT) as cluster:
        name_server = SimpleNamespace(address=str(cluster.name_server_address))
        with JavaClient(name_server) as java, Tool(cluster.address, on_request=respond_as_consumer) as member:
            java.connect()
            served = Served(cluster, java, member)
            fill(served)
            yield served


def respond_as_consumer(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
    """Respond to the requests that a tool sends to a member of a group."""
    if request.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
        properties = {
            "PROP_CLIENT_VERSION": "V5_3_3",
            "PROP_CONSUMER_START_TIMESTAMP": "1700000000000",
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
        }
        return request.response(body=ConsumerRunningInfo(properties=properties).encode())
    if request.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
        handled.append(parse_record(request.body).body)
        return request.response(body=ConsumeMessageDirectlyResult(consume_result="CR_SUCCESS").encode())
    return None


handled: list[bytes] = []


def fill(served: Served) -> None:
    engine = served.cluster.engine
    engine.create_topic(TOPIC, 2)
    queue = MessageQueue(TOPIC, "broker-a", 0)
    for number in range(5):
        message = Message(TOPIC, b"order %d" % number, {"KEYS": f"A-{number}", "TAGS": "paid"})
        served.sent.append(engine.sends.send(message, queue))
    served.member.consume(GROUP, TOPIC, f"%RETRY%{GROUP}", client_id="python@1")
    served.member.produce("shop", client_id="python@1")
    engine.groups.commit_offset(GROUP, queue, 2)


# --- what the tools print ---------------------------------------------------------------------------


def prints(command: str, *patterns: str) -> Any:
    """Return a command, and patterns of lines that it prints; ``!`` before one that it must not print."""
    return pytest.param(command, patterns, id=command)


@pytest.mark.parametrize(
    ("command", "patterns"),
    [
        prints("clusterList", r"^DefaultCluster\s+broker-a\s+0\s+{broker}\s.*V5_3_3"),
        prints("clusterList -m", r"^DefaultCluster\s+broker-a\s+\S+\s+\S+\s+([5-9]|\d\d+)\s"),  # messages of today
        prints("brokerStatus -b {broker}", r"^brokerVersionDesc\s*: V5_3_3", r"^putTps\s*: [\d.]+ [\d.]+ [\d.]+"),
        prints("getNamesrvConfig", r"^orderMessageEnable\s*=\s*true$"),
        prints("topicList", r"^orders$", r"^TBW102$", r"^%RETRY%billing$", r"^SCHEDULE_TOPIC_XXXX$"),
        prints("topicList -c", r"^DefaultCluster\s+orders\s+billing\s*$"),
        prints("topicStatus -t orders", r"^broker-a\s+0\s+0\s+5\s+\d{4}-\d\d-\d\d", r"^broker-a\s+1\s+0\s+0\s"),
        prints("topicRoute -t orders", r'"brokerAddrs":\s*{\s*0:\s*"{broker}"', r'"brokerName":\s*"broker-a"'),
        prints("topicClusterList -t orders", r"^DefaultCluster\s*\Z"),
        prints("consumerProgress -g billing", r"^orders\s+broker-a\s+0\s+5\s+2\s.*\b3\b", r"Diff Total: 3"),
        prints("consumerProgress", r"^billing\s+1\s+V5_3_3\s.*\s3\s*$"),  # number of members, their version, the lag
        prints("consumerConnection -g billing", r"python@1\s+127\.0\.0\.1:\d+\s+PYTHON\s+V5_3_3", r"^orders\s+\*$"),
        prints("producerConnection -g shop -t orders", r"python@1\s+127\.0\.0\.1:\d+\s+PYTHON\s+V5_3_3"),
        prints("producer -b {broker}", r"python@1"),
        prints("getConsumerConfig -g billing", r"^retryMaxTimes\s+=\s+16$"),
        prints("consumerStatus -g billing -i python@1", r"^PROP_CLIENT_VERSION\s*: V5_3_3$"),
        prints("brokerConsumeStats -b {broker}", r"^orders\s+billing\s+broker-a\s+0\s+5\s+2\s+3\s"),
        prints("statsAll -t orders", r"^orders\s+billing\s"),
        prints("queryMsgById -i {offset_ids[1]} -t orders", r"^Topic:?\s+\[?orders\]?\s*$", "{ids[1]}", "A-1"),
        prints("queryMsgByKey -t orders -k A-3", "{ids[3]}", "!{ids[2]}"),
        prints(
            "queryMsgByUniqueKey -t orders -i {ids[4]}", r"^Keys:?\s+\[?A-4\]?\s*$", r"^Queue Offset:?\s+\[?4\]?\s*$"
        ),
        prints("queryMsgByOffset -t orders -b broker-a -i 0 -o 2", "{ids[2]}"),
        prints("haStatus -b {broker}", r"^#MasterAddr\s+{broker}$", r"^#SlaveNum\s+0$"),
        prints("cleanExpiredCQ -b {broker}", r"^success$"),
        prints("cleanUnusedTopic -b {broker}", r"^success$"),
        prints("setConsumeMode -b {broker} -t orders -g billing -m PULL", r"success"),
        prints("setConsumeMode -b {broker} -t orders -g popping -m POP", r"success"),
        prints("deleteExpiredCommitLog -b {broker}", "!success"),
        prints("updateNamesrvConfig -k a -v b", "!success"),
        prints("createUser -b {broker} -u shop-owner -p secret-word", "!success"),
        prints("queryCq -t orders -q 0 -i 0 -c 2 -b {broker}", r"(?s)physicOffset.*physicOffset"),
    ],
)
def test_a_tool_prints(served: Served, command: str, patterns: tuple[str, ...]) -> None:
    printed = served.mqadmin(*served.filled_in(command).split())

    for pattern in map(served.filled_in, patterns):
        found = re.search(pattern.removeprefix("!"), printed, re.MULTILINE)
        assert (found is None) is pattern.startswith("!"), f"{pattern} in\n{printed}"


# --- the cluster ------------------------------------------------------------------------------------


def test_broker_config_is_read_and_changed(served: Served) -> None:
    config = served.mqadmin("getBrokerConfig", "-b", served.broker)
    changed = served.mqadmin("updateBrokerConfig", "-b", served.broker, "-k", "messageDelayLevel", "-v", "1s 2s 3s")
    refused = served.mqadmin("updateBrokerConfig", "-b", served.broker, "-k", "brokerName", "-v", "other")

    assert re.search(r"^brokerName\s*=\s*broker-a", config, re.MULTILINE)
    assert "success" in changed
    assert served.cluster.engine.engine.levels.text == "1s 2s 3s"
    assert "success" not in refused


def test_write_permission_is_removed_and_restored(served: Served) -> None:
    try:
        wiped = served.mqadmin("wipeWritePerm", "-b", "broker-a")
        route = served.mqadmin("topicRoute", "-t", TOPIC)
    finally:
        added = served.mqadmin("addWritePerm", "-b", "broker-a")

    assert re.search(r"wipe write perm of broker\[broker-a\] in name server\[\S+\] OK, \d+", wiped)
    assert '"perm":4' in route.replace(" ", "")
    assert "OK" in added


def test_kv_config_entries_are_created_and_deleted(served: Served) -> None:
    created = served.mqadmin("updateKvConfig", "-s", "shops", "-k", "berlin", "-v", "open")
    found = served.cluster.broker.name_server.entries.get("shops", "berlin")
    deleted = served.mqadmin("deleteKvConfig", "-s", "shops", "-k", "berlin")

    assert "create or update kv config to namespace success" in created
    assert found == "open"
    assert "delete kv config from namespace success" in deleted
    assert served.cluster.broker.name_server.entries.get("shops", "berlin") is None


def test_metadata_and_configs_are_exported(served: Served, tmp_path: Path) -> None:
    served.mqadmin("exportMetadata", "-c", "DefaultCluster", "-f", str(tmp_path))
    served.mqadmin("exportConfigs", "-c", "DefaultCluster", "-f", str(tmp_path))

    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert {TOPIC} <= metadata["topicConfigTable"].keys()
    assert {GROUP} <= metadata["subscriptionGroupTable"].keys()
    assert "broker-a" in (tmp_path / "configs.json").read_text()


# --- topics -----------------------------------------------------------------------------------------


def test_a_topic_is_created_changed_and_deleted(served: Served) -> None:
    created = served.mqadmin("updateTopic", "-c", "DefaultCluster", "-t", "created", "-r", "6", "-w", "6")
    changed = served.mqadmin("updateTopic", "-b", served.broker, "-t", "created", "-r", "6", "-w", "2", "-p", "4")
    config = served.cluster.broker.topics.find("created")
    deleted = served.mqadmin("deleteTopic", "-c", "DefaultCluster", "-t", "created")

    assert f"create topic to {served.broker} success" in created
    assert f"create topic to {served.broker} success" in changed
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (6, 2, 4)
    assert "delete topic [created] from cluster [DefaultCluster] success" in deleted
    assert served.cluster.broker.topics.find("created") is None


def test_topics_and_groups_are_created_from_a_file(served: Served, tmp_path: Path) -> None:
    topics, groups = tmp_path / "topics.json", tmp_path / "groups.json"
    topics.write_text(json.dumps([{"topicName": name, "readQueueNums": 3, "writeQueueNums": 3} for name in "xy"]))
    groups.write_text(json.dumps([{"groupName": name, "retryMaxTimes": 4} for name in "xy"]))

    served.mqadmin("updateTopicList", "-b", served.broker, "-f", str(topics))
    served.mqadmin("updateSubGroupList", "-b", served.broker, "-f", str(groups))

    topics_created = [served.cluster.broker.topics.find(name) for name in "xy"]
    assert [config.read_queue_nums for config in topics_created if config] == [3, 3]
    assert [config.retry_max_times for name in "xy" if (config := served.cluster.broker.groups.find(name))] == [4, 4]


def test_an_ordered_topic_is_created(served: Served) -> None:
    """The tool stores the number of its queues per broker in the name server."""
    created = served.mqadmin("updateTopic", "-b", served.broker, "-t", "ordered", "-o", "true", "-r", "2", "-w", "2")

    assert "set broker orderConf" in created
    assert '"orderTopicConf":"broker-a:2"' in served.mqadmin("topicRoute", "-t", "ordered").replace(" ", "")


def test_the_permission_of_a_topic_is_changed(served: Served) -> None:
    served.cluster.engine.create_topic("closing", 1)

    served.mqadmin("updateTopicPerm", "-b", served.broker, "-t", "closing", "-p", "4")

    config = served.cluster.broker.topics.find("closing")
    assert config is not None
    assert config.perm == 4


# --- groups -----------------------------------------------------------------------------------------


def test_a_group_is_created_and_deleted(served: Served) -> None:
    created = served.mqadmin("updateSubGroup", "-c", "DefaultCluster", "-g", "created", "-r", "3")
    config = served.cluster.broker.groups.find("created")
    deleted = served.mqadmin("deleteSubGroup", "-c", "DefaultCluster", "-g", "created")

    assert f"create subscription group to {served.broker} success" in created
    assert config is not None
    assert config.retry_max_times == 3
    assert "delete subscription group [created]" in deleted
    assert served.cluster.broker.groups.find("created") is None


def test_offsets_are_reset_to_a_time(served: Served) -> None:
    engine = served.cluster.engine
    queue = MessageQueue(TOPIC, "broker-a", 0)
    engine.create_topic("reset", 1)
    served.cluster.broker.groups.ensure("resetting")
    for _ in range(3):
        engine.sends.send(Message("reset", b"x"))
    engine.groups.commit_offset("resetting", MessageQueue("reset", "broker-a", 0), 3)

    served.mqadmin("resetOffsetByTime", "-g", "resetting", "-t", "reset", "-s", "1700000000000")

    assert engine.groups.committed_offset("resetting", MessageQueue("reset", "broker-a", 0)) == 0
    assert engine.groups.committed_offset(GROUP, queue) == 2


def test_a_group_skips_its_unconsumed_messages(served: Served) -> None:
    queue = MessageQueue("skipped", "broker-a", 0)
    served.cluster.engine.create_topic("skipped", 1)
    served.cluster.engine.sends.send(Message("skipped", b"x"), queue)
    served.cluster.broker.groups.ensure("skipping")

    served.mqadmin("skipAccumulatedMessage", "-g", "skipping", "-t", "skipped")

    assert served.cluster.engine.groups.committed_offset("skipping", queue) == 1


def test_the_offsets_of_a_group_are_cloned(served: Served) -> None:
    printed = served.mqadmin("cloneGroupOffset", "-s", GROUP, "-d", "cloned", "-t", TOPIC)

    assert "clone group offset success" in printed
    assert served.cluster.engine.groups.committed_offset("cloned", MessageQueue(TOPIC, "broker-a", 0)) == 2


# --- messages ---------------------------------------------------------------------------------------


def test_a_member_consumes_a_message_directly(served: Served) -> None:
    msg_id = served.sent[2].offset_msg_id

    printed = served.mqadmin("queryMsgById", "-i", msg_id, "-t", TOPIC, "-g", GROUP, "-d", "python@1")

    assert "CR_SUCCESS" in printed
    assert handled == [b"order 2"]


def test_a_message_is_sent_and_found(served: Served) -> None:
    sent = served.mqadmin("sendMessage", "-t", "sent-by-a-tool", "-p", "hello", "-k", "K-1")
    printed = served.mqadmin("queryMsgByKey", "-t", "sent-by-a-tool", "-k", "K-1")

    assert "SEND_OK" in sent
    assert sent.split()[-1] in printed


# --- access control ---------------------------------------------------------------------------------


def test_the_tools_sign_their_requests(served: Served) -> None:
    """A request with a wrong signature is refused, and one without a signature, except for the routes."""
    address = HostAddress("127.0.0.1", free_port())
    account = Account(access_key="administrator", secret_key="a secret of seven words or so", admin=True)
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    settings = BrokerServerSettings(listen=address)
    with LocalCluster(engine, settings, ANY_PORT, acl=AclSettings(accounts=(account,))) as cluster:
        printed = {}
        for secret in (account.secret_key, "another secret", None):
            write_credentials(served.java, account.access_key, secret)
            printed[secret] = served.java.mqadmin("clusterList", "-n", str(cluster.name_server_address))
            if secret == account.secret_key:
                names = str(cluster.name_server_address)
                users = served.java.mqadmin("listUser", "-n", names, "-b", str(cluster.address))
                acls = served.java.mqadmin("listAcl", "-n", names, "-b", str(cluster.address))
        write_credentials(served.java, account.access_key, None)

    assert "broker-a" in printed[account.secret_key]
    assert "V5_3_3" in printed[account.secret_key]  # The response of the broker itself.
    assert re.search(r"^administrator\s+null\s+Super\s+enable", users, re.MULTILINE)
    assert re.search(r"^User:administrator\s+Default\s+Topic:\*\s+\[Pub, Sub\]\s.*Allow", acls, re.MULTILINE)
    assert "broker-a" not in printed["another secret"]
    assert "V5_3_3" not in printed["another secret"] + printed[None]


def write_credentials(java: JavaClient, access_key: str, secret_key: str | None) -> None:
    """Set the keys with which the tools sign. Without a secret key they do not sign."""
    file = java.home / "conf" / "tools.yml"
    file.unlink(missing_ok=True)
    if secret_key is not None:
        file.write_text(f"accessKey: {access_key}\nsecretKey: {secret_key}\n")
