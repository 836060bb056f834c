"""One folder goes back and forth between the embedded broker and Apache RocketMQ, three times each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import Message
from tests.conformance.story import LATER, ORDERS, Sent, read_all, send, settings
from tests.conformance.theirs import send_later

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]

_ROUNDS = 3
_LEVEL_MS = (0, 1_000, 2_000, 12_000)


def test_everything_is_there_exactly_once_in_the_end(
    tmp_path: Path, name_server: NameServer, java: JavaClient, port: int
) -> None:
    """Each owner stores messages, finds others' messages due, and leaves messages that wait: some for the next owner,
    some for the one after it."""
    waited: list[Sent] = []
    stored: list[bytes] = []
    for number in range(_ROUNDS):
        with EmbeddedBroker(tmp_path, settings(port)) as ours:
            stored += [send(ours, Message(ORDERS, b"ours %d %d" % (number, at))).body for at in range(20)]
            waited += _leave_waiting(ours, number)
            _let_pass(ours, 2_000)
        with RocketMQ(tmp_path, name_server, broker_options(settings(port)) | {"listenPort": port}) as theirs:
            java.connect()
            orders = [{"topic": ORDERS, "body": b"theirs %d %d" % (number, at)} for at in range(20)]
            java.send(*orders)
            stored += [order["body"] for order in orders]
            waited += send_later(java, _options(f"theirs {number}"))
            assert len(java.read(ORDERS)) == len(stored)
            theirs.stop()

    with EmbeddedBroker(tmp_path, settings(port)) as ours:
        _let_pass(ours, max(sent.due_ms for sent in waited) - ours.clock.now_ms() + 2_000)
        orders_found = [message.body for message in read_all(ours, ORDERS)]
        found = read_all(ours, LATER)

    due_ms = {sent.body: sent.due_ms for sent in waited}
    assert Counter(orders_found) == Counter(stored)
    assert Counter(message.body for message in found if message.body in due_ms) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms.get(message.body, 0)] == []


def _options(whose: str) -> list[tuple[str, dict[str, int]]]:
    levels = [(f"{whose}, level {level}", {"level": level}) for level in (1, 3)]
    delays = [(f"{whose}, timer {delay_ms}", {"delay_ms": delay_ms}) for delay_ms in (300, 1_999, 5_432, 9_000, 21_000)]
    return levels + delays


def _leave_waiting(broker: EmbeddedBroker, number: int) -> list[Sent]:
    sent = []
    for text, option in _options(f"ours {number}"):
        asked = {"DELAY": str(option["level"])} if "level" in option else {"TIMER_DELAY_MS": str(option["delay_ms"])}
        delay_ms = option.get("delay_ms") or _LEVEL_MS[option["level"]]
        sent.append(send(broker, Message(LATER, text.encode(), asked), delay_ms=delay_ms))
    return sent


def _let_pass(broker: EmbeddedBroker, time_ms: int) -> None:
    """Let the broker work until a message that is due after *time_ms* has come."""
    topic = "passing"
    queue = broker.queues(topic)[0]
    at = broker.max_offset(queue)
    broker.send(Message(topic, b"", {"TIMER_DELAY_MS": str(max(time_ms, 1))}), queue)
    assert broker.pull(queue, at, wait_ms=time_ms + 60_000).messages
