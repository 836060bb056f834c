"""The contract, chapter two: reading a queue by its offsets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.errors import OffsetOutOfRangeError
from mqtemplate.message import MessageQueue
from mqtemplate.results import PullStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_GENEROUS_S = 30.0


def _filled(under_test: BrokerUnderTest, *bodies_and_tags: str) -> MessageQueue:
    """One queue with messages; ``"body:tag"`` gives one a tag."""
    topic = under_test.topic(queue_count=1)
    for text in bodies_and_tags:
        body, _, tag = text.partition(":")
        under_test.send(topic, body, tag=tag or None)
    return under_test.broker.queues(topic)[0]


class PullContract:
    def test_a_pull_goes_on_where_it_is_told_to(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "a", "b", "c")

        page = under_test.broker.pull(queue, 1)

        assert page.pull_status is PullStatus.FOUND
        assert [(message.body, message.queue_offset) for message in page.messages] == [(b"b", 1), (b"c", 2)]
        assert (page.next_begin_offset, page.min_offset, page.max_offset) == (3, 0, 3)

    def test_a_pull_brings_no_more_than_asked_for(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "a", "b", "c")

        page = under_test.broker.pull(queue, 0, max_count=2)

        assert [message.body for message in page.messages] == [b"a", b"b"]
        assert page.next_begin_offset == 2

    def test_at_the_end_there_is_nothing_new(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "a")

        page = under_test.broker.pull(queue, 1)

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_NEW_MSG, [], 1)

    def test_an_offset_outside_the_queue_is_an_error_that_says_where_to_go_on(
        self, under_test: BrokerUnderTest
    ) -> None:
        queue = _filled(under_test, "a", "b")

        with pytest.raises(OffsetOutOfRangeError) as refusal:
            under_test.broker.pull(queue, 7)

        assert refusal.value.next_offset == 2

    def test_a_selector_leaves_other_tags_out_and_goes_past_them(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "1:paid", "2:open", "3", "4:refunded", "5:open")

        page = under_test.broker.pull(queue, 0, selector=TagSelector("paid || refunded"))

        assert [message.body for message in page.messages] == [b"1", b"4"]
        assert page.next_begin_offset == 5

    def test_a_selector_that_matches_nothing_still_gets_ahead(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "1:open", "2:open")

        page = under_test.broker.pull(queue, 0, selector=TagSelector("paid"))

        assert (page.pull_status, page.messages, page.next_begin_offset) == (PullStatus.NO_MATCHED_MSG, [], 2)

    def test_tags_with_equal_hashes_are_told_apart(self, under_test: BrokerUnderTest) -> None:
        """``Aa`` and ``BB`` have one hash in Java, and the queue keeps only hashes."""
        queue = _filled(under_test, "1:Aa", "2:BB")

        page = under_test.broker.pull(queue, 0, selector=TagSelector("BB"))

        assert [message.body for message in page.messages] == [b"2"]

    def test_a_pull_that_waits_gets_the_message_that_comes_meanwhile(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        queue = _filled(under_test)

        with ThreadPoolExecutor(1) as other:
            answer = other.submit(under_test.broker.pull, queue, 0, wait_ms=int(_GENEROUS_S * 1_000))
            under_test.send(queue.topic, "at last")
            page = answer.result(_GENEROUS_S)

        assert [message.body for message in page.messages] == [b"at last"]

    def test_a_pull_that_waits_in_vain_comes_back_empty(self, under_test: BrokerUnderTest) -> None:
        """On a virtual clock it comes back at once: nobody could end the wait."""
        queue = _filled(under_test)

        page = under_test.broker.pull(queue, 0, wait_ms=50)

        assert page.pull_status is PullStatus.NO_NEW_MSG

    def test_offsets_can_be_searched_by_time(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "early")
        under_test.pass_time(50)
        between = under_test.now_ms()
        under_test.send(queue.topic, "late")
        under_test.pass_time(50)

        broker = under_test.broker

        assert broker.search_offset(queue, 0) == 0
        assert broker.search_offset(queue, between) == 1
        assert broker.search_offset(queue, under_test.now_ms()) == 2

    def test_an_empty_queue_reaches_from_nought_to_nought(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test)

        assert (under_test.broker.min_offset(queue), under_test.broker.max_offset(queue)) == (0, 0)

    def test_a_groups_offset_is_kept(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "a", "b")
        group = under_test.name("billing")

        assert under_test.broker.committed_offset(group, queue) is None
        under_test.broker.commit_offset(group, queue, 1)

        assert under_test.broker.committed_offset(group, queue) == 1

    def test_messages_and_offsets_outlive_a_restart(self, under_test: BrokerUnderTest) -> None:
        queue = _filled(under_test, "a", "b")
        group = under_test.name("billing")
        under_test.broker.commit_offset(group, queue, 1)

        under_test.reopen()

        assert under_test.broker.committed_offset(group, queue) == 1
        assert [message.body for message in under_test.broker.pull(queue, 0).messages] == [b"a", b"b"]
