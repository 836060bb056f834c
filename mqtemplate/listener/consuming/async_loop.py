"""Where ``async def`` handlers run: one loop for all listeners of an application."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RunCoroutine = Callable[[Coroutine[Any, Any, object]], object]
"""Runs a coroutine to its end and returns its result; the caller's thread waits."""


class LoopThread:
    """An event loop in a thread of its own, started with the first coroutine.

    The worker that brings a coroutine waits for it, so the threads of a listener bound how many of its coroutines
    are under way. Context variables of the worker, such as the current message, are seen by the coroutine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop or self._start()).result()

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="mqtemplate-listener-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def stop(self) -> None:
        """Cancel what still runs and end the thread. Call it after the listeners were stopped."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        if thread is threading.current_thread():  # a handler stops the application
            loop.call_soon(loop.stop)
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class PrivateLoop:
    """A loop that runs only while somebody waits for a result: for virtual clocks, where nothing goes on by itself."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if not _in_running_loop():
            return self._loop.run_until_complete(coroutine)
        # An async test that moves the clock: a thread can have one running loop only, so another one helps out.
        with ThreadPoolExecutor(max_workers=1) as helper:
            context = contextvars.copy_context()
            return helper.submit(context.run, self._loop.run_until_complete, coroutine).result()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
