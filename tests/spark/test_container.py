"""Spark listeners and the data source in a real Spark; one session for all tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.listener import ListenerSpec
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer, spark_listener
from mqtemplate.testing import Harness

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:.*:ResourceWarning")]

AT_ONCE = "0 seconds"  # the next batch starts when the last one is done
Start = Callable[..., SparkListenerContainer]


class Order(BaseModel):
    id: int
    region: str | None = None


def send(broker: EmbeddedBroker, *ids: int, tags: str = "paid", queue_id: int = 0) -> None:
    for number in ids:
        body = f'{{"id": {number}, "region": "north"}}'.encode()
        broker.send(Message("orders", body, {"TAGS": tags}), MessageQueue("orders", broker.name, queue_id))


def committed(broker: EmbeddedBroker, group: str, queue_id: int = 0) -> int | None:
    return broker.committed_offset(group, MessageQueue("orders", broker.name, queue_id))


@pytest.fixture
def start(spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a listener on the broker. The listener is stopped at the end of the test."""
    running: list[SparkListenerContainer] = []

    def start(endpoint: object, consumer_group: str = "billing", **attributes: Any) -> SparkListenerContainer:
        attributes = {"trigger": AT_ONCE, "retry_delay": 0, **attributes}
        spec = ListenerSpec(topics=("orders",), consumer_group=consumer_group, attributes=attributes)
        container = SparkListenerContainer.on_broker(endpoint, spark, broker, tmp_path / "checkpoints", spec=spec)
        running.append(container)
        container.start()
        return container

    yield start
    for container in running:
        container.stop()


class Collector:
    """Listener that collects the ids of each batch, and fails if it is told to."""

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


def test_an_error_of_the_source_keeps_its_text(spark: SparkSession, broker: EmbeddedBroker) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="option 'topics' is unknown; did you mean 'topic'"):
        spark.read.format("mqtemplate").options(store=str(broker.path), topics="orders").load()


@pytest.mark.feature("X8", "U34")
def test_a_listener_gets_typed_batches_and_its_group_follows(start: Start, broker: EmbeddedBroker) -> None:
    """Tags are selected, the payload is a struct, batches are limited, and the group's offsets follow."""
    seen: list[tuple[int, str | None]] = []
    batches: list[SparkBatch] = []

    @spark_listener("orders", "billing")
    def bill(messages: DataFrame, batch: SparkBatch) -> None:
        seen.extend((row.id, row.region) for row in messages.select("payload.*").collect())
        batches.append(batch)

    send(broker, *range(10))
    send(broker, *range(100, 110), tags="other")
    send(broker, *range(10, 15))
    container = start(bill, selector_expression="paid || refunded", payload=Order, max_offsets_per_trigger=10)

    container.await_idle()

    assert seen == [(number, "north") for number in range(15)]
    assert [(batch.batch_id, batch.message_count, batch.attempt, batch.is_replay) for batch in batches] == [
        (0, 10, 1, False),
        (1, 10, 1, False),
        (2, 5, 1, False),
    ]
    assert [(found.start, found.end) for batch in batches for found in batch.ranges] == [(0, 10), (10, 20), (20, 25)]
    assert committed(broker, "billing") == 25
    assert container.exception is None


def test_a_body_that_is_no_json_has_a_null_payload_or_fails_the_batch(start: Start, broker: EmbeddedBroker) -> None:
    rows: list[Any] = []

    @spark_listener("orders", "billing")
    def keep(messages: DataFrame, batch: SparkBatch) -> None:
        rows.extend(messages.select("payload.id").collect())

    broker.send(Message("orders", b"not json"))
    start(keep, payload=Order).await_idle()

    assert [row.id for row in rows] == [None]

    strict = start(keep, payload=Order, bad_records="fail", consumer_group="strict", max_attempts=1)
    with pytest.raises(SparkError, match="Spark listener .*keep: "):
        strict.await_idle()


