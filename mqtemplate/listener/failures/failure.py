"""Values: messages that failed, and the decision about one of them; and the exceptions that fail a message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeGuard, TypeVar

from mqtemplate.durations import Duration, warn_of_unit
from mqtemplate.errors import ConversionError, Picklable
from mqtemplate.futures import running_loop
from mqtemplate.listener.declaration.settings import retry_delay_ms
from mqtemplate.message import MessageExt
from mqtemplate.user_code import is_interrupt

_Error = TypeVar("_Error", bound=BaseException)


def is_kind(error: BaseException | None, kind: type[_Error] | tuple[type[_Error], ...]) -> TypeGuard[_Error]:
    """Do `isinstance` for an exception of the application, whose class may have a ``__class__`` that raises."""
    return issubclass(type(error), kind)


def raise_if_not_of_handler(error: BaseException) -> None:
    """Raise an exception again that is meant for the thread or the task of a handler, and not for its message.

    Everything that application code raises fails its message and nothing else, whatever its class: ``SystemExit``,
    ``KeyboardInterrupt``, ``GeneratorExit``, the ``BaseException`` of an extension module. Two are different, and leave
    the message as it was, so that it is delivered again:

    - An exception of a signal, such as Ctrl-C, ends the program. It arrives in the main thread, where handlers run on
      a virtual clock and on an event loop of the program. It is raised out of there.
    - The task of the handler was cancelled, for example since its event loop ends. A handler that raises
      ``CancelledError`` itself, or awaits something that is cancelled, fails its message.
    """
    kind = type(error)
    if issubclass(kind, Exception):
        return
    if is_interrupt(error) or (issubclass(kind, asyncio.CancelledError) and _is_task_cancelled()):
        raise error


def _is_task_cancelled() -> bool:
    task = None if running_loop() is None else asyncio.current_task()
    return task is not None and task.cancelling() > 0


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


class Decision(NamedTuple):
    """Decision about one message that failed.

    Attributes:
        attempt: Number of calls of the handler with this message so far.
        attempts: Number of calls after which it is a dead letter; None if it is retried without end.
        delay_ms: Time until the next call; an estimate with *delay_level*, since a cluster may have other levels.
        delay_level: Level to send it back with, 0 for the broker's choice; None to send it back with *delay_ms*.
        fallback_level: Level if the broker refuses *delay_ms*, for example because its timers are switched off.
    """

    next_step: NextStep
    attempt: int
    attempts: int | None
    delay_ms: int = 0
    delay_level: int | None = None
    fallback_level: int = 0

    @property
    def is_retry(self) -> bool:
        """True if the handler is called with the message again."""
        return self.next_step in (NextStep.REDELIVERY, NextStep.RETRY_IN_PLACE)


class RetryLater(Picklable):  # a request of the handler, not an error of the library
    """Raised by a handler: retry this message later. No error is logged.

    It counts as a retry: after the last one the message is a dead letter.

    Args:
        delay: Time until the retry: ``"10m"`` or a timedelta; None: as the listener's schedule says.
        reason: Cause for the log.

    Raises:
        ValueError: *delay* is not allowed.
    """

    def __init__(self, delay: Duration | None = None, reason: str = "") -> None:
        try:
            self.delay_ms = None if delay is None else retry_delay_ms(delay)
        except ValueError as error:
            raise ValueError(f"RetryLater: delay must be {error}") from None
        warn_of_unit("RetryLater: delay={}", delay, 1_000)
        super().__init__(reason or "the handler requested a retry")


class DeadLetter(Picklable):  # a request of the handler, not an error of the library
    """Raised by a handler: send this message to the dead-letter topic now, without a retry.

    Args:
        reason: Cause, for the log and the properties of the dead letter.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class InvalidBodyError(ConversionError):
    """The body of a message cannot be converted to the type that the handler declares. A retry cannot help.

    Its cause is the error of the converter.
    """


class BatchFailure(Picklable):  # a result of the handler, not an error of the library
    """Exception of a batch handler: some messages failed, the others are done.

    Args:
        failed: Indices of the failed messages in the list that the handler got, counted from 0.
        reason: Cause for the log.
    """

    def __init__(self, failed: Iterable[int], reason: str = "") -> None:
        self.failed = tuple(failed)
        super().__init__(reason or f"{len(self.failed)} message(s) of the batch failed")
