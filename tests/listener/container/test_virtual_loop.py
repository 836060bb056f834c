"""``async def`` handlers on a virtual clock: the harness drives the time of their loop."""

from __future__ import annotations

import asyncio
import threading
from asyncio import sleep as virtual_sleep
from collections.abc import Callable, Iterator
from socketserver import StreamRequestHandler, TCPServer
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import EventLoopBlockedError, UnsupportedError
from mqtemplate.listener import message_listener
from mqtemplate.listener.container import virtual
from mqtemplate.listener.container.virtual import VirtualLoop
from mqtemplate.template import RocketMQTemplate

if TYPE_CHECKING:
    from tests.listener.conftest import App

SECOND = 1_000
HOUR_S = 3_600


@pytest.fixture
def done() -> list[str]:
    """Bodies of the messages whose handler has ended."""
    return []


def sleeper(done: list[str], seconds: float = 3, **attributes: Any) -> Callable[..., Any]:
    @message_listener(topic="orders", consumer_group="billing", **attributes)
    async def bill(body: str) -> None:
        await virtual_sleep(seconds)
        done.append(body)

    return bill


# --- sleeping ------------------------------------------------------------------------------------


def test_sleeps_of_this_python_are_told_from_timeouts() -> None:
    """asyncio schedules a private function of its own for a sleep. If another version has another one, see below."""
    scheduled: list[object] = []

    class Recorder(asyncio.SelectorEventLoop):
        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
            scheduled.append(callback)
            return super().call_at(when, callback, *args, context=context)

    loop = Recorder()
    loop.run_until_complete(virtual_sleep(0.001))
    loop.close()
    assert scheduled == [virtual._WAKE_OF_SLEEP]


def test_a_handler_sleeps_also_where_sleeps_cannot_be_told_from_timeouts(
    app: App, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "_WAKE_OF_SLEEP", None)
    app.listen(sleeper(done))
    app.send("orders", "a")
    app.advance("3s")

    assert done == ["a"]


def test_a_timeout_of_asyncio_ends_in_virtual_time(app: App, done: list[str]) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), HOUR_S)
        done.append(body)

    app.listen(bill)
    app.send("orders", "a")
    app.advance("1h")

    assert done == ["a"]


def test_sleeps_are_the_same_when_a_running_loop_moves_the_clock(app: App, done: list[str]) -> None:
    async def test() -> None:
        app.listen(sleeper(done))
        app.send("orders", "a")
        app.advance("2s")
        assert done == []
        app.advance("1s")

    asyncio.run(test())

    assert done == ["a"]


# --- waiting for other handlers ------------------------------------------------------------------


def test_a_handler_awaits_the_reply_of_its_own_listener(app: App) -> None:
    """While it waits, its container goes on with the next message."""
    template = RocketMQTemplate(app.broker)

    @message_listener(topic="numbers", consumer_group="factorial")
    async def factorial(number: int) -> int:
        if number == 0:
            return 1
        await virtual_sleep(1)
        return number * await template.async_send_and_receive("numbers", number - 1, int, timeout="1h")

    app.listen(factorial)
    assert app.harness
    started_ms = app.broker.clock.now_ms()

    assert template.send_and_receive("numbers", 5, int, timeout="1h") == 120
    assert app.broker.clock.now_ms() == started_ms + 5 * SECOND


def test_a_blocking_request_in_a_handler_is_refused(app: App) -> None:
    """As on the real clock, where it would block the loop."""
    template = RocketMQTemplate(app.broker)
    refused: list[str] = []

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        with pytest.raises(EventLoopBlockedError) as error:
            template.send_and_receive("prices", body, str)
        refused.append(str(error.value))

    app.listen(bill)
    app.send("orders", "tea")
    app.run_until_idle()

    [text] = refused
    assert "write 'await template.async_send_and_receive(...)'" in text


# --- waiting for something real ------------------------------------------------------------------


