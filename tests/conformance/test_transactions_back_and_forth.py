"""A folder with open transactions goes to Apache RocketMQ and back: each owner ends those of the other, once."""

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
from mqtemplate.topics import HALF_TOPIC
from tests.conformance.story import read_all, settings

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]

_TOPIC = "transactions"
_SHORT = {"transactionTimeOut": 1_000, "transactionCheckInterval": 1_000, "transactionOpBatchInterval": 100}
_OURS_SHORT = {"transaction_timeout_ms": 1_000, "transaction_check_interval_ms": 1_000}
_PATIENCE_S = 60


def test_each_owner_ends_what_the_other_left_open(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    theirs_options = broker_options(settings(port)) | {"listenPort": port} | _SHORT

    with RocketMQ(tmp_path, name_server, theirs_options) as theirs:
        java.connect()
        java.transaction({"topic": _TOPIC, "body": b"theirs, ended"}, "commit")
        java.transaction({"topic": _TOPIC, "body": b"theirs, dropped"}, "rollback")
        java.transaction({"topic": _TOPIC, "body": b"theirs, left open"}, "unknown", ["unknown"])
        theirs.stop()

    with EmbeddedBroker(tmp_path, settings(port, **_OURS_SHORT)) as ours:
        group = _group(ours)
        asked = _answer_one(ours, group)
        group = _next(group)
        ours.end_transaction(ours.send_half(Message(_TOPIC, b"ours, ended"), group), TransactionState.COMMIT)
        ours.end_transaction(ours.send_half(Message(_TOPIC, b"ours, dropped"), group), TransactionState.ROLLBACK)
        ours.send_half(Message(_TOPIC, b"ours, left open"), group)

    with RocketMQ(tmp_path, name_server, theirs_options) as theirs:
        java.connect()
        java.transaction({"topic": _TOPIC, "body": b"ours, left open"}, "rollback", ["commit"])  # what it answers
        found = java.read(_TOPIC, 4, _PATIENCE_S * 1_000)
        theirs.stop()

    with EmbeddedBroker(tmp_path, settings(port, **_OURS_SHORT)) as ours:
        in_the_end = Counter(message.body for message in read_all(ours, _TOPIC))
        open_count = ours.transactions.open_count

    everything = {b"theirs, ended", b"theirs, left open", b"ours, ended", b"ours, left open"}
    assert [message.body for message in asked] == [b"theirs, left open"]
    assert {message.body for message in found} == everything
    assert in_the_end == Counter(everything)
    assert open_count == 0


def _group(broker: EmbeddedBroker) -> str:
    """The producer group of the Java client, as its half messages name it."""
    half = broker.pull(MessageQueue(HALF_TOPIC, broker.name, 0), 0, 1).messages[0]
    return half.properties["PGROUP"]


def _next(group: str) -> str:
    """The group of the Java client when it connects again: it counts."""
    stem, _, number = group.rpartition("-")
    return f"{stem}-{int(number) + 1}"


def _answer_one(broker: EmbeddedBroker, group: str) -> list[MessageExt]:
    """Answer the first question with COMMIT, and wait until that was done; gives what was asked."""
    asked: list[MessageExt] = []
    ended = threading.Event()

    def check(message: MessageExt) -> TransactionState:
        asked.append(message)
        return TransactionState.COMMIT

    broker.store.watch(_TOPIC, ended.set)
    registration = broker.check_transactions(group, check)
    assert ended.wait(_PATIENCE_S)
    registration.close()
    return asked
