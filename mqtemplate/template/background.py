"""Awaitable forms of verbs that wait: they run in background threads of the template."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mqtemplate.futures import AwaitableFuture

P = ParamSpec("P")
R = TypeVar("R")

_MAX_THREADS = 32


class Background:
    """Threads that wait for verbs in place of their callers. A thread starts when a call needs one.

    On a virtual clock no verb waits, and the caller's thread runs it.
    """

    def __init__(self, *, is_virtual: bool) -> None:
        self._is_virtual = is_virtual
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def run(self, call: Callable[[], R], future: AwaitableFuture[R]) -> AwaitableFuture[R]:
        """Call a function with the caller's context variables, and return *future*, which gets the result."""
        work = functools.partial(copy_context().run, _complete, future, call)
        if self._is_virtual:
            work()
            return future
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MAX_THREADS, "mqtemplate-template")
            self._threads.submit(work)
        return future

    def close(self) -> None:
        """End the threads after the calls that run. A later call starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


def _complete(future: AwaitableFuture[R], call: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as exc:
        future.set_exception(exc)
    else:
        future.set_result(result)


class HasBackground(Protocol):
    """Object whose verbs have awaitable forms."""

    @property
    def _background(self) -> Background: ...


_Self = TypeVar("_Self", bound=HasBackground)


def awaitable(verb: Callable[Concatenate[_Self, P], R]) -> Callable[Concatenate[_Self, P], AwaitableFuture[R]]:
    """Return the awaitable form of a verb: same arguments, and a future of the result. Its name starts ``async_``.

    Errors of the verb are in the future. A call that has not started when its future is cancelled is not made.
    """
    name = verb.__name__

    @functools.wraps(verb)
    def call(self: _Self, /, *args: P.args, **options: P.kwargs) -> AwaitableFuture[R]:
        # By name: a subclass may have replaced the verb.
        verb_of_self: Callable[P, R] = getattr(self, name)
        return self._background.run(functools.partial(verb_of_self, *args, **options), AwaitableFuture())

    _rename(call, verb)
    return call


def _rename(call: Any, verb: Callable[..., object]) -> None:
    """Give an awaitable form the name, signature and documentation that help and editors show."""
    call.__name__ = f"async_{verb.__name__}"
    call.__qualname__ = verb.__qualname__.replace(verb.__name__, call.__name__)
    call.__doc__ = f"Do `{verb.__name__}` without blocking; the future, which can be awaited, has the result."
    signature = inspect.signature(verb)
    returns = f"AwaitableFuture[{signature.return_annotation}]"
    call.__signature__ = signature.replace(return_annotation=returns)
    call.__annotations__ = {**verb.__annotations__, "return": returns}
