"""ORDERLY on a virtual clock: a queue waits for its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import BrokerError
from mqtemplate.listener import BatchFailure, ConsumeMode, ConsumeStatus, message_listener
from mqtemplate.message import MessageExt, MessageQueue

if TYPE_CHECKING:
    from tests.listener.conftest import World

SECOND = 1_000
ORDERLY = ConsumeMode.ORDERLY


def test_a_failed_message_is_tried_again_before_its_successors(world: World) -> None:
    """After a rest, with reconsume_times rising; the message does not leave its queue."""
    start_ms = world.broker.clock.now_ms()
    heard: list[tuple[str, int, int]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str, message: MessageExt) -> None:
        heard.append((body, message.reconsume_times, world.broker.clock.now_ms() - start_ms))
        if body == "b" and message.reconsume_times < 3:
            raise RuntimeError("not today")

    world.listen(bill)
    world.send("orders", "a", "b", "c")
    world.confirm()
    assert world.committed("billing") == 1

    world.advance(10 * SECOND)

    assert heard == [("a", 0, 0), ("b", 0, 0), ("b", 1, 1_000), ("b", 2, 2_000), ("b", 3, 3_000), ("c", 0, 3_000)]
    assert world.committed("billing") == 3


def test_the_rest_is_as_long_as_the_listener_says(world: World) -> None:
    start_ms = world.broker.clock.now_ms()
    tries: list[int] = []

    @message_listener(
        topic="orders", consumer_group="billing", consume_mode=ORDERLY, suspend_current_queue_time_millis=30_000
    )
    def bill(message: MessageExt) -> ConsumeStatus | None:
        tries.append(world.broker.clock.now_ms() - start_ms)
        return ConsumeStatus.RECONSUME_LATER if len(tries) == 1 else None

    world.listen(bill)
    world.send("orders", "x")
    world.advance(60 * SECOND)

    assert tries == [0, 30_000]


def test_other_queues_do_not_wait(world: World) -> None:
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str, queue: MessageQueue) -> None:
        if queue.queue_id == 0:
            raise RuntimeError("never")
        heard.append(body)

    world.listen(bill)
    world.send("orders", "a", "b", queue_id=0)
    world.send("orders", "c", "d", queue_id=1)
    world.advance(5 * SECOND)

    assert heard == ["c", "d"]


def test_after_its_last_try_a_message_is_a_dead_letter_and_the_queue_goes_on(world: World) -> None:
    heard: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, max_reconsume_times=2)
    def bill(body: str, message: MessageExt) -> None:
        heard.append((body, message.reconsume_times))
        if body == "a":
            raise RuntimeError("never")

    with capture_logs() as logs:
        world.listen(bill)
        world.send("orders", "a", "b")
        world.advance(10 * SECOND)

    assert heard == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert world.bodies("%DLQ%billing") == ["a"]
    steps = [event["next_step"] for event in logs if event["event"] == "listener.failed"]
    assert steps == ["retry_in_place", "retry_in_place", "dead_letter"]


def test_without_a_limit_an_orderly_queue_waits_for_ever(world: World) -> None:
    """Order was asked for above all: -1 means no dead letters here."""
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    world.listen(bill)
    world.send("orders", "a")
    world.advance(100 * SECOND)

    assert tries == list(range(101))
    assert world.committed("billing") in (None, 0)


def test_a_message_that_cannot_be_buried_stays_at_the_head(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, max_reconsume_times=0)
    def bill(body: str) -> None:
        heard.append(body)
        if heard == ["a"]:
            raise RuntimeError("not today")

    def full(message: MessageExt, delay_level: int = 0) -> None:
        raise BrokerError("the disk is full")

    container = world.listen(bill)
    monkeypatch.setattr(container._consumer, "send_back", full)
    world.send("orders", "a", "b")
    world.advance(2 * SECOND)

    assert heard == ["a", "a", "b"]


def test_of_an_orderly_batch_the_failed_ones_are_tried_again_in_their_order(world: World) -> None:
    """X8, in order: what failed goes before what follows."""
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, consume_message_batch_max_size=4)
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)
        if len(batches) == 1:
            raise BatchFailure([3, 1])

    world.listen(bill)
    world.send("orders", *"abcdef")
    world.confirm()
    assert world.committed("billing") == 1

    world.advance(2 * SECOND)

    assert batches == [["a", "b", "c", "d"], ["b", "d", "e", "f"]]
    assert world.committed("billing") == 6


def test_a_queue_changes_hands_between_two_messages_and_none_is_handled_twice(world: World) -> None:
    """A second member joins while the first is in the middle of a queue: the group's lock keeps them apart."""
    heard: dict[int, list[tuple[str, str]]] = {queue_id: [] for queue_id in range(4)}

    def listener(name: str) -> Callable[..., None]:
        @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, id=name)
        def bill(body: str, queue: MessageQueue) -> None:
            heard[queue.queue_id].append((name, body))
            if name == "first" and body == "1" and queue.queue_id == 3:
                second.start()

        return bill

    [first] = world.registry.register(listener("first"))
    [second] = world.registry.register(listener("second"))
    first.start()
    for queue_id in range(4):
        world.send("orders", *"0123", queue_id=queue_id)
    world.confirm()
    for queue_id in range(4):
        world.send("orders", *"4567", queue_id=queue_id)
    world.advance(5 * SECOND)

    assert {name for name, _ in heard[3]} == {"first", "second"}
    for queue_id in range(4):
        assert [body for _, body in heard[queue_id]] == list("01234567")


def test_a_queue_that_another_member_has_locked_is_left_alone(world: World) -> None:
    """A member that takes a queue over begins when the one before is through with it, and where that one ended."""
    heard: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str) -> None:
        heard.append(body)

    [container] = world.registry.register(bill)
    queue = MessageQueue("orders", world.broker.name, 0)
    before = world.broker.subscribe(container.endpoint.settings.consumer_spec(0))
    assert before.lock(queue)
    world.registry.start()
    world.send("orders", "a", "b")
    world.confirm()
    assert heard == []

    world.broker.commit_offset("billing", queue, 1)
    before.unlock(queue)
    before.close()
    world.advance(2 * SECOND)

    assert heard == ["b"]
