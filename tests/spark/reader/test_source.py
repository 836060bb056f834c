"""Readers of the data source, called without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark.reader.options import SourceOptions
from mqtemplate.spark.reader.planner import StoreReader
from mqtemplate.spark.reader.source import BatchReader, MqTemplateSource, StreamReader
from mqtemplate.spark.records.offsets import QueueRange, to_spark
from mqtemplate.spark.records.schema import source_schema

ALL = ReadAllAvailable()


def at_offsets(offsets: dict[int, int]) -> dict[str, Any]:
    """Return the offsets of the topic as Spark stores them."""
    return to_spark({MessageQueue("orders", "broker-a", queue_id): offset for queue_id, offset in offsets.items()})


def send(broker: EmbeddedBroker, count: int, *, topic: str = "orders", tags: str = "pay", queue_id: int = 0) -> None:
    for number in range(count):
        broker.sends.send(Message(topic, b"%d" % number, {"TAGS": tags}), MessageQueue(topic, broker.name, queue_id))


def source(broker: EmbeddedBroker, **options: str) -> MqTemplateSource:
    given = {"store": str(broker.path), "topic": "orders", **options}
    return MqTemplateSource({name.lower(): value for name, value in given.items()})


def batch_reader(broker: EmbeddedBroker, **options: str) -> BatchReader:
    reader = source(broker, **options).reader(source_schema())
    assert isinstance(reader, BatchReader)
    return reader


def stream_reader(broker: EmbeddedBroker, **options: str) -> StreamReader:
    reader = source(broker, **options).streamReader(source_schema())
    assert isinstance(reader, StreamReader)
    return reader


def rows(reader: BatchReader | StreamReader, partitions: Iterable[InputPartition]) -> list[dict[str, Any]]:
    """Return the rows that the tasks would read. Reader and partitions are pickled, as by Spark."""
    reader, copies = pickle.loads(pickle.dumps((reader, list(partitions))))
    return [row for partition in copies for batch in reader.read(partition) for row in batch.to_pylist()]


def offsets(found: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["topic"], row["queueId"], row["queueOffset"]) for row in found]


def test_a_batch_reads_every_queue_from_its_start(broker: EmbeddedBroker) -> None:
    send(broker, 3, queue_id=0)
    send(broker, 2, queue_id=2)

    reader = batch_reader(broker)

    expected = [("orders", 0, 0), ("orders", 0, 1), ("orders", 0, 2), ("orders", 2, 0), ("orders", 2, 1)]
    assert offsets(rows(reader, reader.partitions())) == expected


@pytest.mark.feature("U32")
def test_a_topic_without_messages_is_an_empty_batch(broker: EmbeddedBroker) -> None:
    """Spark then creates a partition of None."""
    broker.create_topic("orders")
    reader = batch_reader(broker)

    assert reader.partitions() == []
    assert rows(reader, [InputPartition(None)]) == []


def test_an_unknown_topic_is_an_error_in_a_batch(broker: EmbeddedBroker) -> None:
    broker.create_topic("order")

    with pytest.raises(SparkError, match=r"topic 'orders' is not in the store .*; did you mean 'order'"):
        batch_reader(broker).partitions()


def test_several_topics_are_selected_by_names_or_by_pattern(broker: EmbeddedBroker) -> None:
    """A pattern does not select system topics."""
    for topic in ("orders", "orders-eu", "refunds"):
        send(broker, 1, topic=topic)
    broker.sends.send(Message("orders", b"", {"DELAY": "3"}))
    by_names = batch_reader(broker, topic="orders,refunds")
    pattern = {"store": str(broker.path), "topicpattern": "(?i).*(or|sch).*"}
    by_pattern = MqTemplateSource(pattern).reader(source_schema())
    assert isinstance(by_pattern, BatchReader)

    assert {row["topic"] for row in rows(by_names, by_names.partitions())} == {"orders", "refunds"}
    assert {row["topic"] for row in rows(by_pattern, by_pattern.partitions())} == {"orders", "orders-eu"}


def test_tags_with_equal_hashes_are_distinguished(broker: EmbeddedBroker) -> None:
    """ "Aa" and "BB" have the same Java hash, and a consume queue stores only the hash."""
    send(broker, 2, tags="Aa")
    send(broker, 3, tags="BB")
    send(broker, 4, tags="other")
    reader = batch_reader(broker, tags="Aa || missing")

    found = rows(reader, reader.partitions())

    assert [(row["tags"], row["queueOffset"]) for row in found] == [("Aa", 0), ("Aa", 1)]


def test_a_batch_reads_between_offsets_and_times(tmp_path: Path) -> None:
    clock = VirtualClock(start_ms=1_000_000)
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        for _ in range(10):
            send(broker, 1)
            clock.move_ms(1_000)

        by_offset = batch_reader(broker, startingOffsets='{"orders": {"0": 3}}', endingOffsets='{"orders": {"0": 5}}')
        by_time = batch_reader(broker, startingTimestamp="1003000", endingTimestamp="1004500")

        for reader in (by_offset, by_time):
            assert [row["queueOffset"] for row in rows(reader, reader.partitions())] == [3, 4]


def test_a_batch_that_would_end_before_its_start_is_an_error(broker: EmbeddedBroker) -> None:
    send(broker, 5)
    reader = batch_reader(broker, startingOffsets='{"orders": {"0": 4}}', endingOffsets='{"orders": {"0": 2}}')

    with pytest.raises(ConfigurationError, match="orders, queue 0: the read would start at offset 4 and end at 2"):
        reader.partitions()


@pytest.mark.parametrize(
    ("text", "words"), [('{"other": {"0": 1}}', "names topic 'other'"), ('{"orders": {"9": 1}}', "names queue 9")]
)
def test_starting_offsets_of_other_topics_and_queues_are_an_error(
    broker: EmbeddedBroker, text: str, words: str
) -> None:
    send(broker, 1)

    with pytest.raises(ConfigurationError, match=words):
        batch_reader(broker, startingOffsets=text).partitions()


def test_a_read_can_start_at_the_offsets_of_a_group(tmp_path: Path) -> None:
    """The broker has stored them. A group without offsets starts at the start of each queue."""
    broker = EmbeddedBroker(tmp_path / "store", clock=VirtualClock())
    with broker:
        send(broker, 5)
        broker.groups.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)
    known = batch_reader(broker, group="billing", startingOffsets="group")
    unknown = batch_reader(broker, group="newcomers", startingOffsets="group")

    assert [row["queueOffset"] for row in rows(known, known.partitions())] == [3, 4]
    assert len(rows(unknown, unknown.partitions())) == 5


def test_min_partitions_splits_a_read_into_tasks(broker: EmbeddedBroker) -> None:
    send(broker, 10)
    reader = batch_reader(broker, minPartitions="4")

    partitions = reader.partitions()

    assert len(partitions) == 4
    assert sorted(row["queueOffset"] for row in rows(reader, partitions)) == list(range(10))


def test_a_smaller_schema_reads_fewer_columns(broker: EmbeddedBroker) -> None:
    """Spark does not pass the columns of a query to the source, so the user can give a schema."""
    send(broker, 1)
    schema = StructType([StructField("tags", StringType()), StructField("queueOffset", LongType())])
    reader = source(broker).reader(schema)

    assert rows(reader, reader.partitions()) == [{"tags": "pay", "queueOffset": 0}]
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


def test_a_pattern_without_a_topic_is_an_error_in_a_batch(broker: EmbeddedBroker) -> None:
    send(broker, 1)
    reader = MqTemplateSource({"store": str(broker.path), "topicpattern": "order"}).reader(source_schema())
    assert isinstance(reader, BatchReader)

    with pytest.raises(SparkError, match=r"no topic matches 'order' in the store .*; its topics are: .*orders"):
        reader.partitions()


def test_assigned_queues_are_read_and_no_others(broker: EmbeddedBroker) -> None:
    for queue_id in range(3):
        send(broker, 2, queue_id=queue_id)
    options = {"store": str(broker.path), "assign": '{"orders": [0, 2]}'}
    reader = MqTemplateSource(options).reader(source_schema())
    missing = MqTemplateSource({**options, "assign": '{"orders": [7]}'}).reader(source_schema())
    assert isinstance(reader, BatchReader)
    assert isinstance(missing, BatchReader)

    assert {row["queueId"] for row in rows(reader, reader.partitions())} == {0, 2}
    with pytest.raises(SparkError, match=r"option assign names queue 7 of 'orders'; its queues are \[0, 1, 2\]"):
        missing.partitions()


def test_a_read_can_start_and_end_at_a_time_for_each_queue(tmp_path: Path) -> None:
    clock = VirtualClock(start_ms=1_000_000)
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        for _ in range(10):
            send(broker, 1, queue_id=0)
            send(broker, 1, queue_id=1)
            clock.move_ms(1_000)

        reader = batch_reader(
            broker,
            startingOffsetsByTimestamp='{"orders": {"0": 1003000}}',
            endingOffsetsByTimestamp='{"orders": {"0": "1970-01-01T00:16:45Z", "1": 1002000}}',
        )

        assert offsets(rows(reader, reader.partitions())) == [
            *(("orders", 0, number) for number in (3, 4)),
            *(("orders", 1, number) for number in (0, 1)),
        ]


def test_a_start_after_the_last_message_can_be_an_error(broker: EmbeddedBroker) -> None:
    send(broker, 1)
    late = {"startingTimestamp": "99999999999999"}
    strict = batch_reader(broker, **late, startingOffsetsByTimestampStrategy="error")

    assert batch_reader(broker, **late).partitions() == []
    with pytest.raises(ConfigurationError, match="no message was stored at or after 99999999999999; give an earlier"):
        strict.partitions()


def test_a_condition_in_sql_selects_messages(broker: EmbeddedBroker) -> None:
    """It is evaluated over the properties; the columns of the result need not contain them."""
    for price in (5, 15, 25):
        broker.sends.send(Message("orders", b"", {"price": str(price)}), MessageQueue("orders", broker.name, 0))
    schema = StructType([StructField("queueOffset", LongType())])
    reader = source(broker, sql="price BETWEEN 10 AND 20").reader(schema)
    assert isinstance(reader, BatchReader)

    assert rows(reader, reader.partitions()) == [{"queueOffset": 1}]


def test_messages_of_a_delay_level_are_read_without_those_that_are_done(broker: EmbeddedBroker) -> None:
    """Their units are marked on purpose. That is no damage."""
    handles = [broker.sends.send(Message("orders", b"%d" % n, {"DELAY": "5"})).handle for n in range(4)]
    broker.delayed.cancel(handles[1])
    reader = batch_reader(broker, topic="SCHEDULE_TOPIC_XXXX")

    assert [row["body"] for row in rows(reader, reader.partitions())] == [b"0", b"2", b"3"]


def test_messages_of_a_delay_level_are_selected_by_their_tags(broker: EmbeddedBroker) -> None:
    """Their consume queue has the due time in place of the tag's hash."""
    for tags in ("pay", "ship"):
        broker.sends.send(Message("orders", b"", {"TAGS": tags, "DELAY": "5"}))
    reader = batch_reader(broker, topic="SCHEDULE_TOPIC_XXXX", tags="pay")

    assert [row["tags"] for row in rows(reader, reader.partitions())] == ["pay"]


