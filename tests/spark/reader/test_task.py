"""Division of a read into tasks: every message once, and about equal work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.spark.reader.task import CORES_VARIABLE, Division, core_count, distribute
from mqtemplate.spark.records.offsets import QueueRange

RANGES = st.lists(
    st.builds(QueueRange, st.just("t"), st.integers(0, 3), st.integers(0, 99), st.integers(0, 99_999)),
    max_size=8,
    unique_by=lambda found: found.queue_id,
)
RULES = st.builds(
    Division,
    cores=st.integers(1, 8),
    min_tasks=st.none() | st.integers(1, 20),
    max_messages=st.none() | st.integers(1_000, 50_000),
)


def lengths(shares: list[tuple[QueueRange, ...]]) -> list[int]:
    return [sum(map(len, share)) for share in shares]


@pytest.mark.feature("U32")
@given(RANGES, RULES, st.floats(100, 1e6))
def test_tasks_have_every_message_once(ranges: list[QueueRange], rules: Division, message_bytes: float) -> None:
    """Empty ranges, and ranges that end before their start, are left out."""
    shares = distribute(ranges, rules, lambda found: message_bytes)

    read = sorted(found for share in shares for found in share)
    covered = [(found.queue_id, offset) for found in read for offset in (found.start, found.end)]
    joined = [bounds for at, bounds in enumerate(covered) if covered.count(bounds) == 1 or at in (0, len(covered) - 1)]
    expected = [
        (found.queue_id, offset) for found in sorted(ranges) if len(found) for offset in (found.start, found.end)
    ]
    assert joined == expected
    assert all(share and all(map(len, share)) for share in shares)
    assert rules.max_messages is None or max(lengths(shares), default=0) <= rules.max_messages


def test_a_small_read_is_one_task_and_a_larger_one_uses_every_core() -> None:
    """A task costs more than reading some ten thousand messages."""
    small = [QueueRange("t", queue_id, 0, 100) for queue_id in range(4)]
    large = [QueueRange("t", queue_id, 0, 50_000) for queue_id in range(4)]

    assert lengths(distribute(small, Division(cores=2), lambda found: 300)) == [400]
    assert lengths(distribute(large, Division(cores=2), lambda found: 300)) == [100_000, 100_000]


def test_one_large_queue_is_cut() -> None:
    shares = distribute([QueueRange("t", 0, 10, 250_010)], Division(cores=2), lambda found: 300)

    assert shares == [(QueueRange("t", 0, 10, 125_010),), (QueueRange("t", 0, 125_010, 250_010),)]


def test_the_work_is_divided_by_bytes() -> None:
    """Few large messages are as much work as many small ones."""
    sizes = {0: 100_000, 1: 100}
    ranges = [QueueRange("t", 0, 0, 1_000), QueueRange("t", 1, 0, 100_000)]

    shares = distribute(ranges, Division(cores=2), lambda found: sizes[found.queue_id])

    (first, second) = [sum(len(found) * (256 + sizes[found.queue_id]) for found in share) for share in shares]
    assert abs(first - second) < 0.01 * (first + second)


def test_gigabytes_are_more_tasks_than_cores() -> None:
    """A task that fails is repeated as a whole."""
    shares = distribute([QueueRange("t", 0, 0, 4_000_000)], Division(cores=2), lambda found: 1_024)

    assert len(shares) == 20


def test_the_minimum_of_tasks_and_the_maximum_of_messages_are_kept() -> None:
    hundred = [QueueRange("t", 0, 10, 110)]

    assert lengths(distribute(hundred, Division(cores=1, min_tasks=4), lambda found: 300)) == [25, 25, 25, 25]
    assert lengths(distribute(hundred, Division(cores=1, max_messages=40), lambda found: 300)) == [40, 40, 20]


def test_a_session_states_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "3")
    assert core_count() == 3

    monkeypatch.delenv(CORES_VARIABLE)
    assert core_count() >= 1
