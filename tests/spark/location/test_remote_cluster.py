"""Reading over the network from a server of this library: the same rows as from its folder."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")


from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError, ConfigurationError, CorruptRecordError, RemoteConnectError, SparkError
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.record.codec import RecordDraft
from mqtemplate.remoting.protocol.bodies.route import RegisterBrokerBody, TopicConfig, TopicConfigSerializeWrapper
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers.admin import BrokerRequestHeader, RegisterBrokerRequestHeader
from mqtemplate.server import Account, AclSettings, BrokerServerSettings, LocalCluster, Right
from mqtemplate.spark.location.cluster import ClusterBlocks
from mqtemplate.spark.location.cluster_connection import Retries, close_connections, connect
from mqtemplate.spark.location.connection import location_of, open_broker
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.reader.source import MqTemplateSource
from mqtemplate.spark.records.offsets import QueueRange, to_spark
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA, record_batches
from mqtemplate.spark.records.versions import ReadAllAvailable
from mqtemplate.spark.sink.options import SinkOptions
from tests.contract.test_remote_server import free_address
from tests.server.tool import Tool
from tests.spark.conftest import ANY_PORT, Serve
from tests.spark.reads import batch_reader, read, rows_of, source, stream_reader
from tests.waiting import eventually

SECRET = "never shown"


def fill(broker: EmbeddedBroker, count: int, *, topic: str = "orders", queue_id: int = 0, size: int = 40) -> None:
    body = random.Random(1).randbytes(size)
    messages = [Message(topic, body, {"TAGS": ("pay", "ship")[n % 2], "KEYS": f"k{n}"}) for n in range(count)]
    for start in range(0, count, 100):
        broker.sends.send_batch(messages[start : start + 100], MessageQueue(topic, broker.name, queue_id))


def range_rows(cluster: LocalCluster, start: int, end: int, *, pulls: bool) -> list[dict[str, Any]]:
    place = ClusterBlocks(BrokerLocation(name_servers=(str(cluster.name_server_address),)), pulls=pulls)
    found = QueueRange("orders", 0, start, end, cluster.engine.name)
    return [row for batch in record_batches(place.blocks(found, None), ARROW_SCHEMA) for row in batch.to_pylist()]


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_the_rows_equal_the_rows_of_the_folder(serve: Serve, pulls: bool) -> None:
    """Blocks of this library's server have 4 MiB, pulls of any server have 32 messages."""
    cluster = serve()
    fill(cluster.engine, 700, size=3_000)

    found = range_rows(cluster, 5, 690, pulls=pulls)

    expected = read(cluster.engine)[5:690]
    assert [row["queueOffset"] for row in found] == list(range(5, 690))
    assert found == expected


def test_a_stream_commits_to_its_group(serve: Serve) -> None:
    """So the broker's tools show its progress. A repeated batch does not set the group back."""
    cluster = serve()
    fill(cluster.engine, 30)
    queue = MessageQueue("orders", "broker-a", 0)
    reader = stream_reader(cluster, group="statistics")

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
        range_rows(cluster, 0, 1, pulls=pulls)


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_messages_that_are_not_stored_are_an_error(serve: Serve, pulls: bool) -> None:
    cluster = serve()
    fill(cluster.engine, 3)
    place = ClusterBlocks(BrokerLocation(name_servers=(str(cluster.name_server_address),)), pulls=pulls)

    with pytest.raises(Exception, match="offset 7 is not stored"):
        list(place.blocks(QueueRange("orders", 0, 7, 9, "broker-a"), None))


def test_a_task_that_reaches_another_cluster_says_so(serve: Serve) -> None:
    """The address may mean another machine there."""
    cluster = serve()
    fill(cluster.engine, 3)
    place = ClusterBlocks(BrokerLocation(name_servers=(str(cluster.name_server_address),)))

    with pytest.raises(SparkError, match=r"the cluster at .* has no broker 'broker-z' with 'orders'"):
        list(place.blocks(QueueRange("orders", 0, 0, 3, "broker-z"), None))


# --- restarts ---------------------------------------------------------------------------------------


