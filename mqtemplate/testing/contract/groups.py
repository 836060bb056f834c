"""Contract for consumer groups and their members, for messages that are sent back, and for ``template.receive``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mqtemplate.broker import Capability, ConsumeFromWhere, Consumer, MessageModel
from mqtemplate.errors import BrokerClosedError, ListenerError, UnsupportedError
from mqtemplate.message import MessageExt, MessageQueue, Property
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

_HANG_S = 30.0


def _queues_of(consumer: Consumer, topic: str) -> set[int]:
    """Return the ids of the member's queues of *topic*, without queues of the retry topic."""
    return {queue.queue_id for queue in consumer.assignment() if queue.topic == topic}


def _until_assigned(under_test: BrokerUnderTest, topic: str, counts: list[int], *members: Consumer) -> None:
    """Wait until the members have these numbers of queues, in any order."""
    under_test.until(
        lambda: sorted(len(_queues_of(member, topic)) for member in members) == counts,
        f"the members have {counts} queues",
    )


def _two_members(under_test: BrokerUnderTest) -> tuple[str, Consumer, Consumer]:
    """Return a topic and two members of a group, each with two of its four queues."""
    topic, one = under_test.joined()
    other = under_test.join("billing", topic)
    _until_assigned(under_test, topic, [2, 2], one, other)
    return topic, one, other


def _reader(under_test: BrokerUnderTest, count: int) -> tuple[MessageQueue, Consumer]:
    """Return a queue with *count* messages, and a member that has polled all of them."""
    queue = under_test.filled(*map(str, range(count)))
    member = under_test.join("billing", queue.topic)
    under_test.take(member, count)
    return queue, member


def _fill(under_test: BrokerUnderTest, topic: str, each: int = 2) -> list[str]:
    """Send *each* messages to each queue. Return their bodies, sorted."""
    sent = []
    for queue in under_test.broker.queues(topic):
        for number in range(each):
            sent.append(f"{queue.queue_id}.{number}")
            under_test.send(topic, sent[-1], queue)
    return sorted(sent)


def _join_screens(under_test: BrokerUnderTest, topic: str, instance_name: str) -> Consumer:
    return under_test.join("screens", topic, message_model=MessageModel.BROADCASTING, instance_name=instance_name)


