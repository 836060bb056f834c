"""Spark listeners and the data source in a real Spark; one session for all tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, spark_listener
from mqtemplate.spark.reader.source import MqTemplateSource
from mqtemplate.testing import Harness, messages_in
from tests.spark.listening.conftest import Start
from tests.spark.listening.listeners import started
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:.*:ResourceWarning")]


class Order(BaseModel):
    id: int
    region: str | None = None


def send(broker: EmbeddedBroker, *ids: int, tags: str = "paid", queue_id: int = 0) -> None:
    for number in ids:
        body = f'{{"id": {number}, "region": "north"}}'.encode()
        broker.sends.send(Message("orders", body, {"TAGS": tags}), MessageQueue("orders", broker.name, queue_id))


def committed(broker: EmbeddedBroker, group: str, queue_id: int = 0) -> int | None:
    return broker.groups.committed_offset(group, MessageQueue("orders", broker.name, queue_id))


class Collector:
    """Listener that collects the ids of each batch, and fails on demand."""

    def __init__(self) -> None:
        self.batches: list[tuple[SparkBatch, list[int]]] = []
        self.fails = False

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        ids = [row.id for row in messages.selectExpr("from_json(string(body), 'id bigint').id AS id").collect()]
        self.batches.append((batch, ids))
        if self.fails:
            raise ValueError("the sink is down")

    @property
    def ids(self) -> list[int]:
        return [number for _, ids in self.batches for number in ids]


class RunningListener:
    """Listener that collects payloads and due times. It runs for several tests, since a start takes seconds."""

    def __init__(self, spark: SparkSession, broker: EmbeddedBroker, folder: Path) -> None:
        self.broker = broker
        self.batches: list[tuple[SparkBatch, list[tuple[Any, ...]]]] = []
        attributes = {"selector_expression": "paid || refunded", "payload": Order, "max_offsets_per_trigger": 10}
        self.container = started(spark, broker, folder, self, **attributes)

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        columns = messages.selectExpr("payload.*", "unix_millis(deliverTimestamp) AS due")
        self.batches.append((batch, [tuple(row) for row in columns.collect()]))

    def new_batches(self) -> list[tuple[SparkBatch, list[tuple[Any, ...]]]]:
        """Wait until all messages are handled. Return the batches with messages since the last call."""
        self.container.await_idle()
        taken, self.batches = self.batches, []
        return [(batch, rows) for batch, rows in taken if batch.message_count]


@pytest.fixture(scope="class")
def running(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningListener]:
    folder = tmp_path_factory.mktemp("running")
    with EmbeddedBroker(folder / "store", clock=VirtualClock()) as broker:
        running = RunningListener(spark, broker, folder / "checkpoints")
        yield running
        running.container.stop()


def test_a_folder_is_read_as_a_table(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """A batch read while the broker runs, through SQL and through an Arrow function."""
    send(broker, *range(20), queue_id=0)
    send(broker, *range(5), tags="refunded", queue_id=3)
    read = spark.read.format("mqtemplate").options(store=str(broker.path), topic="orders").load()

    counts = {row["tags"]: row["n"] for row in read.groupBy("tags").agg({"*": "count"}).toDF("tags", "n").collect()}
    last = read.where("queueId = 0").orderBy("queueOffset", ascending=False).first()
    copied = read.mapInArrow(lambda batches: batches, read.schema)

    assert counts == {"paid": 20, "refunded": 5}
    assert last is not None
    assert (last.topic, last.queueOffset, last.properties["TAGS"], last.body) == (
        "orders",
        19,
        "paid",
        bytearray(b'{"id": 19, "region": "north"}'),
    )
    assert last.storeTimestamp.year == 2026
    assert copied.where("tags = 'refunded'").count() == 5


def test_a_condition_of_one_query_does_not_limit_the_next_one(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Spark keeps the planned read of a DataFrame. With filters passed to the source, the next query lacks rows."""
    send(broker, *range(4), queue_id=0)
    send(broker, *range(3), queue_id=1)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        read = spark.read.format("mqtemplate").options(store=str(broker.path), topic="orders").load()
        first = read.where("queueId = 1 AND tags = 'paid'").count()

        assert (first, read.count(), read.where("queueId = 0").count()) == (3, 7, 4)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_an_error_of_the_source_keeps_its_text(spark: SparkSession, broker: EmbeddedBroker) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="option 'topics' is unknown; did you mean 'topic'"):
        spark.read.format("mqtemplate").options(store=str(broker.path), topics="orders").load()


