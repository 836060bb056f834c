"""One structured log line for each failure of a handler, with the stack and what happens to the message now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum

import structlog

from mqtemplate.listener.current import log_fields
from mqtemplate.message import MessageExt

HANDLER_ERRORS = (Exception, asyncio.CancelledError, SystemExit)
"""What a handler may raise without stopping anything but itself."""

_MOST_IDS = 10

_log = structlog.stdlib.get_logger("mqtemplate.listener")


class NextStep(Enum):
    """What becomes of a message that failed."""

    REDELIVERY = "redelivery"
    DEAD_LETTER = "dead_letter"
    RETRY_IN_PLACE = "retry_in_place"
    DROPPED = "dropped"


class FailureLog:
    """Writes the events of one listener.

    - ``listener.failed`` (error): a handler raised, or its answer made no sense; ``exc_info`` has the stack.
    - ``listener.reconsume_later`` (info): the handler itself asked for the messages to come again.
    - ``listener.send_back_failed`` (error): the broker did not take a message back; it is tried again here.
    - ``listener.blocked`` (error): a handler took longer than its ``consume_timeout``.
    """

    def __init__(self, listener: str, group: str) -> None:
        self._log = _log.bind(listener=listener, group=group)

    def failed(self, messages: Sequence[MessageExt], error: BaseException | None, next_step: NextStep) -> None:
        """Report messages that failed together; *error* is None if the handler asked for it without raising."""
        fields = _fields(messages)
        if error is None:
            self._log.info("listener.reconsume_later", next_step=next_step.value, **fields)
        else:
            self._log.error(
                "listener.failed",
                error=f"{type(error).__name__}: {error}",
                next_step=next_step.value,
                exc_info=error,
                **fields,
            )

    def send_back_failed(self, message: MessageExt, error: Exception, retry_in_ms: int) -> None:
        self._log.error("listener.send_back_failed", exc_info=error, retry_in_ms=retry_in_ms, **log_fields(message))

    def blocked(self, messages: Sequence[MessageExt], blocked_ms: int, stack: str, next_step: str) -> None:
        self._log.error(
            "listener.blocked", blocked_ms=blocked_ms, handler_stack=stack, next_step=next_step, **_fields(messages)
        )

    def result_ignored(self, result: object) -> None:
        self._log.warning(
            "listener.result_ignored",
            result=repr(result)[:200],
            hint="it was no request; return nothing when done, ConsumeStatus.RECONSUME_LATER to get the message "
            "again, or raise",
        )


def _fields(messages: Sequence[MessageExt]) -> dict[str, object]:
    first = log_fields(messages[0])
    if len(messages) == 1:
        return first
    ids = [message.msg_id for message in messages[:_MOST_IDS]]
    return {"topic": first["topic"], "tag": first["tag"], "count": len(messages), "msg_ids": ids}
