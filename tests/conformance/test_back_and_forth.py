"""The embedded broker and Apache RocketMQ open the same store in turns, three times each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import Message
from mqtemplate.pending import PendingQuery
from tests.conformance import rocketmq_writer
from tests.conformance.store_contents import DELAYED, ORDERS, Sent, read_all, send, send_delayed, settings
from tests.waiting import eventually

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]

_ROUNDS = 3


def test_in_the_end_every_message_is_stored_exactly_once(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    """Each owner stores messages, delivers delayed messages of the other, and leaves pending messages.

    Some are due while the next owner has the store, some while the one after it has it.
    """
    delayed: list[Sent] = []
    stored: list[bytes] = []
    for number in range(_ROUNDS):
        with EmbeddedBroker(tmp_path, settings(port)) as embedded:
            stored += [send(embedded, Message(ORDERS, b"embedded %d %d" % (number, at))).body for at in range(20)]
            delayed += [send_delayed(embedded, text, **option) for text, option in _options(f"embedded {number}")]
            _run_for(embedded, 2_000)
        with RocketMQ(tmp_path, name_server, broker_options(settings(port)) | {"listenPort": port}) as rocketmq:
            java.connect()
            orders = [{"topic": ORDERS, "body": b"rocketmq %d %d" % (number, at)} for at in range(20)]
            java.send(*orders)
            stored += [order["body"] for order in orders]
            delayed += rocketmq_writer.send_delayed(java, _options(f"rocketmq {number}"))
            assert len(java.read(ORDERS)) == len(stored)
            rocketmq.stop()

    with EmbeddedBroker(tmp_path, settings(port)) as embedded:
        # The delays of RocketMQ's messages count from their arrival at the broker, after the time that `Sent` has.
        eventually(
            lambda: embedded.delayed.count_pending(PendingQuery()).total == 0, "all delayed messages are delivered"
        )
        orders_found = [message.body for message in read_all(embedded, ORDERS)]
        found = read_all(embedded, DELAYED)

    due_ms = {sent.body: sent.due_ms for sent in delayed}
    assert Counter(orders_found) == Counter(stored)
    assert Counter(message.body for message in found if message.body in due_ms) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms.get(message.body, 0)] == []


def _options(owner: str) -> list[tuple[str, dict[str, int]]]:
    """Return texts and delays: levels, and timers within the roll window, beyond it and beyond two windows."""
    levels = [(f"{owner}, level {level}", {"level": level}) for level in (1, 3)]
    delays = [(f"{owner}, timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (300, 1_999, 3_432, 6_000, 9_000)]
    return levels + delays


def _run_for(broker: EmbeddedBroker, time_ms: int) -> None:
    """Let the broker run until it has delivered a message with this delay."""
    topic = "passing"
    queue = broker.queues(topic)[0]
    at = broker.reader.max_offset(queue)
    broker.sends.send(Message(topic, b"", {"TIMER_DELAY_MS": str(max(time_ms, 1))}), queue)
    assert broker.reader.pull(queue, at, wait_ms=time_ms + 60_000).messages
