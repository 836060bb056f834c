"""How far a queue may be committed while its messages are finished in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.listener.consuming.process_queue import ProcessQueue, ProcessQueues
from mqtemplate.message import HostAddress, Message, MessageExt, MessageQueue, Property
from mqtemplate.selectors.tags import TagSelector

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage

QUEUE = MessageQueue("orders", "broker-a", 0)


@pytest.fixture
def rings() -> list[str]:
    return []


@pytest.fixture
def process(rings: list[str]) -> ProcessQueue:
    return ProcessQueue(QUEUE, lambda: rings.append("room"))


def test_an_unread_queue_may_not_be_committed(process: ProcessQueue) -> None:
    """Else a group that begins at offset 100 would be set back to 0."""
    assert process.floor == -1


def test_the_floor_is_the_first_unfinished_message(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in range(5, 9):
        process.add(make_message(offset=offset))

    process.finish(6)
    process.finish(7)
    assert process.floor == 5

    process.finish(5)
    assert process.floor == 8

    process.finish(8)
    assert process.floor == 9


@given(st.permutations(range(8)))
def test_whatever_the_order_nothing_unfinished_lies_below_the_floor(order: list[int]) -> None:
    process = ProcessQueue(QUEUE, lambda: None)
    host = HostAddress("127.0.0.1", 1)
    for offset in range(8):
        process.add(
            MessageExt(
                "orders",
                b"",
                broker_name="broker-a",
                queue_id=0,
                queue_offset=offset,
                physical_offset=0,
                store_size=1,
                sys_flag=0,
                body_crc=0,
                born_timestamp=0,
                born_host=host,
                store_timestamp=0,
                store_host=host,
                reconsume_times=0,
                prepared_transaction_offset=0,
            )
        )
    unfinished = set(range(8))

    for offset in order:
        process.finish(offset)
        unfinished.remove(offset)
        assert process.floor == min(unfinished, default=8)


def test_a_message_that_is_under_way_is_not_taken_twice(process: ProcessQueue, make_message: MakeMessage) -> None:
    """As after a queue went away and came back at once."""
    assert process.add(make_message(offset=3))
    assert not process.add(make_message(offset=3))


def test_a_queue_that_is_read_again_moves_its_floor_back(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in (7, 8):
        process.add(make_message(offset=offset))
        process.finish(offset)

    process.add(make_message(offset=4))

    assert process.floor == 4


def test_a_thousand_unfinished_messages_are_enough(
    process: ProcessQueue, rings: list[str], make_message: MakeMessage
) -> None:
    """Flow control: fetching stops, and goes on when half of them are done."""
    for offset in range(1_000):
        process.add(make_message(offset=offset))
    assert process.is_full

    for offset in range(499):
        process.finish(offset)
    assert process.is_full
    assert rings == []

    process.finish(499)
    assert not process.is_full
    assert rings == ["room"]


def test_so_are_64_mebibytes(process: ProcessQueue, make_message: MakeMessage) -> None:
    for offset in range(16):
        process.add(make_message(offset=offset, store_size=4 << 20))

    assert process.is_full


def test_a_message_that_comes_again_belongs_to_the_retry_topics_queue(make_message: MakeMessage) -> None:
    """It bears its first topic, and its offset counts in the group's retry topic."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        spec = ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()})
        queues = ProcessQueues(broker.subscribe(spec))

        first = queues.of(make_message(offset=0))
        again = queues.of(make_message(offset=0, properties={Property.RETRY_TOPIC: "orders"}))

    assert first.queue == QUEUE
    assert again.queue == MessageQueue("%RETRY%billing", "broker-a", 0)


def test_messages_that_the_selector_left_out_are_committed_too() -> None:
    """Else a group that wants few of many messages would read all the others again at each start."""
    with EmbeddedBroker(None, clock=VirtualClock()) as broker:
        spec = ConsumerSpec(
            group="billing",
            subscriptions={"orders": TagSelector("paid")},
            consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        )
        consumer = broker.subscribe(spec)
        queues = ProcessQueues(consumer)
        for _ in range(3):
            broker.send(Message("orders", b"x", {Property.TAGS: "new"}), QUEUE)

        assert consumer.poll(32) == []
        queues.refresh()
        queues.commit_positions()

        assert broker.committed_offset("billing", QUEUE) == 3
