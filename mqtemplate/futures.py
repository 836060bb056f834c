"""Futures that can be awaited: the results of calls that do not wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast
from weakref import WeakSet

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import EventLoopBlockedError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.user_code import error_text, is_interrupt

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

__all__ = [
    "AwaitableFuture",
    "HandlerFuture",
    "Waiter",
    "handler_loops",
    "has_known_parts",
    "refuse_on_handler_loop",
    "running_loop",
]

T = TypeVar("T")

_log = get_logger("mqtemplate.futures")

_DONE = ("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED")  # states of `concurrent.futures`
_PARTS = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
"""Attributes of a `concurrent.futures.Future`. With others, futures are built without them."""


class _HandlerLoop(Protocol):
    def is_current(self) -> bool: ...


handler_loops: WeakSet[_HandlerLoop] = WeakSet()
"""Event loops of the ``async def`` handlers of applications; several may share one loop. The listeners add them."""


class _SmallCondition:
    """The part of `threading.Condition` that a future uses, in two objects instead of nine.

    A producer may have thousands of futures. The garbage collector visits each object, which took a quarter of the time
    of an asynchronous send.
    """

    __slots__ = ("_lock", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: tuple[threading.Lock, ...] = ()

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for `notify_all`, and acquire it again. Return False after *timeout* seconds."""
        waiting = threading.Lock()
        waiting.acquire()
        self._waiting = (*self._waiting, waiting)
        self._lock.release()
        try:
            return waiting.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            self._lock.acquire()
            self._waiting = tuple(each for each in self._waiting if each is not waiting)

    def notify_all(self) -> None:
        """Wake the threads that wait. The caller has the lock."""
        waiting, self._waiting = self._waiting, ()
        for each in waiting:
            each.release()


class _PortableFuture(Future[T]):
    """A future whose callbacks are called by `_call_back`, over the public methods of `concurrent.futures`."""

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        super().add_done_callback(lambda _: self._call_back(fn))

    def _call_back(self, callback: Callable[[Future[T]], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            if is_interrupt(error):
                raise
            _log.error("future.callback_failed", error=error_text(error), exc_info=error)


class _SmallFuture(_PortableFuture[T]):
    """The same with a `_SmallCondition`. It rests on private parts of CPython, see `_PARTS`."""

    def __init__(self) -> None:
        # All that `Future.__init__` does, but for its condition, which would take longer than the rest together.
        self._condition = cast(threading.Condition, _SmallCondition())
        self._state = "PENDING"
        self._result = None
        self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        with self._condition:
            if self._state not in _DONE:
                self._done_callbacks.append(fn)
                return
        self._call_back(fn)

    def _invoke_callbacks(self) -> None:
        for each in self._done_callbacks:
            self._call_back(each)


def has_known_parts(future: Future[Any]) -> bool:
    """Return True for a future of `concurrent.futures` as CPython 3.11 to 3.14 create it."""
    known = vars(future).keys() == _PARTS and vars(future)["_state"] == "PENDING"
    return known and callable(getattr(future, "_invoke_callbacks", None))


if TYPE_CHECKING:
    _BaseFuture = _SmallFuture
else:
    _BaseFuture = _SmallFuture if has_known_parts(Future()) else _PortableFuture


class AwaitableFuture(_BaseFuture[T]):
    """A `concurrent.futures.Future` that a coroutine can also await, on any asyncio event loop.

    The loop goes on while a coroutine waits. If the waiting task is cancelled, the future is cancelled too, and what it
    stands for may still happen: a message that is being sent is not called off.

    Whatever a callback raises is logged, and nothing else. It runs in the thread that sets the result: a thread of a
    connection or of the flush, which other messages need.
    """

    def __await__(self) -> Generator[Any, None, T]:
        from asyncio import get_running_loop, wrap_future  # not needed where no coroutine waits

        return (yield from wrap_future(self, loop=get_running_loop()).__await__())


class Waiter(Generic[T]):
    """Result of one call that one thread waits for. A bare lock is the cheapest way to wait.

    Attributes:
        result: None until there is one.
    """

    __slots__ = ("_lock", "result")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.result: T | None = None

    def set_result(self, result: T) -> None:
        """Set the result, once, and wake the thread."""
        self.result = result
        self._lock.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Return True when there is a result; -1 waits without a timeout, any other negative number does not wait."""
        return self._lock.acquire(timeout=timeout_s if timeout_s == -1 else max(timeout_s, 0.0))


class HandlerFuture(AwaitableFuture[T]):
    """A future that needs a handler to run, such as the future of a reply.

    Args:
        call: The call that returned it, for errors.
        clock: The virtual clock of the broker. A caller that waits lets time pass; only a coroutine that runs on this
            clock does not, since the harness of the test goes on meanwhile.
    """

    def __init__(self, call: str, clock: VirtualClock | None) -> None:
        super().__init__()
        self._call = call
        self._clock = clock

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Raises:
            EventLoopBlockedError: This thread runs an event loop on which the handler may have to run.
            UnsupportedError: The clock is virtual, and no harness advances it while the caller waits.
        """
        if not self.done():
            refuse_on_handler_loop("waiting for the result", f"await {self._call}(...)")
            if self._clock is not None and timeout is None:
                self._let_time_pass(self._clock)
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        clock = self._clock
        if clock is None or self.done():
            return (yield from super().__await__())
        runs_on_clock: bool = getattr(running_loop(), "clock", None) is clock
        if runs_on_clock:
            with clock.awaiting():
                return (yield from super().__await__())
        self._let_time_pass(clock)
        return (yield from super().__await__())

    def _let_time_pass(self, clock: VirtualClock) -> None:
        if not clock.wait_for(self.done):
            raise UnsupportedError(
                f"the result of {self._call} needs time, and nothing advances the virtual clock; make a Harness, which "
                "does while the caller waits, or advance the clock before you wait"
            )


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if there is one. asyncio is not imported for it."""
    asyncio = sys.modules.get("asyncio")
    return None if asyncio is None else asyncio._get_running_loop()


def refuse_on_handler_loop(call: str, instead: str) -> None:
    """Raise `EventLoopBlockedError` if this thread runs an event loop of ``async def`` handlers."""
    if any(loop.is_current() for loop in tuple(handler_loops)):
        raise EventLoopBlockedError(
            f"{call} would block this event loop, and the handler that it waits for may run on it; write {instead!r}"
        )
