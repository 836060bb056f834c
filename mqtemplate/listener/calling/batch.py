"""Calls of a batch handler: which of the messages failed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mqtemplate.listener.calling.parameters import Read
from mqtemplate.listener.failures.failure import Failure, raise_if_not_of_handler
from mqtemplate.listener.handler_result import BatchFailure, failed_indices
from mqtemplate.message import MessageExt
from mqtemplate.middlewares.delivery import Delivery, ListenerInfo
from mqtemplate.middlewares.steps import (
    AnyAround,
    RunAwaitable,
    call_around,
    call_around_async,
    is_async_around,
    waiting,
)

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
