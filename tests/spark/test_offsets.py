"""Offsets and ranges: no message lost, none read twice, no queue starved."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import ConfigurationError
from mqtemplate.spark.offsets import QueueRange, distribute, from_spark, limited, parse_offsets, to_spark

QUEUES = st.tuples(st.sampled_from(["orders", "refunds"]), st.integers(0, 7))
TABLES = st.dictionaries(QUEUES, st.integers(0, 1_000), max_size=8)
RANGES = st.lists(
    st.builds(QueueRange, st.just("t"), st.integers(0, 3), st.integers(0, 99), st.integers(0, 99_999)), max_size=8
)


@given(TABLES)
def test_a_table_is_restored_from_the_checkpoint(table: dict[tuple[str, int], int]) -> None:
    assert from_spark(json.loads(json.dumps(to_spark(table)))) == table


def test_equal_tables_are_equal_text() -> None:
    """Spark compares the text. With another order it would run empty batches without end. Source: spark#54321."""
    one, other = {("t", 10): 1, ("t", 9): 2}, {("t", 9): 2, ("t", 10): 1}

    assert json.dumps(to_spark(one)) == json.dumps(to_spark(other))


@pytest.mark.feature("U31", "U32")
@given(start=TABLES, end=TABLES, most=st.integers(1, 500))
def test_limited_batches_reach_the_end_and_never_go_back(
    start: dict[tuple[str, int], int], end: dict[tuple[str, int], int], most: int
) -> None:
    """Each step reads at most the limit plus one message for each queue, until all are read."""
    steps = [start]
    while (following := limited(steps[-1], end, most)) != steps[-1] and len(steps) < 10_000:
        steps.append(following)

    for before, after in pairwise(steps):
        assert all(after[queue] >= before.get(queue, 0) for queue in after)
        moved = sum(after[queue] - before.get(queue, 0) for queue in after)
        assert moved <= most + len(after)
    assert all(steps[-1].get(queue, 0) >= offset for queue, offset in end.items())


def test_a_limit_is_distributed_by_the_unread_messages_of_each_queue() -> None:
    start = {("t", 0): 100, ("t", 1): 0, ("t", 2): 5}
    end = {("t", 0): 1_000, ("t", 1): 100, ("t", 2): 5}

    assert limited(start, end, 100) == {("t", 0): 190, ("t", 1): 10, ("t", 2): 5}


@pytest.mark.feature("U32")
@given(RANGES, st.none() | st.integers(1, 20))
def test_distributed_ranges_have_every_message_once(ranges: list[QueueRange], min_partitions: int | None) -> None:
    """Empty ranges, and ranges that end before their start, are left out."""
    shares = distribute(ranges, min_partitions)

    covered = sorted((found.queue_id, found.start, found.end) for share in shares for found in share)
    assert sum(end - start for _, start, end in covered) == sum(map(len, ranges))
    assert all(any(found for found in share) for share in shares)
    if min_partitions is None:
        assert covered == sorted((found.queue_id, found.start, found.end) for found in ranges if len(found))
        assert len(shares) <= max(1, len(covered))


def test_small_queues_share_a_task_and_large_ones_do_not() -> None:
    """A task costs more than reading some thousand messages."""
    small = [QueueRange("t", queue_id, 0, 100) for queue_id in range(4)]
    large = [QueueRange("t", queue_id, 0, 50_000) for queue_id in range(4)]

    assert len(distribute(small)) == 1
    assert len(distribute(large)) == 4


def test_min_partitions_splits_a_large_queue() -> None:
    shares = distribute([QueueRange("t", 0, 10, 110)], 4)

    assert shares == [(QueueRange("t", 0, start, start + 25),) for start in (10, 35, 60, 85)]


@pytest.mark.parametrize("text", ['{"orders": {"0": 23, "1": -2}}', '{"orders": {"broker-a": {"0": 23, "1": -2}}}'])
def test_offsets_are_parsed_with_and_without_the_brokers_name(text: str) -> None:
    assert parse_offsets(text, "startingOffsets") == {("orders", 0): 23, ("orders", 1): -2}


@pytest.mark.parametrize(
    "text",
    [
        '{"orders"',
        "[1]",
        '{"orders": 3}',
        '{"orders": {"a": 1}}',
        '{"orders": {"0": -3}}',
        '{"orders": {"0": true}}',
        '{"orders": {"broker-a": {"0": 1}, "broker-b": {"0": 1}}}',
    ],
)
def test_the_error_for_malformed_offsets_shows_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r'option startingOffsets: .* write JSON such as \{"orders"'):
        parse_offsets(text, "startingOffsets")
