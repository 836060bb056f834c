"""Event loops for ``async def`` handlers: one loop for all listeners of an application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.errors import ListenerError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import handler_loops, running_loop
from mqtemplate.listener.consuming.handler_loop import HandlerLoop, cancel_others

_log = get_logger("mqtemplate.listener")

_CANCEL_S = 10.0


def choose_loop(clock: Clock) -> HandlerLoop:
    """Return the loop for the handlers of an application that this thread starts.

    It is the event loop that runs in this thread, so that handlers share its clients and sessions. Without one it is a
    loop in a thread of its own. On a virtual clock it is a loop whose time is that of the clock.
    """
    if isinstance(clock, VirtualClock):
        from mqtemplate.listener.consuming.virtual_loop import VirtualLoop  # only tests need it

        return VirtualLoop(clock)
    loop = running_loop()
    return LoopThread() if loop is None else RunningLoop(loop)


class RunningLoop(HandlerLoop):
    """Event loop in which the application was started. The program that runs it also ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def open(self) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed():
            raise ListenerError(
                "the event loop in which the application was started is closed, and its handlers run there; stop the "
                "application before the loop ends: 'async with MQApplication(...)', or await app.stop_async()"
            )
        return self._loop

    def is_current(self) -> bool:
        return running_loop() is self._loop

    def call_outside(self, function: Callable[[], object]) -> None:
        _call_in_thread(function)

    def stop(self) -> None:
        self.cancel()
        handler_loops.discard(self)


class LoopThread(HandlerLoop):
    """Event loop in a thread of its own, started with the first coroutine."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="mqtemplate-listener-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def call_outside(self, function: Callable[[], object]) -> None:
        _call_in_thread(function)

    def stop(self) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        handler_loops.discard(self)
        if thread is threading.current_thread():  # a handler stops the application
            loop.call_soon(loop.stop)
            return
        try:
            asyncio.run_coroutine_threadsafe(cancel_others(), loop).result(_CANCEL_S)
        except TimeoutError:
            _log.warning("listener.tasks_not_cancelled", seconds=_CANCEL_S, reason="they ignore the cancellation")
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CANCEL_S)
        if not thread.is_alive():
            loop.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped.

    For ``SystemExit`` and ``KeyboardInterrupt`` asyncio ends the loop, also if they come from a task that a handler
    started. Here they are errors of that task: the handlers of all listeners use this loop.
    """
    while True:
        try:
            loop.run_forever()
            return
        except BaseException:
            _log.exception("listener.task_failed", hint="a task that a handler has started raised it")


def _call_in_thread(function: Callable[[], object]) -> None:
    threading.Thread(target=function, name="mqtemplate-stop").start()
