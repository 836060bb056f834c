"""The embedded broker opens a folder that Apache RocketMQ wrote: a clean stop, or SIGKILL."""

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
from mqtemplate.store.files.json_files import load_json
from tests.conformance.story import (
    BATCHES,
    BIG,
    LATER,
    LONG_TOPIC,
    MUCH_LATER,
    ORDERS,
    READERS,
    Sent,
    read_all,
    settings,
)
from tests.conformance.theirs import Written, write

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(180)]

_TOPICS = (ORDERS, BATCHES, BIG, LONG_TOPIC)


class Opened(NamedTuple):
    """The embedded broker over a folder of RocketMQ's.

    Attributes:
        groups: What ``subscriptionGroup.json`` held before.
    """

    broker: EmbeddedBroker
    folder: Path
    written: Written
    groups: bytes


@pytest.fixture(scope="module", params=["stopped", "killed"])
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
    with EmbeddedBroker(folder, settings(port)) as broker:
        yield Opened(broker, folder, written, groups)


def test_what_waits_is_listed(opened: Opened) -> None:
    """With its time, which RocketMQ's files tell to the second. What was recalled does not wait."""
    due_ms = {sent.keys: sent.due_ms for sent in opened.written.far}

    page = opened.broker.pending(PendingQuery(topic=MUCH_LATER))

    listed = {message.keys: message.deliver_ms for message in page.messages}
    assert set(listed) == set(due_ms)
    assert len(page.messages) == len(due_ms)
    assert [keys for keys, due in due_ms.items() if not due <= listed[keys] <= due + 2_000] == []


def test_every_message_is_read_as_it_was_sent(opened: Opened) -> None:
    """Tags, keys, properties and bodies, compressed ones too, in the queue and at the offset the sender was told."""
    found = [message for topic in _TOPICS for message in read_all(opened.broker, topic)]

    assert sorted(map(_as_sent, found)) == sorted(map(_comparable, opened.written.stored))


def _comparable(sent: Sent) -> tuple[object, ...]:
    return (
        sent.topic,
        sent.queue_id,
        sent.queue_offset,
        sent.body,
        sent.tags or "",
        sent.keys,
        sent.msg_id,
        sent.user or "",
    )


def _as_sent(message: MessageExt) -> tuple[object, ...]:
    place = message.topic, message.queue_id, message.queue_offset
    user = message.properties.get("user", "")
    return *place, message.body, message.tags or "", message.keys, message.msg_id, user


def test_a_message_is_found_by_the_id_the_broker_gave(opened: Opened) -> None:
    wanted = [sent for sent in opened.written.stored if sent.topic in (ORDERS, BATCHES)]

    found = [opened.broker.message_by_id(sent.offset_msg_id) for sent in wanted]

    assert [message and message.body for message in found] == [sent.body for sent in wanted]


def test_a_message_is_found_by_its_key(opened: Opened) -> None:
    """Through the index files that RocketMQ wrote."""
    found = {sent.keys: opened.broker.messages_by_key(BATCHES, sent.keys or "") for sent in _batch(opened.written)}

    assert {keys: [message.body for message in messages] for keys, messages in found.items()} == {
        sent.keys: [sent.body] for sent in _batch(opened.written)
    }


def _batch(written: Written) -> list[Sent]:
    return [sent for sent in written.stored if sent.topic == BATCHES]


def test_a_group_goes_on_where_it_had_come_to(opened: Opened) -> None:
    """All orders are handled but the one that was given back, which comes through the retry topic when it is due."""
    spec = ConsumerSpec(
        group=READERS,
        subscriptions={ORDERS: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    member = opened.broker.subscribe(spec)

    handled = member.poll(32, 30_000)

    member.close()
    ends = [
        opened.broker.committed_offset(READERS, MessageQueue(ORDERS, "broker-a", queue_id)) for queue_id in range(4)
    ]
    assert ends == [5, 5, 5, 5]
    assert [(message.body, message.topic, message.reconsume_times) for message in handled] == [
        (opened.written.retried, ORDERS, 1)
    ]


def test_what_waited_is_delivered_once_and_never_early(opened: Opened) -> None:
    """Levels, timers near and beyond the roll window. What RocketMQ delivered or recalled does not come."""
    expected = opened.written.delivered + opened.written.waiting
    due_ms = {sent.body: sent.due_ms for sent in expected}

    found = _read_to_the_end(opened.broker)

    assert Counter(message.body for message in found) == Counter(due_ms.keys())
    assert [message.body for message in found if message.store_timestamp < due_ms[message.body]] == []
    assert {(message.tags, message.keys) for message in found} == {(sent.tags, sent.keys) for sent in expected}


def _read_to_the_end(broker: EmbeddedBroker) -> list[MessageExt]:
    """All of `LATER`, once nothing waits for it any more."""
    spec = ConsumerSpec(
        group="to-the-end",
        subscriptions={LATER: TagSelector()},
        consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
    )
    member = broker.subscribe(spec)
    while broker.count_pending(PendingQuery(topic=LATER)).total:
        member.poll(32, 1_000)
    member.close()
    return read_all(broker, LATER)


def test_tables_keep_what_only_rocketmq_knows(opened: Opened) -> None:
    """Groups are not ours to write; topics keep their version and what stands beside them."""
    opened.broker.create_topic("made-by-us", 3)

    topics = json.loads((opened.folder / "config/topics.json").read_text())
    before = load_json((opened.folder / "config/topics.json.bak").read_text())

    assert (opened.folder / "config/subscriptionGroup.json").read_bytes() == opened.groups
    assert READERS in load_json(opened.groups.decode())["subscriptionGroupTable"]
    assert topics["dataVersion"]["counter"] > before["dataVersion"]["counter"]
    assert topics["topicConfigTable"].items() >= before["topicConfigTable"].items()
