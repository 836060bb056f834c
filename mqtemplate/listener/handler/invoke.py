"""Invocation of a handler: it takes messages, replies to requests, and returns the failures."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mqtemplate.broker import Broker
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
from mqtemplate.middlewares.declaration import arounds, check_listener
from mqtemplate.middlewares.delivery import Delivery, ListenerInfo
from mqtemplate.middlewares.pause import PauseListener
from mqtemplate.middlewares.steps import (
    AnyAround,
    RunAwaitable,
    call_around,
    call_around_async,
    is_async_around,
    waiting,
)
from mqtemplate.observation.interface import Observation, ObservedListener
from mqtemplate.user_code import safe_text


def _no_properties(payload: object) -> Mapping[str, str]:
    return {}


class Handling(Protocol):
    """Handler of a listener: it returns the failures."""

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages."""

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""

    def task_of(self, message: MessageExt, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Failure | None]:
        """Return a task on a loop that handles one message with an ``async def`` handler of single messages."""


class Invocation:
    """Handler of one endpoint, as functions from messages to failures. They never raise an error of the handler.

    Args:
        resume: Function that ends a pause of the listener.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        broker: Broker,
        converter: MessageConverter,
        run_awaitable: RunAwaitable,
        log: FailureLog,
        resume: Callable[[], None],
        observation: Observation | None = None,
    ) -> None:
        self._group = endpoint.settings.group
        self._topics = endpoint.settings.topics or endpoint.settings.topic_patterns
        self._context = handler_context(self._group, self._topics)
        self._reply_timeout_ms = endpoint.settings.reply_timeout
        self._sends = broker if observation is None else observation.sends(broker, broker.clock)
        self._converter = converter
        self._properties_of: Callable[[object], Mapping[str, str]] = getattr(converter, "properties_of", _no_properties)
        self._run_awaitable = run_awaitable
        self._log = log
        self._publisher = endpoint.plan.publisher
        self._warned = endpoint.plan.publishes
        info = listener_info(endpoint, broker, resume)
        self._call, self._sends_results, batch = _composed(endpoint, converter, run_awaitable, info)
        observed, listener = observation or Observation(), ObservedListener(endpoint.id, self._group)
        self._run_one = observed.one(listener, self._handle_one, broker.clock)
        self._run_on_loop = observed.one_async(listener, self._handle_on_loop, broker.clock)
        self._run_batch = (
            None if batch is None else observed.many(listener, partial(self._handle_batch, batch), broker.clock)
        )

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages: in one call if the handler takes batches, else one after the other."""
        if self._run_batch is not None:
            return self._context.copy().run(self._run_batch, messages)
        return [failure for message in messages if (failure := self.handle_one(message)) is not None]

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        return self._context.copy().run(self._run_one, message)

    def task_of(self, message: MessageExt, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Failure | None]:
        """Return a task on a loop that handles one message with an ``async def`` handler of single messages."""
        return loop.create_task(self._run_on_loop(message), context=self._context.copy())

    def _handle_one(self, message: MessageExt) -> Failure | None:
        enter_message(self._group, self._topics, message)
        try:
            result = self._call(message)
            if result is None or not self._asks_for_redelivery(message, self._awaited(result)):
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

    def _handle_batch(self, batch: BatchCalls, messages: Sequence[MessageExt]) -> list[Failure]:
        enter_batch(self._group, messages)
        return batch.handle(messages)

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
            self._sends.reply(request, body, properties, self._reply_timeout_ms)
        except BaseException as exc:
            raise_if_not_of_handler(exc)
            self._log.reply_failed(request, exc)

    def _awaited(self, result: object) -> object:
        """Return the result of an ``async def`` handler; other results unchanged."""
        return self._run_awaitable(result) if inspect.isawaitable(result) else result


def around(
    middlewares: Iterable[object], call: Callable[[MessageExt], Any], info: ListenerInfo, run: RunAwaitable
) -> Callable[[MessageExt], Any]:
    """Return a function of a message with middlewares around it, in place of those around the handler."""
    found = tuple(middlewares)
    check_listener(found, info)
    return single_call(call, arounds(found, "consume"), info, run)


