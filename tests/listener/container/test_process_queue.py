"""Process queues: the offset to commit while messages are finished in any order, and flow control."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.listener.container.process_queue import ProcessQueue, ProcessQueues
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.selectors.tags import TagSelector
from tests.golden import check_script

if TYPE_CHECKING:
    from tests.listener.conftest import MakeMessage

QUEUE = MessageQueue("orders", "broker-a", 0)


class Commands:
    """``queue`` creates a process queue; the others print its offset to commit, and if it is full or has resumed."""

    def __init__(self, make_message: MakeMessage) -> None:
        self._make_message = make_message

    def queue(self) -> list[str]:
        self._events: list[str] = []
        self._process = ProcessQueue(QUEUE, lambda: self._events.append("resumed"))
        return self._state()

    def add(self, first: str, count: str = "1", size: str = "100") -> list[str]:
        """Add messages; print those that are unfinished already."""
        for offset in range(int(first), int(first) + int(count)):
            if not self._process.add(self._make_message(offset=offset, store_size=int(size))):
                self._events.append(f"has {offset}")
        return self._state()

    def finish(self, first: str, count: str = "1") -> list[str]:
        for offset in range(int(first), int(first) + int(count)):
            self._process.finish(offset)
        return self._state()

    def _state(self) -> list[str]:
        words = [f"commit {self._process.commit_offset}", *["full"] * self._process.is_full, *self._events]
        self._events.clear()
        return [" ".join(words)]


def test_a_process_queue_does_as_the_script_says(make_message: MakeMessage) -> None:
    check_script(Path(__file__).parent / "process_queue.script", Commands(make_message))


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
