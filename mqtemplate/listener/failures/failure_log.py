"""Log events of the failures of one listener."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mqtemplate.clock import Clock
from mqtemplate.errors import MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.failures.failure import DeadLetter, Decision, Failure, InvalidBodyError, RetryLater, is_kind
from mqtemplate.message import MessageExt
from mqtemplate.record.dead_letter import cause_of, class_name, iso_time
from mqtemplate.user_code import error_text, is_interrupt, safe_text, traceback_of

if TYPE_CHECKING:
    import asyncio

HANGING = "hanging"
"""Outcome of a message whose handler hangs; it may have another one later."""

_MAX_LOGGED_IDS = 10
_MAX_STACKS = 64
_COMPARED_FRAMES = 20
_STACK_AGAIN_MS = 10 * 60_000
_FRAMES_OF_DEAD_LETTER = 8
_AROUND_HANDLERS = tuple(str(Path(__file__).parents[2] / package) for package in ("listener", "calls"))

_log = get_logger("mqtemplate.listener")


class RepeatedStacks:
    """Stacks that one listener has logged. A stack is logged in full once in ten minutes."""

    def __init__(self, clock: Clock) -> None:
        self._now_ms = clock.steady_ms
        self._logged: dict[object, tuple[int, int]] = {}  # stack -> time in full, number since

    def count(self, error: BaseException) -> int:
        """Return 0 if the stack of *error* must be logged in full, else how often it was repeated since."""
        key = _stack_of(error)
        since_ms, repeated = self._logged.pop(key, (-_STACK_AGAIN_MS, 0))
        if self._now_ms() - since_ms >= _STACK_AGAIN_MS:
            since_ms, repeated = self._now_ms(), -1
        self._logged[key] = (since_ms, repeated + 1)
        if len(self._logged) > _MAX_STACKS:  # the one that was not repeated for the longest time
            del self._logged[next(iter(self._logged))]
        return repeated + 1


class FailureLog:
    """Log events of one listener.

    - ``listener.failed`` (error): a handler raised, its result is not allowed, or a body is invalid. ``exc_info`` has
      the stack; a repeated one is left out, and ``repeated`` counts it.
    - ``listener.reconsume_later`` (info): the handler returned ``RECONSUME_LATER`` or raised `RetryLater`.
    - ``listener.dead_letter`` (warning): the handler raised `DeadLetter`.
    - ``listener.send_back_failed`` (error): the broker did not take a message back; it is retried here.
    - ``listener.blocked`` (error): a handler hangs, that is, it takes longer than its ``consume_timeout``.
    - ``listener.reply_failed`` (error): a reply could not be converted or sent.
    - ``listener.result_ignored`` (warning): a handler returned a reply, but the message is not a request.

    Attributes:
        outcomes: Next step (`NextStep.value`, or `HANGING`) -> number of messages.
    """

    def __init__(self, listener: str, group: str, clock: Clock) -> None:
        self._log = _log.bind(listener=listener, group=group)
        self._now_ms = clock.now_ms
        self._stacks = RepeatedStacks(clock)
        self._counting = threading.Lock()
        self.outcomes: dict[str, int] = {}

    def failed(self, failure: Failure, decision: Decision) -> None:
        """Report messages that failed together, and the decision about the first of them."""
        self._count(decision.next_step.value, failure.messages)
        error = failure.error
        fields = _fields(failure.messages) | self._decision_fields(decision)
        if (error is None or is_kind(error, RetryLater)) and decision.is_retry:
            reason = {} if error is None else {"reason": safe_text(error)}
            self._log.info("listener.reconsume_later", **reason, **fields)
        elif is_kind(error, DeadLetter):
            self._log.warning("listener.dead_letter", reason=safe_text(error), **fields)
        elif error is None:
            self._log.error("listener.failed", error="the handler returned RECONSUME_LATER", **fields)
        elif is_kind(error, InvalidBodyError):
            # No stack: the code is correct, and the text says what is wrong with the body.
            self._log.error("listener.failed", error=error_text(cause_of(error) or error), **fields)
        elif repeated := self._stacks.count(error):
            self._log.error("listener.failed", error=error_text(error), repeated=repeated, **fields)
        else:
            self._log.error("listener.failed", error=error_text(error), exc_info=error, **fields)

    def _count(self, outcome: str, messages: Sequence[MessageExt]) -> None:
        with self._counting:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + len(messages)

    def _decision_fields(self, decision: Decision) -> dict[str, object]:
        fields: dict[str, object] = {"next_step": decision.next_step.value, "attempt": decision.attempt}
        if decision.attempts is not None:
            fields["attempts"] = decision.attempts
        if decision.is_retry:
            fields["retry_in_ms"] = decision.delay_ms
            fields["retry_at"] = iso_time(self._now_ms() + decision.delay_ms)
        return fields

    def send_back_failed(self, message: MessageExt, error: BaseException, retry_in_ms: int) -> None:
        """Report a message that the broker did not take back. The stack of an error of this library says nothing."""
        fields = _log_fields(message) | {"retry_in_ms": retry_in_ms}
        if is_kind(error, MQTemplateError):
            self._log.error("listener.send_back_failed", reason=safe_text(error), **fields)
        elif repeated := self._stacks.count(error):
            self._log.error("listener.send_back_failed", reason=error_text(error), repeated=repeated, **fields)
        else:
            self._log.error("listener.send_back_failed", exc_info=error, **fields)

    def blocked(self, messages: Sequence[MessageExt], blocked_ms: int, stack: str, next_step: str) -> None:
        """Report a hanging handler with the stack of its thread."""
        self._count(HANGING, messages)
        self._log.error(
            "listener.blocked", blocked_ms=blocked_ms, handler_stack=stack, next_step=next_step, **_fields(messages)
        )

    def reply_failed(self, request: MessageExt, error: BaseException) -> None:
        """Report a reply that could not be converted or sent."""
        reason = safe_text(error) if is_kind(error, MQTemplateError) else error_text(error)
        self._log.error("listener.reply_failed", reason=reason, **_log_fields(request))

    def result_ignored(self, result: object) -> None:
        """Report a returned value that is neither a status nor a reply."""
        self._log.warning(
            "listener.result_ignored",
            result=safe_text(result, 200, repr),
            hint="it was not a request; return nothing when done, ConsumeStatus.RECONSUME_LATER to get the message "
            "again, or raise",
        )


def _stack_of(error: BaseException) -> object:
    """Return a value that is equal for exceptions of one class that were raised on one path through the code."""
    # The id: a metaclass of the application may have a hash of its own.
    return id(type(error)), tuple((frame.f_code, line) for frame, line in own_frames(error)[-_COMPARED_FRAMES:])


def _log_fields(message: MessageExt) -> dict[str, object]:
    """Return the fields that identify a message in logs."""
    return {
        "topic": message.topic,
        "tag": message.tags,
        "msg_id": message.msg_id,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "reconsume_times": message.reconsume_times,
    }


def _fields(messages: Sequence[MessageExt]) -> dict[str, object]:
    first = _log_fields(messages[0])
    if len(messages) == 1:
        return first
    ids = [message.msg_id for message in messages[:_MAX_LOGGED_IDS]]
    return {"topic": first["topic"], "tag": first["tag"], "count": len(messages), "msg_ids": ids}


# --- stacks of handlers --------------------------------------------------------------------------


def own_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return frames and line numbers of the stack of an exception, without frames of this library around handlers."""
    frames = traceback.walk_tb(traceback_of(error))
    return [each for each in frames if not each[0].f_code.co_filename.startswith(_AROUND_HANDLERS)]


def short_stack(error: BaseException) -> str:
    """Return the last frames of the stack of an exception, then the exception and its cause, for a dead letter."""
    try:
        frames = traceback.StackSummary.extract(iter(own_frames(error)[-_FRAMES_OF_DEAD_LETTER:]))
        lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    except BaseException as raised:  # a property of the exception's class, such as __notes__, or a loader of sources
        if is_interrupt(raised):
            raise
        lines = [f"{class_name(error)}: {safe_text(error)}\n"]
    if (cause := cause_of(error)) is not None:
        lines.append(f"caused by {class_name(cause)}: {safe_text(cause)}")
    return "".join(lines)


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """Return the current stack of a task."""
    return "".join(line for frame in _frames(task) for line in traceback.format_stack(frame, 1))


def _frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of the coroutines that a task awaits, the outermost first; the task itself knows only that."""
    awaited: Any = task.get_coro()
    while awaited is not None:
        prefix = next((name for name in ("cr", "gi", "ag") if hasattr(awaited, f"{name}_frame")), None)
        if prefix is None:
            return
        if (frame := getattr(awaited, f"{prefix}_frame")) is not None:
            yield frame
        awaited = getattr(awaited, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
