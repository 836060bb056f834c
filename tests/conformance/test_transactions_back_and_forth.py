"""Apache RocketMQ and the embedded broker open a store in turns. Each ends the open transactions of the other once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.results import TransactionState
from mqtemplate.topics import HALF_TOPIC, OP_TOPIC
from tests.conformance.store_contents import read_all, settings
from tests.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.conformance, pytest.mark.thorough, pytest.mark.timeout(300)]

_TOPIC = "transactions"
_ROCKETMQ_OPTIONS = {"transactionTimeOut": 1_000, "transactionCheckInterval": 1_000}
_EMBEDDED_SETTINGS = {"transaction_timeout_ms": 1_000, "transaction_check_interval_ms": 1_000}


def test_each_owner_ends_the_open_transactions_of_the_other(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    options = broker_options(settings(port)) | {"listenPort": port} | _ROCKETMQ_OPTIONS

    with RocketMQ(tmp_path, name_server, options) as rocketmq:
        java.connect()
        java.transaction({"topic": _TOPIC, "body": b"rocketmq, committed"}, "commit")
        java.transaction({"topic": _TOPIC, "body": b"rocketmq, rolled back"}, "rollback")
        java.transaction({"topic": _TOPIC, "body": b"rocketmq, open"}, "unknown", ["unknown"])
        rocketmq.stop()

    with EmbeddedBroker(tmp_path, settings(port, **_EMBEDDED_SETTINGS)) as embedded:
        group = _group(embedded)
        checked = _commit_one(embedded, group)
        group = _next_group(group)
        committed = embedded.sends.send_half(Message(_TOPIC, b"embedded, committed"), group)
        embedded.transactions.end_transaction(committed, TransactionState.COMMIT)
        rolled_back = embedded.sends.send_half(Message(_TOPIC, b"embedded, rolled back"), group)
        embedded.transactions.end_transaction(rolled_back, TransactionState.ROLLBACK)
        embedded.sends.send_half(Message(_TOPIC, b"embedded, open"), group)

    with RocketMQ(tmp_path, name_server, options) as rocketmq:
        java.connect()
        # A rolled back transaction with the same body defines the client's response to the check.
        java.transaction({"topic": _TOPIC, "body": b"embedded, open"}, "rollback", ["commit"])
        found = java.read(_TOPIC, 4, PATIENCE_S * 1_000)
        eventually(lambda: _all_ended(java), "RocketMQ has stored the end of each transaction")
        rocketmq.stop()

    with EmbeddedBroker(tmp_path, settings(port, **_EMBEDDED_SETTINGS)) as embedded:
        stored = Counter(message.body for message in read_all(embedded, _TOPIC))
        open_count = embedded.engine.transactions.open_count

    expected = {b"rocketmq, committed", b"rocketmq, open", b"embedded, committed", b"embedded, open"}
    assert [message.body for message in checked] == [b"rocketmq, open"]
    assert {message.body for message in found} == expected
    assert stored == Counter(expected)
    assert open_count == 0


def _all_ended(java: JavaClient) -> bool:
    """Return True if RocketMQ has stored the end of each transaction: in batches, some time after the message.

    An op message names half messages by their queue offsets. Only the newest copy of a checked message counts.
    """
    ended = {int(offset) for op in java.read(OP_TOPIC) for offset in op.body.decode().split(",") if offset}
    return set({half.msg_id: half.queue_offset for half in java.read(HALF_TOPIC)}.values()) <= ended


def _group(broker: EmbeddedBroker) -> str:
    """Return the producer group of the Java client, from one of its half messages."""
    half = broker.reader.pull(MessageQueue(HALF_TOPIC, broker.name, 0), 0, 1).messages[0]
    return half.properties["PGROUP"]


def _next_group(group: str) -> str:
    """Return the group that the Java client has after its next `connect`: it ends with a counter."""
    stem, _, number = group.rpartition("-")
    return f"{stem}-{int(number) + 1}"


def _commit_one(broker: EmbeddedBroker, group: str) -> list[MessageExt]:
    """Respond to the first check with COMMIT, wait for the delivery, and return the checked messages."""
    checked: list[MessageExt] = []
    delivered = threading.Event()

    def check(message: MessageExt) -> TransactionState:
        checked.append(message)
        return TransactionState.COMMIT

    broker.store.watch(_TOPIC, delivered.set)
    registration = broker.transactions.check_transactions(group, check)
    assert delivered.wait(PATIENCE_S)
    registration.close()
    return checked
