"""Offsets and ranges: no message lost, none read twice, no queue starved."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.spark.records.offsets import OffsetTable, from_spark, limited, parse_offsets, to_spark

QUEUES = st.builds(
    MessageQueue, st.sampled_from(["orders", "version"]), st.sampled_from(["broker-a", "broker-b"]), st.integers(0, 7)
)
TABLES = st.dictionaries(QUEUES, st.integers(0, 1_000), max_size=8)


def queue(topic: str, queue_id: int) -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


@given(TABLES)
def test_a_table_is_restored_from_the_checkpoint(table: OffsetTable) -> None:
    assert from_spark(json.loads(json.dumps(to_spark(table))), "another") == table


def test_offsets_of_version_1_are_read() -> None:
    """They had no version and no names of brokers. A topic may be called ``version``."""
    golden = {"orders": {"0": 23, "10": 5}, "version": {"0": 1}}

    table = from_spark(golden, "broker-a")

    assert table == {queue("orders", 0): 23, queue("orders", 10): 5, queue("version", 0): 1}


def test_the_form_in_a_checkpoint_is_topic_broker_queue() -> None:
    """The text is a contract with checkpoints of earlier releases."""
    table = {queue("orders", 10): 1, queue("orders", 9): 2, MessageQueue("orders", "broker-b", 0): 3}

    expected = '{"version": 2, "topics": {"orders": {"broker-a": {"9": 2, "10": 1}, "broker-b": {"0": 3}}}}'
    assert json.dumps(to_spark(table)) == expected


def test_offsets_of_a_newer_release_are_refused() -> None:
    with pytest.raises(SparkError, match="the offsets have version 3, and this release of mqtemplate reads 1 and 2"):
        from_spark({"version": 3, "topics": {}}, "broker-a")


def test_equal_tables_are_equal_text() -> None:
    """Spark compares the text. With another order it would run empty batches without end. Source: spark#54321."""
    one, other = {queue("t", 10): 1, queue("t", 9): 2}, {queue("t", 9): 2, queue("t", 10): 1}

    assert json.dumps(to_spark(one)) == json.dumps(to_spark(other))


@pytest.mark.feature("U31", "U32")
@given(start=TABLES, end=TABLES, most=st.integers(1, 500))
def test_limited_batches_reach_the_end_and_never_go_back(start: OffsetTable, end: OffsetTable, most: int) -> None:
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
    start = {queue("t", 0): 100, queue("t", 1): 0, queue("t", 2): 5}
    end = {queue("t", 0): 1_000, queue("t", 1): 100, queue("t", 2): 5}

    assert limited(start, end, 100) == {queue("t", 0): 190, queue("t", 1): 10, queue("t", 2): 5}


def test_offsets_are_parsed_with_and_without_the_names_of_brokers() -> None:
    """A cluster has a queue 0 on each of its brokers."""
    plain = parse_offsets('{"orders": {"0": 23, "1": -2}}', "startingOffsets")
    named = parse_offsets('{"orders": {"broker-a": {"0": 23}, "broker-b": {"0": 5}}}', "startingOffsets")

    copied = parse_offsets(json.dumps(to_spark({queue("orders", 0): 23})), "startingOffsets")

    assert copied == {("orders", "broker-a", 0): 23}
    assert plain == {("orders", None, 0): 23, ("orders", None, 1): -2}
    assert named == {("orders", "broker-a", 0): 23, ("orders", "broker-b", 0): 5}
