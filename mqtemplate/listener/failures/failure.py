"""Values: messages that failed, and the decision about one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from mqtemplate.message import MessageExt

HANDLER_ERRORS = (Exception, asyncio.CancelledError, SystemExit)
"""Exceptions of a handler that fail its message and nothing else."""


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
