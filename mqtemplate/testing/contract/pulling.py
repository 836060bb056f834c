"""Contract for pulling: a queue is read by its offsets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.errors import OffsetOutOfRangeError
from mqtemplate.results import PullStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies

_HANG_S = 30.0


class PullContract:
    """Pulling, searching by time, and offsets of groups."""

    def test_a_pull_starts_at_the_given_offset(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.pull(under_test.filled("a", "b", "c"), 1)

        assert page.pull_status is PullStatus.FOUND
        assert [(message.body, message.queue_offset) for message in page.messages] == [(b"b", 1), (b"c", 2)]
        assert (page.next_begin_offset, page.min_offset, page.max_offset) == (3, 0, 3)

    def test_a_pull_returns_at_most_the_given_number_of_messages(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.pull(under_test.filled("a", "b", "c"), 0, max_count=2)

        assert bodies(page.messages) == ["a", "b"]
        assert page.next_begin_offset == 2

    def test_a_pull_at_the_end_of_a_queue_returns_no_message(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.pull(under_test.filled("a"), 1)

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_NEW_MSG, [], 1)

    def test_the_error_for_an_offset_out_of_range_has_the_next_valid_one(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("a", "b")

        with pytest.raises(OffsetOutOfRangeError) as refusal:
            under_test.broker.pull(queue, 7)

        assert refusal.value.next_offset == 2

    def test_a_selector_skips_messages_with_other_tags(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("1#paid", "2#open", "3", "4#refunded", "5#open")

        page = under_test.broker.pull(queue, 0, selector=TagSelector("paid || refunded"))

        assert bodies(page.messages) == ["1", "4"]
        assert page.next_begin_offset == 5

    def test_a_selector_that_matches_no_message_returns_the_next_offset(self, under_test: BrokerUnderTest) -> None:
        page = under_test.broker.pull(under_test.filled("1#open", "2#open"), 0, selector=TagSelector("paid"))

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_MATCHED_MSG, [], 2)

    def test_tags_with_equal_hashes_are_distinguished(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have the same hash in Java, and the consume queue stores only hashes."""
        page = under_test.broker.pull(under_test.filled("1#Aa", "2#BB"), 0, selector=TagSelector("BB"))

        assert bodies(page.messages) == ["2"]

    def test_a_waiting_pull_returns_a_message_that_arrives(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        queue = under_test.queue()

        with ThreadPoolExecutor(1) as other:
            future = other.submit(under_test.broker.pull, queue, 0, wait_ms=int(_HANG_S * 1_000))
            under_test.send(queue.topic, "at last")
            page = future.result(_HANG_S)

        assert bodies(page.messages) == ["at last"]

    def test_a_waiting_pull_without_a_message_ends_after_its_wait_time(self, under_test: BrokerUnderTest) -> None:
        """On a virtual clock it ends at once, since no other thread could send a message."""
        page = under_test.broker.pull(under_test.queue(), 0, wait_ms=50)

        assert page.pull_status is PullStatus.NO_NEW_MSG

    def test_offsets_can_be_searched_by_time(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("early")
        under_test.pass_time(50)
        between = under_test.now_ms()
        under_test.send(queue.topic, "late")
        under_test.pass_time(50)

        found = [under_test.broker.search_offset(queue, at_ms) for at_ms in (0, between, under_test.now_ms())]

        assert found == [0, 1, 2]

    def test_an_empty_queue_starts_and_ends_at_0(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue()

        assert (under_test.broker.min_offset(queue), under_test.broker.max_offset(queue)) == (0, 0)

    def test_the_offset_of_a_group_is_stored(self, under_test: BrokerUnderTest) -> None:
        queue, group = under_test.filled("a", "b"), under_test.name("billing")

        assert under_test.broker.committed_offset(group, queue) is None
        under_test.broker.commit_offset(group, queue, 1)

        assert under_test.broker.committed_offset(group, queue) == 1

    def test_messages_and_offsets_are_kept_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        queue, group = under_test.filled("a", "b"), under_test.name("billing")
        under_test.broker.commit_offset(group, queue, 1)

        under_test.reopen()

        assert under_test.broker.committed_offset(group, queue) == 1
        assert bodies(under_test.broker.pull(queue, 0).messages) == ["a", "b"]