def test_a_delayed_message_is_read_when_it_is_due(start: Start, broker: EmbeddedBroker) -> None:
    """A query does not read pending messages. A delivered one is an ordinary message with its due time."""
    due: list[Any] = []

    @spark_listener("orders", "billing")
    def keep(messages: DataFrame, batch: SparkBatch) -> None:
        due.extend(row.ms for row in messages.selectExpr("unix_millis(deliverTimestamp) AS ms").collect())

    deliver_at = broker.clock.now_ms() + 60_000
    broker.send(Message("orders", b"{}", {"TIMER_DELIVER_MS": str(deliver_at)}))
    container = start(keep)
    container.await_idle()
    before = list(due)
    Harness(broker).advance("1m")
    container.await_idle()

    assert before == []
    assert due == [deliver_at]


def test_a_failing_batch_is_retried_and_then_ends_the_query(start: Start, broker: EmbeddedBroker) -> None:
    """With ``on_failure="stop"`` no message is skipped, and the group's offsets do not change."""
    collector = Collector()
    collector.fails = True
    send(broker, 1, 2, 3)

    container = start(collector, max_attempts=3)

    with pytest.raises(SparkError, match="Spark listener Collector: the sink is down"):
        container.await_idle()
    assert [(batch.batch_id, batch.attempt, ids) for batch, ids in collector.batches] == [
        (0, attempt, [1, 2, 3]) for attempt in (1, 2, 3)
    ]
    assert isinstance(container.exception, SparkError)
    assert isinstance(container.exception.__cause__, ValueError)
    assert not container.is_running
    assert committed(broker, "billing") is None


@pytest.mark.feature("U31", "U35")
def test_a_failed_batch_is_repeated_unchanged_after_a_restart(start: Start, broker: EmbeddedBroker) -> None:
    """It has the same id and messages, although new messages arrived and the group's offset was changed."""
    failing, working = Collector(), Collector()
    failing.fails = True
    send(broker, 1, 2, 3)
    broken = start(failing, max_attempts=1)
    with pytest.raises(SparkError):
        broken.await_idle()
    broken.stop()
    send(broker, 4, 5)
    broker.commit_offset("billing", MessageQueue("orders", broker.name, 0), 2)

    start(working).await_idle()

    (first, ids), (second, more) = working.batches
    assert (first.batch_id, first.is_replay, ids) == (0, True, [1, 2, 3])
    assert (second.batch_id, second.is_replay, more) == (1, False, [4, 5])
    assert first.query_id == failing.batches[0][0].query_id
    assert committed(broker, "billing") == 5


@pytest.mark.feature("U31")
def test_restarts_lose_nothing_and_repeat_nothing(start: Start, broker: EmbeddedBroker) -> None:
    """The container is stopped between batches, and messages are sent before the next start."""
    collector = Collector()
    for first in range(0, 30, 10):
        send(broker, *range(first, first + 10))
        container = start(collector, max_offsets_per_trigger=4)
        container.await_idle()
        container.stop()

    assert collector.ids == list(range(30))
    assert not any(batch.is_replay for batch, _ in collector.batches)


def test_a_stop_waits_for_the_running_batch(start: Start, broker: EmbeddedBroker) -> None:
    """The batch is committed, and no other one starts."""
    started, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    @spark_listener("orders", "billing")
    def slow(messages: DataFrame, batch: SparkBatch) -> None:
        started.set()
        assert may_end.wait(60)
        done.append(batch.batch_id)

    send(broker, *range(10))
    container = start(slow, max_offsets_per_trigger=5)
    assert started.wait(60)
    stopping = threading.Thread(target=container.stop)
    stopping.start()
    assert container._stopping.wait(60)
    may_end.set()
    stopping.join(60)

    assert done == [0]
    assert committed(broker, "billing") == 5
    assert container.exception is None
    assert not container.is_running


def test_an_available_now_query_reads_from_its_groups_offset_and_ends(start: Start, broker: EmbeddedBroker) -> None:
    """A new query starts at the offset of its group, for example that of an earlier message listener."""
    collector = Collector()
    send(broker, *range(8))
    broker.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)

    container = start(collector, trigger=AVAILABLE_NOW)
    container.await_idle()

    assert collector.ids == [3, 4, 5, 6, 7]
    assert not container.is_running
    assert container.exception is None


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