def test_a_task_that_sees_another_store_says_so(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """A machine of a cluster may have another store under the path, and its rows would come silently."""
    send(broker, 3)
    reader = batch_reader(broker)
    partitions = reader.partitions()
    broker.close()
    broker.path.rename(tmp_path / "away")

    with pytest.raises(SparkError, match=r"the task on .*: store folder .* does not exist; .*nameServer"):
        rows(reader, partitions)

    with EmbeddedBroker(broker.path, clock=VirtualClock(start_ms=5)) as other:
        send(other, 3)
        with pytest.raises(SparkError, match=r"the task on .*is another store than was planned: message 2 of orders"):
            rows(reader, partitions)


# --- streams ----------------------------------------------------------------------------------------


def test_the_first_offset_of_a_stream_is_determined_once(broker: EmbeddedBroker) -> None:
    """Spark calls ``initialOffset`` twice. With two different offsets the messages between them would be lost."""
    send(broker, 3)
    reader = stream_reader(broker, startingOffsets="latest")

    first = reader.initialOffset()
    send(broker, 3)

    assert first == at_offsets({0: 3})
    assert reader.initialOffset() == first


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

    first_time = [rows(reader, reader.partitions(*span)) for span in pairwise(steps)]
    send(broker, 5)
    again = [rows(reader, reader.partitions(*span)) for span in pairwise(steps)]

    assert limit == ReadMaxRows(10)
    assert first_time == again
    found = sorted(position for part in again for position in offsets(part))
    assert found == [("orders", 0, number) for number in range(25)] + [("orders", 1, number) for number in range(15)]


def test_available_now_reads_the_messages_that_were_there_at_the_start(broker: EmbeddedBroker) -> None:
    send(broker, 4)
    reader = stream_reader(broker)
    reader.prepareForTriggerAvailableNow()
    send(broker, 4)

    end = reader.latestOffset(reader.initialOffset(), ALL)

    assert end == at_offsets({0: 4})
    assert reader.latestOffset(end, ALL) == end
    assert reader.reportLatestOffset() == at_offsets({0: 8})


def test_a_queue_that_is_created_later_is_read_from_its_start(broker: EmbeddedBroker) -> None:
    send(broker, 2, queue_id=0)
    reader = stream_reader(broker)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    send(broker, 3, queue_id=3)

    end = reader.latestOffset(start, ALL)

    assert offsets(rows(reader, reader.partitions(start, end))) == [("orders", 3, number) for number in range(3)]


def test_a_stream_can_start_before_its_topic_has_messages(broker: EmbeddedBroker) -> None:
    reader = stream_reader(broker)
    start = reader.initialOffset()
    nothing_yet = reader.latestOffset(start, ALL)
    send(broker, 1)

    assert start == nothing_yet == {"version": 2, "topics": {}}
    assert reader.latestOffset(start, ALL) == at_offsets({0: 1})


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
    assert [row["queueOffset"] for row in rows(lenient, lenient.partitions(*span))] == [2, 3]


def test_a_replaced_folder_ends_a_stream(broker: EmbeddedBroker) -> None:
    """The queue ends before the offset of the checkpoint. Waiting for it would hide the loss."""
    send(broker, 2)

    with pytest.raises(SparkError, match=r"messages are gone: orders, queue 0, .*the queue now ends at 2"):
        stream_reader(broker).latestOffset({"orders": {"0": 9}}, ALL)


def test_a_first_batch_with_another_start_is_an_error(broker: EmbeddedBroker) -> None:
    """Spark calls ``initialOffset`` again after a restart, and 'latest' is another offset then."""
    send(broker, 9)
    reader = stream_reader(broker, startingOffsets="latest")

    with pytest.raises(SparkError, match="the batch would end at 5, before its start"):
        reader.partitions(reader.initialOffset(), {"orders": {"0": 5}})


def test_a_reader_continues_in_the_next_file_of_a_queue(tmp_path: Path) -> None:
    small = EmbeddedSettings(mapped_file_size_consume_queue=10 * 20, mapped_file_size_commit_log=16_384)
    with EmbeddedBroker(tmp_path / "store", small, VirtualClock()) as broker:
        reader = stream_reader(broker)
        at, found = reader.initialOffset(), []
        for _ in range(8):
            send(broker, 23)
            end = reader.latestOffset(at, ALL)
            found += rows(reader, reader.partitions(at, end))
            at = end

        assert [row["queueOffset"] for row in found] == list(range(8 * 23))


def test_a_stream_over_a_missing_topic_warns_once(broker: EmbeddedBroker) -> None:
    """It may start before its topic exists, but a misspelt name must not look like a quiet topic."""
    broker.create_topic("order")
    reader = stream_reader(broker)
    with capture_logs() as logs:
        start = reader.initialOffset()
        reader.latestOffset(start, ALL)
        reader.latestOffset(start, ALL)

    (warning,) = [entry for entry in logs if entry["event"] == "spark.topic_missing"]
    assert "did you mean 'order'" in warning["reason"]


def test_a_batch_is_limited_by_bytes(broker: EmbeddedBroker) -> None:
    for _ in range(20):
        broker.sends.send(Message("orders", bytes(1_000)), MessageQueue("orders", broker.name, 0))
    reader = stream_reader(broker, maxBytesPerTrigger="6000")

    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())

    assert end == at_offsets({0: 5})


