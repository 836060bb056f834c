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

    def rows(self, command: str, *arguments: str) -> list[list[str]]:
        """Return the words of each line that a command prints."""
        return [line.split() for line in self.mqadmin(command, *arguments).splitlines() if line.strip()]


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


# --- the cluster ------------------------------------------------------------------------------------


def test_cluster_list(served: Served) -> None:
    row = next(words for words in served.rows("clusterList") if "broker-a" in words)

    assert row[:4] == ["DefaultCluster", "broker-a", "0", served.broker]
    assert "V5_3_3" in row


def test_cluster_list_with_totals(served: Served) -> None:
    row = next(words for words in served.rows("clusterList", "-m") if "broker-a" in words)

    assert int(row[4]) >= len(served.sent)  # Messages stored today.


def test_broker_status(served: Served) -> None:
    table = served.mqadmin("brokerStatus", "-b", served.broker)

    assert re.search(r"^brokerVersionDesc\s*: V5_3_3", table, re.MULTILINE)
    assert re.search(r"^putTps\s*: [\d.]+ [\d.]+ [\d.]+", table, re.MULTILINE)


def test_broker_config_is_read_and_changed(served: Served) -> None:
    config = served.mqadmin("getBrokerConfig", "-b", served.broker)
    changed = served.mqadmin("updateBrokerConfig", "-b", served.broker, "-k", "messageDelayLevel", "-v", "1s 2s 3s")
    refused = served.mqadmin("updateBrokerConfig", "-b", served.broker, "-k", "brokerName", "-v", "other")

    assert re.search(r"^brokerName\s*=\s*broker-a", config, re.MULTILINE)
    assert "success" in changed
    assert served.cluster.engine.engine.levels.text == "1s 2s 3s"
    assert "success" not in refused


def test_name_server_config(served: Served) -> None:
    config = served.mqadmin("getNamesrvConfig")

    assert re.search(r"^orderMessageEnable\s*=\s*true$", config, re.MULTILINE)


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


def test_topic_list(served: Served) -> None:
    listed = {words[0] for words in served.rows("topicList")}

    assert {TOPIC, "TBW102", f"%RETRY%{GROUP}", "SCHEDULE_TOPIC_XXXX"} <= listed


def test_topic_list_of_a_cluster_shows_the_consumer_groups(served: Served) -> None:
    rows = served.rows("topicList", "-c")

    assert ["DefaultCluster", TOPIC, GROUP] in rows


def test_topic_status(served: Served) -> None:
    rows = [words for words in served.rows("topicStatus", "-t", TOPIC) if words[0] == "broker-a"]

    assert [words[:4] for words in rows] == [["broker-a", "0", "0", "5"], ["broker-a", "1", "0", "0"]]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows[0][4])


def test_topic_route(served: Served) -> None:
    route = "".join(served.mqadmin("topicRoute", "-t", TOPIC).split())

    assert f'"brokerAddrs":{{0:"{served.broker}"' in route
    assert '"brokerName":"broker-a"' in route


def test_topic_cluster_list(served: Served) -> None:
    assert served.mqadmin("topicClusterList", "-t", TOPIC).split() == ["DefaultCluster"]


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


def test_consumer_progress_of_a_group(served: Served) -> None:
    printed = served.mqadmin("consumerProgress", "-g", GROUP)

    row = next(words for words in map(str.split, printed.splitlines()) if words[:3] == [TOPIC, "broker-a", "0"])
    assert row[3:5] == ["5", "2"]
    assert "3" in row[5:]  # The lag.
    assert re.search(r"Diff Total: 3", printed)


def test_consumer_progress_of_all_groups(served: Served) -> None:
    row = next(words for words in served.rows("consumerProgress") if words[0] == GROUP)

    assert row[1:3] == ["1", "V5_3_3"]  # Number of members, and their version.
    assert row[-1] == "3"


def test_consumer_connection(served: Served) -> None:
    printed = served.mqadmin("consumerConnection", "-g", GROUP)

    assert re.search(r"python@1\s+127\.0\.0\.1:\d+\s+PYTHON\s+V5_3_3", printed)
    assert re.search(rf"^{TOPIC}\s+\*$", printed, re.MULTILINE)


def test_producer_connection(served: Served) -> None:
    printed = served.mqadmin("producerConnection", "-g", "shop", "-t", TOPIC)

    assert re.search(r"python@1\s+127\.0\.0\.1:\d+\s+PYTHON\s+V5_3_3", printed)