class GroupContract:
    """Assignment of queues, commits, subscriptions, read positions and locks."""

    def test_a_single_member_gets_all_messages_in_the_order_of_each_queue(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic, each=5)

        taken = bodies(under_test.take(under_test.join("billing", topic), len(sent)))

        for queue_id in range(4):
            assert [body for body in taken if body.startswith(f"{queue_id}.")] == [f"{queue_id}.{n}" for n in range(5)]

    def test_no_queue_is_starved_by_a_full_one(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic, each=40)
        member = under_test.join("billing", topic)
        _until_assigned(under_test, topic, [4], member)

        seen: set[int] = set()
        for _ in range(16):
            seen |= {message.queue_id for message in member.poll(10)}

        assert len(sent) == 160
        assert seen == {0, 1, 2, 3}

    def test_members_share_the_queues(self, under_test: BrokerUnderTest) -> None:
        topic, one, other = _two_members(under_test)

        assert _queues_of(one, topic) | _queues_of(other, topic) == {0, 1, 2, 3}

    def test_members_share_the_messages(self, under_test: BrokerUnderTest) -> None:
        topic, one, other = _two_members(under_test)

        sent = _fill(under_test, topic)

        assert sorted(bodies(under_test.take(one, 4) + under_test.take(other, 4))) == sent

    def test_with_more_members_than_queues_some_members_have_none(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        members = [under_test.join("billing", topic) for _ in range(3)]

        _until_assigned(under_test, topic, [0, 0, 1], *members)

    def test_the_queues_of_a_closed_member_are_reassigned(self, under_test: BrokerUnderTest) -> None:
        topic, one, other = _two_members(under_test)

        one.close()

        _until_assigned(under_test, topic, [4], other)

    def test_a_committed_message_is_not_redelivered(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        _fill(under_test, topic)
        one = under_test.join("billing", topic)
        under_test.take(one, 8)
        under_test.commit_all(one)
        one.close()

        under_test.send(topic, "new")

        assert bodies(under_test.take(under_test.join("billing", topic), 1)) == ["new"]

    def test_an_uncommitted_message_is_redelivered_to_another_member(self, under_test: BrokerUnderTest) -> None:
        """At least once: no message is lost with a member."""
        topic = under_test.topic()
        sent = _fill(under_test, topic)
        one = under_test.join("billing", topic)
        under_test.take(one, 8)
        one.close()

        assert sorted(bodies(under_test.take(under_test.join("billing", topic), 8))) == sent

    def test_a_new_member_starts_after_the_last_commit(self, under_test: BrokerUnderTest) -> None:
        queue, one = _reader(under_test, 5)
        one.commit(queue, 3)
        one.close()

        other = under_test.join("billing", queue.topic)

        assert [message.queue_offset for message in under_test.take(other, 2)] == [3, 4]

    def test_each_group_gets_all_messages(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        sent = _fill(under_test, topic)

        for group in ("billing", "audit"):
            assert sorted(bodies(under_test.take(under_test.join(group, topic), 8))) == sent

    def test_each_member_of_a_broadcasting_group_gets_all_messages(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        members = [_join_screens(under_test, topic, name) for name in ("hall", "lobby")]

        sent = _fill(under_test, topic)

        for member in members:
            assert sorted(bodies(under_test.take(member, 8))) == sent

    def test_a_broadcasting_member_continues_after_its_own_commit(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled("first").topic
        hall = _join_screens(under_test, topic, "hall")
        under_test.take(hall, 1)
        under_test.commit_all(hall)
        hall.close()
        under_test.send(topic, "second")

        assert bodies(under_test.take(_join_screens(under_test, topic, "hall"), 1)) == ["second"]
        assert bodies(under_test.take(_join_screens(under_test, topic, "lobby"), 2)) == ["first", "second"]

    # --- subscriptions -------------------------------------------------------------------------

    def test_a_member_gets_only_messages_with_its_tags(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.filled("1#paid", "2#open", "3", "4#refunded")

        member = under_test.join("billing", queue.topic, "paid || refunded")

        assert sorted(bodies(under_test.take(member, 2))) == ["1", "4"]
        assert under_test.takes_nothing(member)

    @pytest.mark.parametrize("other", [{"selector": "refunded"}, {"message_model": MessageModel.BROADCASTING}], ids=str)
    def test_a_member_with_another_subscription_or_model_is_refused(
        self, under_test: BrokerUnderTest, other: dict[str, Any]
    ) -> None:
        """In RocketMQ the last subscription wins, and the group loses messages of the first one."""
        topic = under_test.topic()
        under_test.join("billing", topic, "paid")

        with pytest.raises(ListenerError, match=under_test.name("billing")):
            under_test.join("billing", topic, **({"selector": "paid"} | other))

    # --- start of a new group ------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("where", "expected"),
        [
            (ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, ["before", "between", "later"]),
            (ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, ["between", "later"]),
        ],
    )
    def test_a_new_group_starts_at_the_first_offset_or_at_a_timestamp(
        self, under_test: BrokerUnderTest, where: ConsumeFromWhere, expected: list[str]
    ) -> None:
        topic = under_test.filled("before").topic
        under_test.pass_time(50)
        since = under_test.now_ms()
        under_test.send(topic, "between")

        member = under_test.join("billing", topic, consume_from_where=where, consume_timestamp=since)
        _until_assigned(under_test, topic, [1], member)
        under_test.send(topic, "later")

        assert bodies(under_test.take(member, len(expected))) == expected

    def test_a_new_group_that_starts_at_the_end_gets_later_messages(self, under_test: BrokerUnderTest) -> None:
        """It may get earlier ones, too: RocketMQ's brokers deliver all messages of a young queue."""
        topic = under_test.filled("before").topic
        member = under_test.join("billing", topic, consume_from_where=ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        _until_assigned(under_test, topic, [1], member)

        under_test.send(topic, "later")

        under_test.until(lambda: "later" in bodies(member.poll(32)), "the message has arrived")

    # --- read positions ------------------------------------------------------------------------

    def test_polling_changes_the_position_and_not_the_commit(self, under_test: BrokerUnderTest) -> None:
        queue, member = _reader(under_test, 3)

        assert (member.position(queue), member.committed(queue)) == (3, None)
        member.commit(queue, 3)
        assert member.committed(queue) == under_test.broker.groups.committed_offset(member.spec.group, queue) == 3

    def test_a_member_can_read_from_any_offset_again(self, under_test: BrokerUnderTest) -> None:
        queue, member = _reader(under_test, 3)

        member.seek(queue, 1)

        assert [message.queue_offset for message in under_test.take(member, 2)] == [1, 2]

    def test_a_poll_can_exclude_queues(self, under_test: BrokerUnderTest) -> None:
        """Listener containers do so. No message of an excluded queue is lost."""
        topic = under_test.topic(queue_count=2)
        _fill(under_test, topic, each=1)
        member = under_test.join("billing", topic)
        _until_assigned(under_test, topic, [2], member)

        first = member.poll(32, without=frozenset(under_test.broker.queues(topic)[:1]))
        second = under_test.take(member, 1)

        assert (bodies(first), bodies(second)) == (["1.0"], ["0.0"])

    # --- locks, waking, closing ----------------------------------------------------------------

    def test_a_queue_is_locked_by_one_member_at_a_time(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue()
        one = under_test.join("billing", queue.topic)
        _until_assigned(under_test, queue.topic, [1], one)
        assert one.lock(queue)
        other = under_test.join("billing", queue.topic)

        assert one.lock(queue), "the owner can lock it again"
        assert not other.lock(queue)

        one.close()
        under_test.until(lambda: other.lock(queue), "the other one can lock it")

    def test_a_queue_is_locked_by_one_caller_at_a_time(self, under_test: BrokerUnderTest) -> None:
        """Callers are no members. Their locks are by group, and apart from those of other queues."""
        queue, groups = under_test.queue(), under_test.broker.groups
        lock = groups.lock_queue("billing", queue)
        assert lock is not None
        assert lock.is_held

        assert groups.lock_queue("billing", queue) is None
        others = [
            groups.lock_queue("audit", queue),
            groups.lock_queue("billing", MessageQueue(queue.topic, queue.broker_name, 99)),
        ]
        lock.release()
        again = groups.lock_queue("billing", queue)

        held = [each for each in (*others, again) if each is not None]
        assert len(held) == 3
        for each in held:
            each.release()

    def test_a_waiting_poll_can_be_woken(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        _, member = under_test.joined()

        with ThreadPoolExecutor(1) as other:
            future = other.submit(member.poll, 32, int(_HANG_S * 2_000))
            while not future.done():
                member.wake()

            assert future.result(_HANG_S) == []

    def test_a_closed_member_raises_an_error(self, under_test: BrokerUnderTest) -> None:
        _, member = under_test.joined()
        member.close()

        with pytest.raises(BrokerClosedError, match=r"closed|not running"):
            member.poll(32)


_EXACT_MS = 1_234
_LEVEL_MS = {1: 1_000, 3: 10_000, 4: 30_000, 5: 60_000}


def _send_and_take(under_test: BrokerUnderTest, body: str, **settings: int) -> tuple[Consumer, MessageExt]:
    """Send a message and take it. Skip the test if the broker has no delay levels."""
    under_test.needs(Capability.DELAY_LEVEL)
    topic = under_test.topic()
    under_test.send(topic, body, properties={Property.KEYS: "4466"}, tag="paid")
    member = under_test.join("billing", topic, "paid", **settings)
    return member, under_test.take_one(member)


def _dead_letter(under_test: BrokerUnderTest, member: Consumer) -> MessageExt:
    return under_test.take_one(under_test.join("audit", f"{DLQ_TOPIC_PREFIX}{member.spec.group}"))


class RetryContract:
    """Redelivery of messages that are sent back, with a limit."""

    def test_a_message_that_is_sent_back_is_redelivered(self, under_test: BrokerUnderTest) -> None:
        member, first = _send_and_take(under_test, "hard")

        member.send_back(first, delay_level=1)
        again = under_test.take_one(member)

        assert (first.reconsume_times, again.reconsume_times) == (0, 1)
        assert (again.topic, again.body, again.tags, again.keys) == (first.topic, b"hard", "paid", "4466")
        assert again.msg_id == first.msg_id
        assert again.store_timestamp >= first.store_timestamp + _LEVEL_MS[1]

    def test_the_delay_increases_with_each_retry(self, under_test: BrokerUnderTest) -> None:
        """As in RocketMQ: 10 s, 30 s, 1 m, …"""
        under_test.needs_virtual_time()
        member, message = _send_and_take(under_test, "hard")

        for level in (3, 4, 5):
            member.send_back(message)
            message = under_test.take_one_after(member, _LEVEL_MS[level])

        assert message.reconsume_times == 3

    def test_the_delay_of_a_retry_is_exact(self, under_test: BrokerUnderTest) -> None:
        """On a broker with the capability: a delay without a level, to the millisecond where time is virtual."""
        under_test.needs(Capability.RETRY_DELAY)
        member, first = _send_and_take(under_test, "hard")
        sent_back_ms = under_test.now_ms()

        member.send_back(first, delay_ms=_EXACT_MS, properties={"first_failed_at": "now"})
        under_test.pass_time(_EXACT_MS - 1 if under_test.broker.clock.is_virtual else _EXACT_MS // 2)
        assert under_test.takes_nothing(member), "before the delay has passed"
        again = under_test.take_one(member)

        assert (again.body, again.tags, again.msg_id) == (b"hard", "paid", first.msg_id)
        assert (again.reconsume_times, again.properties["first_failed_at"]) == (1, "now")
        assert again.store_timestamp >= sent_back_ms + _EXACT_MS - under_test.early_ms
        if under_test.broker.clock.is_virtual:
            assert again.store_timestamp == sent_back_ms + _EXACT_MS

    def test_a_broker_without_exact_delays_refuses_them(self, under_test: BrokerUnderTest) -> None:
        if Capability.RETRY_DELAY in under_test.broker.capabilities:
            pytest.skip("this broker has exact retry delays")
        member, first = _send_and_take(under_test, "hard")

        with pytest.raises(UnsupportedError, match="use a delay level"):
            member.send_back(first, delay_ms=_EXACT_MS)

    def test_a_dead_letter_has_the_properties_that_it_was_sent_back_with(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "poison")

        member.send_back(message, delay_level=-1, properties={"dead_letter_message": "no such customer"})
        dead = _dead_letter(under_test, member)

        assert (dead.body, dead.msg_id, dead.keys) == (b"poison", message.msg_id, "4466")
        assert dead.properties["dead_letter_message"] == "no such customer"
        assert dead.properties[Property.DLQ_ORIGIN_TOPIC].endswith(message.topic)

    def test_after_the_last_retry_a_message_is_a_dead_letter(self, under_test: BrokerUnderTest) -> None:
        member, first = _send_and_take(under_test, "hopeless", max_reconsume_times=1)

        member.send_back(first, delay_level=1)
        member.send_back(under_test.take_one(member), delay_level=1)
        under_test.pass_time(_LEVEL_MS[1])

        assert under_test.takes_nothing(member)
        dead = _dead_letter(under_test, member)
        assert (dead.body, dead.msg_id) == (b"hopeless", first.msg_id)

    def test_with_a_negative_level_a_message_is_a_dead_letter_at_once(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "poison")

        member.send_back(message, delay_level=-1)

        assert _dead_letter(under_test, member).body == b"poison"
        assert under_test.takes_nothing(member)

    def test_a_message_is_redelivered_only_to_the_group_that_sent_it_back(self, under_test: BrokerUnderTest) -> None:
        billing, message = _send_and_take(under_test, "hard")
        audit = under_test.join("audit", message.topic)
        under_test.take(audit, 1)

        billing.send_back(message, delay_level=1)

        assert len(under_test.take(billing, 1)) == 1
        assert under_test.takes_nothing(audit)

    def test_the_retry_topic_is_assigned_without_a_subscription(self, under_test: BrokerUnderTest) -> None:
        member = under_test.join("billing", under_test.topic())
        retry_topic = f"{RETRY_TOPIC_PREFIX}{member.spec.group}"

        under_test.until(
            lambda: retry_topic in {queue.topic for queue in member.assignment()}, "the retry topic is assigned"
        )

    def test_a_message_that_was_sent_back_is_redelivered_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        member, message = _send_and_take(under_test, "hard")
        member.send_back(message, delay_level=1)
        under_test.commit_all(member)

        under_test.reopen()
        again = under_test.take(under_test.join("billing", message.topic, "paid"), 1)

        assert bodies(again) == ["hard"]
        assert again[0].reconsume_times == 1


def _receiver(under_test: BrokerUnderTest, topic: str, selector_expression: str = "*") -> RocketMQTemplate:
    """Return a template that receives from *topic*. It is closed at the end of a ``with`` block."""
    return RocketMQTemplate(
        under_test.broker,
        consumer_group=under_test.name("readers"),
        consumer_topic=topic,
        selector_expression=selector_expression,
    )


def _receive(under_test: BrokerUnderTest, template: RocketMQTemplate, count: int, kind: type = str) -> list[Any]:
    """Receive until *count* messages have arrived."""
    wait_ms = 0 if under_test.broker.clock.is_virtual else 200
    return under_test.gather(lambda missing: template.receive(kind, max_count=missing, timeout=wait_ms), count)


class ReceiveContract:
    """Receiving by a call, with conversion and commits."""

    def test_receive_returns_earlier_messages(self, under_test: BrokerUnderTest) -> None:
        """A new group starts at the first message, since a program may call ``receive`` only now and then."""
        topic = under_test.filled("order 0", "order 1", "order 2").topic

        with _receiver(under_test, topic) as template:
            assert _receive(under_test, template, 3) == ["order 0", "order 1", "order 2"]

    def test_receive_converts_payloads_to_the_given_type(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled('{"id": 7}', '{"id": 8}').topic

        with _receiver(under_test, topic) as template:
            [order], [message] = _receive(under_test, template, 1, dict), _receive(under_test, template, 1, MessageExt)

        assert order == {"id": 7}
        assert isinstance(message, MessageExt)
        assert message.body == b'{"id": 8}'

    def test_receive_commits_messages_with_the_next_call(self, under_test: BrokerUnderTest) -> None:
        """Another member of the group starts after the committed messages, and gets the others again."""
        topic = under_test.filled("0", "1", "2", "3").topic
        with _receiver(under_test, topic) as first:
            committed = _receive(under_test, first, 2)
            _receive(under_test, first, 1)

        with _receiver(under_test, topic) as second:
            rest = _receive(under_test, second, 1)

        assert (committed, rest) == (["0", "1"], ["3"])

    def test_receive_selects_by_tag(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled("paid#paid", "open#open", "paid too#paid").topic

        with _receiver(under_test, topic, selector_expression="paid") as template:
            assert _receive(under_test, template, 2) == ["paid", "paid too"]

    def test_receive_without_a_message_returns_an_empty_list(self, under_test: BrokerUnderTest) -> None:
        with _receiver(under_test, under_test.topic(queue_count=1)) as template:
            assert template.receive(str, timeout=100) == []

    def test_receive_sends_unreadable_messages_to_the_dead_letters(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.filled("no json", '{"id": 8}').topic

        with _receiver(under_test, topic) as template:
            assert _receive(under_test, template, 1, dict) == [{"id": 8}]

        [dead_queue] = under_test.broker.queues(DLQ_TOPIC_PREFIX + under_test.name("readers"))
        under_test.until(lambda: under_test.broker.reader.max_offset(dead_queue) == 1, "it is with the dead letters")
