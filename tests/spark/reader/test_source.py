"""Readers of the data source, called without Spark."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.reader.planner import StoreReader
from mqtemplate.spark.reader.source import MqTemplateSource, StreamReader
from mqtemplate.spark.records.offsets import QueueRange, to_spark
from mqtemplate.spark.records.schema import source_schema
from mqtemplate.spark.records.versions import ReadAllAvailable, ReadMaxRows
from tests.spark.reads import batch_reader, rows_of, source, stream_reader

ALL = ReadAllAvailable()


def at_offsets(offsets: dict[int, int]) -> dict[str, Any]:
    """Return the offsets of the topic as Spark stores them."""
    return to_spark({MessageQueue("orders", "broker-a", queue_id): offset for queue_id, offset in offsets.items()})


def send(broker: EmbeddedBroker, count: int, *, topic: str = "orders", tags: str = "pay", queue_id: int = 0) -> None:
    for number in range(count):
        broker.sends.send(Message(topic, b"%d" % number, {"TAGS": tags}), MessageQueue(topic, broker.name, queue_id))


def offsets(found: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["topic"], row["queueId"], row["queueOffset"]) for row in found]


@pytest.mark.feature("U32")
def test_a_topic_without_messages_is_an_empty_batch(broker: EmbeddedBroker) -> None:
    """Spark then creates a partition of None."""
    broker.create_topic("orders")
    reader = batch_reader(broker)

    assert reader.partitions() == []
    assert rows_of(reader, [InputPartition(None)]) == []


def test_a_read_can_start_at_the_offsets_of_a_group(tmp_path: Path) -> None:
    """The broker has stored them. A group without offsets starts at the start of each queue."""
    broker = EmbeddedBroker(tmp_path / "store", clock=VirtualClock())
    with broker:
        send(broker, 5)
        broker.groups.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)
    known = batch_reader(broker, group="billing", startingOffsets="group")
    unknown = batch_reader(broker, group="newcomers", startingOffsets="group")

    assert [row["queueOffset"] for row in rows_of(known, known.partitions())] == [3, 4]
    assert len(rows_of(unknown, unknown.partitions())) == 5


def test_min_partitions_splits_a_read_into_tasks(broker: EmbeddedBroker) -> None:
    send(broker, 10)
    reader = batch_reader(broker, minPartitions="4")

    partitions = reader.partitions()

    assert len(partitions) == 4
    assert sorted(row["queueOffset"] for row in rows_of(reader, partitions)) == list(range(10))


def test_a_smaller_schema_reads_fewer_columns(broker: EmbeddedBroker) -> None:
    """Spark does not pass the columns of a query to the source, so the user can give a schema."""
    send(broker, 1)
    schema = StructType([StructField("tags", StringType()), StructField("queueOffset", LongType())])
    for options in ({}, {"sql": "TAGS = 'pay'"}):  # the columns need not contain what a condition needs
        reader = source(broker, **options).reader(schema)

        assert rows_of(reader, reader.partitions()) == [{"tags": "pay", "queueOffset": 0}]
    assert "properties" not in source(broker, includeProperties="false").schema().names


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (StructField("tag", StringType()), "there is no column 'tag'"),
        (StructField("queueOffset", IntegerType()), "column 'queueOffset' is bigint, not int"),
    ],
)
def test_a_schema_with_other_columns_is_refused(broker: EmbeddedBroker, field: StructField, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        source(broker).reader(StructType([field]))


def test_a_task_that_sees_another_store_says_so(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """A machine of a cluster may have another store under the path, and its rows would come silently."""
    send(broker, 3)
    reader = batch_reader(broker)
    partitions = reader.partitions()
    broker.close()
    broker.path.rename(tmp_path / "away")

    with pytest.raises(SparkError, match=r"the task on .*: store folder .* does not exist; .*nameServer"):
        rows_of(reader, partitions)

    with EmbeddedBroker(broker.path, clock=VirtualClock(start_ms=5)) as other:
        send(other, 3)
        with pytest.raises(SparkError, match=r"the task on .*is another store than was planned: message 2 of orders"):
            rows_of(reader, partitions)


# --- streams ----------------------------------------------------------------------------------------


@pytest.mark.feature("U31", "U35")
def test_the_ranges_of_a_stream_have_the_same_messages_each_time(broker: EmbeddedBroker) -> None:
    """Batches are limited. After a restart at any step, no message is read twice or left out."""
    send(broker, 25, queue_id=0)
    send(broker, 15, queue_id=1)
    reader = stream_reader(broker, maxOffsetsPerTrigger="10")
    limit = reader.getDefaultReadLimit()
    steps = [reader.initialOffset()]
    while (end := stream_reader(broker).latestOffset(steps[-1], limit)) != steps[-1]:
        steps.append(end)

    first_time = [rows_of(reader, reader.partitions(*span)) for span in pairwise(steps)]
    send(broker, 5)
    again = [rows_of(reader, reader.partitions(*span)) for span in pairwise(steps)]

    assert limit == ReadMaxRows(10)
    assert reader.reportLatestOffset() == to_spark(
        {MessageQueue("orders", "broker-a", 0): 30, MessageQueue("orders", "broker-a", 1): 15}
    )
    assert first_time == again
    found = sorted(position for part in again for position in offsets(part))
    assert found == [("orders", 0, number) for number in range(25)] + [("orders", 1, number) for number in range(15)]


def test_deleted_messages_end_a_stream_unless_data_loss_is_allowed(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """A range has the same messages each time, or is an error."""
    records = [foreign_record(body=bytes(400))] * 20
    store = write_foreign_folder(tmp_path / "store", records, log_file_size=1_200)
    (store / "commitlog" / f"{0:020d}").unlink()
    span = {"orders": {"0": 0}}, {"orders": {"0": 4}}
    options = {"store": str(store), "topic": "orders"}
    strict = MqTemplateSource(options).streamReader(source_schema())
    lenient = MqTemplateSource({**options, "failondataloss": "false"}).streamReader(source_schema())
    assert isinstance(lenient, StreamReader)

    with pytest.raises(
        SparkError, match=r"messages are gone: orders, queue 0, offsets 0 to 4 .* now goes from 2 to 20"
    ):
        strict.partitions(*span)
    assert [row["queueOffset"] for row in rows_of(lenient, lenient.partitions(*span))] == [2, 3]
    plan = StoreReader(SourceOptions.parse(options, streaming=True))
    assert plan.stored_ranges([QueueRange("orders", 0, 0, 4, "broker-a")]) == (
        QueueRange("orders", 0, 2, 4, "broker-a"),
    )


def test_a_first_batch_with_another_start_is_an_error(broker: EmbeddedBroker) -> None:
    """Spark calls ``initialOffset`` again after a restart, and 'latest' is another offset then."""
    send(broker, 9)
    reader = stream_reader(broker, startingOffsets="latest")

    with pytest.raises(SparkError, match="the batch would end at 5, before its start"):
        reader.partitions(reader.initialOffset(), {"orders": {"0": 5}})


@pytest.mark.parametrize("moved_to", [20, 60])
@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_repeated_first_batch_has_the_start_that_was_planned(
    broker: EmbeddedBroker, moved_to: int, fails: str
) -> None:
    """A crash in the first batch, and then something else moves the group: Spark stores the end of a batch only."""
    send(broker, 60)
    queue = MessageQueue("orders", broker.name, 0)
    options = {"group": "billing", "failOnDataLoss": fails}
    first = stream_reader(broker, maxOffsetsPerTrigger="40", **options)
    end = first.latestOffset(first.initialOffset(), first.getDefaultReadLimit())
    broker.groups.commit_offset("billing", queue, moved_to)
    broker.groups.committed.persist()

    again = stream_reader(broker, **options)
    start, stored = again.initialOffset(), json.loads(json.dumps(end))
    found = rows_of(again, again.partitions(start, stored))

    assert start["topics"]["orders"]["broker-a"]["0"] == moved_to
    assert [row["queueOffset"] for row in found] == list(range(40))
    after = again.latestOffset(stored, ALL)
    assert [row["queueOffset"] for row in rows_of(again, again.partitions(stored, after))] == list(range(40, 60))


def test_a_repeated_first_batch_from_the_end_of_a_topic_does_not_skip_messages(broker: EmbeddedBroker) -> None:
    send(broker, 9)
    first = stream_reader(broker, startingOffsets="latest")
    start = first.initialOffset()
    send(broker, 3)
    end = first.latestOffset(start, ALL)
    send(broker, 5)

    again = stream_reader(broker, startingOffsets="latest")

    assert [row["queueOffset"] for row in rows_of(again, again.partitions(again.initialOffset(), end))] == [9, 10, 11]


def test_a_first_batch_without_messages_is_followed_by_none(broker: EmbeddedBroker) -> None:
    """Spark runs a batch if the end differs from the last one, as text."""
    send(broker, 9)
    reader = stream_reader(broker, startingOffsets="latest")

    end = reader.latestOffset(reader.initialOffset(), ALL)
    after = reader.latestOffset(json.loads(json.dumps(end)), ALL)

    assert json.dumps(after) == json.dumps(end)
    assert reader.partitions(reader.initialOffset(), end) == []


def test_another_selection_with_an_old_checkpoint_is_reported_once(broker: EmbeddedBroker) -> None:
    """The messages before are not read again, which a user of the new selection may expect."""
    send(broker, 3)
    first = stream_reader(broker, tags="pay")
    stored = first.latestOffset(first.initialOffset(), ALL)
    same, other = stream_reader(broker, tags="pay"), stream_reader(broker, sql="TAGS = 'ship'")

    with capture_logs() as events:
        assert same.latestOffset(stored, ALL) == stored
        for _ in range(2):
            other.latestOffset(stored, ALL)

    assert [(each["event"], each["before"], each["now"]) for each in events] == [
        ("spark.selection_changed", "pay", "TAGS = 'ship'")
    ]


def test_a_reader_continues_in_the_next_file_of_a_queue(tmp_path: Path) -> None:
    small = EmbeddedSettings(mapped_file_size_consume_queue=10 * 20, mapped_file_size_commit_log=16_384)
    with EmbeddedBroker(tmp_path / "store", small, VirtualClock()) as broker:
        reader = stream_reader(broker)
        at, found = reader.initialOffset(), []
        for _ in range(8):
            send(broker, 23)
            end = reader.latestOffset(at, ALL)
            found += rows_of(reader, reader.partitions(at, end))
            at = end

        assert [row["queueOffset"] for row in found] == list(range(8 * 23))
