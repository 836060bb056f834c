"""Pause, and changes of the read position, on a running listener."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import ConsumeMode, ContainerState, ListenerContainer, message_listener
from mqtemplate.message import MessageExt, MessageQueue
from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.listener.conftest import App

MODES = pytest.mark.parametrize("mode", list(ConsumeMode), ids=lambda mode: mode.value)
SECOND = 1_000
MINUTE = 60 * SECOND
PATIENCE_S = 60


def queue_of(app: App, queue_id: int = 0) -> MessageQueue:
    return MessageQueue("orders", app.broker.name, queue_id)


def listen(app: App, received: list[str], mode: ConsumeMode = ConsumeMode.CONCURRENTLY) -> ListenerContainer:
    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode, id="bill")
    def bill(message: str) -> None:
        received.append(message)

    return app.listen(bill)


# --- pause -------------------------------------------------------------------------------------------


@MODES
def test_no_fetched_message_is_handled_after_pause_returned(app: App, mode: ConsumeMode) -> None:
    """The handler itself pauses its listener: messages of the same fetch wait for the resume."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode, id="bill")
    def bill(message: str) -> None:
        received.append(message)
        if message == "two":
            container.pause()

    container = app.listen(bill)
    app.send("orders", "one", "two", "three", "four")
    app.run_until_idle()
    assert received == ["one", "two"]
    app.advance(10 * MINUTE)
    assert received == ["one", "two"]

    container.resume()
    app.run_until_idle()

    assert received == ["one", "two", "three", "four"]
    assert app.committed("billing") == 4


@MODES
def test_pause_holds_on_threads_too(threaded_app: App, mode: ConsumeMode) -> None:
    """A handler that runs finishes. The stop counts the fetched messages as unfinished; a restart gets them again."""
    started, proceed = threading.Event(), threading.Event()
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode, consume_thread_number=1)
    def bill(message: str) -> None:
        started.set()
        assert proceed.wait(PATIENCE_S)
        received.put(message)

    container = threaded_app.listen(bill)
    threaded_app.send("orders", "one", "two", "three")
    assert started.wait(PATIENCE_S)
    eventually(lambda: container.member.queues.in_flight == 3, "all three are fetched")

    container.pause()
    proceed.set()
    assert received.get(timeout=PATIENCE_S) == "one"
    container.stop()
    assert received.empty()
    container.start()

    assert [received.get(timeout=PATIENCE_S) for _ in range(2)] == ["two", "three"]


def test_resume_continues_with_the_fetched_messages(threaded_app: App) -> None:
    started, proceed = threading.Event(), threading.Event()
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", consume_thread_number=1)
    def bill(message: str) -> None:
        started.set()
        assert proceed.wait(PATIENCE_S)
        received.put(message)

    container = threaded_app.listen(bill)
    threaded_app.send("orders", "one", "two", "three")
    assert started.wait(PATIENCE_S)
    container.pause()
    proceed.set()
    assert received.get(timeout=PATIENCE_S) == "one"

    container.resume()

    assert {received.get(timeout=PATIENCE_S) for _ in range(2)} == {"two", "three"}


@MODES
def test_a_pause_at_any_moment_stops_all_threads(threaded_app: App, mode: ConsumeMode) -> None:
    """Only calls that were noted before `pause` returned may still start; all messages arrive after the last resume."""
    started: list[int] = []
    count, rounds = 20, 15

    @message_listener(topic="orders", consumer_group="billing", consume_mode=mode)
    def bill(message: str) -> None:
        started.append(threading.get_ident())

    container = threaded_app.listen(bill)
    texts = [str(number) for number in range(count)]
    for _ in range(rounds):
        threaded_app.send("orders", *texts)
        container.pause()
        noted, before = len(container.member.service._watchdog._running), len(started)
        threaded_app.send("orders", *texts)
        assert len(started) - before <= noted
        container.resume()

    eventually(lambda: len(started) == 2 * count * rounds, "all messages are handled")


def test_a_failed_message_is_not_retried_while_its_listener_is_paused(app: App) -> None:
    tries: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode="ORDERLY", id="bill")
    def bill(message: MessageExt) -> None:
        tries.append(message.reconsume_times)
        if message.reconsume_times == 0:
            raise RuntimeError("once")

    container = app.listen(bill)
    app.send("orders", "bad")
    app.run_until_idle()
    container.pause()
    app.advance(10 * MINUTE)
    assert tries == [0]

    container.resume()
    app.run_until_idle()

    assert tries == [0, 1]


# --- seek --------------------------------------------------------------------------------------------


@MODES
def test_seek_to_an_earlier_offset_handles_messages_again(app: App, mode: ConsumeMode) -> None:
    received: list[str] = []
    container = listen(app, received, mode)
    app.send("orders", "one", "two", "three")
    app.run_until_idle()
    received.clear()

    container.seek(queue_of(app), 1)
    assert app.committed("billing") == 1, "the new position holds after a crash too"
    app.run_until_idle()

    assert received == ["two", "three"]
    assert app.committed("billing") == 3


def test_after_a_seek_back_the_commit_is_not_ahead_of_the_handled_messages(app: App) -> None:
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", pull_batch_size=1, id="bill")
    def bill(message: str) -> None:
        received.append(message)
        committed.append(app.committed("billing"))

    committed: list[int | None] = []
    container = app.listen(bill)
    app.send("orders", "one", "two", "three")
    app.run_until_idle()
    committed.clear()

    container.seek(queue_of(app), 0)
    app.run_until_idle()

    assert received[3:] == ["one", "two", "three"]
    assert committed == [0, 1, 2]


