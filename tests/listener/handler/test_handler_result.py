"""Results of batch handlers: the indices of the messages that failed."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate.errors import ListenerError
from mqtemplate.listener import BatchFailure, ConsumeStatus, Send
from mqtemplate.listener.handler.results import failed_indices, is_batch_done, is_done


@pytest.mark.feature("X8")  # partial acknowledgement
@pytest.mark.parametrize(
    ("result", "failed"),
    [
        (None, set()),
        (ConsumeStatus.CONSUME_SUCCESS, set()),
        (ConsumeStatus.RECONSUME_LATER, {0, 1, 2}),
        ([], set()),
        ([2, 0], {0, 2}),
        ({1}, {1}),
        ((1, 1), {1}),
    ],
)
def test_a_result_means_a_set_of_failed_indices(result: Any, failed: set[int]) -> None:
    assert failed_indices(result, 3) == failed


@pytest.mark.parametrize("result", [True, "0", 1, {"a": 1}])
def test_a_result_without_indices_is_refused(result: Any) -> None:
    with pytest.raises(ListenerError, match="return nothing, a ConsumeStatus, the indices of those that failed"):
        failed_indices(result, 3)


def test_the_reply_of_a_handler_of_single_messages_may_be_a_list() -> None:
    """Only a batch handler returns indices of messages that failed."""
    assert is_done([0, 1])
    assert not is_done(ConsumeStatus.RECONSUME_LATER)
    assert [is_batch_done(result) for result in (None, [], [Send("a", "b")], Send("a", "b"))] == [True] * 4
    assert [is_batch_done(result) for result in ([0], {1}, ConsumeStatus.RECONSUME_LATER)] == [False] * 3


@pytest.mark.parametrize("index", [3, -1, True, "0"])
def test_an_index_outside_of_the_batch_is_refused(index: Any) -> None:
    with pytest.raises(ListenerError, match=r"the batch has 0\.\.2"):
        failed_indices([index], 3)


def test_a_batch_failure_has_indices_and_a_reason() -> None:
    assert BatchFailure(iter([1, 2])).failed == (1, 2)
    assert str(BatchFailure([1])) == "1 message(s) of the batch failed"
    assert str(BatchFailure([1], "no such customer")) == "no such customer"
