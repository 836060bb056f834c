"""Assignment of queues to the members of a group, as by RocketMQ's clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.engine.group_rules import allocate_averagely, sort_client_ids
from mqtemplate.message import MessageQueue

QUEUES = [MessageQueue("t", "b", queue_id) for queue_id in range(8)]


@pytest.mark.parametrize(
    ("members", "queues", "shares"),
    [(1, 4, [4]), (2, 4, [2, 2]), (3, 4, [2, 1, 1]), (3, 8, [3, 3, 2]), (5, 3, [1, 1, 1, 0, 0])],
)
def test_each_member_gets_a_range_of_queues_and_the_first_members_get_one_more(
    members: int, queues: int, shares: list[int]
) -> None:
    ids = [f"m{number}" for number in range(members)]

    assigned = [allocate_averagely(member, ids, QUEUES[:queues]) for member in ids]

    assert [len(part) for part in assigned] == shares
    assert sum(assigned, []) == QUEUES[:queues]


@given(members=st.integers(1, 20), queues=st.integers(0, 8))
def test_each_queue_is_assigned_to_exactly_one_member(members: int, queues: int) -> None:
    ids = [f"m{number:02}" for number in range(members)]

    assigned = [queue for member in ids for queue in allocate_averagely(member, ids, QUEUES[:queues])]

    assert sorted(assigned) == QUEUES[:queues]


def test_a_client_that_is_not_a_member_gets_no_queue() -> None:
    assert allocate_averagely("other", ["a"], QUEUES) == []


def test_client_ids_are_sorted_as_in_java() -> None:
    """By UTF-16 code units: a character outside the basic plane starts with a surrogate, which is below U+FFFD."""
    ids = ["b@1", "a@2", "\ufffd@1", "\U0001f600@1", "a@10"]

    assert sort_client_ids(ids) == ["a@10", "a@2", "b@1", "\U0001f600@1", "\ufffd@1"]
    assert sorted(ids) != sort_client_ids(ids)