@MODES
def test_seek_to_a_later_offset_skips_fetched_messages(app: App, mode: ConsumeMode) -> None:
    received: list[str] = []
    container = listen(app, received, mode)

    app.send("orders", "one", "two", "three", "four")
    container.member._fetch(0)
    assert container.member.queues.in_flight == 4, "all are fetched, and no handler has one"

    container.seek(queue_of(app), 3)
    app.run_until_idle()

    assert received == ["four"]
    assert app.committed("billing") == 4


def test_seek_frees_a_queue_that_a_failing_message_suspends(app: App) -> None:
    """Otherwise the message would be retried for hours, and block the others."""
    received: list[str] = []

    @message_listener(topic="orders", consumer_group="billing", consume_mode="ORDERLY", retry=["10h"], id="bill")
    def bill(message: str) -> None:
        received.append(message)
        if message == "bad":
            raise RuntimeError("never")

    container = app.listen(bill)
    app.send("orders", "bad", "good")
    app.run_until_idle()
    assert received == ["bad"]

    container.seek(queue_of(app), 1)
    app.run_until_idle()

    assert received == ["bad", "good"]


def test_an_offset_that_does_not_exist_becomes_the_nearest(app: App) -> None:
    received: list[str] = []
    container = listen(app, received)
    app.send("orders", "one")
    app.run_until_idle()

    container.seek(queue_of(app), 1_000)
    assert app.committed("billing") == 1
    container.seek(queue_of(app), -5)
    app.run_until_idle()

    assert received == ["one", "one"]


@MODES
def test_rewind_handles_the_messages_of_a_span_again(app: App, mode: ConsumeMode) -> None:
    """In all queues; without a span, all messages."""
    received: list[str] = []
    container = listen(app, received, mode)
    app.send("orders", "old")
    app.advance(2 * 60 * MINUTE)
    app.send("orders", "young", queue_id=1)
    app.advance(30 * MINUTE)
    received.clear()

    container.rewind("1h")
    app.run_until_idle()
    assert received == ["young"]
    container.rewind()
    app.run_until_idle()

    assert sorted(received) == ["old", "young", "young"]


def test_reset_to_a_time_continues_with_the_messages_from_it_on(app: App) -> None:
    received: list[str] = []
    container = listen(app, received)
    app.send("orders", "first")
    app.advance(MINUTE)
    second_ms = app.broker.clock.now_ms()
    app.send("orders", "second")
    app.run_until_idle()
    received.clear()

    container.reset_to_time(datetime.fromtimestamp(second_ms / 1_000, UTC))
    app.run_until_idle()
    assert received == ["second"]
    container.pause()
    app.send("orders", "skipped")
    container.reset_to_time(second_ms + MINUTE)
    container.resume()
    app.run_until_idle()

    assert received == ["second"]


def test_a_failing_handler_whose_message_a_seek_skipped_is_retried_all_the_same(app: App) -> None:
    """The handler had the message when the position changed: its failure is not lost."""
    received: list[int] = []

    @message_listener(topic="orders", consumer_group="billing", retry=["5s"], id="bill")
    def bill(message: MessageExt) -> None:
        received.append(message.reconsume_times)
        if message.reconsume_times == 0:
            container.seek(queue_of(app), 1)
            raise RuntimeError("once")

    container = app.listen(bill)
    app.send("orders", "bad")
    app.advance(MINUTE)

    assert received == [0, 1]


def test_seek_on_threads_waits_until_it_holds(threaded_app: App) -> None:
    received: SimpleQueue[str] = SimpleQueue()

    @message_listener(topic="orders", consumer_group="billing", id="bill")
    def bill(message: str) -> None:
        received.put(message)

    container = threaded_app.listen(bill)
    threaded_app.send("orders", "one", "two")
    assert {received.get(timeout=PATIENCE_S) for _ in range(2)} == {"one", "two"}

    container.seek(queue_of(threaded_app), 1)
    assert received.get(timeout=PATIENCE_S) == "two"
    container.rewind("1h")

    assert {received.get(timeout=PATIENCE_S) for _ in range(2)} == {"one", "two"}


# --- mistakes ----------------------------------------------------------------------------------------


def test_a_queue_of_another_topic_is_refused(app: App) -> None:
    container = listen(app, [])

    with pytest.raises(ListenerError, match=r"queue other/0 of broker broker-a is not assigned to this listener; "):
        container.seek(MessageQueue("other", app.broker.name, 0), 0)


def test_a_stopped_listener_has_no_position_to_change(threaded_app: App) -> None:
    container = listen(threaded_app, [])
    container.stop()
    assert container.state is ContainerState.STOPPED

    with pytest.raises(ListenerError, match="listener bill is not running; start it first"):
        container.rewind("1h")


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None), "has no time zone; give it one"),
        (1_700_000_000, r"is epoch seconds; give epoch milliseconds \(1700000000000\)"),
    ],
)
def test_a_time_that_may_mean_two_things_is_refused(app: App, time: datetime | int, expected: str) -> None:
    container = listen(app, [])

    with pytest.raises(ListenerError, match=expected):
        container.reset_to_time(time)


@pytest.mark.parametrize(
    ("span", "expected"),
    [("yesterday", "span must be a duration: '3h', .*; got 'yesterday'"), (timedelta(hours=-1), "must be 0 or longer")],
)
def test_a_span_that_is_none_is_refused(app: App, span: str | timedelta, expected: str) -> None:
    container = listen(app, [])

    with pytest.raises(ValueError, match=expected):
        container.rewind(span)