class Restart:
    """A cluster that stops, and starts again in the first pause of a request."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._ports = tmp_path / "restarted", (ANY_PORT, ANY_PORT)
        self.cluster = self._started()
        self._ports = self.cluster.address, self.cluster.name_server_address
        self.pauses = 0
        monkeypatch.setattr(Retries, "pause", lambda retries: self._restart())

    def _started(self) -> LocalCluster:
        address, names = self._ports
        engine = EmbeddedBroker(self._folder, EmbeddedSettings(listen_host=ANY_PORT), SystemClock())
        cluster = LocalCluster(engine, BrokerServerSettings(listen=address), names)
        cluster.start()
        return cluster

    def _restart(self) -> bool:
        self.pauses += 1
        if self.pauses == 1:
            self.cluster = self._started()
        return True

    def stop(self) -> None:
        self.cluster.stop()
        self.pauses = 0


@pytest.fixture
def restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Restart]:
    restart = Restart(tmp_path, monkeypatch)
    yield restart
    restart.stop()
    close_connections()


def test_no_step_of_a_stream_ends_by_a_restart_of_the_server(restart: Restart) -> None:
    """First offset, end, plan, read and commit: each is repeated until the server is there again."""
    fill(restart.cluster.engine, 30)
    reader = stream_reader(restart.cluster, group="statistics")
    steps: list[Callable[[], Any]] = [
        reader.initialOffset,
        lambda: reader.latestOffset(reader.initialOffset(), ReadAllAvailable()),
        lambda: reader.partitions(reader.initialOffset(), to_spark({MessageQueue("orders", "broker-a", 0): 30})),
        lambda: reader.commit(to_spark({MessageQueue("orders", "broker-a", 0): 30})),
    ]

    for step in steps:
        restart.stop()
        step()
        assert restart.pauses >= 1

    assert restart.cluster.engine.groups.committed_offset("statistics", MessageQueue("orders", "broker-a", 0)) == 30


@pytest.mark.parametrize("pulls", [False, True], ids=["blocks", "pulls"])
def test_a_task_reads_on_after_a_restart_of_the_server(restart: Restart, pulls: bool) -> None:
    fill(restart.cluster.engine, 100)
    rows = range_rows(restart.cluster, 0, 10, pulls=pulls)
    restart.stop()

    rows += range_rows(restart.cluster, 10, 100, pulls=pulls)

    assert restart.pauses >= 1
    assert [row["queueOffset"] for row in rows] == list(range(100))


def test_queues_of_a_broker_that_registers_again_are_expected(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that was started again knows no topic of a broker for some seconds."""
    first, second = serve(), serve("broker-b")
    for cluster in (first, second):
        cluster.engine.create_topic("orders", 1)
        fill(cluster.engine, 1)
    with Tool(first.name_server_address) as connection:
        register(second, connection, "orders", 1)
        reader = stream_reader(first)
        start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        unregister(second, connection)
        monkeypatch.setattr(Retries, "pause", lambda retries: register(second, connection, "orders", 1) or True)

        end = reader.latestOffset(start, ReadAllAvailable())

    assert end == start
    assert set(start["topics"]["orders"]) == {"broker-a", "broker-b"}


def test_a_server_that_stays_away_is_an_error_after_the_time_for_retries(serve: Serve) -> None:
    cluster = serve()
    fill(cluster.engine, 3)
    reader = stream_reader(cluster, retryTimeout="50ms")
    start = reader.initialOffset()
    cluster.stop()

    with pytest.raises(RemoteConnectError, match="name server"):
        reader.latestOffset(start, ReadAllAvailable())


def unregister(broker: LocalCluster, connection: Tool) -> None:
    header = BrokerRequestHeader(
        broker_name=broker.engine.name, broker_addr=str(broker.address), cluster_name="DefaultCluster", broker_id=0
    )
    connection.request_ok(RequestCode.UNREGISTER_BROKER, header)


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
    """The driver reads them. A block needs the right to its topic."""
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    for topic in ("orders", "salaries"):
        fill(cluster.engine, 4, topic=topic)
    keys = tmp_path / "client.json"
    keys.write_text(json.dumps({"access-key": "spark-job", "secret-key": SECRET}))

    assert len(read(cluster, clientFile=str(keys))) == 4
    with pytest.raises(BrokerError, match="access key 'spark-job' has no right PUB.SUB on topic 'salaries'"):
        read(cluster, clientFile=str(keys), topic="salaries")
    with pytest.raises(BrokerError, match="access control is enabled"):
        read(cluster)
    with pytest.raises(
        SparkError, match="topic 'order' is not in the cluster at .*; check its name: this account may not"
    ):
        read(cluster, clientFile=str(keys), topic="order")


def test_another_key_is_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner lives as long as its application, whose key may change."""
    first = connect(BrokerLocation(name_servers=("127.0.0.1:1",)))
    assert connect(BrokerLocation(name_servers=("127.0.0.1:1",))) is first

    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", "never shown")
    assert connect(BrokerLocation(name_servers=("127.0.0.1:1",))) is not first
    close_connections()


def test_the_keys_may_be_in_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    fill(cluster.engine, 4)
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark-job")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", SECRET)

    assert len(read(cluster)) == 4


def test_the_keys_of_the_driver_reach_the_tasks(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors need no variables and no file: the reader has the keys, and does not show them."""
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    fill(cluster.engine, 4)
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "spark-job")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", SECRET)
    reader = batch_reader(cluster)
    monkeypatch.delenv("MQTEMPLATE_ACCESS_KEY")
    monkeypatch.delenv("MQTEMPLATE_SECRET_KEY")

    assert len(rows_of(reader, reader.partitions())) == 4
    assert SECRET not in repr(reader._options)


