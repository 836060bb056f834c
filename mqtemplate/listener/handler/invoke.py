"""Invocation of a handler: one way for each call, composed once at the start, from messages to failures.

::

    observers(failures(middlewares(error handler(publisher(scope(arguments(handler)))))))

The first two return the failures, the others the result of the handler. What a listener does not have is left out. If
nothing is around a handler, it is called with the message itself, without a `HandlerCall`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import HandlerCall, HandlerWrapper, ListenerInfo, Observation
from mqtemplate.calls.middlewares import arounds, check_listener
from mqtemplate.calls.pauses import PauseListener
from mqtemplate.calls.steps import (
    AnyAround,
    Next,
    RunAwaitable,
    Wrapper,
    chained,
    is_async_around,
    unwrapped,
    wrapper_of,
)
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.results import ConsumeStatus, is_sends
from mqtemplate.listener.failures.failure import BatchFailure, Failure, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.handler.current import enter_batch, enter_message, handler_context
from mqtemplate.listener.handler.payload import Read
from mqtemplate.listener.handler.plan import Endpoint, ErrorHandler
from mqtemplate.listener.handler.providers import is_async
from mqtemplate.listener.handler.results import check_result, failed_indices, is_batch_done, is_done
from mqtemplate.message import MessageExt, Property
from mqtemplate.user_code import safe_text

Observer = Callable[[Sequence[MessageExt], Sequence[Failure]], object]
"""Function that gets the messages of one call, and its failures."""


def _no_properties(payload: object) -> Mapping[str, str]:
    return {}


class HandlerInvocation:
    """Handler of one endpoint, as functions from messages to failures. They never raise an error of the handler.

    Args:
        info: The listener, as middlewares see it.
        run: Runs the result of an ``async def`` handler to its end, while the calling thread waits.
        observation: Measures or traces the calls; its wrapper is outermost but for *observers*.
        observers: Reported to after each call, on a virtual clock only: on a real one they would cost time for each
            message. The list may grow.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        info: ListenerInfo,
        broker: Broker,
        converter: MessageConverter,
        run: RunAwaitable,
        log: FailureLog,
        observation: Observation | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        plan = endpoint.plan
        self._info = info
        self._group = endpoint.settings.group
        self._topics = endpoint.settings.topics or endpoint.settings.topic_patterns
        self._context = handler_context(self._group, self._topics)
        self._reply_timeout_ms = endpoint.settings.reply_timeout
        self._broker = broker
        self._observation = observation or Observation()
        self._converter = converter
        self._properties_of: Callable[[object], Mapping[str, str]] = getattr(converter, "properties_of", _no_properties)
        self._run = run
        self._log = log
        self._publisher = plan.publisher
        self._warned = plan.publishes
        check_listener(endpoint.middlewares, info)
        middlewares = arounds(endpoint.middlewares, "consume")
        # The results of most handlers are None. Only what is around a handler needs that it sends them itself.
        self._sends_results = bool(plan.is_batch or middlewares or endpoint.on_error or plan.sends_results)
        reading: tuple[AnyAround, ...] = ()
        handler = _single_call(plan.sending_call(converter))
        if plan.is_batch:
            handler, reading = _batch_call(plan.batch_call()), (_reading(plan.payload_reader(converter)),)
        decide = unwrapped if endpoint.on_error is None else deciding(endpoint.on_error, run)
        around_handler = chained((wrapper_of((*middlewares, *reading), run), decide))
        handle = around_handler(_innermost(handler, info.is_async, run))
        self._call: Callable[[MessageExt], Any] = plan.single_call(converter)
        if self._sends_results:
            self._call = lambda message: handle(HandlerCall(info, (message,)))

        report = _reporting(observers) if info.clock.is_virtual else unwrapped
        observed = chained((report, self._observation.handling(info)))
        one, on_loop = observed(self._failures_of_one), observed(self._failures_on_loop)

        async def handle_on_loop(message: MessageExt) -> Failure | None:
            return _first(await on_loop(HandlerCall(info, (message,))))

        is_bare = one == self._failures_of_one
        self._run_one = self._handle_one if is_bare else lambda message: _first(one(HandlerCall(info, (message,))))
        self._run_on_loop = self._handle_on_loop if is_bare else handle_on_loop
        self._run_batch = observed(self._batch_failures(handle)) if plan.is_batch else None

    def handle(self, messages: Sequence[MessageExt]) -> Sequence[Failure]:
        """Handle several messages: in one call if the handler takes batches, else one after the other."""
        if self._run_batch is not None:
            failures: Sequence[Failure] = self._context.copy().run(self._run_batch, HandlerCall(self._info, messages))
            return failures
        return [failure for message in messages if (failure := self.handle_one(message)) is not None]

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        return self._context.copy().run(self._run_one, message)

    def task_of(self, message: MessageExt, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Failure | None]:
        """Return a task on a loop that handles one message with an ``async def`` handler of single messages."""
        return loop.create_task(self._run_on_loop(message), context=self._context.copy())

    # --- from results to failures ------------------------------------------------------------------

    def _failures_of_one(self, call: HandlerCall) -> Sequence[Failure]:
        return () if (failure := self._handle_one(call.messages[0])) is None else (failure,)

    async def _failures_on_loop(self, call: HandlerCall) -> Sequence[Failure]:
        return () if (failure := await self._handle_on_loop(call.messages[0])) is None else (failure,)

    def _handle_one(self, message: MessageExt) -> Failure | None:
        enter_message(self._group, self._topics, message)
        try:
            result = self._call(message)
            if result is None or not self._asks_for_redelivery(message, _awaited(result, self._run)):
                return None
            return Failure((message,), None)
        except BaseException as error:
            raise_if_not_of_handler(error)
            return Failure((message,), error)

    async def _handle_on_loop(self, message: MessageExt) -> Failure | None:
        enter_message(self._group, self._topics, message)
        try:
            result = await self._call(message)
            if result is None:
                return None
            if not self._sends_results and is_sends(result):
                await self._publisher.publish_async(result)
                return None
            if isinstance(result, ConsumeStatus) or not message.properties.get(Property.REPLY_TO_CLIENT):
                asks = self._asks_for_redelivery(message, result)
            else:  # a reply waits for the broker, and this loop runs other handlers
                asks = await asyncio.to_thread(self._asks_for_redelivery, message, result)
            return Failure((message,), None) if asks else None
        except BaseException as error:
            # Also because asyncio would end the loop, which runs the handlers of all listeners, for some of them.
            raise_if_not_of_handler(error)
            return Failure((message,), error)

    def _batch_failures(self, handle: Next) -> Callable[[HandlerCall], Sequence[Failure]]:
        """Return the function that handles a batch. Each body is converted alone, so an invalid one fails alone."""
        is_on_loop = inspect.iscoroutinefunction(handle)

        def handle_batch(call: HandlerCall) -> Sequence[Failure]:
            enter_batch(self._group, call.messages)
            outcome = _BatchOutcome()
            _OUTCOME.set(outcome)
            try:
                try:
                    self._run(handle(call)) if is_on_loop else handle(call)
                except BatchFailure as failure:
                    if outcome.failed is None or outcome.failed.error is not failure:  # a middleware raised it
                        outcome.note_indices(call.messages, failure.failed, failure)
            except BaseException as error:
                raise_if_not_of_handler(error)
                unreadable = {id(failure.messages[0]) for failure in outcome.unreadable}
                readable = [message for message in call.messages if id(message) not in unreadable]
                return [*outcome.unreadable, Failure(readable, error)]
            return outcome.failures()

        return handle_batch

    def _asks_for_redelivery(self, message: MessageExt, result: object) -> bool:
        if result is None or isinstance(result, ConsumeStatus):
            return result is ConsumeStatus.RECONSUME_LATER
        if is_sends(result):
            if not self._sends_results:
                self._publisher.publish(result)
            return False
        check_result(result)
        if message.properties.get(Property.REPLY_TO_CLIENT):
            self._reply(message, result)
        elif not self._warned:
            self._warned = True
            self._log.result_ignored(result)
        return False

    def _reply(self, request: MessageExt, result: object) -> None:
        """Send the result of the handler to the client that sent the request.

        A reply that fails is logged and nothing else, as in rocketmq-spring, whatever the converter raises: the message
        was handled, and the client gets a timeout.
        """
        try:
            body, content_type = self._converter.to_body(result)
            properties = self._properties_of(result)
            if content_type is not None:
                properties = {**properties, CONTENT_TYPE: content_type}
            properties = self._observation.reply_properties(properties)
            self._broker.requests.reply(request, body, properties, self._reply_timeout_ms)
        except BaseException as exc:
            raise_if_not_of_handler(exc)
            self._log.reply_failed(request, exc)