class Echo(StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(self.rfile.readline())


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Port of a server that returns a line."""
    with TCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def echoing(done: list[str], echo_port: int) -> Callable[..., Any]:
    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", echo_port)
            writer.write(f"{body}\n".encode())
            done.append((await reader.readline()).decode().strip())
            writer.close()
            await writer.wait_closed()

    return bill


def test_a_handler_uses_a_socket(app: App, done: list[str], echo_port: int) -> None:
    """Its timeout does not pass in virtual time while the server answers."""

    app.listen(echoing(done, echo_port))
    app.send("orders", "a", "b")
    app.advance("60s")

    assert sorted(done) == ["a", "b"]


def test_a_handler_uses_a_socket_while_background_tasks_sleep(app: App, done: list[str], echo_port: int) -> None:
    """A task that outlives the handler or hook that started it does not count as a sleeping handler."""
    background: list[asyncio.Task[None]] = []

    async def on_start() -> None:
        background.append(asyncio.ensure_future(virtual_sleep(HOUR_S)))
        await asyncio.wait(background, timeout=0)

    app.registry.loop.run(on_start())
    app.listen(echoing(done, echo_port))
    app.send("orders", "a")
    app.run_until_idle()

    assert done == ["a"]


def test_a_handler_uses_a_thread(app: App, done: list[str]) -> None:
    proceed = threading.Event()

    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await asyncio.to_thread(proceed.wait)
        await virtual_sleep(3)
        done.append(body)

    app.listen(bill)
    app.send("orders", "a")
    threading.Timer(0.01, proceed.set).start()
    app.advance("3s")

    assert done == ["a"]


# --- stop ----------------------------------------------------------------------------------------


def test_a_stop_cancels_handlers_that_sleep_longer(app: App, done: list[str]) -> None:
    container = app.listen(sleeper(done, HOUR_S))
    app.send("orders", "a")
    app.run_until_idle()

    with capture_logs() as logs:
        container.stop()
        app.registry.stop()

    assert done == []
    assert app.committed("billing") in (None, 0)
    assert [line["unfinished"] for line in logs if line["event"] == "listener.stopped"] == [1]
    assert not [thread for thread in threading.enumerate() if thread.name == "mqtemplate-virtual-consume"]


def test_a_handler_may_stop_the_listeners(app: App, done: list[str]) -> None:
    @message_listener(topic="orders", consumer_group="billing")
    async def bill(body: str) -> None:
        await virtual_sleep(1)
        app.registry.stop()
        done.append(body)

    app.listen(bill)
    app.send("orders", "a")
    app.advance("1s")

    assert done == ["a"]
    assert app.harness.clock.services == []


# --- the loop alone ------------------------------------------------------------------------------


def test_without_a_harness_a_coroutine_moves_the_clock() -> None:
    """The hooks of an application run so, before a harness exists."""
    clock = VirtualClock()
    started_ms = clock.now_ms()
    loop = VirtualLoop(clock)

    async def count() -> int:
        await virtual_sleep(3)
        return 7

    assert loop.run(count()) == 7
    assert clock.now_ms() == started_ms + 3 * SECOND
    loop.stop()


@pytest.mark.parametrize("with_harness", [False, True])
def test_a_coroutine_that_nothing_wakes_is_an_error(app: App, with_harness: bool) -> None:
    clock = app.broker.clock
    assert isinstance(clock, VirtualClock)
    assert not with_harness or app.harness
    loop = VirtualLoop(clock)

    with pytest.raises(UnsupportedError, match="waits for something that no timer and no service does"):
        loop.run(asyncio.Event().wait())
    loop.stop()


@pytest.mark.parametrize("with_harness", [False, True])
def test_the_clock_sleeps_in_virtual_time(app: App, with_harness: bool) -> None:
    """A harness does the work that is due meanwhile."""
    clock = app.broker.clock
    started_ms, pause = clock.now_ms(), clock.sleep
    received: list[tuple[str, int]] = []

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        received.append((body, clock.now_ms() - started_ms))

    app.listen(bill)
    assert not with_harness or app.harness
    RocketMQTemplate(app.broker).sync_send("orders", "a", delay="2s")
    pause(3)

    assert clock.now_ms() == started_ms + 3 * SECOND
    assert received == ([("a", 2 * SECOND)] if with_harness else [])


def test_a_plain_handler_sleeps_with_the_clock(app: App, done: list[str]) -> None:
    pause = app.broker.clock.sleep

    @message_listener(topic="orders", consumer_group="billing")
    def bill(body: str) -> None:
        pause(3)
        done.append(body)

    app.listen(bill)
    app.send("orders", "a")
    started_ms = app.broker.clock.now_ms()
    app.run_until_idle()

    assert done == ["a"]
    assert app.broker.clock.now_ms() == started_ms + 3 * SECOND


def test_a_negative_sleep_is_refused() -> None:
    pause = VirtualClock().sleep

    with pytest.raises(ValueError, match="sleep length must not be negative, got -1"):
        pause(-1)
