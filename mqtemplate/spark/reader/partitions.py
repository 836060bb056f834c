"""Division of a read into tasks, by bytes and cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mqtemplate.spark.offsets import QueueRange

CORES_VARIABLE = "MQTEMPLATE_SPARK_CORES"
"""Environment variable with the number of tasks that run at once; by default the cores of this machine."""

_ROW_BYTES = 256  # the work for a message without its bytes, as bytes of work
_SMALLEST_TASK = 8 << 20  # below this work, one more task costs more than it saves
_LARGEST_TASK = 256 << 20  # above it, a failed task repeats too much


@dataclass(frozen=True, slots=True)
class Share:
    """Ranges that one task reads.

    Attributes:
        identity: See `Blocks.identity`, of the first range.
    """

    ranges: tuple[QueueRange, ...]
    identity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Rules for the number of tasks.

    Attributes:
        cores: Tasks that run at once.
        min_tasks: Minimum number of tasks, if there are so many messages; None: the size decides.
        max_messages: Maximum number of messages of a task; None: the size decides.
    """

    cores: int
    min_tasks: int | None = None
    max_messages: int | None = None


def core_count() -> int:
    """Return the number of tasks that run at once, as far as this process knows."""
    stated = os.environ.get(CORES_VARIABLE, "")
    return int(stated) if stated.isdecimal() and int(stated) else os.cpu_count() or 1


def distribute(
    ranges: Iterable[QueueRange], rules: Division, message_bytes: Callable[[QueueRange], float]
) -> list[tuple[QueueRange, ...]]:
    """Divide ranges into tasks of about equal work, in the order of queues and offsets. Leave out empty ranges.

    A read that is small is one task: a task costs more than reading some ten thousand messages. A larger one gets a
    task for each core, and a read of gigabytes a multiple of that.

    Args:
        message_bytes: Returns the average size of a record of a range.
    """
    filled = sorted(found for found in ranges if len(found))
    if not filled:
        return []
    weights = [_ROW_BYTES + message_bytes(found) for found in filled]
    work = sum(len(found) * weight for found, weight in zip(filled, weights, strict=True))
    tasks = _task_count(work, sum(map(len, filled)), rules)
    shares: list[list[QueueRange]] = [[]]
    room = quota = work / tasks
    for found, weight in zip(filled, weights, strict=True):
        rest = found
        while len(rest):
            count = len(rest) if len(shares) == tasks else min(len(rest), max(1, round(room / weight)))
            shares[-1].append(replace(rest, end=rest.start + count))
            rest = replace(rest, start=rest.start + count)
            room -= count * weight
            if room < weight / 2 and len(shares) < tasks:
                shares.append([])
                room += quota
    return [tuple(part) for share in shares if share for part in _limited(share, rules.max_messages)]


def _task_count(work: float, messages: int, rules: Division) -> int:
    tasks = min(rules.cores, -(-work // _SMALLEST_TASK))
    if (rounds := -(-work // (_LARGEST_TASK * rules.cores))) > 1:
        tasks = rules.cores * rounds
    return int(min(max(tasks, rules.min_tasks or 1, 1), messages))


def _limited(share: list[QueueRange], most: int | None) -> list[list[QueueRange]]:
    """Split the ranges of a task that has more than *most* messages."""
    if most is None:
        return [share]
    parts: list[list[QueueRange]] = [[]]
    room = most
    for found in share:
        rest = found
        while len(rest):
            if not room:
                parts.append([])
                room = most
            count = min(len(rest), room)
            parts[-1].append(replace(rest, end=rest.start + count))
            rest, room = replace(rest, start=rest.start + count), room - count
    return parts
