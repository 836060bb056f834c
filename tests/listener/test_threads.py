"""Containers on the machine's clock: threads, and events to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.errors import CorruptRecordError
from mqtemplate.listener import ConsumeMode, ContainerState, current_message, message_listener
from mqtemplate.listener.consuming.process_queue import ProcessQueue
from mqtemplate.message import MessageExt

if TYPE_CHECKING:
    from tests.listener.conftest import World

PATIENCE_S = 30


@pytest.mark.feature("C2")
def test_messages_reach_their_handler_by_themselves(real_world: World) -> None:
    """On the real clock."""
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        heard.put(body)

    real_world.listen(bill)
    real_world.send("orders", "a", "b", "c")

    assert {heard.get(timeout=PATIENCE_S) for _ in range(3)} == {"a", "b", "c"}


def test_handlers_run_side_by_side_up_to_their_number(real_world: World) -> None:
    """All four wait for each other, so all four must run at once; a fifth would be counted."""
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

    real_world.listen(bill)
    real_world.send("orders", *"abcdefgh")

    assert [most.get(timeout=PATIENCE_S) for _ in range(8)] == [4] * 8


def test_orderly_queues_run_side_by_side_and_each_in_order(real_world: World) -> None:
    heard: dict[int, list[str]] = {0: [], 1: []}
    both = threading.Barrier(2)
    done: SimpleQueue[int] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_mode=ConsumeMode.ORDERLY)
    def bill(body: str, message: MessageExt) -> None:
        if message.queue_offset == 0:
            both.wait(PATIENCE_S)
        heard[message.queue_id].append(body)
        done.put(message.queue_id)

    real_world.listen(bill)
    for queue_id in (0, 1):
        real_world.send("orders", *map(str, range(100)), queue_id=queue_id)
    for _ in range(200):
        done.get(timeout=PATIENCE_S)

    assert heard[0] == heard[1] == list(map(str, range(100)))


def test_an_orderly_queue_tries_again_after_its_rest(real_world: World) -> None:
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

    real_world.listen(bill)
    real_world.send("orders", "bad", "good")

    assert [tries.get(timeout=PATIENCE_S) for _ in range(4)] == [0, 1, 2, 0]


@pytest.mark.feature("U19")
def test_one_failing_handler_does_not_stop_the_others(real_world: World) -> None:
    """Neither its own next message nor another listener."""
    heard: SimpleQueue[tuple[str, str]] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(body: str) -> None:
        heard.put(("billing", body))
        raise RuntimeError("never")

    @message_listener(topic="orders", consumer_group="audit")
    def audit(body: str) -> None:
        heard.put(("audit", body))

    real_world.listen(bill, audit)
    real_world.send("orders", "a", "b")

    assert sorted(heard.get(timeout=PATIENCE_S) for _ in range(4)) == [
        ("audit", "a"),
        ("audit", "b"),
        ("billing", "a"),
        ("billing", "b"),
    ]


def test_coroutines_of_all_listeners_run_on_one_loop(real_world: World) -> None:
    """Design 3: one loop thread; the current message follows into it."""
    heard: SimpleQueue[tuple[str, int, asyncio.AbstractEventLoop]] = SimpleQueue()

    def listener(group: str) -> Callable[..., Any]:
        @message_listener(topic="orders", consumer_group=group, id=group)
        async def handle(body: str) -> None:
            await asyncio.to_thread(lambda: None)
            message = current_message()
            assert message is not None
            heard.put((group, message.queue_offset, asyncio.get_running_loop()))

        return handle

    real_world.listen(listener("a"), listener("b"))
    real_world.send("orders", "x", "y")
    results = [heard.get(timeout=PATIENCE_S) for _ in range(4)]

    assert sorted(result[:2] for result in results) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert len({id(loop) for *_, loop in results}) == 1


def test_sys_exit_in_a_coroutine_does_not_end_the_loop(real_world: World) -> None:
    """asyncio lets SystemExit out of the loop; the loop belongs to the other listeners, too."""
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    async def bill(body: str) -> None:
        if body == "bad":
            raise SystemExit(1)
        heard.put(body)

    real_world.listen(bill)
    real_world.send("orders", "bad", "good")

    assert heard.get(timeout=PATIENCE_S) == "good"


# --- stop --------------------------------------------------------------------------------------------


def test_a_stop_lets_running_handlers_finish_and_commits_them(real_world: World) -> None:
    """Graceful stop: what was begun is done, what was fetched is drained."""
    begun, go_on = threading.Event(), threading.Event()
    heard: list[str] = []

    @message_listener(
        topic="orders",
        consumer_group="billing",
        consume_thread_number=1,
        await_termination_millis_when_shutdown=PATIENCE_S * 1_000,
    )
    def bill(body: str) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        heard.append(body)

    container = real_world.listen(bill)
    real_world.send("orders", "a", "b", "c")
    assert begun.wait(PATIENCE_S)
    stopping = _in_thread(container.stop)
    go_on.set()
    stopping.result(PATIENCE_S)

    assert container.state is ContainerState.STOPPED
    assert real_world.committed("billing") == len(heard) >= 1
    assert heard == ["a", "b", "c"][: len(heard)]


def test_what_is_not_finished_in_time_stays_uncommitted_and_comes_again(real_world: World) -> None:
    """A handler that hangs cannot hold the application up; its late end changes nothing."""
    begun, go_on = threading.Event(), threading.Event()
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", await_termination_millis_when_shutdown=1)
    def bill(body: str) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE_S)
        heard.put(body)

    container = real_world.listen(bill)
    real_world.send("orders", "a")
    assert begun.wait(PATIENCE_S)
    with capture_logs() as logs:
        container.stop()
    assert [event["unfinished"] for event in logs if event["event"] == "listener.stopped"] == [1]
    assert not real_world.committed("billing")

    go_on.set()
    assert heard.get(timeout=PATIENCE_S) == "a"
    assert not real_world.committed("billing")

    container.start()
    assert heard.get(timeout=PATIENCE_S) == "a"


def test_a_pause_keeps_new_messages_waiting(real_world: World) -> None:
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        heard.put(body)

    container = real_world.listen(bill)
    real_world.send("orders", "a")
    assert heard.get(timeout=PATIENCE_S) == "a"

    container.pause()
    container.pause()
    container.resume()
    real_world.send("orders", "b")

    assert heard.get(timeout=PATIENCE_S) == "b"


def test_a_broker_that_is_closed_first_ends_its_listeners_quietly(real_world: World) -> None:

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None: ...

    container = real_world.listen(bill)
    thread = container._thread
    assert thread is not None
    real_world.broker.close()
    thread.join(PATIENCE_S)

    assert container.state is ContainerState.BROKEN
    container.stop()
    assert container.state is ContainerState.STOPPED


# --- what hangs, what is damaged, what is too much ----------------------------------------------------


def test_a_message_that_a_handler_keeps_for_too_long_is_sent_back(
    real_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """consume_timeout: reported with the place where it hangs, replaced by a fresh thread, its late end ignored."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    sent_back: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=1, consume_thread_max=2)
    def bill(body: str) -> None:
        if body == "slow":
            begun.set()
            assert go_on.wait(PATIENCE_S)
            ended.set()
            raise RuntimeError("nobody cares any more")
        heard.put(body)

    container = real_world.listen(bill)
    monkeypatch.setattr(container._consumer, "send_back", lambda message, level=0: sent_back.put((message.body, level)))
    with capture_logs() as logs:
        real_world.send("orders", "slow")
        assert begun.wait(PATIENCE_S)
        container._work._watchdog._timeout_ms = -1  # a quarter of an hour has passed
        real_world.send("orders", "next")
        assert sent_back.get(timeout=PATIENCE_S) == (b"slow", 3)
        container._work._watchdog._timeout_ms = 900_000
        real_world.send("orders", "after")
        assert "after" in {heard.get(timeout=PATIENCE_S), heard.get(timeout=PATIENCE_S)}
        go_on.set()
        assert ended.wait(PATIENCE_S)
        container.stop()

    [event] = [event for event in logs if event["event"] == "listener.blocked" and event["offset"] == 0]
    assert "go_on.wait" in event["handler_stack"]
    assert not [event for event in logs if event["event"] == "listener.failed"]
    assert real_world.committed("billing") == 3


