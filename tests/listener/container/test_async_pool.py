"""Tasks of async listeners on the real clock: failures, dead letters, commits, replies, hanging tasks, and the stop."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import RequestTimeoutError
from mqtemplate.listener import ConsumeStatus, DeadLetter, current_message, message_listener
from mqtemplate.template import RocketMQTemplate
from mqtemplate.topics import DLQ_TOPIC_PREFIX
from tests.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from tests.listener.conftest import App


def test_all_messages_are_handled_on_the_loop_and_committed(threaded_app: App) -> None:
    """No thread is started for them; each one has its own context."""
    threads: set[str] = set()
    seen: SimpleQueue[str | None] = SimpleQueue()

    @message_listener("orders", "billing")
    async def handle(order: str) -> None:
        threads.add(threading.current_thread().name)
        await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(int, order))])
        message = current_message()
        seen.put(message.body.decode() if message is not None else None)

    threaded_app.listen(handle)
    orders = [str(number) for number in range(200)]
    threaded_app.send("orders", *orders)

    assert sorted(str(seen.get(timeout=PATIENCE_S)) for _ in orders) == sorted(orders)
    eventually(lambda: threaded_app.committed("billing") == 200, "all are committed")
    assert threads == {"mqtemplate-listener-loop"}


def test_a_message_that_failed_is_a_dead_letter_while_others_go_on(threaded_app: App) -> None:
    handled: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "billing", max_reconsume_times=0)
    async def handle(order: str) -> ConsumeStatus | None:
        if order == "status":
            return ConsumeStatus.RECONSUME_LATER
        if order == "raise":
            raise DeadLetter("never")
        if order == "exit":
            raise SystemExit(3)
        if order == "cancel":
            raise asyncio.CancelledError
        handled.put(order)
        return None

    threaded_app.listen(handle)
    failing = ["status", "raise", "exit", "cancel"]
    threaded_app.send("orders", "one", *failing, "two")

    assert sorted(handled.get(timeout=PATIENCE_S) for _ in range(2)) == ["one", "two"]
    topic = f"{DLQ_TOPIC_PREFIX}billing"
    eventually(lambda: sorted(threaded_app.bodies(topic)) == sorted(failing), "the dead letters are stored")
    eventually(lambda: threaded_app.committed("billing") == 6, "all are committed")


def test_a_request_gets_its_reply_and_one_that_was_dropped_none(threaded_app: App) -> None:
    template = RocketMQTemplate(threaded_app.broker)

    @message_listener("prices", "prices")
    async def price(article: str) -> str | None:
        return None if article == "salt" else f"{article} is 320"

    threaded_app.listen(price)

    assert template.send_and_receive("prices", "tea", str, f"{PATIENCE_S}s") == "tea is 320"
    with pytest.raises(RequestTimeoutError):
        template.send_and_receive("prices", "salt", str, "50ms")


def test_a_task_that_outlasts_the_stop_is_cancelled_and_its_message_is_redelivered(threaded_app: App) -> None:
    entered = threading.Event()
    ends: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "billing", await_termination_millis_when_shutdown=1)
    async def handle(order: str) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.put("cancelled")
            raise

    threaded_app.listen(handle)
    threaded_app.send("orders", "one")
    assert entered.wait(PATIENCE_S)
    threaded_app.registry.stop()

    assert ends.get(timeout=PATIENCE_S) == "cancelled"
    assert not threaded_app.committed("billing")


def test_a_hanging_task_is_replaced_and_its_message_sent_back(threaded_app: App) -> None:
    """The log has the line in which the task waits."""
    entered: SimpleQueue[str] = SimpleQueue()
    release = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @message_listener("orders", "billing", consume_thread_number=1, consume_thread_max=2, retry=["1h"])
    async def handle(order: str) -> None:
        loops.append(asyncio.get_running_loop())
        entered.put(order)
        if order == "hangs":
            await release.wait()  # here it hangs

    threaded_app.listen(handle, consume_timeout_ms=100)
    with capture_logs() as logs:
        threaded_app.send("orders", "hangs", "goes on")
        assert entered.get(timeout=PATIENCE_S) == "hangs"
        assert entered.get(timeout=PATIENCE_S) == "goes on"
        eventually(lambda: [each for each in logs if each["event"] == "listener.blocked"], "the log has it")
    loops[0].call_soon_threadsafe(release.set)

    [blocked, *_] = [each for each in logs if each["event"] == "listener.blocked"]
    assert "here it hangs" in blocked["handler_stack"]
