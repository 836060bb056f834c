"""Wrappers of the handling of messages: RocketMQ's message trace, and observers on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from mqtemplate.listener.failures.failure import Failure
from mqtemplate.listener.handler.invoke import Handling
from mqtemplate.message import MessageExt, Property, create_unique_id
from mqtemplate.message_trace.dispatcher import TraceDispatcher
from mqtemplate.message_trace.records import ConsumeCode, after_record, before_record
from mqtemplate.message_trace.traced_broker import DEFAULT_REGION


class TracedHandling:
    """Handling that writes a record before and after each call.

    Source: RocketMQ ``client: ConsumeMessageTraceHookImpl``.
    """

    def __init__(self, handling: Handling, dispatcher: TraceDispatcher, group: str, now_ms: Callable[[], int]) -> None:
        self._handling = handling
        self._dispatcher = dispatcher
        self._group = group
        self._now_ms = now_ms

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages."""
        request_id, started_ms = self._before(messages)
        failures = self._handling.handle(messages)
        codes = {id(message): _code(failure) for failure in failures for message in failure.messages}
        self._after(messages, request_id, started_ms, codes)
        return failures

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        request_id, started_ms = self._before((message,))
        failure = self._handling.handle_one(message)
        self._after((message,), request_id, started_ms, {id(message): _code(failure)})
        return failure

    def task_of(self, message: MessageExt, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Failure | None]:
        """Return a task that handles one message with an ``async def`` handler of single messages."""
        request_id, started_ms = self._before((message,))
        task = self._handling.task_of(message, loop)

        def note(done: asyncio.Task[Failure | None]) -> None:
            raised = done.cancelled() or done.exception() is not None
            code = ConsumeCode.EXCEPTION if raised else _code(done.result())
            self._after((message,), request_id, started_ms, {id(message): code})

        task.add_done_callback(note)
        return task

    def _before(self, messages: Sequence[MessageExt]) -> tuple[str, int]:
        request_id, now_ms = create_unique_id(), self._now_ms()
        for message in filter(self._is_traced, messages):
            record = before_record(
                time_ms=now_ms,
                region=_region(message),
                group=self._group,
                request_id=request_id,
                msg_id=message.msg_id,
                retries=message.reconsume_times,
                keys=message.keys,
            )
            self._dispatcher.append(record)
        return request_id, now_ms

    def _after(
        self, messages: Sequence[MessageExt], request_id: str, started_ms: int, codes: dict[int, ConsumeCode]
    ) -> None:
        now_ms = self._now_ms()
        for message in filter(self._is_traced, messages):
            record = after_record(
                time_ms=now_ms,
                region=_region(message),
                group=self._group,
                request_id=request_id,
                msg_id=message.msg_id,
                keys=message.keys,
                cost_ms=(now_ms - started_ms) // len(messages),
                code=codes.get(id(message), ConsumeCode.SUCCESS),
                is_cloud=self._dispatcher.is_cloud,
            )
            self._dispatcher.append(record)

    def _is_traced(self, message: MessageExt) -> bool:
        return message.properties.get(Property.TRACE_ON) != "false" and self._dispatcher.is_traced(message.topic)


def _region(message: MessageExt) -> str:
    return message.properties.get(Property.MSG_REGION, DEFAULT_REGION)


def _code(failure: Failure | None) -> ConsumeCode:
    if failure is None:
        return ConsumeCode.SUCCESS
    return ConsumeCode.FAILED if failure.error is None else ConsumeCode.EXCEPTION


Observer: TypeAlias = Callable[[Sequence[MessageExt], Sequence[Failure]], object]
"""Function that gets the messages of one call, and those of them that failed."""


class ObservedHandling:
    """Handling that reports each call after it.

    Args:
        observers: Observers; the list may grow while the container runs.
    """

    def __init__(self, handling: Handling, observers: Sequence[Observer]) -> None:
        self._handling = handling
        self._observers = observers

    def handle(self, messages: Sequence[MessageExt]) -> list[Failure]:
        """Handle several messages."""
        failures = self._handling.handle(messages)
        self._report(messages, failures)
        return failures

    def handle_one(self, message: MessageExt) -> Failure | None:
        """Handle one message with a handler that takes single messages."""
        failure = self._handling.handle_one(message)
        self._report((message,), () if failure is None else (failure,))
        return failure

    def task_of(self, message: MessageExt, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Failure | None]:
        """Return a task that handles one message; observers see it by `handle_one` only."""
        return self._handling.task_of(message, loop)

    def _report(self, messages: Sequence[MessageExt], failures: Sequence[Failure]) -> None:
        for observe in self._observers:
            observe(messages, failures)
