"""Process queues: the offset to commit while messages are finished in any order, and flow control."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.listener.container.process_queue import ProcessQueue, ProcessQueues
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.selectors.tags import TagSelector

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage

QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def resumed() -> list[str]:
    return []


@pytest.fixture
def process(resumed: list[str]) -> ProcessQueue:
    return ProcessQueue(QUEUE, lambda: resumed.append("resumed"))


def test_an_unread_queue_may_not_be_committed(process: ProcessQueue) -> None:
    """Otherwise a group that starts at offset 100 would be set back to 0."""
    assert process.commit_offset == -1


def test_the_first_unfinished_message_is_the_offset_to_commit(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in range(5, 9):
        process.add(make_message(offset=offset))

    process.finish(6)
    process.finish(7)
    assert process.commit_offset == 5

    process.finish(5)
    assert process.commit_offset == 8

    process.finish(8)
    assert process.commit_offset == 9


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture has no state
@given(order=st.permutations(range(8)))
def test_no_unfinished_message_is_before_the_offset_to_commit(make_message: MakeMessage, order: list[int]) -> None:
    process = ProcessQueue(QUEUE, lambda: None)
    for offset in range(8):
        process.add(make_message(offset=offset))
    unfinished = set(range(8))

    for offset in order:
        process.finish(offset)
        unfinished.remove(offset)
        assert process.commit_offset == min(unfinished, default=8)


def test_an_unfinished_message_is_not_added_twice(process: ProcessQueue, make_message: MakeMessage) -> None:
    """It is fetched twice if a queue was reassigned and assigned back at once."""
    assert process.add(make_message(offset=3))
    assert not process.add(make_message(offset=3))


def test_a_queue_that_is_read_again_commits_a_lower_offset(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in (7, 8):
        process.add(make_message(offset=offset))
        process.finish(offset)

    process.add(make_message(offset=4))

    assert process.commit_offset == 4


def test_a_queue_is_full_with_a_thousand_unfinished_messages(
    process: ProcessQueue, resumed: list[str], make_message: MakeMessage
) -> None:
    """Flow control: fetching pauses, and resumes when half of them are finished."""
    for offset in range(1_000):
        process.add(make_message(offset=offset))
    assert process.is_full

    for offset in range(499):
        process.finish(offset)
    assert process.is_full
    assert resumed == []

    process.finish(499)
    assert not process.is_full
    assert resumed == ["resumed"]


def test_a_queue_is_full_with_64_mebibytes(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in range(16):
        process.add(make_message(offset=offset, store_size=4 << 20))

    assert process.is_full


def test_a_redelivered_message_belongs_to_a_queue_of_the_retry_topic(make_message: MakeMessage) -> None:
    """It has its first topic, but its offset is one of the group's retry topic."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        spec = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()})
        queues = ProcessQueues(broker.groups.subscribe(spec))

        first = queues.of(make_message(offset=0))
        again = queues.of(make_message(offset=0, properties={Property.RETRY_TOPIC: "orders"}))

    assert first.queue == QUEUE
    assert again.queue == MessageQueue("%RETRY%billing", "broker-a", 0)


def test_messages_that_the_selector_left_out_are_committed_too() -> None:
    """Otherwise a group that selects few of many messages would read all the others again at each start."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        spec = ConsumerSpec(
            group="billing",
            subscriptions={"orders": TagSelector("paid")},
            consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        )
        consumer = broker.groups.subscribe(spec)
        queues = ProcessQueues(consumer)
        for _ in range(3):
            broker.sends.send(Message("orders", b"x", {Property.TAGS: "new"}), QUEUE)

        assert consumer.poll(32) == []
        queues.refresh()
        queues.commit_positions()

        assert broker.groups.committed_offset("billing", QUEUE) == 3