def test_producer(served: Served) -> None:
    assert "python@1" in served.mqadmin("producer", "-b", served.broker)


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


def test_consumer_config(served: Served) -> None:
    printed = served.mqadmin("getConsumerConfig", "-g", GROUP)

    assert re.search(r"^retryMaxTimes\s+=\s+16$", printed, re.MULTILINE)


def test_consumer_status_of_one_member(served: Served) -> None:
    printed = served.mqadmin("consumerStatus", "-g", GROUP, "-i", "python@1")

    assert re.search(r"^PROP_CLIENT_VERSION\s*: V5_3_3$", printed, re.MULTILINE)


def test_statistics_of_a_broker_by_group(served: Served) -> None:
    rows = served.rows("brokerConsumeStats", "-b", served.broker)

    assert [TOPIC, GROUP, "broker-a", "0", "5", "2", "3"] in [words[:7] for words in rows]


def test_statistics_of_all_topics(served: Served) -> None:
    rows = served.rows("statsAll", "-t", TOPIC)

    assert [TOPIC, GROUP] in [words[:2] for words in rows]


# --- messages ---------------------------------------------------------------------------------------


def test_a_message_by_its_offset_message_id(served: Served) -> None:
    printed = served.mqadmin("queryMsgById", "-i", served.sent[1].offset_msg_id, "-t", TOPIC)

    assert value_of(printed, "Topic") == f"[{TOPIC}]" or value_of(printed, "Topic") == TOPIC
    assert served.sent[1].msg_id in printed
    assert "A-1" in printed


def test_a_message_by_its_key(served: Served) -> None:
    printed = served.mqadmin("queryMsgByKey", "-t", TOPIC, "-k", "A-3")

    assert served.sent[3].msg_id in printed
    assert served.sent[2].msg_id not in printed


def test_a_message_by_its_message_id(served: Served) -> None:
    printed = served.mqadmin("queryMsgByUniqueKey", "-t", TOPIC, "-i", served.sent[4].msg_id)

    assert value_of(printed, "Keys") in ("[A-4]", "A-4")
    assert value_of(printed, "Queue Offset") in ("[4]", "4")


def test_a_message_by_its_queue_offset(served: Served) -> None:
    printed = served.mqadmin("queryMsgByOffset", "-t", TOPIC, "-b", "broker-a", "-i", "0", "-o", "2")

    assert served.sent[2].msg_id in printed


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


def test_entries_of_a_consume_queue(served: Served) -> None:
    printed = served.mqadmin("queryCq", "-t", TOPIC, "-q", "0", "-i", "0", "-c", "2", "-b", served.broker)

    assert len(re.findall(r"physicOffset", printed)) >= 2


# --- access control ---------------------------------------------------------------------------------


def test_the_tools_sign_their_requests(served: Served) -> None:
    """A request with a wrong signature or without one is refused."""
    address = HostAddress("127.0.0.1", free_port())
    account = Account(access_key="administrator", secret_key="a secret of seven words or so", admin=True)
    engine = EmbeddedBroker(settings=EmbeddedSettings(listen_host=address))
    settings = BrokerServerSettings(listen=address)
    with LocalCluster(engine, settings, ANY_PORT, acl=AclSettings(accounts=(account,))) as cluster:
        printed = {}
        for secret in (account.secret_key, "another secret", None):
            write_credentials(served.java, account.access_key, secret)
            printed[secret] = served.java.mqadmin("clusterList", "-n", str(cluster.name_server_address))
        write_credentials(served.java, account.access_key, None)

    assert "broker-a" in printed[account.secret_key]
    assert "V5_3_3" in printed[account.secret_key]  # The response of the broker itself.
    assert "broker-a" not in printed["another secret"] + printed[None]


def write_credentials(java: JavaClient, access_key: str, secret_key: str | None) -> None:
    """Set the keys with which the tools sign. Without a secret key they do not sign."""
    file = java.home / "conf" / "tools.yml"
    file.unlink(missing_ok=True)
    if secret_key is not None:
        file.write_text(f"accessKey: {access_key}\nsecretKey: {secret_key}\n")


def value_of(printed: str, name: str) -> Any:
    """Return the value of a line ``name: value`` that a tool prints."""
    found = re.search(rf"^{name}:?\s*(.*?)\s*$", printed, re.MULTILINE)
    return found[1] if found else None
