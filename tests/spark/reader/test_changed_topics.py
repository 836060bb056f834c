"""Topics and brokers that change under a stream: recreated, with more or fewer queues, on one more broker."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol.bodies.route import RegisterBrokerBody, TopicConfig, TopicConfigSerializeWrapper
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.headers.admin import (
    CreateTopicRequestHeader,
    RegisterBrokerRequestHeader,
    TopicNameRequestHeader,
)
from mqtemplate.server import BrokerServerSettings, LocalCluster
from mqtemplate.spark.location.cluster_connection import close_connections
from mqtemplate.spark.reader.source import MqTemplateSource, StreamReader
from mqtemplate.spark.records.schema import source_schema
from tests.server.tool import ANY_PORT, Tool

ALL = ReadAllAvailable()
Serve = Callable[..., LocalCluster]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server whose name server accepts other brokers."""
    with ExitStack() as running:
        running.callback(close_connections)

        def serve(name: str = "broker-a") -> LocalCluster:
            settings = EmbeddedSettings(broker_name=name, listen_host=ANY_PORT)
            engine = EmbeddedBroker(tmp_path / name, settings, SystemClock())
            options = BrokerServerSettings(listen=ANY_PORT, broker_registration_enable=True)
            return running.enter_context(LocalCluster(engine, options, ANY_PORT))

        yield serve


def send(cluster: LocalCluster, count: int, queue_id: int = 0, topic: str = "orders") -> None:
    queue = MessageQueue(topic, cluster.engine.name, queue_id)
    for number in range(count):
        cluster.engine.sends.send(Message(topic, b"%d" % number), queue)


def stream(cluster: LocalCluster, *, from_folder: bool = False, **options: str) -> StreamReader:
    place = {"store": str(cluster.engine.path)} if from_folder else {"nameserver": str(cluster.name_server_address)}
    reader = MqTemplateSource({**place, "topic": "orders", **options}).streamReader(source_schema())
    assert isinstance(reader, StreamReader)
    return reader


def positions(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int, int]]:
    parts = reader.partitions(start, end)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted((row["brokerName"], row["queueId"], row["queueOffset"]) for row in rows)


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


def set_queues(cluster: LocalCluster, topic: str, queues: int) -> None:
    """Change the number of queues, as ``mqadmin updateTopic`` does."""
    header = CreateTopicRequestHeader(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        order=False,
    )
    with Tool(cluster.address) as tool:
        tool.request_ok(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def test_a_broker_that_joins_the_cluster_is_read_from_its_start(serve: Serve) -> None:
    """Each broker has a queue 0 of the topic."""
    first, second = serve(), serve("broker-b")
    first.engine.create_topic("orders", 1)
    second.engine.create_topic("orders", 1)
    send(first, 3)
    send(second, 2)
    reader = stream(first)
    start = reader.latestOffset(reader.initialOffset(), ALL)

    with Tool(first.name_server_address) as connection:
        register(second, connection, "orders", 1)
        send(first, 1)
        end = reader.latestOffset(start, ALL)

        assert start["topics"]["orders"] == {"broker-a": {"0": 3}}
        assert positions(reader, start, end) == [("broker-a", 0, 3), ("broker-b", 0, 0), ("broker-b", 0, 1)]


@pytest.mark.parametrize("from_folder", [False, True], ids=["cluster", "folder"])
def test_a_queue_that_is_added_is_read_from_its_start(serve: Serve, from_folder: bool) -> None:
    cluster = serve()
    cluster.engine.create_topic("orders", 1)
    send(cluster, 2)
    reader = stream(cluster, from_folder=from_folder)
    start = reader.latestOffset(reader.initialOffset(), ALL)

    set_queues(cluster, "orders", 2)
    send(cluster, 3, queue_id=1)

    end = reader.latestOffset(start, ALL)
    assert positions(reader, start, end) == [("broker-a", 1, number) for number in range(3)]


def test_a_queue_that_is_removed_ends_a_stream_unless_data_loss_is_allowed(serve: Serve) -> None:
    """The query had read messages of it, and may not have read all of them."""
    cluster = serve()
    cluster.engine.create_topic("orders", 2)
    send(cluster, 2, queue_id=0)
    send(cluster, 3, queue_id=1)
    reader = stream(cluster)
    start = reader.latestOffset(reader.initialOffset(), ALL)

    set_queues(cluster, "orders", 1)
    send(cluster, 1, queue_id=0)

    with pytest.raises(SparkError, match="messages are gone: orders, queue 1, .*the queue now ends at 0"):
        stream(cluster).latestOffset(start, ALL)
    lenient = stream(cluster, failondataloss="false")
    end = lenient.latestOffset(start, ALL)
    assert positions(lenient, start, end) == [("broker-a", 0, 2)]


@pytest.mark.parametrize("from_folder", [False, True], ids=["cluster", "folder"])
def test_a_topic_that_was_deleted_and_created_again_is_continued(serve: Serve, from_folder: bool) -> None:
    """Our broker never gives an offset twice. Where one does, `test_a_replaced_folder_ends_a_stream` has the error."""
    cluster = serve()
    cluster.engine.create_topic("orders", 1)
    send(cluster, 5)
    start = (reader := stream(cluster, from_folder=from_folder)).latestOffset(reader.initialOffset(), ALL)

    with Tool(cluster.address) as tool:
        tool.request_ok(RequestCode.DELETE_TOPIC_IN_BROKER, TopicNameRequestHeader(topic="orders"))
    cluster.engine.create_topic("orders", 1)
    send(cluster, 2)

    again = stream(cluster, from_folder=from_folder)
    assert positions(again, start, again.latestOffset(start, ALL)) == [("broker-a", 0, 5), ("broker-a", 0, 6)]


def test_a_topic_that_is_added_to_a_query_is_read_from_its_start(serve: Serve) -> None:
    cluster = serve()
    cluster.engine.create_topic("orders", 1)
    cluster.engine.create_topic("returns", 1)
    send(cluster, 2)
    send(cluster, 3, topic="returns")
    start = (reader := stream(cluster)).latestOffset(reader.initialOffset(), ALL)

    both = stream(cluster, topic="orders,returns")

    assert positions(both, start, both.latestOffset(start, ALL)) == [("broker-a", 0, number) for number in range(3)]