class TestRunningListener:
    @pytest.mark.feature("X8", "U34")
    def test_a_listener_gets_typed_batches_and_its_group_follows(self, running: RunningListener) -> None:
        """Tags are selected, the payload is a struct, batches are limited, and the group's offsets follow."""
        start = committed(running.broker, "billing") or 0

        send(running.broker, *range(10))
        send(running.broker, *range(100, 110), tags="other")
        send(running.broker, *range(10, 15))
        batches = running.new_batches()

        assert [row for _, rows in batches for row in rows] == [(number, "north", None) for number in range(15)]
        assert max(batch.message_count for batch, _ in batches) <= 10
        assert {(batch.attempt, batch.is_replay) for batch, _ in batches} == {(1, False)}
        assert len({batch.batch_id for batch, _ in batches}) == len(batches)
        ends = [start, *(found.end for batch, _ in batches for found in batch.ranges)]
        assert [found.start for batch, _ in batches for found in batch.ranges] == ends[:-1]
        assert committed(running.broker, "billing") == ends[-1] == start + 25
        assert running.container.exception is None

    def test_a_body_that_is_not_json_has_a_null_payload(self, running: RunningListener) -> None:
        running.broker.sends.send(Message("orders", b"not json", {"TAGS": "paid"}))

        [(_, rows)] = running.new_batches()

        assert rows == [(None, None, None)]

    def test_a_delayed_message_is_read_when_it_is_due(self, running: RunningListener) -> None:
        """A query does not read pending messages. A delivered one is an ordinary message with its due time."""
        deliver_at = running.broker.clock.now_ms() + 60_000
        properties = {"TAGS": "paid", "TIMER_DELIVER_MS": str(deliver_at)}

        running.broker.sends.send(Message("orders", b'{"id": 1}', properties))
        before = running.new_batches()
        Harness(running.broker).advance("1m")
        [(_, rows)] = running.new_batches()

        assert before == []
        assert rows == [(1, None, deliver_at)]


@pytest.mark.thorough
def test_with_bad_records_fail_a_body_that_is_not_json_ends_the_query(start: Start, broker: EmbeddedBroker) -> None:
    """The error has the position of the message, and what it contains."""

    @spark_listener("orders", "billing")
    def collect(messages: DataFrame, batch: SparkBatch) -> None:
        messages.select("payload.id").collect()

    send(broker, 1)
    broker.sends.send(Message("orders", b"not json"), MessageQueue("orders", broker.name, 0))
    container = start(collect, payload=Order, bad_records="fail", max_attempts=1)

    with pytest.raises(
        SparkError,
        match="the first is orders, queue 0, offset 1: the body is not JSON of Order: 'not json'",
    ):
        container.await_idle()


@pytest.mark.feature("U31", "U35")
def test_a_failed_batch_ends_the_query_and_is_repeated_unchanged_after_a_restart(
    start: Start, broker: EmbeddedBroker
) -> None:
    """With ``on_failure="stop"`` no message is skipped.

    The repeated batch has the same id and messages, although new messages arrived and the group's offset was changed.
    """
    failing, working = Collector(), Collector()
    failing.fails = True
    send(broker, 1, 2, 3)

    broken = start(failing, max_attempts=3)

    with pytest.raises(SparkError, match="Spark listener Collector: the sink is down"):
        broken.await_idle()
    assert [(batch.batch_id, batch.attempt, ids) for batch, ids in failing.batches] == [
        (0, attempt, [1, 2, 3]) for attempt in (1, 2, 3)
    ]
    assert isinstance(broken.exception, SparkError)
    assert isinstance(broken.exception.__cause__, ValueError)
    assert not broken.is_running
    assert committed(broker, "billing") is None

    broken.stop()
    send(broker, 4, 5)
    broker.groups.commit_offset("billing", MessageQueue("orders", broker.name, 0), 2)
    start(working).await_idle()

    (first, ids), (second, more) = working.batches
    assert (first.batch_id, first.is_replay, ids) == (0, True, [1, 2, 3])
    assert (second.batch_id, second.is_replay, more) == (1, False, [4, 5])
    assert first.query_id == failing.batches[0][0].query_id
    assert committed(broker, "billing") == 5


