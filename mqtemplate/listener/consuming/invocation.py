"""Invocation of a handler: it takes messages, replies to requests, and returns the failures."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.calls.handling import HandlerCall, ListenerInfo, Observation
from mqtemplate.calls.middlewares import arounds, check_listener
from mqtemplate.calls.steps import is_async_around
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.listener.calling.batch import BatchCalls, single_call
from mqtemplate.listener.calling.error_decision import deciding
from mqtemplate.listener.calling.send import is_sends
from mqtemplate.listener.consume_status import ConsumeStatus
from mqtemplate.listener.consuming.handler_loop import RunAwaitable, is_async
from mqtemplate.listener.current import enter_batch, enter_message, handler_context
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.listener.failures.failure import Failure, raise_if_not_of_handler
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.handler_result import check_result, is_batch_done, is_done
from mqtemplate.message import MessageExt, Property


def _no_properties(payload: object) -> Mapping[str, str]:
    return {}


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
        self._broker = broker
        self._observation = observation = observation or Observation()
        self._converter = converter
        self._properties_of: Callable[[object], Mapping[str, str]] = getattr(converter, "properties_of", _no_properties)
        self._run_awaitable = run_awaitable
        self._log = log
        self._publisher = endpoint.plan.publisher
        self._warned = endpoint.plan.publishes
        self._info = _info(endpoint, broker, resume)
        self._call, self._sends_results, batch = _composed(endpoint, converter, run_awaitable, self._info)
        wrap, info, handle_call = observation.handling(self._info), self._info, _one_of(self._handle_one)
        one, on_loop = wrap(handle_call), wrap(_on_loop_of(self._handle_on_loop))
        direct = one is handle_call  # nothing is around the calls
        self._run_one = self._handle_one if direct else lambda message: _first(one(HandlerCall(info, (message,))))
        self._run_on_loop = self._handle_on_loop if direct else _failure_on_loop(on_loop, info)
        self._run_batch: Callable[[Sequence[MessageExt]], list[Failure]] | None = None
        if batch is not None:
            handle_batch = partial(self._handle_batch, batch)
            many = wrap(lambda call: handle_batch(call.messages))
            self._run_batch = lambda messages: many(HandlerCall(info, messages))

    def around(self, middlewares: Iterable[object], call: Callable[[MessageExt], Any]) -> Callable[[MessageExt], Any]:
        """Return a function of a message with middlewares around it, in place of those around the handler."""
        found = tuple(middlewares)
        check_listener(found, self._info)
        return single_call(call, arounds(found, "consume"), self._info, self._run_awaitable)

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
            properties = self._observation.reply_properties(properties)
            self._broker.reply(request, body, properties, self._reply_timeout_ms)
        except BaseException as exc:
            raise_if_not_of_handler(exc)
            self._log.reply_failed(request, exc)

    def _awaited(self, result: object) -> object:
        """Return the result of an ``async def`` handler; other results unchanged."""
        return self._run_awaitable(result) if inspect.isawaitable(result) else result


def _one_of(handle: Callable[[MessageExt], Failure | None]) -> Callable[[HandlerCall], Sequence[Failure]]:
    return lambda call: () if (failure := handle(call.messages[0])) is None else (failure,)


def _on_loop_of(handle: Callable[[MessageExt], Any]) -> Callable[[HandlerCall], Any]:
    async def on_loop(call: HandlerCall) -> Sequence[Failure]:
        return () if (failure := await handle(call.messages[0])) is None else (failure,)

    return on_loop


def _failure_on_loop(on_loop: Callable[[HandlerCall], Any], info: ListenerInfo) -> Callable[[MessageExt], Any]:
    async def failure(message: MessageExt) -> Failure | None:
        return _first(await on_loop(HandlerCall(info, (message,))))

    return failure


def _first(failures: Sequence[Failure]) -> Failure | None:
    return failures[0] if failures else None


def _info(endpoint: Endpoint, broker: Broker, resume: Callable[[], None]) -> ListenerInfo:
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
