"""Failures of handlers: which messages failed, and one structured log event for each failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt

HANDLER_ERRORS = (Exception, asyncio.CancelledError, SystemExit)
"""Exceptions of a handler that fail its message and nothing else."""

_MAX_LOGGED_IDS = 10

_log = get_logger("mqtemplate.listener")


class Failure(NamedTuple):
    """Messages that failed together.

    Attributes:
        error: Exception of the handler; None if the handler requested redelivery without raising.
    """

    messages: Sequence[MessageExt]
    error: BaseException | None


class NextStep(Enum):
    """Next step for a message that failed."""

    REDELIVERY = "redelivery"
    DEAD_LETTER = "dead_letter"
    RETRY_IN_PLACE = "retry_in_place"
    DROPPED = "dropped"


class FailureLog:
    """Log events of one listener.

    - ``listener.failed`` (error): a handler raised, or its result is not allowed; ``exc_info`` has the stack.
    - ``listener.reconsume_later`` (info): the handler returned ``RECONSUME_LATER``.
    - ``listener.send_back_failed`` (error): the broker did not take a message back; it is retried here.
    - ``listener.blocked`` (error): a handler hangs, that is, it takes longer than its ``consume_timeout``.
    - ``listener.reply_failed`` (error): a reply could not be converted or sent.
    - ``listener.result_ignored`` (warning): a handler returned a reply, but the message is no request.
    """

    def __init__(self, listener: str, group: str) -> None:
        self._log = _log.bind(listener=listener, group=group)

    def failed(self, failure: Failure, next_step: NextStep) -> None:
        """Report messages that failed together."""
        messages, error = failure
        fields = _fields(messages)
        if error is None:
            self._log.info("listener.reconsume_later", next_step=next_step.value, **fields)
        else:
            text = f"{type(error).__name__}: {error}"
            self._log.error("listener.failed", error=text, next_step=next_step.value, exc_info=error, **fields)

    def send_back_failed(self, message: MessageExt, error: Exception, retry_in_ms: int) -> None:
        """Report a message that the broker did not take back."""
        self._log.error("listener.send_back_failed", exc_info=error, retry_in_ms=retry_in_ms, **_log_fields(message))

    def blocked(self, messages: Sequence[MessageExt], blocked_ms: int, stack: str, next_step: str) -> None:
        """Report a hanging handler with the stack of its thread."""
        self._log.error(
            "listener.blocked", blocked_ms=blocked_ms, handler_stack=stack, next_step=next_step, **_fields(messages)
        )

    def reply_failed(self, request: MessageExt, error: Exception) -> None:
        """Report a reply that could not be converted or sent."""
        self._log.error("listener.reply_failed", reason=str(error), **_log_fields(request))

    def result_ignored(self, result: object) -> None:
        """Report a returned value that is neither a status nor a reply."""
        self._log.warning(
            "listener.result_ignored",
            result=repr(result)[:200],
            hint="it was no request; return nothing when done, ConsumeStatus.RECONSUME_LATER to get the message "
            "again, or raise",
        )


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
