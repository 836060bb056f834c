"""Applications in asyncio programs: start and stop by await, async hooks, and the loop of async handlers."""

from __future__ import annotations

import asyncio
import threading
from asyncio import sleep as virtual_sleep
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.context import MQApplication, service
from mqtemplate.errors import BrokerClosedError, DependencyError, EventLoopBlockedError, ListenerError
from mqtemplate.listener import message_listener
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.harness import Harness
from tests.context.loading import AppOf
from tests.waiting import PATIENCE_S, eventually

PATIENCE_MS = PATIENCE_S * 1_000


@pytest.fixture
def app_of(app_of: AppOf) -> AppOf:
    """Function that creates applications on the real clock, with a store in memory."""
    return partial(app_of, clock=None)


class Session:
    """A client that works on one event loop only, as clients of databases do."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    async def on_start(self) -> None:
        await asyncio.to_thread(lambda: None)
        self.loop = asyncio.get_running_loop()
        self.events.append("started")

    async def query(self, text: str) -> str:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.to_thread(lambda: None)
        return f"{text} found"

    async def on_stop(self) -> None:
        assert self.loop is asyncio.get_running_loop()
        self.events.append("stopping")

    async def close(self) -> None:
        assert self.loop is asyncio.get_running_loop()
        await asyncio.to_thread(lambda: None)
        self.events.append("closed")


@message_listener("orders", "searchers")
class Searcher:
    def __init__(self, session: Session) -> None:
        self.session = session

    async def on_message(self, text: str) -> str:
        return await self.session.query(text)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(main())


# --- start and stop by await -----------------------------------------------------------------------


def test_hooks_handlers_and_program_share_one_loop(app_of: AppOf) -> None:
    async def main() -> tuple[str, Session]:
        async with app_of(Session, Searcher) as app:
            session = app.get(Session)
            assert session.loop is asyncio.get_running_loop()
            assert app.is_ready.is_set()
            return await app.template.async_send_and_receive("orders", "tea", str, PATIENCE_MS), session

    reply, session = run(main)

    assert reply == "tea found"
    assert session.events == ["started", "stopping", "closed"]


def test_start_and_stop_are_awaited_one_by_one(app_of: AppOf) -> None:
    async def main() -> None:
        app = app_of(Session, Searcher)
        await app.start_async()
        session = app.get(Session)
        assert await app.template.async_send_and_receive("orders", "tea", str, PATIENCE_MS) == "tea found"
        await app.stop_async()
        await app.stop_async()

        assert session.events == ["started", "stopping", "closed"]
        with pytest.raises(BrokerClosedError):
            await app.template.async_send("orders", "tea")

    run(main)


def test_an_application_is_the_lifespan_of_a_web_application(app_of: AppOf) -> None:
    """As Starlette and FastAPI call it: an async context manager around the requests."""

    @asynccontextmanager
    async def lifespan(state: dict[str, MQApplication]) -> AsyncIterator[None]:
        async with app_of(Session, Searcher) as state["mq"]:
            yield

    async def main() -> str:
        state: dict[str, MQApplication] = {}
        async with lifespan(state):
            return await state["mq"].template.async_send_and_receive("orders", "tea", str, PATIENCE_MS)

    assert run(main) == "tea found"


def test_a_stop_by_await_lets_running_handlers_finish(app_of: AppOf) -> None:
    """Their loop goes on meanwhile."""
    finished: list[str] = []

    async def main() -> None:
        entered, proceed = asyncio.Event(), asyncio.Event()

        @message_listener("orders", "g", await_termination_millis_when_shutdown=PATIENCE_MS)
        async def on_order(text: str) -> None:
            entered.set()
            await proceed.wait()
            finished.append(text)

        async with app_of(on_order) as app:
            await app.template.async_send("orders", "tea")
            await asyncio.wait_for(entered.wait(), PATIENCE_S)
            stopping = asyncio.ensure_future(app.stop_async())
            await asyncio.wait([stopping], timeout=0)
            proceed.set()

    run(main)

    assert finished == ["tea"]


def test_a_failed_start_by_await_closes_what_is_open(app_of: AppOf) -> None:
    events: list[str] = []

    class Failing:
        def __init__(self, session: Session) -> None:
            events.append("built")

        async def on_start(self) -> None:
            raise ValueError("no database")

        async def aclose(self) -> None:
            events.append("closed")

    session = Session()

    async def main() -> None:
        with pytest.raises(ValueError, match="no database"):
            await app_of(session, Failing).start_async()

    run(main)

    assert events == ["built", "closed"]
    assert session.events == ["started", "stopping", "closed"]


def test_errors_of_async_stops_are_raised_together(app_of: AppOf) -> None:
    """All other stops run."""

    class Failing:
        def __init__(self, session: Session) -> None: ...

        async def on_stop(self) -> None:
            raise ValueError("no goodbye")

        async def close(self) -> None:
            raise KeyError("closed twice")

    session = Session()

    async def main(error: Exception | None) -> None:
        async with app_of(session, Failing):
            if error is not None:
                raise error

    with pytest.raises(ExceptionGroup) as stopped:
        run(lambda: main(None))
    session.events.clear()
    with pytest.raises(OSError, match="work") as raised:
        run(lambda: main(OSError("work")))

    assert [str(error) for error in stopped.value.exceptions] == ["no goodbye", "'closed twice'"]
    assert session.events == ["started", "stopping", "closed"]
    assert raised.value.__notes__[0] == "stopping failed too: ValueError: no goodbye"


def test_a_cancelled_program_stops_its_application(app_of: AppOf) -> None:
    session = Session()

    async def work() -> None:
        async with app_of(session):
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.ensure_future(work())
        await asyncio.to_thread(eventually, lambda: session.events, "the session was started")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)

    assert session.events == ["started", "stopping", "closed"]


# --- start and stop without await ------------------------------------------------------------------


def test_hooks_and_handlers_share_a_loop_of_their_own(app_of: AppOf) -> None:
    """Without a running loop. It lives until the last hook has ended."""
    with app_of(Session, Searcher) as app:
        session = app.get(Session)
        assert app.template.send_and_receive("orders", "tea", str, PATIENCE_MS) == "tea found"

    assert session.events == ["started", "stopping", "closed"]


def test_a_plain_start_in_a_running_loop_runs_handlers_there(app_of: AppOf) -> None:
    async def main() -> bool:
        handled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        @message_listener("orders", "g")
        async def on_order(text: str) -> None:
            handled.set_result(asyncio.get_running_loop() is loop)

        with app_of(on_order) as app:
            await app.template.async_send("orders", "tea")
            return await asyncio.wait_for(handled, PATIENCE_S)

    assert run(main)


def test_a_plain_start_in_a_running_loop_refuses_async_hooks(app_of: AppOf) -> None:
    """It would wait for the loop that it blocks."""

    class Closing:
        async def aclose(self) -> None: ...

    async def main() -> None:
        with pytest.raises(
            EventLoopBlockedError, match=r"Session\.close is async, and start\(\) .* block the event loop"
        ):
            app_of(Session).start()
        with pytest.raises(EventLoopBlockedError, match=r"\.aclose is async, .* await app.start_async\(\)"):
            app_of(Closing).start()

    run(main)


def test_a_plain_stop_refuses_async_hooks_before_it_stops_anything(app_of: AppOf) -> None:
    async def main() -> None:
        async with app_of(Session) as app:
            with pytest.raises(EventLoopBlockedError, match=r"await app.start_async\(\) and app.stop_async\(\)"):
                app.stop()
            assert app.is_ready.is_set()
            assert (await app.template.async_send("orders", "tea")).msg_id

    run(main)


# --- a handler stops the application ---------------------------------------------------------------


@pytest.mark.parametrize("on_the_loop_of_the_program", [True, False])
def test_a_handler_may_await_the_stop(app_of: AppOf, on_the_loop_of_the_program: bool) -> None:
    """It returns at once, and the handler does not wait for itself."""
    returned = threading.Event()

    @message_listener("orders", "g", await_termination_millis_when_shutdown=PATIENCE_MS)
    async def on_order(text: str) -> None:
        await app.stop_async()
        returned.set()

    async def main() -> None:
        await app.start_async()
        await app.template.async_send("orders", "end")
        await asyncio.to_thread(eventually, lambda: app.containers[0].state.value == "stopped", "it is stopped")
        await app.stop_async()

    session = Session()
    app = app_of(on_order, session)
    if on_the_loop_of_the_program:
        run(main)
    else:
        app.start()
        app.template.sync_send("orders", "end")

    eventually(lambda: session.events == ["started", "stopping", "closed"], "everything is stopped")
    assert returned.is_set()


def test_a_plain_handler_stops_an_application_with_async_hooks(app_of: AppOf) -> None:
    """It stops everything in its own thread, while the program leaves ``async with`` and must not block the hooks."""
    session = Session()

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        @message_listener("orders", "g")
        def on_order(text: str) -> None:
            loop.call_soon_threadsafe(stopping.set)
            app.stop()

        app = app_of(session, on_order)
        async with app:
            await app.template.async_send("orders", "end")
            await asyncio.wait_for(stopping.wait(), PATIENCE_S)

        assert session.events == ["started", "stopping", "closed"]
        with pytest.raises(BrokerClosedError):
            await app.template.async_send("orders", "more")

    run(main)


def test_a_stop_of_an_application_that_was_not_started_has_no_effect(app_of: AppOf) -> None:
    run(lambda: app_of().stop_async())


# --- run -------------------------------------------------------------------------------------------


def test_run_awaits_an_async_main_and_returns_its_result(app_of: AppOf) -> None:
    async def main(template: RocketMQTemplate, session: Session) -> str:
        assert session.loop is asyncio.get_running_loop()
        return await template.async_send_and_receive("orders", "tea", str, PATIENCE_MS)

    session = Session()

    assert app_of(session, Searcher).run(main) == "tea found"
    assert session.events == ["started", "stopping", "closed"]


def test_an_error_in_an_async_main_is_raised_after_the_stop(app_of: AppOf) -> None:
    async def main() -> None:
        raise KeyError("work")

    session = Session()
    with pytest.raises(KeyError, match="work"):
        app_of(session).run(main)

    assert session.events == ["started", "stopping", "closed"]


def test_a_handler_may_request_the_stop_of_run(app_of: AppOf) -> None:
    """The handler runs in the thread of ``run``, which stops the application after it."""
    finished: SimpleQueue[str] = SimpleQueue()

    @message_listener("orders", "g")
    async def on_order(text: str) -> None:
        app.stop()
        await app.stop_async()
        finished.put(text)

    async def main(template: RocketMQTemplate) -> None:
        await template.async_send("orders", "end")

    app = app_of(on_order)
    app.run(main, keep_running=True)

    assert finished.get(timeout=0) == "end"
    assert not app.is_ready.is_set()


def test_run_is_refused_in_a_running_loop(app_of: AppOf) -> None:
    async def main() -> None:
        with pytest.raises(EventLoopBlockedError, match=r"run\(\) would block the event loop of this thread"):
            app_of().run()

    run(main)


def test_a_start_fails_alike_with_and_without_await(app_of: AppOf) -> None:
    @message_listener("orders", "g", selector_expression="a")
    def one(text: str) -> None: ...

    @message_listener("orders", "g", selector_expression="b")
    def other(text: str) -> None: ...

    async def main() -> None:
        with pytest.raises(ListenerError, match="have different subscriptions"):
            await app_of(one, other).start_async()
        app = app_of()
        await app.start_async()
        with pytest.raises(DependencyError, match="an application is started once"):
            await app.start_async()

    run(main)


# --- on a virtual clock ----------------------------------------------------------------------------


@message_listener("orders", "sleepers")
class Sleeper:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.found: list[str] = []

    async def on_message(self, text: str) -> None:
        await virtual_sleep(3)
        self.found.append(await self.session.query(text))


def test_hooks_and_handlers_share_a_loop_on_a_virtual_clock(app_of: AppOf) -> None:
    with app_of(Session, Sleeper, clock=VirtualClock()) as app:
        harness, session = Harness(app), app.get(Session)
        app.template.sync_send("orders", "tea")
        harness.advance("2s")
        assert app.get(Sleeper).found == []
        harness.advance("1s")
        assert app.get(Sleeper).found == ["tea found"]

    assert session.events == ["started", "stopping", "closed"]


def test_an_async_test_starts_an_application_on_a_virtual_clock(app_of: AppOf) -> None:
    """The harness blocks the loop of the test, so handlers and hooks have a loop of the clock."""
    session = Session()

    async def test() -> list[str]:
        async with app_of(session, Sleeper, clock=VirtualClock()) as app:
            await app.template.async_send("orders", "tea", delay="1h")
            Harness(app).advance("1h 3s")
            return app.get(Sleeper).found

    assert run(test) == ["tea found"]
    assert session.events == ["started", "stopping", "closed"]


def test_a_hook_sleeps_in_virtual_time(app_of: AppOf) -> None:
    class Slow:
        async def on_start(self) -> None:
            await virtual_sleep(3_600)

    clock = VirtualClock()
    started_ms = clock.now_ms()
    with app_of(Slow, clock=clock):
        assert clock.now_ms() == started_ms + 3_600_000


def test_a_handler_stops_an_application_on_a_virtual_clock(app_of: AppOf) -> None:
    session = Session()

    @message_listener("orders", "g")
    async def on_order(text: str) -> None:
        await app.stop_async()

    app = app_of(on_order, session, EmbeddedBroker(None, clock=VirtualClock()))
    app.start()
    harness = Harness(app)
    app.template.sync_send("orders", "end")
    harness.run_until_idle()

    assert session.events == ["started", "stopping", "closed"]
    assert not app.is_ready.is_set()


def test_an_async_function_that_builds_an_object_is_refused(app_of: AppOf) -> None:
    """Its coroutine would be injected instead of the object."""

    @service
    async def open_session() -> Session:
        return Session()

    with pytest.raises(
        DependencyError, match="open_session is async, and objects are built without waiting; build it in a plain"
    ):
        app_of(open_session).start()
