"""ORDERLY on a virtual clock: a failed message suspends its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import BrokerError
from mqtemplate.listener import BatchFailure, ConsumeMode, ConsumeStatus, message_listener
from mqtemplate.message import MessageExt, MessageQueue

if TYPE_CHECKING:
    from tests.listener.conftest import App

SECOND = 1_000
ORDERLY = ConsumeMode.ORDERLY


def test_a_failed_message_is_retried_before_the_next_one(app: App) -> None:
    """The queue is suspended, reconsume_times rises, and the message does not leave its queue."""
    start_ms = app.broker.clock.now_ms()
    received: list[tuple[str, int, int]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str, message: MessageExt) -> None:
        received.append((body, message.reconsume_times, app.broker.clock.now_ms() - start_ms))
        if body == "b" and message.reconsume_times < 3:
            raise RuntimeError("not today")

    app.listen(bill)
    app.send("orders", "a", "b", "c")
    app.run_until_idle()
    assert app.committed("billing") == 1

    app.advance(10 * SECOND)

    assert received == [("a", 0, 0), ("b", 0, 0), ("b", 1, 1_000), ("b", 2, 2_000), ("b", 3, 3_000), ("c", 0, 3_000)]
    assert app.committed("billing") == 3


def test_a_queue_is_suspended_for_the_configured_time(app: App) -> None:
    start_ms = app.broker.clock.now_ms()
    tries: list[int] = []

    @message_listener(
        topic="orders", consumer_group="billing", consume_mode=ORDERLY, suspend_current_queue_time_millis=30_000
    )
    def bill(message: MessageExt) -> ConsumeStatus | None:
        tries.append(app.broker.clock.now_ms() - start_ms)
        return ConsumeStatus.RECONSUME_LATER if len(tries) == 1 else None

    app.listen(bill)
    app.send("orders", "x")
    app.advance(60 * SECOND)

    assert tries == [0, 30_000]


def test_other_queues_are_not_suspended(app: App) -> None:
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str, queue: MessageQueue) -> None:
        if queue.queue_id == 0:
            raise RuntimeError("never")
        received.append(body)

    app.listen(bill)
    app.send("orders", "a", "b", queue_id=0)
    app.send("orders", "c", "d", queue_id=1)
    app.advance(5 * SECOND)

    assert received == ["c", "d"]


def test_after_its_last_retry_a_message_is_a_dead_letter_and_the_queue_continues(app: App) -> None:
    received: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, max_reconsume_times=2)
    def bill(body: str, message: MessageExt) -> None:
        received.append((body, message.reconsume_times))
        if body == "a":
            raise RuntimeError("never")

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "a", "b")
        app.advance(10 * SECOND)

    assert received == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert app.bodies("%DLQ%billing") == ["a"]
    steps = [event["next_step"] for event in logs if event["event"] == "listener.failed"]
    assert steps == ["retry_in_place", "retry_in_place", "dead_letter"]


def test_without_a_limit_a_message_is_retried_without_end(app: App) -> None:
    """The order comes first: -1 means no dead letters here."""
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        raise RuntimeError("never")

    app.listen(bill)
    app.send("orders", "a")
    app.advance(100 * SECOND)

    assert tries == list(range(101))
    assert app.committed("billing") in (None, 0)


def test_a_message_that_the_dead_letter_topic_does_not_take_is_retried_first(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, max_reconsume_times=0)
    def bill(body: str) -> None:
        received.append(body)
        if received == ["a"]:
            raise RuntimeError("not today")

    def full(message: MessageExt, delay_level: int = 0) -> None:
        raise BrokerError("the disk is full")

    container = app.listen(bill)
    monkeypatch.setattr(container.member.consumer, "send_back", full)
    app.send("orders", "a", "b")
    app.advance(2 * SECOND)

    assert received == ["a", "a", "b"]


@pytest.mark.feature("X8")
def test_the_failed_messages_of_a_batch_are_retried_in_order_before_the_next_ones(app: App) -> None:
    batches: list[list[str]] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, consume_message_batch_max_size=4)
    def bill(bodies: list[str]) -> None:
        batches.append(bodies)
        if len(batches) == 1:
            raise BatchFailure([3, 1])

    app.listen(bill)
    app.send("orders", *"abcdef")
    app.run_until_idle()
    assert app.committed("billing") == 1

    app.advance(2 * SECOND)

    assert batches == [["a", "b", "c", "d"], ["b", "d", "e", "f"]]
    assert app.committed("billing") == 6


def test_a_queue_is_reassigned_between_two_messages_and_none_is_handled_twice(app: App) -> None:
    """A second member joins while the first one handles a queue. The group's lock excludes the second one."""
    received: dict[int, list[tuple[str, str]]] = {queue_id: [] for queue_id in range(4)}

    def listener(name: str) -> Callable[..., None]:
        @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, id=name)
        def bill(body: str, queue: MessageQueue) -> None:
            received[queue.queue_id].append((name, body))
            if name == "first" and body == "1" and queue.queue_id == 3:
                second.start()

        return bill

    [first] = app.registry.register(listener("first"))
    [second] = app.registry.register(listener("second"))
    first.start()
    for queue_id in range(4):
        app.send("orders", *"0123", queue_id=queue_id)
    app.run_until_idle()
    for queue_id in range(4):
        app.send("orders", *"4567", queue_id=queue_id)
    app.advance(5 * SECOND)

    assert {name for name, _ in received[3]} == {"first", "second"}
    for queue_id in range(4):
        assert [body for _, body in received[queue_id]] == list("01234567")


def test_a_queue_that_another_member_has_locked_is_not_read(app: App) -> None:
    """The new owner starts when the previous one unlocks the queue, and after its last commit."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY)
    def bill(body: str) -> None:
        received.append(body)

    [container] = app.registry.register(bill)
    queue = MessageQueue("orders", app.broker.name, 0)
    before = app.broker.groups.subscribe(container.endpoint.settings.consumer_spec(0))
    assert before.lock(queue)
    app.registry.start()
    app.send("orders", "a", "b")
    app.run_until_idle()
    assert received == []

    app.broker.groups.commit_offset("billing", queue, 1)
    before.unlock(queue)
    before.close()
    app.advance(2 * SECOND)

    assert received == ["b"]
