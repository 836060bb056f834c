"""Listener containers on the real clock, with threads; tests wait for events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.context.application import read_health
from mqtemplate.errors import CorruptRecordError
from mqtemplate.listener import ConsumeMode, ContainerState, current_message, message_listener
from mqtemplate.listener.container.process_queue import ProcessQueue
from mqtemplate.message import MessageExt
from tests.kit import both_kinds
from tests.listener.conftest import App, Gate
from tests.listener.hostile import KINDS
from tests.waiting import PATIENCE_S, eventually


def test_as_many_handlers_run_at_once_as_configured(threaded_app: App) -> None:
    """All four wait for each other, so all four must run at once. A fifth one would be counted."""
    together = threading.Barrier(4)
    running: list[int] = []
    most: SimpleQueue[int] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=4)
    def bill(body: str) -> None:
        running.append(1)
        together.wait(PATIENCE_S)
        most.put(len(running))
        together.wait(PATIENCE_S)
        running.pop()

    threaded_app.listen(bill)
    threaded_app.send("orders", *"abcdefgh")

    assert [most.get(timeout=PATIENCE_S) for _ in range(8)] == [4] * 8


def test_orderly_queues_are_handled_at_the_same_time_and_each_in_order(threaded_app: App) -> None:
    received: dict[int, list[str]] = {0: [], 1: []}
    both = threading.Barrier(2)
    done: SimpleQueue[int] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ConsumeMode.ORDERLY)
    def bill(body: str, message: MessageExt) -> None:
        if message.queue_offset == 0:
            both.wait(PATIENCE_S)
        received[message.queue_id].append(body)
        done.put(message.queue_id)

    threaded_app.listen(bill)
    for queue_id in (0, 1):
        threaded_app.send("orders", *map(str, range(100)), queue_id=queue_id)
    for _ in range(200):
        done.get(timeout=PATIENCE_S)

    assert received[0] == received[1] == list(map(str, range(100)))


def test_an_orderly_queue_is_retried_after_its_suspension(threaded_app: App) -> None:
    tries: SimpleQueue[int] = SimpleQueue()

    @message_listener(
        topic="orders",
        consumer_group="billing",
        consume_mode=ConsumeMode.ORDERLY,
        suspend_current_queue_time_millis=10,
        max_reconsume_times=2,
    )
    def bill(message: MessageExt) -> None:
        tries.put(message.reconsume_times)
        if message.body == b"bad":
            raise RuntimeError("never")

    threaded_app.listen(bill)
    threaded_app.send("orders", "bad", "good")

    assert [tries.get(timeout=PATIENCE_S) for _ in range(4)] == [0, 1, 2, 0]


def test_coroutines_of_all_listeners_run_on_one_loop(threaded_app: App) -> None:
    """The current message is set there, too."""
    received: SimpleQueue[tuple[str, int, asyncio.AbstractEventLoop]] = SimpleQueue()

    def listener(group: str) -> Callable[..., Any]:
        @message_listener(topic="orders", consumer_group=group, id=group)
        async def handle(body: str) -> None:
            await asyncio.to_thread(lambda: None)
            message = current_message()
            assert message is not None
            received.put((group, message.queue_offset, asyncio.get_running_loop()))

        return handle

    threaded_app.listen(listener("a"), listener("b"))
    threaded_app.send("orders", "x", "y")
    results = [received.get(timeout=PATIENCE_S) for _ in range(4)]

    assert sorted(result[:2] for result in results) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len({id(loop) for *_, loop in results}) == 1


# --- stop --------------------------------------------------------------------------------------------


@both_kinds
def test_a_stop_lets_running_handlers_finish_and_commits_them(threaded_app: App, is_async: bool) -> None:
    """No other one starts: a stop takes as long as the longest handler, not as long as the fetched messages."""
    gate = Gate()
    container = threaded_app.listen(gate.listener(is_async=is_async, consume_thread_number=1))
    threaded_app.send("orders", "a", "b", "c")
    assert gate.started.wait(PATIENCE_S)
    eventually(lambda: container.member.queues.in_flight == 3, "all are fetched")
    with ThreadPoolExecutor(1) as other:
        stopping = other.submit(container.stop)
        eventually(lambda: container.state is ContainerState.STOPPING, "the stop has begun")
        gate.proceed.set()
        stopping.result(PATIENCE_S)

    assert container.state is ContainerState.STOPPED
    assert threaded_app.committed("billing") == 1
    assert gate.take(1) == ["a"]
    assert gate.is_empty


@both_kinds
def test_a_stop_says_how_many_handlers_it_waits_for(
    threaded_app: App, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it waits 30 seconds."""
    monkeypatch.setattr("mqtemplate.listener.container.membership._FIRST_REPORT_S", 0.001)
    gate = Gate()
    container = threaded_app.listen(gate.listener(is_async=is_async))
    threaded_app.send("orders", "a", "b")
    gate.await_started(2)
    with capture_logs() as logs, ThreadPoolExecutor(1) as other:
        stopping = other.submit(container.stop)
        eventually(lambda: [each for each in logs if each["event"] == "listener.waiting"], "it is logged")
        gate.proceed.set()
        stopping.result(PATIENCE_S)

    [waiting] = [each for each in logs if each["event"] == "listener.waiting"]
    assert waiting["running_handlers"] == 2
    assert waiting["at_most_s"] <= container.endpoint.settings.await_termination_millis_when_shutdown / 1_000 == 30
    assert threaded_app.committed("billing") == 2