def _first(failures: Sequence[Failure]) -> Failure | None:
    return failures[0] if failures else None


def _awaited(result: Any, run: RunAwaitable) -> Any:
    """Return the result of an ``async def`` function; other results unchanged."""
    return run(result) if result is not None and inspect.isawaitable(result) else result


def _reporting(observers: Sequence[Observer]) -> HandlerWrapper:
    """Return the wrapper that reports each call after it. Tasks on an event loop exist on a real clock only."""

    def wrap(next_: Next) -> Next:
        def report(call: HandlerCall) -> Sequence[Failure]:
            failures: Sequence[Failure] = next_(call)
            for observe in observers:
                observe(call.messages, failures)
            return failures

        return next_ if inspect.iscoroutinefunction(next_) else report

    return wrap


# --- the handler itself ------------------------------------------------------------------------------


def _innermost(handler: Next, on_loop: bool, run: RunAwaitable) -> Next:
    """Return a handler as a function of a call: a coroutine function, or one that waits for what is awaitable."""

    def handle(call: HandlerCall) -> object:
        return _awaited(handler(call), run) if call.messages else None

    async def handle_on_loop(call: HandlerCall) -> object:
        return await handler(call) if call.messages else None

    return handle_on_loop if on_loop else handle


def _single_call(function: Callable[[MessageExt], Any]) -> Next:
    return lambda call: function(call.messages[0])


