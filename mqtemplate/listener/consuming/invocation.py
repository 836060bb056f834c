"""Calls a handler and reads its answer; whatever it raises comes back as a value."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from mqtemplate.converter import MessageConverter
from mqtemplate.listener.batch import BatchFailure, failed_indices
from mqtemplate.listener.consuming.async_loop import RunCoroutine
from mqtemplate.listener.consuming.failure import HANDLER_ERRORS, FailureLog
from mqtemplate.listener.current import CURRENT
from mqtemplate.listener.endpoint import Endpoint
from mqtemplate.listener.modes import ConsumeStatus
from mqtemplate.message import MessageExt

Reply = Callable[[MessageExt, object], bool]
"""Sends what a handler returned to who asked; False if the message is no request."""


class Failure(NamedTuple):
    """Messages that failed together.

    Attributes:
        error: What was raised; None if the handler asked to get them again without raising.
    """

    messages: Sequence[MessageExt]
    error: BaseException | None


class Invocation:
    """The handler of one endpoint, as something that takes messages and tells which of them failed."""

    def __init__(
        self,
        endpoint: Endpoint,
        converter: MessageConverter,
        run_coroutine: RunCoroutine,
        log: FailureLog,
        reply: Reply = lambda message, answer: False,
    ) -> None:
        self._group = endpoint.settings.group
        self._is_batch = endpoint.plan.is_batch
        self._run_coroutine = run_coroutine
        self._log = log
        self._reply = reply
        self._warned = False
        if self._is_batch:
            self._batch = endpoint.plan.batch_call(converter)
        else:
            self._call = endpoint.plan.single_call(converter)

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages: together if the handler takes batches, else one after the other."""
        if self._is_batch:
            return self._handle_batch(messages)
        return [failure for message in messages if (failure := self.handle_one(message)) is not None]

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes one."""
        token = CURRENT.set((self._group, message))
        try:
            answer = self._call(message)
            if answer is None or not self._is_refusal(message, answer):
                return None
            return Failure((message,), None)
        except HANDLER_ERRORS as error:
            return Failure((message,), error)
        finally:
            CURRENT.reset(token)

    def _handle_batch(self, messages: Sequence[MessageExt]) -> list[Failure]:
        failures: list[Failure] = []
        payloads: list[object] = []
        readable: list[MessageExt] = []
        token = CURRENT.set((self._group, messages))
        try:
            for message in messages:
                try:
                    payloads.append(self._batch.read(message))
                    readable.append(message)
                except HANDLER_ERRORS as error:
                    failures.append(Failure((message,), error))
            if readable and (failure := self._call_batch(payloads, readable)):
                failures.append(failure)
        finally:
            CURRENT.reset(token)
        return failures

    def _call_batch(self, payloads: list[object], messages: list[MessageExt]) -> Failure | None:
        count, error = len(messages), None
        try:
            failed = failed_indices(self._awaited(self._batch.call(payloads, messages)), count)
        except BatchFailure as failure:
            error = failure
            try:
                failed = failed_indices(failure.failed, count)
            except HANDLER_ERRORS as nonsense:
                return Failure(messages, nonsense)
        except HANDLER_ERRORS as raised:
            return Failure(messages, raised)
        return Failure([messages[index] for index in sorted(failed)], error) if failed else None

    def _is_refusal(self, message: MessageExt, answer: object) -> bool:
        answer = self._awaited(answer)
        if answer is None or isinstance(answer, ConsumeStatus):
            return answer is ConsumeStatus.RECONSUME_LATER
        if not self._reply(message, answer) and not self._warned:
            self._warned = True
            self._log.result_ignored(answer)
        return False

    def _awaited(self, answer: object) -> object:
        """What an ``async def`` handler comes to; other answers as they are."""
        return self._run_coroutine(_guarded(answer)) if inspect.isawaitable(answer) else answer


async def _guarded(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except SystemExit as error:
        # asyncio would let it end the loop, which belongs to all listeners.
        raise RuntimeError(f"the handler called sys.exit({error.code!r})") from error