def test_the_keys_may_be_options(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have priority: a session may read from several clusters."""
    cluster = serve(acl=AclSettings(accounts=ACCOUNTS))
    fill(cluster.engine, 4)
    monkeypatch.setenv("MQTEMPLATE_ACCESS_KEY", "of another cluster")
    monkeypatch.setenv("MQTEMPLATE_SECRET_KEY", "of another cluster")

    assert len(read(cluster, accessKey="spark-job", secretKey=SECRET)) == 4
    with pytest.raises(ConfigurationError, match="option 'secretKey' would be stored in the catalog, for all to see"):
        source(cluster, accessKey="spark-job", secretKey=SECRET, provider="mqtemplate").schema()


# --- addresses --------------------------------------------------------------------------------------


IN_A_CONTAINER = HostAddress("172.18.0.3", 10_911)


@pytest.fixture
def hidden() -> Iterator[LocalCluster]:
    """Server that registers an address which this machine cannot reach, as one in a container does."""
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=IN_A_CONTAINER))
    with LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT, advertise=IN_A_CONTAINER), ANY_PORT) as cluster:
        yield cluster
        close_connections()


def address_map(reached: object) -> str:
    return json.dumps({"172.18.*": str(reached)})


def test_the_address_map_reaches_the_tasks(hidden: LocalCluster) -> None:
    """Messages, the pending view and writes. The map of the listener's client is the map of its tasks."""
    fill(hidden.engine, 4)
    hidden.engine.sends.send(Message("later", b"", {"DELAY": "18"}))
    server = str(hidden.name_server_address)
    given = {"nameServer": server, "addressMap": address_map(hidden.broker.remoting.address)}
    expected = BrokerLocation.of_options(given)

    assert len(read(hidden, addressMap=given["addressMap"])) == 4
    pending = MqTemplateSource({"view": "pending", **given})
    reader = pending.reader(pending.schema())
    assert len(rows_of(reader, reader.partitions())) == 1
    with open_broker(SinkOptions.parse({**given, "topic": "copies"}).location) as broker:
        broker.sends.send(Message("copies", b"x"))
        assert location_of(broker) == expected
    assert BrokerLocation.of_options(expected.options()) == expected


def test_an_unreachable_broker_names_the_option_for_its_address(hidden: LocalCluster) -> None:
    closed = free_address()
    fill(hidden.engine, 4)

    with pytest.raises(BrokerError) as raised:
        read(hidden, addressMap=address_map(closed), retryTimeout="10ms")

    assert f"cannot connect to {closed} (Connection refused)" in str(raised.value)
    origin = "option addressMap gives this address for 172.18.0.3:10911, which broker 'broker-a' has registered"
    assert str(raised.value).endswith(origin)


def test_a_broker_that_joins_the_cluster_is_read_from_its_start(serve: Serve) -> None:
    """Each broker has a queue 0 of the topic."""
    first, second = serve(), serve("broker-b")
    for cluster, count in ((first, 3), (second, 2)):
        cluster.engine.create_topic("orders", 1)
        fill(cluster.engine, count)
    reader = stream_reader(first)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())

    with Tool(first.name_server_address) as connection:
        register(second, connection, "orders", 1)
        fill(first.engine, 1)
        end = reader.latestOffset(start, ReadAllAvailable())

        assert start["topics"]["orders"] == {"broker-a": {"0": 3}}
        rows = rows_of(reader, reader.partitions(start, end))
    found = sorted((row["brokerName"], row["queueOffset"]) for row in rows)
    assert found == [("broker-a", 3), ("broker-b", 0), ("broker-b", 1)]


def register(broker: LocalCluster, connection: Tool, topic: str, queues: int) -> None:
    """Register a broker at the name server of another one, as brokers of RocketMQ do."""
    config = TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues)
    wrapper = TopicConfigSerializeWrapper(topic_config_table={topic: config})
    body = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()
    header = RegisterBrokerRequestHeader(
        broker_name=broker.engine.name,
        broker_addr=str(broker.address),
        cluster_name="DefaultCluster",
        ha_server_addr="",
        broker_id=0,
        body_crc32=zlib.crc32(body) & 0x7FFF_FFFF,
    )
    connection.request_ok(RequestCode.REGISTER_BROKER, header, body)