def test_an_unfinished_message_stays_uncommitted_at_a_stop_and_is_redelivered(threaded_app: App) -> None:
    """A hanging handler does not block the stop. When it returns late, nothing is committed."""
    gate = Gate()
    container = threaded_app.listen(gate.listener(await_termination_millis_when_shutdown=1))
    threaded_app.send("orders", "a")
    assert gate.started.wait(PATIENCE_S)
    with capture_logs() as logs:
        container.stop()
    assert [event["unfinished"] for event in logs if event["event"] == "listener.stopped"] == [1]
    assert not threaded_app.committed("billing")

    gate.proceed.set()
    assert gate.take() == ["a"]
    assert not threaded_app.committed("billing")

    container.start()
    assert gate.take() == ["a"]


def test_whatever_a_fetch_raises_the_polling_thread_goes_on(threaded_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.listener.container.membership._RETRY_POLL_MS", 1)
    gate = Gate().opened()
    kinds = [KINDS[kind] for kind in ("panic", "exit", "interrupt", "generator exit", "without anything")]

    container = threaded_app.listen(gate.listener())
    refresh = container.member.queues.refresh

    def hostile() -> None:
        if kinds:
            kinds.pop()()
        refresh()

    monkeypatch.setattr(container.member.queues, "refresh", hostile)
    container.member.wake_polling()
    eventually(lambda: not kinds, "each of them was raised")
    threaded_app.send("orders", "good")

    assert gate.take() == ["good"]
    assert container.state is ContainerState.RUNNING


def test_a_listener_whose_polling_thread_has_ended_is_not_ready(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that an application does ends the thread. If something does all the same, probes must see it."""
    broken = threading.Event()

    container = threaded_app.listen(Gate().listener())
    container.on_broken = broken.set
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(container.member, "_report", KINDS["panic"])
    monkeypatch.setattr(container.member, "_poll", KINDS["panic"])
    container.member.wake_polling()

    assert broken.wait(PATIENCE_S)
    assert container.state is ContainerState.BROKEN
    assert not threaded_app.registry.is_ready
    assert read_health(True, {}, [container]).is_ready is False


def test_a_broker_that_is_closed_first_ends_its_listeners_without_an_error(threaded_app: App) -> None:
    container = threaded_app.listen(Gate().listener())
    threaded_app.broker.close()

    eventually(lambda: container.state is ContainerState.BROKEN, "the container is broken")
    container.stop()
    assert container.state is ContainerState.STOPPED


# --- hanging handlers, damaged records, flow control ---------------------------------------------------


def test_the_message_of_a_hanging_handler_is_sent_back(threaded_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler is reported with its stack, its thread is replaced, and its late error is ignored."""
    started, proceed, ended = threading.Event(), threading.Event(), threading.Event()
    sent_back: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=1, consume_thread_max=2)
    def bill(body: str) -> None:
        if body == "slow":
            started.set()
            assert proceed.wait(PATIENCE_S)
            ended.set()
            raise RuntimeError("too late")
        received.put(body)

    container = threaded_app.listen(bill, consume_timeout_ms=100)
    monkeypatch.setattr(
        container.member.consumer, "send_back", lambda message, level=0: sent_back.put((message.body, level))
    )
    with capture_logs() as logs:
        threaded_app.send("orders", "slow")
        assert started.wait(PATIENCE_S)
        threaded_app.send("orders", "next")
        assert sent_back.get(timeout=PATIENCE_S) == (b"slow", 0)
        threaded_app.send("orders", "after")
        assert "after" in {received.get(timeout=PATIENCE_S), received.get(timeout=PATIENCE_S)}
        proceed.set()
        assert ended.wait(PATIENCE_S)
        container.stop()

    [event] = [event for event in logs if event["event"] == "listener.blocked" and event["offset"] == 0]
    assert "proceed.wait" in event["handler_stack"]
    assert not [event for event in logs if event["event"] == "listener.failed"]
    assert threaded_app.committed("billing") == 3


def test_a_damaged_record_is_reported_and_the_other_messages_arrive(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event names file and offset."""
    gate = Gate().opened()
    [container] = threaded_app.registry.register(gate.listener(auto_startup=False))
    with capture_logs() as logs:
        container.start()
        poll = container.member.consumer.poll
        damages = [CorruptRecordError("commitlog/00000000000000000000", 4711, "the checksum does not match")]

        def damaged_poll(max_count: int, wait_ms: int = 0, **options: Any) -> list[MessageExt]:
            if damages:
                raise damages.pop()
            return poll(max_count, wait_ms, **options)

        monkeypatch.setattr(container.member.consumer, "poll", damaged_poll)
        threaded_app.send("orders", "first", "second")
        assert set(gate.take(2)) == {"first", "second"}
        threaded_app.send("orders", "third")
        assert gate.take() == ["third"]
        container.stop()

    [event] = [event for event in logs if event["event"] == "listener.record_corrupt"]
    assert (event["file"], event["offset"]) == ("commitlog/00000000000000000000", 4711)


def test_fetching_pauses_while_too_many_messages_are_unfinished(
    threaded_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow control: a slow handler does not fill the memory."""
    monkeypatch.setattr(ProcessQueue, "MOST_MESSAGES", 40)
    proceed = threading.Event()
    received: SimpleQueue[int] = SimpleQueue()
    most_in_flight: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=2, pull_batch_size=8)
    def bill(body: str) -> None:
        assert proceed.wait(PATIENCE_S)
        most_in_flight.append(container.member.queues.in_flight)
        received.put(int(body))

    container = threaded_app.listen(bill)
    threaded_app.send("orders", *map(str, range(500)))
    proceed.set()

    assert {received.get(timeout=PATIENCE_S) for _ in range(500)} == set(range(500))
    assert max(most_in_flight) < 40 + 8


def test_all_listeners_stop_fetching_before_the_first_one_waits_for_its_handlers(threaded_app: App) -> None:
    """Their times for the stop pass together: a handler of the last listener sees the first one stopping already."""
    handled: SimpleQueue[str] = SimpleQueue()
    handling = threading.Event()

    @message_listener(topic="orders", consumer_group="billing", id="first")
    def first(message: str) -> None: ...

    @message_listener(topic="orders", consumer_group="audit", id="last", await_termination_millis_when_shutdown=60_000)
    def last(message: str) -> None:
        handling.set()
        first_container = threaded_app.registry.container("first")
        eventually(lambda: first_container.state is ContainerState.STOPPING, "the first listener is stopping")
        handled.put(message)

    threaded_app.listen(first, last)
    threaded_app.send("orders", "x")
    assert handling.wait(PATIENCE_S)

    threaded_app.registry.stop()

    assert handled.get_nowait() == "x"
    assert threaded_app.committed("audit") == 1
