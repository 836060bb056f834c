"""ORDERLY on a virtual clock: a failed message suspends its queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
