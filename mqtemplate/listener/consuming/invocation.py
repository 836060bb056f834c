"""Invocation of a handler: it takes messages, replies to requests, and returns the failures."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from mqtemplate.broker import Broker
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import MQTemplateError
from mqtemplate.listener.consuming.handler_loop import RunAwaitable
from mqtemplate.listener.current import enter_batch, enter_message, handler_context
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.listener.failures.failure import HANDLER_ERRORS, Failure
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.listener.handler_result import BatchFailure, ConsumeStatus, failed_indices
from mqtemplate.message import MessageExt, Property
from mqtemplate.observation.interface import HandleMany, HandleOne, Observation, ObservedListener


class Invocation:
    """Handler of one endpoint, as functions from messages to failures. They never raise an error of the handler."""

    def __init__(
        self,
        endpoint: Endpoint,
        broker: Broker,
        converter: MessageConverter,
        run_awaitable: RunAwaitable,
        log: FailureLog,
        observation: Observation | None = None,
    ) -> None:
        self._group = endpoint.settings.group
        self._topics = endpoint.settings.topics
        self._context = handler_context(self._group, self._topics)
        self._reply_timeout_ms = endpoint.settings.reply_timeout
        self._sends = broker if observation is None else observation.sends(broker, broker.clock)
        self._converter = converter
        self._is_batch = endpoint.plan.is_batch
        self._run_awaitable = run_awaitable
        self._log = log
        self._warned = False
        if self._is_batch:
            self._read, self._call_many = endpoint.plan.payload_reader(converter), endpoint.plan.batch_call()
        else:
            self._call = endpoint.plan.single_call(converter)
        self._run_one: HandleOne[Failure | None] = self._handle_one
        self._run_batch: HandleMany[list[Failure]] = self._handle_batch
        if observation is not None:
            listener = ObservedListener(endpoint.id, self._group)
            self._run_one = observation.one(listener, self._handle_one, broker.clock)
            self._run_batch = observation.many(listener, self._handle_batch, broker.clock)

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages: in one call if the handler takes batches, else one after the other."""
        if self._is_batch:
            return self._context.copy().run(self._run_batch, messages)
        return [failure for message in messages if (failure := self.handle_one(message)) is not None]

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        return self._context.copy().run(self._run_one, message)

    def _handle_one(self, message: MessageExt) -> Failure | None:
        enter_message(self._group, self._topics, message)
        try:
            result = self._call(message)
            if result is None or not self._asks_for_redelivery(message, result):
                return None
            return Failure((message,), None)
        except HANDLER_ERRORS as error:
            return Failure((message,), error)

    def _handle_batch(self, messages: Sequence[MessageExt]) -> list[Failure]:
        enter_batch(self._group, messages)
        failures: list[Failure] = []
        payloads: list[object] = []
        readable: list[MessageExt] = []
        for message in messages:
            try:  # each body is read alone, so that an unreadable one fails alone
                payloads.append(self._read(message))
                readable.append(message)
            except HANDLER_ERRORS as error:
                failures.append(Failure((message,), error))
        if readable and (failure := self._call_batch(payloads, readable)):
            failures.append(failure)
        return failures

    def _call_batch(self, payloads: list[object], messages: list[MessageExt]) -> Failure | None:
        count, error = len(messages), None
        try:
            try:
                failed = failed_indices(self._awaited(self._call_many(payloads, messages)), count)
            except BatchFailure as failure:
                failed, error = failed_indices(failure.failed, count), failure
        except HANDLER_ERRORS as raised:
            return Failure(messages, raised)
        return Failure([messages[index] for index in sorted(failed)], error) if failed else None

    def _asks_for_redelivery(self, message: MessageExt, result: object) -> bool:
        result = self._awaited(result)
        if result is None or isinstance(result, ConsumeStatus):
            return result is ConsumeStatus.RECONSUME_LATER
        if message.properties.get(Property.REPLY_TO_CLIENT):
            self._reply(message, result)
        elif not self._warned:
            self._warned = True
            self._log.result_ignored(result)
        return False

    def _reply(self, request: MessageExt, result: object) -> None:
        """Send the result of the handler to the client that sent the request.

        A reply that fails is logged and nothing else, as in rocketmq-spring: the message was handled, and the client
        gets a timeout.
        """
        try:
            body, content_type = self._converter.to_body(result)
            properties = {} if content_type is None else {CONTENT_TYPE: content_type}
            self._sends.reply(request, body, properties, self._reply_timeout_ms)
        except MQTemplateError as exc:
            self._log.reply_failed(request, exc)

    def _awaited(self, result: object) -> object:
        """Return the result of an ``async def`` handler; other results unchanged."""
        return self._run_awaitable(result) if inspect.isawaitable(result) else result
