"""Pause, and changes of the read position, on a running listener."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import ConsumeMode, ContainerState, ListenerContainer, message_listener
from mqtemplate.message import MessageQueue
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


# --- seek --------------------------------------------------------------------------------------------


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


def test_a_stopped_listener_has_no_position_to_change(threaded_app: App) -> None:
    container = listen(threaded_app, [])
    container.stop()
    assert container.state is ContainerState.STOPPED

    with pytest.raises(ListenerError, match="listener bill is not running; start it first"):
        container.rewind("1h")