def _batch_call(function: Callable[..., Any]) -> Next:
    return lambda call: function(call.payloads, call.messages)


def around(
    middlewares: Iterable[object], call: Callable[[MessageExt], Any], info: ListenerInfo, run: RunAwaitable
) -> Callable[[MessageExt], Any]:
    """Return a function of a message with middlewares around it, in place of those around the handler."""
    found = tuple(middlewares)
    check_listener(found, info)
    handle = wrapper_of(arounds(found, "consume"), run)(_innermost(_single_call(call), info.is_async, run))
    return lambda message: handle(HandlerCall(info, (message,)))


def listener_info(endpoint: Endpoint, broker: Broker, resume: Callable[[], None]) -> ListenerInfo:
    """Return the listener of an endpoint, as middlewares see it.

    Args:
        resume: Function that ends a pause of the listener.
    """
    return ListenerInfo(
        id=endpoint.id,
        group=endpoint.settings.group,
        topics=endpoint.settings.topics,
        is_batch=endpoint.plan.is_batch,
        is_async=endpoint.plan.is_async,
        clock=broker.clock,
        is_done=is_batch_done if endpoint.plan.is_batch else is_done,
        resume=resume,
    )


def uses_loop(endpoint: Endpoint) -> bool:
    """Return True if something of a listener is ``async``: a handler, its error handler, or a middleware."""
    on_error = endpoint.on_error
    return (
        any(plan.is_async for plan in endpoint.plan.plans())
        or any(map(is_async_around, arounds(endpoint.middlewares, "consume")))
        or (on_error is not None and is_async(on_error))
    )


