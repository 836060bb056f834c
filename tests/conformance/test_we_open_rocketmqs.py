"""The embedded broker opens a store that Apache RocketMQ wrote and closed, or left after SIGKILL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.rocketmq import NameServer
from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.pending import PendingQuery
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.tables import load_json
from tests.conformance.rocketmq_writer import Written, write
from tests.conformance.store_contents import (
    BATCHES,
    BIG,
    DELAYED,
    FAR_DELAYED,
    LONG_TOPIC,
    NO_SIZES,
    ORDERS,
    READERS,
    Sent,
    as_sent,
    comparable,
    read_all,
    settings,
)

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TOPICS = (ORDERS, BATCHES, BIG, LONG_TOPIC)


class Opened(NamedTuple):
    """The embedded broker with a store of RocketMQ.

    Attributes:
        groups: Contents of ``subscriptionGroup.json`` before the store was opened.
    """

    broker: EmbeddedBroker
    folder: Path
    written: Written
    groups: bytes


@pytest.fixture(scope="module", params=[pytest.param("stopped", marks=pytest.mark.thorough), "killed"])
def opened(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    name_server: NameServer,
    java: JavaClient,
    port: int,
) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("store")
    written = write(folder, name_server, java, port, request.param)
    groups = (folder / "config/subscriptionGroup.json").read_bytes()
    with EmbeddedBroker(folder, settings(port, **NO_SIZES)) as broker:
        yield Opened(broker, folder, written, groups)


def test_pending_messages_are_listed(opened: Opened) -> None:
    """The due times of RocketMQ's files have a resolution of a second. A recalled message is not pending."""
    due_ms = {sent.keys: sent.due_ms for sent in opened.written.far}

    page = opened.broker.delayed.pending(PendingQuery(topic=FAR_DELAYED))

    listed = {message.keys: message.deliver_ms for message in page.messages}
    assert set(listed) == set(due_ms)
    assert len(page.messages) == len(due_ms)
    assert [keys for keys, due in due_ms.items() if not due <= listed[keys] <= due + 2_000] == []


def test_every_message_is_read_as_it_was_sent(opened: Opened) -> None:
    """Compare tags, keys, properties and bodies, compressed ones too, and the queue and offset in the send result."""
    found = [message for topic in _TOPICS for message in read_all(opened.broker, topic)]

    assert sorted(map(as_sent, found)) == sorted(map(comparable, opened.written.stored))


def test_a_message_is_found_by_its_offset_message_id(opened: Opened) -> None:
    stored = [sent for sent in opened.written.stored if sent.topic in (ORDERS, BATCHES)]

    found = [opened.broker.reader.message_by_id(sent.offset_msg_id) for sent in stored]

    assert [message and message.body for message in found] == [sent.body for sent in stored]


def test_a_message_is_found_by_its_key(opened: Opened) -> None:
    """RocketMQ wrote the index files."""
    found = {
        sent.keys: opened.broker.reader.messages_by_key(BATCHES, sent.keys or "") for sent in _batch(opened.written)
    }

    assert {keys: [message.body for message in messages] for keys, messages in found.items()} == {
        sent.keys: [sent.body] for sent in _batch(opened.written)
    }


def _batch(written: Written) -> list[Sent]:
    return [sent for sent in written.stored if sent.topic == BATCHES]


def test_a_group_continues_at_its_offsets(opened: Opened) -> None:
    """All orders were consumed except the one that was sent back: it is delivered to the retry topic when it is due."""
    spec = ConsumerSpec(
        group=READERS,
        subscriptions={ORDERS: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    member = opened.broker.groups.subscribe(spec)

    handled = member.poll(32, 30_000)

    member.close()
    ends = [
        opened.broker.groups.committed_offset(READERS, MessageQueue(ORDERS, "broker-a", queue_id))
        for queue_id in range(4)
    ]
    assert ends == [5, 5, 5, 5]
    assert [(message.body, message.topic, message.reconsume_times) for message in handled] == [
        (opened.written.retried, ORDERS, 1)
    ]


def test_pending_messages_are_delivered_once_and_never_early(opened: Opened) -> None:
    """Levels, and timers within and beyond the roll window. Delivered and recalled messages are not delivered again."""
    expected = opened.written.delivered + opened.written.pending
    due_ms = {sent.body: sent.due_ms for sent in expected}

    found = _read_to_the_end(opened.broker)

    assert Counter(message.body for message in found) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms[message.body]] == []
    assert {(message.tags, message.keys) for message in found} == {(sent.tags, sent.keys) for sent in expected}


def _read_to_the_end(broker: EmbeddedBroker) -> list[MessageExt]:
    """Return all messages of `DELAYED` when none is pending any more."""
    spec = ConsumerSpec(
        group="to-the-end",
        subscriptions={DELAYED: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    member = broker.groups.subscribe(spec)
    while broker.delayed.count_pending(PendingQuery(topic=DELAYED)).total:
        member.poll(32, 1_000)
    member.close()
    return read_all(broker, DELAYED)


def test_tables_preserve_values_that_only_rocketmq_knows(opened: Opened) -> None:
    """The embedded broker does not write groups. In the topic table it preserves versions and unknown values."""
    opened.broker.create_topic("created-by-embedded", 3)

    topics = json.loads((opened.folder / "config/topics.json").read_text())
    before = load_json((opened.folder / "config/topics.json.bak").read_text())

    assert (opened.folder / "config/subscriptionGroup.json").read_bytes() == opened.groups
    assert READERS in load_json(opened.groups.decode())["subscriptionGroupTable"]
    assert topics["dataVersion"]["counter"] > before["dataVersion"]["counter"]
    assert topics["topicConfigTable"].items() >= before["topicConfigTable"].items()