def listener_info(endpoint: Endpoint, broker: Broker, resume: Callable[[], None]) -> ListenerInfo:
    """Return the listener of an endpoint, as middlewares see it."""
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


def _composed(
    endpoint: Endpoint,
    converter: MessageConverter,
    run: RunAwaitable,
    info: ListenerInfo,
) -> tuple[Callable[[MessageExt], Any], bool, BatchCalls | None]:
    """Return the handler of single messages with all that is around it, True if it sends its results, and batches."""
    plan = endpoint.plan
    check_listener(endpoint.middlewares, info)
    around = arounds(endpoint.middlewares, "consume")
    if plan.is_batch:
        call_many = _with_error_handler(plan.batch_call(), endpoint, run)
        return call_many, True, BatchCalls(plan.payload_reader(converter), call_many, around, info, run)
    # The results of most handlers are None. Only what is around a handler needs that it sends them itself.
    sends_results = bool(around or endpoint.on_error or plan.sends_results)
    call = plan.sending_call(converter) if sends_results else plan.single_call(converter)
    call = _with_error_handler(call, endpoint, run)
    return single_call(call, around, info, run) if around else call, sends_results, None


def _with_error_handler(call: Callable[..., Any], endpoint: Endpoint, run: RunAwaitable) -> Callable[..., Any]:
    on_error = endpoint.on_error
    return call if on_error is None else deciding(call, on_error, run, is_async=endpoint.plan.is_async)


def uses_loop(endpoint: Endpoint) -> bool:
    """Return True if something of a listener is ``async``: a handler, its error handler, or a middleware."""
    on_error = endpoint.on_error
    return (
        any(plan.is_async for plan in endpoint.plan.plans())
        or any(map(is_async_around, arounds(endpoint.middlewares, "consume")))
        or (on_error is not None and is_async(on_error))
    )


_NO_ERRORS = (BatchFailure, PauseListener)
"""Exceptions that decide themselves."""


def deciding(
    call: Callable[..., Any], on_error: ErrorHandler, run: RunAwaitable, *, is_async: bool
) -> Callable[..., Any]:
    """Return a handler with its error handler: it returns the status of the error handler, or raises.

    Args:
        call: Function whose last argument is the message, or the list of a batch.
        run: Runs an awaitable of a plain handler or error handler, while this thread waits.
    """

    def call_or_decide(*source: Any) -> object:
        try:
            return _awaited(call(*source), run)
        except _NO_ERRORS:
            raise
        except BaseException as error:
            raise_if_not_of_handler(error)
            status = _checked(_awaited(on_error(error, source[-1]), run))
            if status is None:
                raise
            return status

    async def await_or_decide(*source: Any) -> object:
        try:
            return await call(*source)
        except _NO_ERRORS:
            raise
        except BaseException as error:
            raise_if_not_of_handler(error)
            verdict = on_error(error, source[-1])
            status = _checked(await verdict if inspect.isawaitable(verdict) else verdict)
            if status is None:
                raise
            return status

    return await_or_decide if is_async else call_or_decide


def _awaited(result: Any, run: RunAwaitable) -> Any:
    return run(result) if result is not None and inspect.isawaitable(result) else result


def _checked(verdict: object) -> ConsumeStatus | None:
    if verdict is None or isinstance(verdict, ConsumeStatus):
        return verdict
    raise ListenerError(f"the error handler returned {safe_text(verdict, 200, repr)}; return None or a ConsumeStatus")


BatchCall = Callable[[list[object], list[MessageExt]], Any]
"""Function that calls a batch handler with its payloads and their messages."""


class _Outcome:
    """Messages of one call that failed, as they were fetched."""

    def __init__(self) -> None:
        self.unreadable: list[Failure] = []
        self.failed: Failure | None = None

    def failures(self) -> list[Failure]:
        return self.unreadable if self.failed is None else [*self.unreadable, self.failed]

    def note_indices(self, messages: Sequence[MessageExt], failed: Any, error: BatchFailure | None) -> None:
        indices = sorted(failed_indices(failed, len(messages)))
        self.failed = Failure([messages[index] for index in indices], error) if indices else None