@pytest.mark.feature("U31")
def test_a_stop_waits_for_the_running_batch_and_restarts_lose_and_repeat_nothing(
    start: Start, broker: EmbeddedBroker
) -> None:
    """The batch is committed, and no other one starts. Messages are sent before each restart."""
    running, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    @spark_listener("orders", "billing")
    def slow(messages: DataFrame, batch: SparkBatch) -> None:
        running.set()
        assert may_end.wait(PATIENCE_S)
        done.append(batch.batch_id)

    send(broker, *range(10))
    container = start(slow, max_offsets_per_trigger=5)
    assert running.wait(PATIENCE_S)
    stopping = threading.Thread(target=container.stop)
    stopping.start()
    assert container._stopping.wait(PATIENCE_S)
    may_end.set()
    stopping.join(60)

    assert done == [0]
    assert committed(broker, "billing") == 5
    assert container.exception is None
    assert not container.is_running

    collector = Collector()
    for first in (10, 20):
        send(broker, *range(first, first + 10))
        container = start(collector, max_offsets_per_trigger=5)
        container.await_idle()
        container.stop()

    assert collector.ids == list(range(5, 30))
    assert [len(ids) for _, ids in collector.batches] == [5, 5, 5, 5, 5]
    # Spark may have planned the first of these batches before the stop: the plan is then in the checkpoint.
    assert not any(batch.is_replay for batch, _ in collector.batches[1:])


@pytest.mark.thorough
def test_an_available_now_query_reads_from_its_groups_offset_and_ends(start: Start, broker: EmbeddedBroker) -> None:
    """A new query starts at the offset of its group, for example after an earlier message listener."""
    collector = Collector()
    send(broker, *range(8))
    broker.groups.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)

    container = start(collector, trigger=AVAILABLE_NOW)
    container.await_idle()

    assert collector.ids == [3, 4, 5, 6, 7]
    assert not container.is_running
    assert container.exception is None


@pytest.mark.thorough
def test_a_damaged_record_ends_the_query_with_file_and_offset(start: Start, broker: EmbeddedBroker) -> None:
    """It is not skipped."""
    collector = Collector()
    send(broker, 1)
    (log,) = sorted((broker.path or Path()).glob("commitlog/*"))[:1]
    with log.open("r+b") as file:
        file.seek(90)
        file.write(b"?")

    container = start(collector, max_attempts=1)

    with pytest.raises(SparkError, match="0{20}: bad record at physical offset 0: its body does not match its CRC-32"):
        container.await_idle()


@pytest.mark.thorough
def test_a_table_of_the_catalog_reads_a_topic(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Spark adds options of its own to the options of the table."""
    send(broker, 1, 2, 3)
    spark.dataSource.register(MqTemplateSource)
    spark.sql(f"CREATE TABLE orders USING mqtemplate OPTIONS (store '{broker.path}', topic 'orders')")

    try:
        assert spark.sql("SELECT count(*) AS n FROM orders WHERE queueOffset >= 1").first() == (2,)
    finally:
        spark.sql("DROP TABLE orders")


@pytest.mark.thorough
def test_a_table_of_the_catalog_takes_rows_and_may_have_few_columns(
    spark: SparkSession, served: EmbeddedBroker
) -> None:
    """Columns for reads only have no effect. A write names its topic: Spark may pass the options of what is read."""
    send(served, 1, 2)
    spark.dataSource.register(MqTemplateSource)
    tables = {
        "orders": "topic 'orders'",
        "copies": "topic 'copies'",
        "narrow": "topic 'orders', columns 'queueId, body'",
    }
    for name, options in tables.items():
        spark.sql(f"CREATE TABLE {name} USING mqtemplate OPTIONS (store '{served.path}', {options})")
    spark.sql("CREATE TABLE lost (queueId int, body binary) USING mqtemplate OPTIONS (topic 'orders')")

    try:
        into = f"INSERT INTO copies WITH ('store' = '{served.path}', 'topic' = 'copies')"
        spark.sql(f"{into} SELECT * FROM orders")
        spark.sql(f"{into} (body, keys) VALUES (X'41', 'k7')")

        assert len(messages_in(served, "orders")) == 2
        copies = [message.body for message in messages_in(served, "copies")]
        assert sorted(copies) == [b"A", *sorted(message.body for message in messages_in(served, "orders"))]
        assert [message.keys for message in messages_in(served, "copies") if message.body == b"A"] == ["k7"]
        assert spark.table("narrow").columns == ["queueId", "body"]
        assert spark.table("narrow").count() == 2
        for use, advice in (
            ("SELECT * FROM lost", "Spark drops those of a table that is created with columns: create it without"),
            ("INSERT INTO copies SELECT * FROM orders", "name them, as in INSERT INTO orders WITH"),
        ):
            with pytest.raises(Exception, match=advice):
                spark.sql(use).collect()
    finally:
        for name in (*tables, "lost"):
            spark.sql(f"DROP TABLE {name}")
