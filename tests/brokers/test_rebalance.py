"""Sharing queues out, as every RocketMQ client does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.brokers.rebalance import allocate_averagely, sort_client_ids
from mqtemplate.message import MessageQueue

QUEUES = [MessageQueue("t", "b", queue_id) for queue_id in range(8)]


@pytest.mark.parametrize(
    ("members", "queues", "shares"),
    [(1, 4, [4]), (2, 4, [2, 2]), (3, 4, [2, 1, 1]), (3, 8, [3, 3, 2]), (5, 3, [1, 1, 1, 0, 0])],
)
def test_neighbours_stay_together_and_the_first_members_get_the_rest(
    members: int, queues: int, shares: list[int]
) -> None:
    ids = [f"m{number}" for number in range(members)]

    got = [allocate_averagely(member, ids, QUEUES[:queues]) for member in ids]

    assert [len(part) for part in got] == shares
    assert sum(got, []) == QUEUES[:queues]


@given(members=st.integers(1, 20), queues=st.integers(0, 8))
def test_every_queue_has_exactly_one_reader(members: int, queues: int) -> None:
    ids = [f"m{number:02}" for number in range(members)]

    got = [queue for member in ids for queue in allocate_averagely(member, ids, QUEUES[:queues])]

    assert sorted(got) == QUEUES[:queues]


def test_who_is_no_member_gets_nothing() -> None:
    assert allocate_averagely("stranger", ["a"], QUEUES) == []


def test_members_are_sorted_as_java_sorts_them() -> None:
    """By UTF-16 units: what lies beyond the first plane begins with a surrogate, which is below U+FFFD."""
    ids = ["b@1", "a@2", "\ufffd@1", "\U0001f600@1", "a@10"]

    assert sort_client_ids(ids) == ["a@10", "a@2", "b@1", "\U0001f600@1", "\ufffd@1"]
    assert sorted(ids) != sort_client_ids(ids)
