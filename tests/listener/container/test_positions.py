"""Pause, and changes of the read position, on a running listener."""

from __future__ import annotations

import threading

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import ConsumeMode, ContainerState, message_listener
from mqtemplate.message import MessageQueue
from tests.kit import both_kinds
from tests.listener.conftest import App, Gate
from tests.waiting import PATIENCE_S, eventually

MODES = pytest.mark.parametrize("mode", list(ConsumeMode), ids=lambda mode: mode.value)


# --- pause -------------------------------------------------------------------------------------------


@MODES
def test_pause_holds_on_threads_too(threaded_app: App, mode: ConsumeMode) -> None:
    """A handler that runs finishes. A restart fetches the others again."""
    gate = Gate()
    container = threaded_app.listen(gate.listener(consume_mode=mode, consume_thread_number=1))
    threaded_app.send("orders", "one", "two", "three")
    assert gate.started.wait(PATIENCE_S)
    eventually(lambda: container.member.queues.in_flight == 3, "all three are fetched")

    container.pause()
    gate.proceed.set()
    assert gate.take() == ["one"]
    container.stop()
    assert gate.is_empty
    container.start()

    assert gate.take(2) == ["two", "three"]


@both_kinds
def test_resume_continues_with_the_fetched_messages(threaded_app: App, is_async: bool) -> None:
    gate = Gate()
    container = threaded_app.listen(gate.listener(is_async=is_async, consume_thread_number=1))
    threaded_app.send("orders", "one", "two", "three")
    assert gate.started.wait(PATIENCE_S)
    container.pause()
    gate.proceed.set()
    assert gate.take() == ["one"]

    container.resume()

    assert set(gate.take(2)) == {"two", "three"}


def test_a_pause_that_a_handler_requests_at_the_moment_of_another_one_ends_by_itself(app: App) -> None:
    """Its thread had looked at the state before. The polling thread would look again each millisecond."""
    gate = Gate()
    gate.proceed.set()
    container = app.listen(gate.listener())
    container.pause()

    container.member._resume_ms = app.broker.clock.steady_ms()
    app.run_until_idle()

    assert container.member.step() is None
    assert container.state is ContainerState.PAUSED
    container.resume()
    app.send("orders", "one")
    app.run_until_idle()
    assert gate.take() == ["one"]


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
    gate = Gate().opened()
    container = threaded_app.listen(gate.listener())
    threaded_app.send("orders", "one", "two")
    assert set(gate.take(2)) == {"one", "two"}

    container.seek(MessageQueue("orders", threaded_app.broker.name, 0), 1)
    assert gate.take() == ["two"]
    container.rewind("1h")

    assert set(gate.take(2)) == {"one", "two"}


# --- mistakes ----------------------------------------------------------------------------------------


def test_a_stopped_listener_has_no_position_to_change(threaded_app: App) -> None:
    container = threaded_app.listen(Gate().listener(id="bill"))
    container.stop()
    assert container.state is ContainerState.STOPPED

    with pytest.raises(ListenerError, match="listener bill is not running; start it first"):
        container.rewind("1h")
