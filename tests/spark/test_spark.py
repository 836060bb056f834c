"""The whole way through a real Spark; one session for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import AVAILABLE_NOW, SparkBatch, SparkListenerContainer, SparkListenerSpec, spark_listener
from mqtemplate.testing import Harness

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:.*:ResourceWarning")]

AT_ONCE = "0 seconds"  # look again as soon as the last batch is done
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
    """Starts a listener on the broker; stopped when the test is over."""
    running: list[SparkListenerContainer] = []

    def start(endpoint: object, **attributes: Any) -> SparkListenerContainer:
        attributes = {"topics": ("orders",), "consumer_group": "billing", "trigger": AT_ONCE, **attributes}
        spec = SparkListenerSpec(retry_delay=0, **attributes)
        container = SparkListenerContainer.on_broker(endpoint, spark, broker, tmp_path / "checkpoints", spec=spec)
        running.append(container)
        container.start()
        return container

    yield start
    for container in running:
        container.stop()


class Collector:
    """A listener that keeps the ids it gets, batch by batch, and may be told to fail."""

    def __init__(self) -> None:
        self.batches: list[tuple[SparkBatch, list[int]]] = []
        self.fails = False

    def on_batch(self, messages: DataFrame, batch: SparkBatch) -> None:
        ids = [row.id for row in messages.selectExpr("from_json(string(body), 'id bigint').id AS id").collect()]
        self.batches.append((batch, ids))
        if self.fails:
            raise ValueError("the sink is away")

    @property
    def ids(self) -> list[int]:
        return [number for _, ids in self.batches for number in ids]


def test_a_folder_is_read_as_a_table(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Batch read beside the running owner, through SQL and through an Arrow function."""
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


def test_what_the_source_refuses_is_told_in_its_own_words(spark: SparkSession, broker: EmbeddedBroker) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="option 'topics' is unknown; did you mean 'topic'"):
        spark.read.format("mqtemplate").options(store=str(broker.path), topics="orders").load()


@pytest.mark.feature("X8", "U34")
def test_a_listener_gets_typed_batches_and_its_group_follows(start: Start, broker: EmbeddedBroker) -> None:
    """Tags select, the payload is a struct, batches keep to the limit, the group follows."""
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


def test_a_body_that_is_no_json_is_an_empty_payload_or_fails_the_batch(start: Start, broker: EmbeddedBroker) -> None:
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


def test_a_delayed_message_comes_when_it_is_due_and_tells_when_that_was(start: Start, broker: EmbeddedBroker) -> None:
    """A query sees nothing of a message that waits; to Spark it is an ordinary message once it is there."""
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


def test_a_failing_batch_is_tried_again_and_then_ends_the_query(start: Start, broker: EmbeddedBroker) -> None:
    """on_failure="stop": nothing is passed over; the group stays where it was."""
    collector = Collector()
    collector.fails = True
    send(broker, 1, 2, 3)

    container = start(collector, max_attempts=3)

    with pytest.raises(SparkError, match="Spark listener Collector: the sink is away"):
        container.await_idle()
    assert [(batch.batch_id, batch.attempt, ids) for batch, ids in collector.batches] == [
        (0, attempt, [1, 2, 3]) for attempt in (1, 2, 3)
    ]
    assert isinstance(container.exception, SparkError)
    assert isinstance(container.exception.__cause__, ValueError)
    assert not container.is_running
    assert committed(broker, "billing") is None


@pytest.mark.feature("U31", "U35")
def test_a_batch_that_failed_comes_again_after_a_restart_as_it_was(start: Start, broker: EmbeddedBroker) -> None:
    """The same id and the same messages, though more came and somebody moved the group; then it goes on."""
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
    """Stop between batches, start again, send meanwhile."""
    collector = Collector()
    for beginning in range(0, 30, 10):
        send(broker, *range(beginning, beginning + 10))
        container = start(collector, max_offsets_per_trigger=4)
        container.await_idle()
        container.stop()

    assert collector.ids == list(range(30))
    assert not any(batch.is_replay for batch, _ in collector.batches)


def test_a_stop_waits_for_the_batch_that_runs(start: Start, broker: EmbeddedBroker) -> None:
    """It is counted as done, and no further one begins."""
    begun, may_end = threading.Event(), threading.Event()
    done: list[int] = []

    @spark_listener("orders", "billing")
    def slow(messages: DataFrame, batch: SparkBatch) -> None:
        begun.set()
        assert may_end.wait(60)
        done.append(batch.batch_id)

    send(broker, *range(10))
    container = start(slow, max_offsets_per_trigger=5)
    assert begun.wait(60)
    stopping = threading.Thread(target=container.stop)
    stopping.start()
    while not container._stopping.wait(60):
        pytest.fail("stop did not begin")
    may_end.set()
    stopping.join(60)

    assert done == [0]
    assert committed(broker, "billing") == 5
    assert container.exception is None
    assert not container.is_running


def test_a_job_takes_what_is_there_from_where_its_group_was_and_ends(start: Start, broker: EmbeddedBroker) -> None:
    """A new query goes on where the group stands: the way from a message listener to a Spark listener."""
    collector = Collector()
    send(broker, *range(8))
    broker.commit_offset("billing", MessageQueue("orders", broker.name, 0), 3)

    container = start(collector, trigger=AVAILABLE_NOW)
    container.await_idle()

    assert collector.ids == [3, 4, 5, 6, 7]
    assert not container.is_running
    assert container.exception is None


def test_a_damaged_record_ends_the_query_with_file_and_offset(start: Start, broker: EmbeddedBroker) -> None:
    """Never passed over in silence."""
    collector = Collector()
    send(broker, 1)
    (log,) = sorted((broker.path or Path()).glob("commitlog/*"))[:1]
    with log.open("r+b") as file:
        file.seek(90)
        file.write(b"?")

    container = start(collector, max_attempts=1)

    with pytest.raises(SparkError, match="0{20}: bad record at physical offset 0: its body does not match its CRC-32"):
        container.await_idle()
