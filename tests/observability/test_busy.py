"""The union of the times of calls."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.observability.lateness import BusyTimes

MS = 1_000_000


def busy_of(*calls: tuple[int, int]) -> BusyTimes:
    busy = BusyTimes()
    for start_ms, end_ms in calls:
        if not busy.extend(start_ms * MS, end_ms * MS):
            busy.add(start_ms * MS, end_ms * MS)
    return busy


def test_adjoining_calls_are_one_time() -> None:
    busy = busy_of((1_000, 2_000), (2_001, 3_000), (9_000, 9_500))

    assert busy.overlap_ms(0, 10_000) == 2_500
    assert busy.overlap_ms(1_500, 2_500) == 1_000
    assert busy.overlap_ms(3_500, 8_500) == 0


def test_a_long_call_that_ends_last_covers_the_short_ones() -> None:
    busy = busy_of((5_000, 5_100), (6_000, 6_100), (1_000, 8_000))

    assert busy.overlap_ms(0, 10_000) == 7_000


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100)), max_size=40))
def test_the_overlap_is_that_of_the_union(calls: list[tuple[int, int]]) -> None:
    """Calls in the order of their ends, on a grid that is coarser than the pauses that count as none."""
    spans = sorted(((start * 10, (start + length) * 10) for start, length in calls), key=lambda span: span[1])
    busy = busy_of(*spans)

    covered = {ms for start_ms, end_ms in spans for ms in range(start_ms, end_ms)}
    for from_ms, to_ms in pairwise(range(0, 5_000, 777)):
        assert busy.overlap_ms(from_ms, to_ms) == len([ms for ms in covered if from_ms <= ms < to_ms])
