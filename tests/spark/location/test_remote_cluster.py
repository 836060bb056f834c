"""Reading over the network from a server of this library: the same rows as from its folder."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError, ConfigurationError, CorruptRecordError, SparkError
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.record.codec import RecordDraft
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.spark.location.cluster import ClusterBlocks
from mqtemplate.spark.location.cluster_connection import close_connections, connect
from mqtemplate.spark.reader.source import BatchReader, MqTemplateSource, StreamReader
from mqtemplate.spark.records.offsets import QueueRange, to_spark
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA, record_batches
from mqtemplate.spark.records.schema import source_schema
from tests.waiting import eventually

SECRET = "never shown"
ANY_PORT = HostAddress("127.0.0.1", 0)
Serve = Callable[..., LocalCluster]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server with a name server on loopback."""
    running: list[LocalCluster] = []

    def start(folder: str = "store", name: str = "broker-a", **options: Any) -> LocalCluster:
        engine = EmbeddedBroker(
            tmp_path / folder, EmbeddedSettings(broker_name=name, listen_host=ANY_PORT), SystemClock()
        )
        running.append(LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT), ANY_PORT, **options))
        running[-1].start()
        return running[-1]

    yield start
    for cluster in running:
        cluster.stop()


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """Close the connections of the test: a task of Spark keeps them for the next one in its process."""
    yield
    close_connections()


def fill(broker: EmbeddedBroker, count: int, *, topic: str = "orders", queue_id: int = 0, size: int = 40) -> None:
    body = random.Random(1).randbytes(size)
    messages = [Message(topic, body, {"TAGS": ("pay", "ship")[n % 2], "KEYS": f"k{n}"}) for n in range(count)]
    for start in range(0, count, 100):
        broker.sends.send_batch(messages[start : start + 100], MessageQueue(topic, broker.name, queue_id))


