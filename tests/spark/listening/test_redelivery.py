"""Redelivery of rows: retries, dead letters, and repeats after a kill. Without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.spark.listening.redelivery import FailedRow, Redelivery, RedeliveryPlan
from mqtemplate.spark.listening.shared_broker import send_back_rows
from mqtemplate.testing import Harness, messages_in
from tests.spark.listening.listeners import resolved

QUERY = "a-query"
RETRY, DLQ = "%RETRY%billing", "%DLQ%billing"


def filled(broker: EmbeddedBroker, count: int) -> list[FailedRow]:
    for number in range(count):
        broker.sends.send(
            Message("orders", b"%d" % number, {"KEYS": f"k{number}"}), MessageQueue("orders", broker.name, 0)
        )
    return [FailedRow("orders", 0, number, "no such customer") for number in range(count)]


def redelivery(broker: EmbeddedBroker, tmp_path: Path, max_redeliveries: int = 16) -> Redelivery:
    settings = resolved(max_redeliveries=max_redeliveries)
    return Redelivery(broker, send_back_rows(broker), broker.metrics, "by_region", settings, tmp_path / "checkpoint")


def delivered(broker: EmbeddedBroker, topic: str, wait: str = "3h") -> list[MessageExt]:
    Harness(broker).advance(wait)
    return messages_in(broker, topic)


def test_only_the_failed_rows_are_sent_back(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """They are delayed as retries of a message listener are, and know their topic and their first message."""
    rows = filled(broker, 100)

    count = redelivery(broker, tmp_path).send(QUERY, 0, [rows[70], rows[3], rows[71]])

    assert count == 3
    assert messages_in(broker, RETRY) == []
    retries = delivered(broker, RETRY, "10s")
    assert [(retry.body, retry.keys, retry.reconsume_times) for retry in retries] == [
        (b"3", "k3", 1),
        (b"70", "k70", 1),
        (b"71", "k71", 1),
    ]
    [original] = [message for message in messages_in(broker, "orders") if message.queue_offset == 3]
    assert retries[0].properties["RETRY_TOPIC"] == "orders"
    assert retries[0].properties["ORIGIN_MESSAGE_ID"] == original.offset_msg_id
    assert retries[0].born_timestamp == original.born_timestamp


def test_a_row_may_have_a_delay_of_its_own(broker: EmbeddedBroker, tmp_path: Path) -> None:
    [row] = filled(broker, 1)

    redelivery(broker, tmp_path).send(QUERY, 0, [row._replace(delay_ms=90_000)])

    assert delivered(broker, RETRY, "89s") == []
    assert len(delivered(broker, RETRY, "1s")) == 1


def test_after_the_last_redelivery_a_row_is_a_dead_letter_with_its_cause(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    [row] = filled(broker, 1)
    sends = redelivery(broker, tmp_path, max_redeliveries=1)

    sends.send(QUERY, 0, [row])
    assert len(delivered(broker, RETRY)) == 1
    sends.send(QUERY, 1, [FailedRow(RETRY, 0, 0, "still no such customer")])

    [dead] = delivered(broker, DLQ)
    assert (dead.body, dead.properties["DLQ_ORIGIN_TOPIC"]) == (b"0", "orders")
    assert dead.properties["dead_letter_message"] == "still no such customer"
    assert dead.properties["dead_letter_listener"] == "by_region"
    metrics = broker.metrics.snapshot()
    assert (metrics["spark.billing.redelivered"], metrics["spark.billing.dead_letters"]) == (1, 1)


def test_a_repeated_batch_sends_the_same_rows_once(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """The first process is killed after the send. The second one fails with other rows too: these are added."""
    rows = filled(broker, 10)
    redelivery(broker, tmp_path).send(QUERY, 4, rows[2:4])

    again = redelivery(broker, tmp_path)
    assert again.resume(QUERY, 4) == [row._replace(broker_name=broker.name) for row in rows[2:4]]
    assert again.send(QUERY, 4, [rows[3], rows[7]]) == 1

    assert [message.body for message in delivered(broker, RETRY)] == [b"2", b"3", b"7"]


def test_a_plan_that_was_not_sent_is_sent_by_the_repeated_batch(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """The process was killed between the plan and the send."""
    rows = filled(broker, 3)
    RedeliveryPlan(tmp_path / "checkpoint", 0).write(rows)

    redelivery(broker, tmp_path).resume(QUERY, 0)

    assert [message.body for message in delivered(broker, RETRY)] == [b"0", b"1", b"2"]


def test_plans_of_committed_batches_are_deleted(broker: EmbeddedBroker, tmp_path: Path) -> None:
    rows = filled(broker, 2)
    sends = redelivery(broker, tmp_path)
    for batch_id, row in enumerate(rows):
        sends.send(QUERY, batch_id, [row])

    assert [path.name for path in (tmp_path / "checkpoint" / "mqtemplate-redeliveries").iterdir()] == ["1.json"]


def test_a_row_that_is_not_a_message_of_its_queue_is_refused(broker: EmbeddedBroker, tmp_path: Path) -> None:
    filled(broker, 1)
    with pytest.raises(SparkError, match="orders, queue 0, offset 7 cannot be sent back: .* unchanged"):
        redelivery(broker, tmp_path).send(QUERY, 0, [FailedRow("orders", 0, 7, "x")])


def test_a_damaged_plan_is_an_error_that_says_what_to_do(broker: EmbeddedBroker, tmp_path: Path) -> None:
    RedeliveryPlan(tmp_path / "checkpoint", 0).write([])
    (tmp_path / "checkpoint" / "mqtemplate-redeliveries" / "0.json").write_text("[[")

    with pytest.raises(SparkError, match="cannot be read .* delete it to let the listener handle the whole"):
        redelivery(broker, tmp_path).resume(QUERY, 0)
