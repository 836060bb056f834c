"""The number of handlers that run at a time is changed while a listener runs."""

from __future__ import annotations

from asyncio import sleep as virtual_sleep
from typing import TYPE_CHECKING, Any

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import message_listener
from mqtemplate.message import MessageQueue
from tests.listener.concurrency import CASES, Counted, check_changes

if TYPE_CHECKING:
    from tests.listener.conftest import App


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_message_is_handled_once_and_never_by_more_handlers_than_allowed(
    threaded_app: App, case: dict[str, Any]
) -> None:
    threaded_app.broker.create_topic("orders", 4)
    counted = Counted()
    container = threaded_app.listen(counted.listener(**case))
    is_orderly = "consume_mode" in case

    numbers = iter(range(1_000))
    check_changes(
        counted,
        container,
        lambda body: threaded_app.send("orders", body, queue_id=next(numbers) % 4),
        at_most=4 if is_orderly else 64,
    )

    if is_orderly:
        for queue_id in range(4):
            sent = [f"order-{number}" for number in range(60) if number % 4 == queue_id]
            assert [body for body in counted.order if body in sent] == sent
    if "message_model" not in case:
        committed = [threaded_app.committed("billing", queue_id=queue_id) for queue_id in range(4)]
        assert committed == [threaded_app.broker.reader.max_offset(_queue(threaded_app, each)) for each in range(4)]


def _queue(app: App, queue_id: int) -> MessageQueue:
    return MessageQueue("orders", app.broker.name, queue_id)


def test_the_concurrency_is_one_up_to_the_maximum_of_the_listener(threaded_app: App) -> None:
    @message_listener("orders", "billing", id="bill", consume_thread_number=4, consume_thread_max=8)
    def bill(body: str) -> None: ...

    container = threaded_app.listen(bill)

    for number in (0, 9, -1):
        with pytest.raises(
            ListenerError, match=rf"must be 1\.\.8, its consume_thread_max, got {number}; for more, raise"
        ):
            container.set_concurrency(number)
    container.set_concurrency(8)
    assert container.concurrency == 8


def test_a_restart_of_the_container_keeps_the_concurrency(threaded_app: App) -> None:
    counted = Counted()
    container = threaded_app.listen(counted.listener())

    container.set_concurrency(3)
    container.stop()
    container.set_concurrency(2)
    container.start()
    threaded_app.send("orders", *"abcdef")
    counted.until_running(2)
    counted.proceed(4)
    counted.until_running(2)
    counted.proceed(2)
    counted.until_running(0)

    assert container.concurrency == 2
    assert counted.handled.total() == 6


def test_a_paused_listener_uses_the_new_concurrency_after_the_pause(threaded_app: App) -> None:
    counted = Counted()
    container = threaded_app.listen(counted.listener())

    container.pause()
    threaded_app.send("orders", *"abcdef")
    container.set_concurrency(2)
    assert counted.started == 0
    container.resume()
    counted.until_running(2)
    counted.proceed(6)
    counted.until_running(0)

    assert counted.handled.total() == 6


def test_on_a_virtual_clock_as_many_coroutines_wait_as_allowed(app: App) -> None:
    """A test of an application sees the change as well."""

    most = running = 0

    @message_listener("orders", "billing", id="bill", consume_thread_number=1)
    async def bill(body: str) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await virtual_sleep(1)
        running -= 1

    container = app.listen(bill)
    app.send("orders", *"abcdef")
    app.run_until_idle()
    assert most == 1

    container.set_concurrency(3)
    app.advance("10s")

    assert (most, running) == (3, 0)