def rows(cluster: LocalCluster, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a batch. Reader and partitions are pickled, as by Spark."""
    given = {"nameServer": str(cluster.name_server_address), "topic": "orders", **options}
    reader = MqTemplateSource({name.lower(): value for name, value in given.items()}).reader(source_schema())
    assert isinstance(reader, BatchReader)
    reader, partitions = pickle.loads(pickle.dumps((reader, reader.partitions())))
    return [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]


def folder_rows(cluster: LocalCluster, **options: str) -> list[dict[str, Any]]:
    given = {"store": str(cluster.engine.path), "topic": "orders", **options}
    reader = MqTemplateSource({name.lower(): value for name, value in given.items()}).reader(source_schema())
    assert isinstance(reader, BatchReader)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def read(cluster: LocalCluster, start: int, end: int, *, pulls: bool) -> list[dict[str, Any]]:
    place = ClusterBlocks((str(cluster.name_server_address),), pulls=pulls)
    found = QueueRange("orders", 0, start, end, cluster.engine.name)
    return [row for batch in record_batches(place.blocks(found, None), ARROW_SCHEMA) for row in batch.to_pylist()]


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_the_rows_are_those_of_the_folder(serve: Serve, pulls: bool) -> None:
    """Whatever the server is: blocks of this library's server have 4 MiB, pulls have 32 messages."""
    cluster = serve()
    fill(cluster.engine, 700, size=3_000)

    found = read(cluster, 5, 690, pulls=pulls)

    expected = folder_rows(cluster)[5:690]
    assert [row["queueOffset"] for row in found] == list(range(5, 690))
    assert found == expected


def test_a_read_selects_columns_tags_times_and_queues(serve: Serve) -> None:
    """The options mean what they mean for a folder."""
    cluster = serve()
    for queue_id in range(3):
        fill(cluster.engine, 50, queue_id=queue_id)

    for options in (
        {"tags": "ship"},
        {"sql": "KEYS IN ('k3', 'k4')"},
        {"startingOffsets": '{"orders": {"0": 10, "1": -2, "2": 45}}', "endingOffsets": '{"orders": {"1": 7}}'},
        {"startingTimestamp": "1"},
        {"minPartitions": "5"},
    ):
        assert rows(cluster, **options) == folder_rows(cluster, **options)


def test_a_read_can_start_at_the_offsets_of_a_group(serve: Serve) -> None:
    """The broker has them; a queue without one is read from its start."""
    cluster = serve()
    for queue_id in range(2):
        fill(cluster.engine, 50, queue_id=queue_id)
    cluster.engine.groups.commit_offset("billing", MessageQueue("orders", "broker-a", 1), 48)

    found = rows(cluster, group="billing", startingOffsets="group")

    assert [row["queueOffset"] for row in found] == [*range(50), 48, 49]


def test_a_missing_topic_is_an_error_with_the_nearest_name(serve: Serve) -> None:
    cluster = serve()
    fill(cluster.engine, 1)

    with pytest.raises(SparkError, match=r"topic 'order' is not in the cluster at .*; did you mean 'orders'"):
        rows(cluster, topic="order")


def test_a_pattern_selects_topics_of_the_cluster(serve: Serve) -> None:
    cluster = serve()
    for topic in ("orders", "orders-eu", "refunds"):
        fill(cluster.engine, 2, topic=topic)
    options = {"nameserver": str(cluster.name_server_address), "topicpattern": "orders.*"}
    reader = MqTemplateSource(options).reader(source_schema())
    assert isinstance(reader, BatchReader)

    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    assert [row["topic"] for row in found] == ["orders", "orders", "orders-eu", "orders-eu"]


def test_a_stream_commits_to_its_group(serve: Serve) -> None:
    """So the broker's tools show its progress. A repeated batch does not set the group back."""
    cluster = serve()
    fill(cluster.engine, 30)
    queue = MessageQueue("orders", "broker-a", 0)
    options = {"nameserver": str(cluster.name_server_address), "topic": "orders", "group": "statistics"}
    reader = MqTemplateSource(options).streamReader(source_schema())
    assert isinstance(reader, StreamReader)

    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.commit(to_spark({queue: 20}))
    reader.commit(to_spark({queue: 10}))

    assert end["topics"]["orders"]["broker-a"]["0"] == 30
    assert cluster.engine.groups.committed_offset("statistics", queue) == 20


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_a_damaged_record_is_an_error_and_not_skipped(serve: Serve, pulls: bool) -> None:
    """It can be stored, and no reader can use it."""
    cluster = serve()
    cluster.engine.create_topic("orders", 1)
    cluster.engine.store.put(
        RecordDraft(topic="orders", queue_id=0, body=b"not compressed", properties=b"", sys_flag=0x1)
    )
    eventually(
        lambda: cluster.engine.reader.max_offset(MessageQueue("orders", "broker-a", 0)) == 1, "the message is durable"
    )

    with pytest.raises(CorruptRecordError, match="broker-a at .*: bad record at physical offset 0: its zlib body"):
        read(cluster, 0, 1, pulls=pulls)


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_messages_that_are_not_stored_are_an_error(serve: Serve, pulls: bool) -> None:
    cluster = serve()
    fill(cluster.engine, 3)
    place = ClusterBlocks((str(cluster.name_server_address),), pulls=pulls)

    with pytest.raises(Exception, match="offset 7 is not stored"):
        list(place.blocks(QueueRange("orders", 0, 7, 9, "broker-a"), None))


def test_a_task_that_reaches_another_cluster_says_so(serve: Serve) -> None:
    """The address may mean another machine there."""
    cluster = serve()
    fill(cluster.engine, 3)
    place = ClusterBlocks((str(cluster.name_server_address),))

    with pytest.raises(SparkError, match=r"the cluster at .* has no broker 'broker-z' with 'orders'"):
        list(place.blocks(QueueRange("orders", 0, 0, 3, "broker-z"), None))


# --- access control ---------------------------------------------------------------------------------

ACCOUNTS = (
    Account(
        access_key="spark-job",
        secret_key=SECRET,
        topic_perms={"orders": Right.SUB},
        group_perms={"statistics": Right.SUB},
    ),
)


def test_the_keys_of_a_client_file_sign_the_requests(serve: Serve, tmp_path: Path) -> None:
    """They are read on each machine, and no option contains them. A block needs the right to its topic."""
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    for topic in ("orders", "salaries"):
        fill(cluster.engine, 4, topic=topic)
    keys = tmp_path / "client.json"
    keys.write_text(json.dumps({"access-key": "spark-job", "secret-key": SECRET}))

    assert len(rows(cluster, clientFile=str(keys))) == 4
    with pytest.raises(BrokerError, match="access key 'spark-job' has no right PUB.SUB on topic 'salaries'"):
        rows(cluster, clientFile=str(keys), topic="salaries")
    with pytest.raises(BrokerError, match="access control is enabled"):
        rows(cluster)
    with pytest.raises(
        SparkError, match="topic 'order' is not in the cluster at .*; check its name: this account may not"
    ):
        rows(cluster, clientFile=str(keys), topic="order")


def test_another_key_is_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner lives as long as its application, whose key may change."""
    first = connect(("127.0.0.1:1",), None)
    assert connect(("127.0.0.1:1",), None) is first

    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", "never shown")
    assert connect(("127.0.0.1:1",), None) is not first
    close_connections()


def test_the_keys_may_be_in_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    fill(cluster.engine, 4)
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark-job")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", SECRET)

    assert len(rows(cluster)) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object; its keys are access-key, secret-key"),
        ('{"accesskey": "a"}', "key 'accesskey' is unknown; known are access-key"),
        ('{"access-key": "a"}', "has only one of access-key and secret-key"),
        ('{"tls": {"ca": "x"}}', "tls: 'ca' is unknown; known are cert-path, check-host-name"),
    ],
)
def test_the_error_for_a_wrong_client_file_says_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "client.json"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=words):
        connect(("127.0.0.1:9",), str(path))


def test_a_missing_client_file_is_an_error_of_that_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read .*; each machine that runs tasks needs it"):
        connect(("127.0.0.1:9",), str(tmp_path / "missing.json"))
