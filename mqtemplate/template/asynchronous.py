"""Calls of a template that do not block: awaitable forms of its verbs, callbacks, and requests with their replies."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from mqtemplate.callables import name_of_callable, unfinished
from mqtemplate.calls.send import SendCall, SendPipeline
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.converter import MessageConverter, TypeChecks, payload_of
from mqtemplate.durations import keep_caller
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture, HandlerFuture
from mqtemplate.message import Message, MessageExt
from mqtemplate.user_code import error_text, is_interrupt

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_log = get_logger("mqtemplate.template")

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
        context = copy_context()
        keep_caller(context)
        work = functools.partial(context.run, _complete, future, call)
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
_Template_contra = TypeVar("_Template_contra", contravariant=True)


class AwaitableVerb(Protocol[_Template_contra, P, R]):
    """Type of an awaitable form. It is not a ``Callable``: some type checkers do not bind one to its object."""

    @overload
    def __get__(
        self, template: None, owner: type[object]
    ) -> Callable[Concatenate[_Template_contra, P], AwaitableFuture[R]]: ...
    @overload
    def __get__(self, template: _Template_contra, owner: type[object]) -> Callable[P, AwaitableFuture[R]]: ...


def awaitable(verb: Callable[Concatenate[_Self, P], R]) -> AwaitableVerb[_Self, P, R]:
    """Return the awaitable form of a verb: same arguments, and a future of the result. Its name starts ``async_``.

    Errors of the verb are in the future. A call that has not started when its future is cancelled is not made.
    """
    return cast("AwaitableVerb[_Self, P, R]", awaitable_overloads(verb))


def awaitable_overloads(
    verb: Callable[Concatenate[_Self, P], R],
) -> Callable[Concatenate[_Self, P], AwaitableFuture[R]]:
    """Do `awaitable` for a verb with overloads, which type checkers only keep in a ``Callable``."""
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


# --- callbacks of asynchronous sends and requests ----------------------------------------------------


def add_callbacks(
    future: Future[T],
    on_success: Callable[[T], object] | None,
    on_error: Callable[[BaseException], object] | None,
    *,
    kind: str,
    destination: str,
    executor: Executor | None = None,
) -> None:
    """Call one of the callbacks when the future is done. An error without *on_error* is logged.

    Args:
        executor: Runs the callbacks; without one, the thread that receives the result does.
        kind: First part of the names of log events: ``send`` or ``request``.
    """
    if on_success is None and on_error is None:
        return
    # Not a closure: thousands may wait, and the garbage collector visits each cell of a closure.
    report = partial(_report, on_success, on_error, kind, destination)
    future.add_done_callback(report if executor is None else partial(executor.submit, report))


def _report(
    on_success: Callable[[T], object] | None,
    on_error: Callable[[BaseException], object] | None,
    kind: str,
    destination: str,
    done: Future[T],
) -> None:
    try:
        result = done.result()
    except BaseException as exc:  # also what a middleware of the application raised
        if on_error is None:
            _log.error(f"{kind}.failed", destination=destination, exc_info=exc)
        else:
            _call(on_error, exc, kind, destination)
        return
    if on_success is not None:
        _call(on_success, result, kind, destination)


def _call(callback: Callable[[T], object], value: T, kind: str, destination: str) -> None:
    """Call a callback of the application. Whatever it raises, this thread goes on: others wait for their results."""
    try:
        if (found := unfinished(callback(value))) is not None:
            raise TypeError(
                f"the callback {name_of_callable(callback)} returned {found}, so it did nothing; write it with 'def', "
                "or await the future"
            )
    except BaseException as exc:
        if is_interrupt(exc):
            raise
        _log.error(f"{kind}.callback_failed", destination=destination, error=error_text(exc), exc_info=exc)


# --- requests ---------------------------------------------------------------------------------------


class TemplateRequests:
    """TemplateRequests of one template: sends them and converts the replies."""

    def __init__(self, sends: SendPipeline, clock: Clock, converter: MessageConverter) -> None:
        self._sends = sends
        self._converter = converter
        self._types = TypeChecks(converter)
        self._virtual_clock = clock if isinstance(clock, VirtualClock) else None

    def send(self, call: SendCall, reply_type: type[T]) -> AwaitableFuture[T]:
        """Send the message of *call* and return the future of its reply, as *reply_type*.

        Raises:
            ConversionError: No reply can become *reply_type*; nothing was sent.
        """
        self._types.check(reply_type)
        answer: HandlerFuture[T] = HandlerFuture("async_send_and_receive", self._virtual_clock)
        answer.set_running_or_notify_cancel()  # a message that is sent cannot be cancelled

        def arrived(reply: Future[MessageExt]) -> None:
            try:
                answer.set_result(self._convert(reply.result(), reply_type))
            except BaseException as exc:  # also of the converter: the caller waits for the answer
                answer.set_exception(exc)

        self._sends.call(call).add_done_callback(arrived)
        return answer

    def _convert(self, reply: MessageExt, reply_type: type[T]) -> T:
        wanted: Any = reply_type
        if wanted in (MessageExt, Message):
            return cast("T", reply)
        return cast("T", payload_of(reply, wanted, self._converter))
