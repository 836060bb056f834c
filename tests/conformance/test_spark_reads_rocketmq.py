"""The data source over Apache RocketMQ 5.5: ordinary pulls from two brokers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")


from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.location.cluster import ClusterBlocks
from mqtemplate.spark.location.cluster_connection import close_connections
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.reader.source import BatchReader, MqTemplateSource, StreamReader
from mqtemplate.spark.records.schema import source_schema
from mqtemplate.spark.records.versions import ReadAllAvailable
from tests.waiting import eventually

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
]  # two brokers start, on a machine that may be busy

_BROKERS = ("broker-a", "broker-b")
_COUNT = 120


@pytest.fixture(scope="module")
def broker(name_server: NameServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteBroker]:
    """Client of a cluster with two brokers, and messages in each of their queues."""
    folders = [tmp_path_factory.mktemp(name) for name in _BROKERS]
    first, second = (
        RocketMQ(folder, name_server, {"brokerName": name}) for folder, name in zip(folders, _BROKERS, strict=True)
    )
    with first, second:
        cluster = ClusterBlocks(BrokerLocation(name_servers=(name_server.address,)))
        eventually(lambda: len(brokers_of(cluster, "TBW102")) == 2, "both brokers have registered")
        yield from _filled(name_server, cluster)
    close_connections()


def brokers_of(cluster: ClusterBlocks, topic: str) -> set[str]:
    return {queue.broker_name for queue in cluster.queues(topic)}


def _filled(name_server: NameServer, cluster: ClusterBlocks) -> Iterator[RemoteBroker]:
    with RemoteBroker(RemoteSettings(name_servers=(name_server.address,))) as client:
        client.create_topic("spark-orders", 2)
        eventually(lambda: len(brokers_of(cluster, "spark-orders")) == 2, "both brokers have the topic")
        for name in _BROKERS:
            for number in range(_COUNT):
                body = bytes(number * 97 + 1)
                message = Message("spark-orders", body, {"TAGS": ("pay", "ship")[number % 2], "KEYS": f"k{number}"})
                client.sends.send(message, MessageQueue("spark-orders", name, number % 2))
        yield client


def source(name_server: NameServer, **options: str) -> MqTemplateSource:
    given = {"nameServer": name_server.address, "topic": "spark-orders", **options}
    return MqTemplateSource({name.lower(): value for name, value in given.items()})


def rows(reader: BatchReader | StreamReader, partitions: Any) -> list[dict[str, Any]]:
    return [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]


def test_a_batch_reads_every_queue_of_every_broker(broker: RemoteBroker, name_server: NameServer) -> None:
    reader = source(name_server).reader(source_schema())
    assert isinstance(reader, BatchReader)

    found = rows(reader, reader.partitions())

    expected = {(name, n % 2, n // 2, bytes(n * 97 + 1), f"k{n}") for name in _BROKERS for n in range(_COUNT)}
    columns = ("brokerName", "queueId", "queueOffset", "body", "keys")
    assert {tuple(row[name] for name in columns) for row in found} == expected
    assert len(found) == len(expected)


def test_offsets_are_those_of_each_broker(broker: RemoteBroker, name_server: NameServer) -> None:
    """Each broker has a queue 0. A stream continues after what it has read, and commits to its group."""
    queues = [MessageQueue("spark-orders", name, queue_id) for name in _BROKERS for queue_id in range(2)]
    reader = source(name_server, group="spark-statistics", maxOffsetsPerTrigger="100").streamReader(source_schema())
    assert isinstance(reader, StreamReader)
    start = reader.initialOffset()

    middle = reader.latestOffset(start, reader.getDefaultReadLimit())
    end = reader.latestOffset(middle, ReadAllAvailable())
    reader.commit(end)

    found = rows(reader, reader.partitions(start, middle)) + rows(reader, reader.partitions(middle, end))
    assert len(found) == len({(row["brokerName"], row["queueId"], row["queueOffset"]) for row in found}) == 2 * _COUNT
    assert [broker.groups.committed_offset("spark-statistics", queue) for queue in queues] == [_COUNT // 2] * 4


def test_tags_and_times_select_messages(broker: RemoteBroker, name_server: NameServer, tmp_path: Path) -> None:
    by_tag = source(name_server, tags="ship").reader(source_schema())
    late = source(name_server, startingTimestamp="99999999999999").reader(source_schema())
    assert isinstance(by_tag, BatchReader)
    assert isinstance(late, BatchReader)

    assert {row["tags"] for row in rows(by_tag, by_tag.partitions())} == {"ship"}
    assert late.partitions() == []
