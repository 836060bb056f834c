"""Failures of Spark listeners: returned rows, bad records, restarts."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import RemoteConnectError, SparkError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.spark import SparkBatch
from mqtemplate.testing import Harness, messages_in
from tests.listener.hostile import KINDS
from tests.spark.listening.conftest import Start
from tests.spark.listening.listeners import Order
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:.*:ResourceWarning")]


@pytest.fixture
def start(start: Start) -> Start:
    return partial(start, payload=Order)


def send(broker: EmbeddedBroker, *bodies: bytes) -> None:
    for body in bodies:
        broker.sends.send(Message("orders", body), MessageQueue("orders", broker.name, 0))


def orders(*ids: int) -> list[bytes]:
    return [b'{"id": %d}' % number for number in ids]


def ids(broker: EmbeddedBroker, topic: str) -> list[bytes]:
    return sorted(message.body for message in messages_in(broker, topic))


def test_returned_rows_and_bad_records_cost_only_themselves(start: Start, broker: EmbeddedBroker) -> None:
    """One bad body goes to the dead-letter topic, one returned row comes back once and then goes there as well."""
    handled: list[tuple[int, int]] = []

    def work(messages: DataFrame, batch: SparkBatch) -> DataFrame:
        rows = messages.select("payload.id", "reconsumeTimes").collect()
        handled.extend((row.id, row.reconsumeTimes) for row in rows)
        return messages.where("payload.id = 2").selectExpr("*", "'no such customer' AS reason")

    send(broker, *orders(1, 2), b"not json", *orders(3))
    container = start(work, bad_records="dlq", max_redeliveries=1, redelivery_delay="10s")
    container.await_idle()
    Harness(broker).advance("10s")
    container.await_idle()

    assert sorted(handled) == [(1, 0), (2, 0), (2, 1), (3, 0)]
    reasons = {each.body: each.properties["dead_letter_message"] for each in messages_in(broker, "%DLQ%billing")}
    assert reasons == {b"not json": "the body is not JSON of Order: 'not json'", b'{"id": 2}': "no such customer"}
    assert container.monitor.lag().keys() == {MessageQueue("orders", broker.name, number) for number in range(4)} | {
        MessageQueue("%RETRY%billing", broker.name, 0)
    }
    assert sum(container.monitor.lag().values()) == 0


@pytest.mark.thorough
def test_a_failing_batch_is_sent_back_and_the_query_goes_on(start: Start, broker: EmbeddedBroker) -> None:
    """With ``on_failure="redeliver"`` the rows come back with their delay; one query handles what comes after them."""
    fails = [True]
    handled: list[int] = []

    def work(messages: DataFrame, batch: SparkBatch) -> None:
        found = [row.id for row in messages.select("payload.id").collect()]
        if fails[0] and found:
            raise ValueError("the sink is down")
        handled.extend(found)

    send(broker, *orders(1, 2))
    container = start(work, on_failure="redeliver", max_attempts=2)
    container.await_idle()
    fails[0] = False
    send(broker, *orders(3))
    container.await_idle()
    assert handled == [3]
    Harness(broker).advance("10s")
    container.await_idle()

    assert sorted(handled) == [1, 2, 3]
    metrics = broker.metrics.snapshot()
    assert (metrics["spark.billing.redelivered"], metrics["spark.billing.failed_attempts"]) == (2, 2)
    assert (metrics["spark.billing.failures"], metrics["spark.billing.running"]) == (0, 1)


@pytest.mark.thorough
def test_a_query_that_ended_with_an_error_is_started_again_by_policy(start: Start, broker: EmbeddedBroker) -> None:
    """The failure is visible in the metrics, and the restarted query repeats the batch."""
    attempts: list[SparkBatch] = []
    changes = threading.Semaphore(0)

    def work(messages: DataFrame, batch: SparkBatch) -> None:
        attempts.append(batch)
        if len(attempts) == 1:
            raise ValueError("the sink is down")

    send(broker, *orders(1))
    container = start(work, on_change=changes.release, max_attempts=1, max_restarts=1, restart_delay=0.0)
    assert changes.acquire(timeout=PATIENCE_S)  # it failed
    assert changes.acquire(timeout=PATIENCE_S)  # it runs again
    container.await_idle()

    assert [(batch.batch_id, batch.is_replay) for batch in attempts[:2]] == [(0, False), (0, True)]
    assert container.is_running
    assert container.exception is None
    metrics = broker.metrics.snapshot()
    assert (metrics["spark.billing.failures"], metrics["spark.billing.restarts"]) == (1, 1)


@pytest.mark.thorough
def test_a_query_that_lost_its_broker_is_started_again_by_default(start: Start, broker: EmbeddedBroker) -> None:
    """A server that restarts for longer than the retries of a request last ends no listener."""
    attempts: list[SparkBatch] = []

    def work(messages: DataFrame, batch: SparkBatch) -> None:
        attempts.append(batch)
        if len(attempts) < 4:
            raise RemoteConnectError("127.0.0.1:9876 refused the connection")

    send(broker, *orders(1))
    with capture_logs() as events:
        start(work, max_attempts=1, restart_delay="1ms")
        eventually(lambda: len(attempts) == 4, "the batch was handled after three restarts")

    assert [each["restarts_left"] for each in events if each["event"] == "spark.failed"] == [math.inf] * 3


@pytest.mark.thorough
def test_a_payload_may_be_a_function_of_the_body(start: Start, broker: EmbeddedBroker) -> None:
    """For CSV, and for Avro and Protobuf with Spark's functions. A body without a payload is a bad record."""
    handled: list[tuple[int, str]] = []

    def csv(body: Any) -> Any:
        from pyspark.sql import functions as f

        row = f.from_csv(body.cast("string"), "id bigint, region string")
        return f.when(row.id.isNotNull(), row)

    def work(messages: DataFrame, batch: SparkBatch) -> None:
        handled.extend((row.id, row.region) for row in messages.select("payload.*").collect())

    send(broker, b"1,north", b"x,south", b"3,west")
    start(work, payload=csv, bad_records="dlq").await_idle()

    assert sorted(handled) == [(1, "north"), (3, "west")]
    [dead] = messages_in(broker, "%DLQ%billing")
    assert dead.properties["dead_letter_message"] == "the body is not readable by the payload function: 'x,south'"


def test_whatever_the_function_raises_is_an_attempt_that_failed(start: Start, broker: EmbeddedBroker) -> None:
    """Py4J, whose thread calls the function, would report nothing but an `Exception` to Spark."""
    kinds, attempts = ["panic", "exit", "interrupt", "without anything"], list[int]()

    def work(messages: DataFrame, batch: SparkBatch) -> None:
        attempts.append(batch.attempt)
        if batch.attempt <= len(kinds):
            KINDS[kinds[batch.attempt - 1]]()

    send(broker, *orders(1))
    container = start(work, max_attempts=5)
    container.await_idle()

    assert attempts == [1, 2, 3, 4, 5]


def test_a_query_that_ends_with_a_panic_says_so(start: Start, broker: EmbeddedBroker) -> None:
    def work(messages: DataFrame, batch: SparkBatch) -> None:
        KINDS["panic"]()

    send(broker, *orders(1))
    container = start(work, max_attempts=1, on_failure="stop")

    with pytest.raises(SparkError, match="the function of the listener raised Panic: attempt to subtract"):
        container.await_idle()