def test_a_damaged_record_is_reported_and_its_neighbours_arrive(
    real_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with file and offset, never skipped silently."""
    heard: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", auto_startup=False)
    def bill(body: str) -> None:
        heard.put(body)

    [container] = real_world.registry.register(bill)
    with capture_logs() as logs:
        container.start()
        poll = container._consumer.poll
        damages = [CorruptRecordError("commitlog/00000000000000000000", 4711, "the checksum does not match")]

        def damaged_poll(max_count: int, wait_ms: int = 0, **options: Any) -> list[MessageExt]:
            if damages:
                raise damages.pop()
            return poll(max_count, wait_ms, **options)

        monkeypatch.setattr(container._consumer, "poll", damaged_poll)
        real_world.send("orders", "first", "second")
        assert {heard.get(timeout=PATIENCE_S) for _ in range(2)} == {"first", "second"}
        real_world.send("orders", "third")
        assert heard.get(timeout=PATIENCE_S) == "third"
        container.stop()

    [event] = [event for event in logs if event["event"] == "listener.record_corrupt"]
    assert (event["file"], event["offset"]) == ("commitlog/00000000000000000000", 4711)


def test_fetching_stops_while_too_much_is_under_way_and_goes_on_after(
    real_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow control: a slow handler does not fill the memory."""
    monkeypatch.setattr(ProcessQueue, "MOST_MESSAGES", 40)
    go_on = threading.Event()
    heard: SimpleQueue[int] = SimpleQueue()
    most_in_flight: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=2, pull_batch_size=8)
    def bill(body: str) -> None:
        assert go_on.wait(PATIENCE_S)
        most_in_flight.append(container.in_flight)
        heard.put(int(body))

    container = real_world.listen(bill)
    real_world.send("orders", *map(str, range(500)))
    go_on.set()

    assert {heard.get(timeout=PATIENCE_S) for _ in range(500)} == set(range(500))
    assert max(most_in_flight) < 40 + 8


def _in_thread(call: Callable[[], None]) -> Future[None]:
    """Start *call* in a thread."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
