"""The contract, chapter three: groups and their members."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.broker import ConsumeFromWhere, Consumer, MessageModel
from mqtemplate.errors import BrokerClosedError, ListenerError
from mqtemplate.message import MessageExt
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_GENEROUS_S = 30.0


def _queues_of(consumer: Consumer, topic: str) -> set[int]:
    """The queues of *topic* that are this member's; its part of the retry topic aside."""
    return {queue.queue_id for queue in consumer.assignment() if queue.topic == topic}


def _bodies(messages: list[MessageExt]) -> list[str]:
    return sorted(message.body.decode() for message in messages)


def _fill(under_test: BrokerUnderTest, topic: str, each: int = 2) -> list[str]:
    """So many messages into each queue; their bodies, sorted."""
    sent = []
    for queue in under_test.broker.queues(topic):
        for number in range(each):
            sent.append(f"{queue.queue_id}.{number}")
            under_test.send(topic, sent[-1], queue)
    return sorted(sent)


class GroupContract:
    def test_a_single_member_gets_everything_in_the_order_of_each_queue(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic, each=5)
        member = under_test.join("billing", topic)

        taken = [message.body.decode() for message in under_test.take(member, len(sent))]

        for queue_id in range(4):
            assert [body for body in taken if body.startswith(f"{queue_id}.")] == [f"{queue_id}.{n}" for n in range(5)]

    def test_no_queue_is_starved_by_a_full_one(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic, each=40)
        member = under_test.join("billing", topic)
        under_test.until(lambda: len(_queues_of(member, topic)) == 4, "the member has all queues")

        seen: set[int] = set()
        for _ in range(16):
            seen |= {message.queue_id for message in member.poll(10)}

        assert len(sent) == 160
        assert seen == {0, 1, 2, 3}

    def test_members_share_the_queues_out(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        one, other = under_test.join("billing", topic), under_test.join("billing", topic)

        under_test.until(
            lambda: len(_queues_of(one, topic)) == len(_queues_of(other, topic)) == 2,
            "each member has two of four queues",
        )

        assert _queues_of(one, topic) | _queues_of(other, topic) == {0, 1, 2, 3}

    def test_members_share_the_messages_out(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        one, other = under_test.join("billing", topic), under_test.join("billing", topic)
        under_test.until(lambda: len(_queues_of(one, topic)) == len(_queues_of(other, topic)) == 2, "they share")

        sent = _fill(under_test, topic)
        taken = under_test.take(one, 4) + under_test.take(other, 4)

        assert _bodies(taken) == sent

    def test_more_members_than_queues_leave_some_without(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        members = [under_test.join("billing", topic) for _ in range(3)]

        under_test.until(
            lambda: sorted(len(_queues_of(member, topic)) for member in members) == [0, 0, 1],
            "one member has the queue",
        )

    def test_a_member_that_leaves_hands_its_queues_on(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        one, other = under_test.join("billing", topic), under_test.join("billing", topic)
        under_test.until(lambda: len(_queues_of(other, topic)) == 2, "they share")

        one.close()

        under_test.until(lambda: _queues_of(other, topic) == {0, 1, 2, 3}, "the other has all queues")

    def test_what_was_committed_does_not_come_again(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        _fill(under_test, topic)
        one = under_test.join("billing", topic)
        under_test.take(one, 8)
        under_test.commit_all(one)
        one.close()

        under_test.send(topic, "new")
        other = under_test.join("billing", topic)

        assert _bodies(under_test.take(other, 1)) == ["new"]

    def test_what_was_not_committed_comes_again_to_another_member(self, under_test: BrokerUnderTest) -> None:
        """At least once: a member that dies takes nothing with it."""
        topic = under_test.topic()
        sent = _fill(under_test, topic)
        one = under_test.join("billing", topic)
        under_test.take(one, 8)
        one.close()

        other = under_test.join("billing", topic)

        assert _bodies(under_test.take(other, 8)) == sent

    def test_a_member_goes_on_in_the_middle_of_a_queue(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        _fill(under_test, topic, each=5)
        [queue] = under_test.broker.queues(topic)
        one = under_test.join("billing", topic)
        under_test.take(one, 5)
        one.commit(queue, 3)
        one.close()

        other = under_test.join("billing", topic)

        assert [message.queue_offset for message in under_test.take(other, 2)] == [3, 4]

    def test_groups_do_not_see_each_other(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic)
        billing, audit = under_test.join("billing", topic), under_test.join("audit", topic)

        assert _bodies(under_test.take(billing, 8)) == sent
        assert _bodies(under_test.take(audit, 8)) == sent

    def test_in_a_broadcasting_group_each_member_gets_all(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        members = [
            under_test.join("screens", topic, message_model=MessageModel.BROADCASTING, instance_name=name)
            for name in ("hall", "lobby")
        ]

        sent = _fill(under_test, topic)

        for member in members:
            assert _bodies(under_test.take(member, 8)) == sent

    def test_a_broadcasting_member_goes_on_with_its_own_progress(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "first")
        hall = under_test.join("screens", topic, message_model=MessageModel.BROADCASTING, instance_name="hall")
        under_test.take(hall, 1)
        under_test.commit_all(hall)
        hall.close()
        under_test.send(topic, "second")

        again = under_test.join("screens", topic, message_model=MessageModel.BROADCASTING, instance_name="hall")
        lobby = under_test.join("screens", topic, message_model=MessageModel.BROADCASTING, instance_name="lobby")

        assert _bodies(under_test.take(again, 1)) == ["second"]
        assert _bodies(under_test.take(lobby, 2)) == ["first", "second"]

    # --- subscriptions -------------------------------------------------------------------------

    def test_a_member_gets_the_tags_it_asked_for(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        for body, tag in (("1", "paid"), ("2", "open"), ("3", None), ("4", "refunded")):
            under_test.send(topic, body, tag=tag)

        member = under_test.join("billing", topic, "paid || refunded")

        assert _bodies(under_test.take(member, 2)) == ["1", "4"]
        assert under_test.takes_nothing(member)

    def test_one_group_with_two_subscriptions_is_refused(self, under_test: BrokerUnderTest) -> None:
        """RocketMQ lets the last one win, and the first one's messages are lost to it."""
        topic = under_test.topic()
        under_test.join("billing", topic, "paid")

        with pytest.raises(ListenerError, match=under_test.name("billing")):
            under_test.join("billing", topic, "refunded")

    def test_one_group_with_two_message_models_is_refused(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        under_test.join("billing", topic)

        with pytest.raises(ListenerError, match=under_test.name("billing")):
            under_test.join("billing", topic, message_model=MessageModel.BROADCASTING)

    # --- where a new group begins --------------------------------------------------------------

    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, ["before", "between", "later"]),
            (ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, ["between", "later"]),
        ],
    )
    def test_a_new_group_begins_where_it_says(
        self, under_test: BrokerUnderTest, where: ConsumeFromWhere, expected: list[str]
    ) -> None:
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "before")
        under_test.pass_time(50)
        since = under_test.now_ms()
        under_test.send(topic, "between")

        member = under_test.join("billing", topic, consume_from_where=where, consume_timestamp=since)
        under_test.until(lambda: _queues_of(member, topic) == {0}, "the member has the queue")
        under_test.send(topic, "later")

        assert _bodies(under_test.take(member, len(expected))) == expected

    def test_a_new_group_that_begins_at_the_end_gets_what_comes_then(self, under_test: BrokerUnderTest) -> None:
        """What came before it may get, too: upstream's brokers read a queue whole that is young."""
        topic = under_test.topic(queue_count=1)
        under_test.send(topic, "before")
        member = under_test.join("billing", topic, consume_from_where=ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        under_test.until(lambda: _queues_of(member, topic) == {0}, "the member has the queue")

        under_test.send(topic, "later")
        seen: list[MessageExt] = []

        def came() -> bool:
            seen.extend(member.poll(32))
            return "later" in _bodies(seen)

        under_test.until(came, "the message came")

    # --- positions -----------------------------------------------------------------------------

    def test_polling_moves_the_position_and_not_the_commit(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        _fill(under_test, topic, each=3)
        [queue] = under_test.broker.queues(topic)
        member = under_test.join("billing", topic)

        under_test.take(member, 3)

        assert (member.position(queue), member.committed(queue)) == (3, None)
        member.commit(queue, 3)
        assert member.committed(queue) == under_test.broker.committed_offset(member.spec.group, queue) == 3

    def test_a_member_can_read_again_from_anywhere(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        _fill(under_test, topic, each=3)
        [queue] = under_test.broker.queues(topic)
        member = under_test.join("billing", topic)
        under_test.take(member, 3)

        member.seek(queue, 1)

        assert [message.queue_offset for message in under_test.take(member, 2)] == [1, 2]

    def test_queues_can_be_left_alone_for_a_poll(self, under_test: BrokerUnderTest) -> None:
        """A paused or an orderly container does so; nothing is lost by it."""
        topic = under_test.topic(queue_count=2)
        _fill(under_test, topic, each=1)
        left_alone = frozenset(under_test.broker.queues(topic)[:1])
        member = under_test.join("billing", topic)
        under_test.until(lambda: _queues_of(member, topic) == {0, 1}, "the member has both queues")

        first = member.poll(32, without=left_alone)
        second = under_test.take(member, 1)

        assert (_bodies(first), _bodies(second)) == (["1.0"], ["0.0"])

    # --- locks, waking, ending -----------------------------------------------------------------

    def test_a_queue_is_locked_by_one_member_at_a_time(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        [queue] = under_test.broker.queues(topic)
        one = under_test.join("billing", topic)
        under_test.until(lambda: _queues_of(one, topic) == {0}, "the member has the queue")
        assert one.lock(queue)
        other = under_test.join("billing", topic)

        assert one.lock(queue), "who has it may ask again"
        assert not other.lock(queue)

        one.close()
        under_test.until(lambda: other.lock(queue), "the other can lock it")

    def test_a_poll_that_waits_can_be_woken(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        member = under_test.join("billing", under_test.topic())

        with ThreadPoolExecutor(1) as other:
            answer = other.submit(member.poll, 32, int(_GENEROUS_S * 2_000))
            while not answer.done():
                member.wake()

            assert answer.result(_GENEROUS_S) == []

    def test_a_closed_member_says_so(self, under_test: BrokerUnderTest) -> None:
        member = under_test.join("billing", under_test.topic())
        member.close()

        with pytest.raises(BrokerClosedError, match=r"closed|not running"):
            member.poll(32)