def test_a_batch_waits_for_a_minimum_of_messages(broker: EmbeddedBroker) -> None:
    """A delay of zero ends the wait at once; with ``Trigger.AvailableNow`` there is none."""
    patient = stream_reader(broker, minOffsetsPerTrigger="5", maxTriggerDelay="1h")
    hasty = stream_reader(broker, minOffsetsPerTrigger="5", maxTriggerDelay="0s")
    send(broker, 3)
    start = at_offsets({0: 0})

    assert patient.latestOffset(start, patient.getDefaultReadLimit()) == start
    assert hasty.latestOffset(start, hasty.getDefaultReadLimit()) == at_offsets({0: 3})
    send(broker, 2)
    assert patient.latestOffset(start, patient.getDefaultReadLimit()) == at_offsets({0: 5})


def test_a_topic_that_was_removed_from_a_query_is_named(broker: EmbeddedBroker) -> None:
    """The store was not cleaned: the list of topics was changed."""
    send(broker, 1)
    table = to_spark({MessageQueue("orders", "broker-a", 0): 1, MessageQueue("refunds", "broker-a", 0): 4})

    with pytest.raises(SparkError, match="the checkpoint has the topic 'refunds', which the query does not read any"):
        stream_reader(broker).latestOffset(table, ALL)