# --- the error handler of a listener -----------------------------------------------------------------

_NO_ERRORS = (BatchFailure, PauseListener)
"""Exceptions that decide themselves."""


def deciding(on_error: ErrorHandler, run: RunAwaitable) -> Wrapper:
    """Return the wrapper that returns the status of an error handler in place of an exception.

    Args:
        run: Runs an awaitable of the error handler of a plain handler, while this thread waits.
    """

    def verdict_of(error: BaseException, call: HandlerCall) -> Any:
        raise_if_not_of_handler(error)
        return on_error(error, list(call.messages) if call.listener.is_batch else call.messages[0])

    def wrap(next_: Next) -> Next:
        def call_or_decide(call: HandlerCall) -> object:
            try:
                return next_(call)
            except _NO_ERRORS:
                raise
            except BaseException as error:
                status = _checked(_awaited(verdict_of(error, call), run))
                if status is None:
                    raise
                return status

        async def await_or_decide(call: HandlerCall) -> object:
            try:
                return await next_(call)
            except _NO_ERRORS:
                raise
            except BaseException as error:
                verdict = verdict_of(error, call)
                status = _checked(await verdict if inspect.isawaitable(verdict) else verdict)
                if status is None:
                    raise
                return status

        return await_or_decide if inspect.iscoroutinefunction(next_) else call_or_decide

    return wrap


def _checked(verdict: object) -> ConsumeStatus | None:
    if verdict is None or isinstance(verdict, ConsumeStatus):
        return verdict
    raise ListenerError(f"the error handler returned {safe_text(verdict, 200, repr)}; return None or a ConsumeStatus")


# --- batches -----------------------------------------------------------------------------------------


class _BatchOutcome:
    """Messages of one call that failed, as they were fetched."""

    def __init__(self) -> None:
        self.unreadable: list[Failure] = []
        self.failed: Failure | None = None

    def failures(self) -> list[Failure]:
        return self.unreadable if self.failed is None else [*self.unreadable, self.failed]

    def note_indices(self, messages: Sequence[MessageExt], failed: Any, error: BatchFailure | None) -> None:
        indices = sorted(failed_indices(failed, len(messages)))
        self.failed = Failure([messages[index] for index in indices], error) if indices else None


_OUTCOME: ContextVar[_BatchOutcome] = ContextVar("mqtemplate_batch_outcome")
"""Outcome of the batch that is being handled: each call of a handler has a context of its own."""


class _ReadBatch(HandlerCall):
    """Call of a batch handler with the payloads of its messages."""

    __slots__ = ("payloads",)

    def __init__(
        self, call: HandlerCall, messages: list[MessageExt], origins: list[MessageExt], payloads: list[object]
    ) -> None:
        super().__init__(call.listener, messages, origins)
        self.payloads = payloads


def _reading(read: Read) -> Callable[[HandlerCall], Generator[HandlerCall, Any, object]]:
    """Return the innermost middleware of a batch handler: it converts the bodies, which others may have changed."""

    def read_payloads(call: HandlerCall) -> Generator[HandlerCall, Any, object]:
        outcome = _OUTCOME.get()
        outcome.unreadable, outcome.failed = [], None
        payloads: list[object] = []
        messages: list[MessageExt] = []
        origins: list[MessageExt] = []
        for message, origin in zip(call.messages, call.origins, strict=True):
            try:
                payloads.append(read(message))
            except BaseException as error:
                raise_if_not_of_handler(error)
                outcome.unreadable.append(Failure((origin,), error))
            else:
                messages.append(message)
                origins.append(origin)
        if not payloads:
            return None
        try:
            result = yield _ReadBatch(call, messages, origins, payloads)
            outcome.note_indices(origins, result, None)
        except BatchFailure as failure:
            outcome.note_indices(origins, failure.failed, failure)
            raise
        return result

    return read_payloads
