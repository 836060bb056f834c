"""Apache RocketMQ opens a store that the embedded broker closed or left after SIGKILL. Its client and tools read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer, RocketMQ, broker_options
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import StoreLockedError
from tests.conformance.embedded_writer import Written, write
from tests.conformance.rocketmq_writer import TIMEOUT_MS
from tests.conformance.store_contents import (
    BATCHES,
    BIG,
    DELAYED,
    IPV6,
    LONG_TOPIC,
    NUMBERED,
    ORDERS,
    READERS,
    Sent,
    as_sent,
    comparable,
    now_ms,
    settings,
)

pytestmark = pytest.mark.conformance

_TOPICS = (ORDERS, BATCHES, BIG, IPV6, LONG_TOPIC)


class Opened(NamedTuple):
    """RocketMQ with a store of the embedded broker, which was "closed" or "killed"."""

    how: str
    java: JavaClient
    names: NameServer
    folder: Path
    written: Written


@pytest.fixture(scope="module", params=[pytest.param("closed", marks=pytest.mark.thorough), "killed"])
def opened(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    name_server: NameServer,
    java: JavaClient,
    port: int,
) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("store")
    written = write(folder, port, request.param)
    with RocketMQ(folder, name_server, broker_options(settings(port)) | {"listenPort": port}):
        java.connect()
        yield Opened(request.param, java, name_server, folder, written)


def test_every_message_is_read_as_it_was_sent(opened: Opened) -> None:
    """Compare tags, keys, properties and bodies, and the queue and offset in the send result.

    There are V2 topics, IPv6 hosts, batches, and records before and after the end of a file.
    """
    found = [message for topic in _TOPICS for message in opened.java.read(topic)]

    assert sorted(map(as_sent, found)) == sorted(map(comparable, opened.written.stored))


def test_messages_of_a_sequenced_send_are_ordinary_messages(opened: Opened) -> None:
    """Their number is a property, and RocketMQ ignores the table of numbers and the bit in the flags."""
    found = opened.java.read(NUMBERED)

    assert [(message.body, message.properties["__SEQUENCE"]) for message in found] == [
        (b"numbered %d" % number, f"a-query 7 0 {number}") for number in range(5)
    ]


def test_a_message_is_found_by_its_offset_message_id(opened: Opened) -> None:
    stored = [sent for sent in opened.written.stored if sent.topic in (ORDERS, BATCHES)]

    found = [opened.java.by_id(sent.topic, sent.offset_msg_id) for sent in stored]

    assert [message.body for message in found] == [sent.body for sent in stored]


def test_messages_are_found_by_their_keys(opened: Opened) -> None:
    """By the client and by the tools.

    After a crash RocketMQ deletes the newest index file, and rebuilds it from the newest commit log file only.
    """
    newest_file = len(list((opened.folder / "commitlog").iterdir())) - 1 if opened.how == "killed" else 0
    keys = {sent.keys or "": sent for sent in opened.written.stored if _file_of(sent) >= newest_file}

    found = {key: [message.body for message in opened.java.by_key(sent.topic, key)] for key, sent in keys.items()}
    key, sent = keys.popitem()
    printed = opened.java.mqadmin("queryMsgByKey", "-n", opened.names.address, "-t", sent.topic, "-k", key)

    assert len(found) >= 10
    assert found == {key: [sent.body] for key, sent in [*keys.items(), (key, sent)]}
    assert sent.msg_id in printed


def _file_of(sent: Sent) -> int:
    """Return the number of the commit log file of a message. An offset message ID ends with the physical offset."""
    return int(sent.offset_msg_id[-16:], 16) >> 20


def test_a_store_that_rocketmq_has_open_is_refused(opened: Opened, port: int) -> None:
    with pytest.raises(StoreLockedError, match="is in use by process"):
        EmbeddedBroker(opened.folder, settings(port)).start()


def test_the_tools_count_the_messages_of_a_topic(opened: Opened) -> None:
    status = opened.java.topic_status(ORDERS)
    printed = opened.java.mqadmin("topicStatus", "-n", opened.names.address, "-t", ORDERS)

    assert status == dict.fromkeys(range(4), (0, 10))
    assert [line.split()[1:4] for line in printed.splitlines() if line.startswith("broker-a")] == [
        [str(queue_id), "0", "10"] for queue_id in range(4)
    ]


def test_a_group_continues_at_its_offsets(opened: Opened) -> None:
    """Four of the ten messages in queue 0 were consumed. Queues without an offset are consumed from the start."""
    committed = opened.java.committed(READERS, ORDERS)

    handled = opened.java.consume(READERS, ORDERS, 36, TIMEOUT_MS, linger=True)

    assert committed[0] == opened.written.consumed
    assert Counter(message.queue_id for message in handled) == {0: 6, 1: 10, 2: 10, 3: 10}
    assert min(message.queue_offset for message in handled if message.queue_id == 0) == opened.written.consumed


@pytest.mark.timeout(180)
def test_pending_messages_are_delivered_once_and_never_early(opened: Opened) -> None:
    """Levels, and timers in near slots, in one slot, and beyond the roll window.

    Delivered and cancelled messages are not delivered again. Rescheduled messages are delivered at their new time.
    """
    expected = opened.written.delivered + opened.written.pending
    due_ms = {sent.body: sent.due_ms for sent in expected}
    # A last message, due after all others. A busy machine may deliver a few that were overdue at the start after it.
    opened.java.send({"topic": DELAYED, "body": b"last", "deliver_ms": max(*due_ms.values(), now_ms()) + 3_000})

    found = opened.java.read(DELAYED, len(expected) + 1, until=b"last", timeout_ms=60_000)

    found = [message for message in found if message.body != b"last"]
    assert Counter(message.body for message in found) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms[message.body]] == []
    assert {(message.tags, message.keys) for message in found} == {(sent.tags, sent.keys) for sent in expected}