def test_offsets_of_version_1_are_continued(broker: EmbeddedBroker) -> None:
    """Whatever the name of the broker is: a folder has only one."""
    send(broker, 4)
    reader = stream_reader(broker, brokerName="broker-b")

    end = reader.latestOffset({"orders": {"0": 1}}, ALL)

    assert end == to_spark({MessageQueue("orders", "broker-b", 0): 4})
    assert [row["queueOffset"] for row in rows(reader, reader.partitions({"orders": {"0": 1}}, end))] == [1, 2, 3]


@pytest.mark.parametrize("table", [{"orders": 3}, {"orders": {"a": 1}}, {"version": 2}, {"version": 2, "topics": [1]}])
def test_damaged_offsets_of_a_stream_are_an_error_with_advice(broker: EmbeddedBroker, table: dict[str, Any]) -> None:
    with pytest.raises(
        SparkError, match=r"offsets in the checkpoint are damaged, or of another source .*from a backup"
    ):
        stream_reader(broker).latestOffset(table, ALL)


def test_the_ranges_of_a_batch_after_a_data_loss_are_those_of_its_rows(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    records = [foreign_record(body=bytes(400))] * 20
    store = write_foreign_folder(tmp_path / "store", records, log_file_size=1_200)
    (store / "commitlog" / f"{0:020d}").unlink()
    plan = StoreReader(SourceOptions.parse({"store": str(store), "topic": "orders"}, streaming=True))

    assert plan.stored_ranges([QueueRange("orders", 0, 0, 4, "broker-a")]) == (
        QueueRange("orders", 0, 2, 4, "broker-a"),
    )
