"""The shape of a topic: how its delayed messages are released when they are due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

HEAD_START_MS = 1_000
"""Lead of one step of priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicShape:
    """Release of the delayed messages of one topic. A message is never released before it is due."""

    max_rate: Annotated[float, Gt(0), Le(10_000_000)] | None = None
    """Most messages released in a second; the others follow in the order of their deliver times. Without it there is no
    limit."""

    jitter_ms: Annotated[int, Ge(0), Le(86_400_000)] = 0
    """Each message is released up to this much later, by chance: messages for one instant arrive apart."""

    spread_ms: Annotated[int, Ge(0), Le(86_400_000)] = 0
    """Messages for one instant are released evenly over this time."""

    priority: Annotated[int, Ge(0), Le(9)] = 0
    """While more is due than can be released: each step counts as if the messages had been due a second earlier. So a
    higher priority goes first, and a lower one waits at most nine seconds longer than its turn."""
