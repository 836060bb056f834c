"""Event loops for ``async def`` handlers: one loop for all listeners of an application."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RunCoroutine = Callable[[Coroutine[Any, Any, object]], object]
"""Function that runs a coroutine to its end and returns its result; the calling thread waits."""


class LoopThread:
    """Event loop in a thread of its own, started with the first coroutine.

    The consume thread that passes a coroutine waits for it. So the number of consume threads of a listener limits how
    many of its coroutines run at once. A coroutine sees the context variables of that thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Run a coroutine on the loop, wait for it, and return its result."""
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
        """Cancel the coroutines that still run, and end the thread. Stop the listeners before."""
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
    """Event loop that runs only while a caller waits for a result. Listeners on a virtual clock use it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
        """Run a coroutine to its end and return its result."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if not _is_in_running_loop():
            return self._loop.run_until_complete(coroutine)
        # An async test moves the clock. A thread can run one loop only, so a second thread runs this one.
        with ThreadPoolExecutor(max_workers=1) as helper:
            context = contextvars.copy_context()
            return helper.submit(context.run, self._loop.run_until_complete, coroutine).result()

    def stop(self) -> None:
        """Close the loop; the next coroutine opens a new one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _is_in_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
