"""ORDERLY on a virtual clock: a failed message suspends its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.listener import ConsumeMode, message_listener
from mqtemplate.message import MessageQueue

if TYPE_CHECKING:
    from tests.listener.conftest import App

ORDERLY = ConsumeMode.ORDERLY


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
    app.advance("5s")

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
    app.advance("2s")

    assert received == ["b"]


@pytest.mark.parametrize("has_fetched", [False, True], ids=["idle", "with fetched messages"])
def test_a_paused_member_lets_others_have_its_reassigned_queues(app: App, has_fetched: bool) -> None:
    """A pause may be long, and the next member of a queue waits until it is unlocked."""
    received: list[tuple[str, str]] = []

    def listener(name: str) -> Callable[..., None]:
        @message_listener(topic="orders", consumer_group="billing", consume_mode=ORDERLY, id=name)
        def bill(body: str) -> None:
            if has_fetched and (name, body) == ("first", "1"):
                raise PauseListener("1h")
            received.append((name, body))

        return bill

    [first] = app.registry.register(listener("first"))
    [second] = app.registry.register(listener("second"))
    first.start()
    app.send("orders", "0", queue_id=3)
    app.run_until_idle()
    if has_fetched:
        app.send("orders", "1", "2", queue_id=3)
        app.run_until_idle()
    else:
        first.pause()

    second.start()
    app.send("orders", "3", queue_id=3)
    app.advance("10s")

    missing = ["1", "2"] if has_fetched else []
    assert received == [("first", "0"), *(("second", body) for body in [*missing, "3"])]


def test_a_seek_while_a_handler_fails_does_not_wait_for_its_retry(app: App) -> None:
    """The failed message is not retried, so that nothing is left to wait for."""
    received: list[str] = []

    @message_listener(
        topic="orders", consumer_group="billing", consume_mode=ORDERLY, suspend_current_queue_time_millis=30_000
    )
    def bill(body: str) -> None:
        received.append(body)
        if received == ["0", "1"]:
            container.seek(MessageQueue("orders", app.broker.name, 0), 2)
            raise ValueError("no such order")

    container = app.listen(bill)
    app.send("orders", "0", "1", "2")
    app.run_until_idle()

    assert received == ["0", "1", "2"]