class BatchCalls:
    """Batch handler with its middlewares, as a function from messages to failures.

    Each body is converted alone, so an invalid one fails alone. Middlewares are around both, so they may change bodies.

    Args:
        read: Converts a body to a payload.
        call: Calls the handler.
    """

    def __init__(
        self,
        read: Read,
        call: BatchCall,
        arounds: Sequence[AnyAround],
        info: ListenerInfo,
        run: RunAwaitable,
    ) -> None:
        self._read = read
        self._call = call
        self._info = info
        self._run = run
        self._is_async = info.is_async
        self._pairs = [(around, is_async_around(around)) for around in arounds]
        self._plain: list[Any] = [waiting(each, run) if is_async else each for each, is_async in self._pairs]  # type: ignore[arg-type]

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle messages in one call."""
        outcome, delivery = _Outcome(), Delivery(self._info, messages)
        try:
            try:
                if self._is_async:
                    self._run(call_around_async(self._pairs, delivery, lambda each: self._handle_async(each, outcome)))
                else:
                    call_around(self._plain, delivery, lambda each: self._handle(each, outcome))
            except BatchFailure as failure:
                if outcome.failed is None or outcome.failed.error is not failure:  # a middleware raised it
                    outcome.note_indices(messages, failure.failed, failure)
        except BaseException as error:
            raise_if_not_of_handler(error)
            unreadable = {id(failure.messages[0]) for failure in outcome.unreadable}
            readable = [message for message in messages if id(message) not in unreadable]
            return [*outcome.unreadable, Failure(readable, error)]
        return outcome.failures()

    def _handle(self, delivery: Delivery, outcome: _Outcome) -> object:
        payloads, messages, origins = self._readable(delivery, outcome)
        if not payloads:
            return None
        try:
            result = self._call(payloads, messages)
            if inspect.isawaitable(result):
                result = self._run(result)
            outcome.note_indices(origins, result, None)
        except BatchFailure as failure:
            outcome.note_indices(origins, failure.failed, failure)
            raise
        return result

    async def _handle_async(self, delivery: Delivery, outcome: _Outcome) -> object:
        payloads, messages, origins = self._readable(delivery, outcome)
        if not payloads:
            return None
        try:
            result = await self._call(payloads, messages)
            outcome.note_indices(origins, result, None)
        except BatchFailure as failure:
            outcome.note_indices(origins, failure.failed, failure)
            raise
        return result

    def _readable(
        self, delivery: Delivery, outcome: _Outcome
    ) -> tuple[list[object], list[MessageExt], list[MessageExt]]:
        """Return the payloads, their messages, and these as they were fetched."""
        payloads: list[object] = []
        messages: list[MessageExt] = []
        origins: list[MessageExt] = []
        outcome.unreadable, outcome.failed = [], None
        for message, origin in zip(delivery.messages, delivery.origins, strict=True):
            try:
                payloads.append(self._read(message))
            except BaseException as error:
                raise_if_not_of_handler(error)
                outcome.unreadable.append(Failure((origin,), error))
            else:
                messages.append(message)
                origins.append(origin)
        return payloads, messages, origins


def single_call(
    call: Callable[[MessageExt], Any],
    arounds: Sequence[AnyAround],
    info: ListenerInfo,
    run: RunAwaitable,
) -> Callable[[MessageExt], Any]:
    """Return a handler of single messages with its middlewares; a coroutine function if the handler is async."""
    if info.is_async:
        pairs = [(around, is_async_around(around)) for around in arounds]

        async def handle_async(delivery: Delivery) -> object:
            return await call(delivery.messages[0]) if delivery.messages else None

        return lambda message: call_around_async(pairs, Delivery(info, (message,)), handle_async)
    plain: list[Any] = [waiting(each, run) if is_async_around(each) else each for each in arounds]  # type: ignore[arg-type]

    def handle(delivery: Delivery) -> object:
        if not delivery.messages:
            return None
        result = call(delivery.messages[0])
        return run(result) if result is not None and inspect.isawaitable(result) else result

    return lambda message: call_around(plain, Delivery(info, (message,)), handle)
