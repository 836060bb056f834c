"""The shape of a topic: how its delayed messages are released when they are due."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

HEAD_START_MS = 1_000
"""Lead of one step of priority."""

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicShape:
    """Release of the delayed messages of one topic. A message is never released before it is due."""

    # Read by pydantic where the shape is a part of a configuration: an unknown key is an error.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    max_rate: Annotated[float, Gt(0), Le(10_000_000)] | None = None
    """Most messages released in a second; the others follow in the order of their deliver times. Without it there is no
    limit."""

    jitter: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Each message is released up to this much later, by chance: messages for one instant arrive apart."""

    spread: Annotated[timedelta, Ge(timedelta(0)), Le(_DAY)] = timedelta(0)
    """Messages for one instant are released evenly over this time."""

    priority: Annotated[int, Ge(0), Le(9)] = 0
    """While more is due than can be released: each step counts as if the messages had been due a second earlier. So a
    higher priority goes first, and a lower one waits at most nine seconds longer than its turn."""
