"""Calls of a batch handler: which of the messages failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mqtemplate.calls.handling import Delivery, ListenerInfo
from mqtemplate.calls.steps import AnyAround, RunAwaitable, wrapper_of
from mqtemplate.listener.calling.parameters import Read
from mqtemplate.listener.failures.failure import Failure, raise_if_not_of_handler
from mqtemplate.listener.handler_result import BatchFailure, failed_indices
from mqtemplate.message import MessageExt

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
        self._around = wrapper_of(arounds, run)

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle messages in one call."""
        outcome, delivery = _Outcome(), Delivery(self._info, messages)
        try:
            try:
                if self._is_async:
                    self._run(self._around(partial(self._handle_async, outcome=outcome))(delivery))
                else:
                    self._around(partial(self._handle, outcome=outcome))(delivery)
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

    async def handle_async(delivery: Delivery) -> object:
        return await call(delivery.messages[0]) if delivery.messages else None

    def handle(delivery: Delivery) -> object:
        if not delivery.messages:
            return None
        result = call(delivery.messages[0])
        return run(result) if result is not None and inspect.isawaitable(result) else result

    around = wrapper_of(arounds, run)(handle_async if info.is_async else handle)
    return lambda message: around(Delivery(info, (message,)))
