"""Steps back of the broker's clock: between two of them the store timestamps ascend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from mqtemplate.store.layout import MAX_CLOCK_STEPS

NO_LIMIT_MS = 1 << 63


class ClockStep(NamedTuple):
    """A place in the commit log where store timestamps fall.

    Attributes:
        physical_offset: The first record that was stored after the step starts here, or later.
        before_ms: Store timestamp of the record before.
        after_ms: Store timestamp of the first record after the step.
    """

    physical_offset: int
    before_ms: int
    after_ms: int


class ClockSteps:
    """The steps back of the clock in the part of the log that exists.

    RocketMQ does not note them: in the log of another broker only those are known that a recovery read. With more than
    `MAX_CLOCK_STEPS` the smallest ones are forgotten. A search by time is inexact by their length then.
    """

    def __init__(self, steps: Iterable[ClockStep] = ()) -> None:
        self._steps = sorted(steps)

    def __iter__(self) -> Iterator[ClockStep]:
        return iter(list(self._steps))

    def note(self, physical_offset: int, before_ms: int, after_ms: int) -> None:
        """Note a step. Noting one again is harmless: a recovery reads records twice."""
        steps = [step for step in self._steps if step.physical_offset != physical_offset]
        steps.append(ClockStep(physical_offset, before_ms, after_ms))
        if len(steps) > MAX_CLOCK_STEPS:
            steps.remove(min(steps, key=lambda step: step.before_ms - step.after_ms))
        self._steps = sorted(steps)  # a new list: threads may iterate over the other one

    def forget_outside(self, physical_start: int, physical_end: int) -> None:
        """Forget the steps in parts of the log that were deleted."""
        self._steps = [step for step in self._steps if physical_start <= step.physical_offset < physical_end]

    def are_between(self, physical_start: int, physical_end: int) -> bool:
        """Return True if the clock was set back between the records at these offsets."""
        return any(physical_start < step.physical_offset <= physical_end for step in self._steps)

    def latest_ms(self, physical_offset: int, now_ms: int) -> int:
        """Return a time at which the record at this offset was stored already, by the clock of *now_ms*.

        That is the first later one that is not in the future.
        """
        later = [step.after_ms for step in self._steps if step.physical_offset > physical_offset]
        return next((after_ms for after_ms in later if after_ms <= now_ms), now_ms)

    def spans(self, offsets: range, first_from: Callable[[int], int]) -> Iterator[range]:
        """Yield the parts of *offsets*, queue offsets, in which store timestamps ascend.

        Args:
            first_from: Returns the first queue offset whose record starts at a physical offset or later.
        """
        starts = {min(max(first_from(step.physical_offset), offsets.start), offsets.stop) for step in self}
        for start, stop in pairwise(sorted({offsets.start, *starts, offsets.stop})):
            yield range(start, stop)

    def search(
        self,
        offsets: range,
        timestamp: int,
        now_ms: int,
        time_at: Callable[[int], int],
        first_from: Callable[[int], int],
    ) -> int:
        """Return the first queue offset stored at *timestamp* or later; the end of *offsets* if there is none.

        A record of the future was stored while the clock was ahead, some time between the records around it. It counts
        as one of *timestamp* only if the record before it is older and the one after it is not: then no message is
        skipped.
        If *timestamp* is in the future itself, the store timestamps are compared as they are.

        Args:
            offsets: The queue offsets to search.
            time_at: Returns the store timestamp of a queue offset.
            first_from: See `spans`.
        """
        limit_ms = now_ms if timestamp <= now_ms else NO_LIMIT_MS
        future: int | None = None  # the first of the records of the future right before the current span
        for span in self.spans(offsets, first_from):
            start, stop = span.start, span.stop
            found = start + bisect_left(span, timestamp, key=time_at)
            past_end = start + bisect_left(span, True, key=lambda at: time_at(at) > limit_ms)
            if found < past_end:
                return found if found > start or future is None else future
            if past_end > start:  # these are older, and so is what was stored before them
                future = None
            if past_end < stop and future is None:
                future = past_end
        return offsets.stop if future is None else future
