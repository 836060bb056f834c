"""Contract for delayed messages, for schedule changes (cancel and reschedule), and for queries of pending messages."""

from __future__ import annotations

import random

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult
from mqtemplate.testing.contract.under_test import TIMER_PROPERTIES, BrokerUnderTest, bodies

_LEVEL_1 = {Property.DELAY: "1"}
_LEVEL_1_MS = 1_000


class DelayContract:
    """Delay levels and timers."""

    def test_a_level_delays_a_message(self, under_test: BrokerUnderTest) -> None:
        """Levels start at 1. The message enters its real topic when it is due, and not before."""
        queue, sent_ms = under_test.queue(), under_test.now_ms()

        under_test.send(queue.topic, "later", properties=_LEVEL_1, tag="paid")
        assert under_test.broker.reader.max_offset(queue) == 0
        message = under_test.take_one(under_test.join("billing", queue.topic, "paid"))

        assert message.store_timestamp >= sent_ms + _LEVEL_1_MS
        assert (message.topic, message.body, message.tags, message.delay_level) == (queue.topic, b"later", "paid", 1)

    def test_messages_with_equal_levels_keep_the_order_of_their_queue(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue(2, of=4)
        for number in range(10):
            under_test.send(queue.topic, str(number), queue, _LEVEL_1)

        messages = under_test.take(under_test.join("billing", queue.topic), 10)

        assert bodies(messages) == [str(number) for number in range(10)]
        assert {message.message_queue for message in messages} == {queue}

    @pytest.mark.parametrize("level", ["-1", "99", "soon"])
    def test_an_illegal_level_is_refused(self, under_test: BrokerUnderTest, level: str) -> None:
        with pytest.raises(DelayError, match=level):
            under_test.send(under_test.topic(), "when?", properties={Property.DELAY: level})

    # --- timers --------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", sorted(TIMER_PROPERTIES))
    def test_each_timer_property_means_the_same_time(self, under_test: BrokerUnderTest, name: str) -> None:
        """One second from now; longer for a broker that may deliver early."""
        topic, member = under_test.joined()
        delay_ms = 1_000 + under_test.early_ms
        due_ms = under_test.now_ms() + delay_ms
        value = {Property.TIMER_DELAY_SEC: delay_ms // 1_000, Property.TIMER_DELAY_MS: delay_ms}.get(name, due_ms)

        under_test.send(topic, "later", properties={name: str(value)})
        message = under_test.take_one(member)

        assert message.store_timestamp >= due_ms - under_test.early_ms

    def test_a_timer_is_due_to_the_millisecond(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_virtual_time()
        topic, member = under_test.joined()
        due_ms = under_test.now_ms() + 90_061_234

        under_test.send(topic, "later", properties={Property.TIMER_DELAY_MS: "90061234"})
        message = under_test.take_one_after(member, 90_061_234)

        assert message.store_timestamp == message.deliver_timestamp == due_ms

    def test_a_message_with_a_past_deliver_time_is_delivered_at_once(self, under_test: BrokerUnderTest) -> None:
        topic, member = under_test.joined()

        under_test.send(topic, "late already", properties={Property.TIMER_DELIVER_MS: str(under_test.now_ms() - 1)})

        assert len(under_test.take(member, 1)) == 1

    def test_a_level_has_priority_over_a_timer(self, under_test: BrokerUnderTest) -> None:
        topic, member = under_test.joined()

        under_test.send(topic, "both", properties=_LEVEL_1 | {Property.TIMER_DELAY_SEC: "3600"})
        under_test.pass_time(_LEVEL_1_MS)

        assert len(under_test.take(member, 1)) == 1

    def test_the_longest_delay_is_accepted_and_a_longer_one_refused(self, under_test: BrokerUnderTest) -> None:
        topic, longest = under_test.topic(), under_test.longest_delay_ms

        under_test.send(topic, "in forty days", properties={Property.TIMER_DELAY_MS: str(longest)})
        with pytest.raises(DelayError, match=r"days|limit|longest|max"):
            under_test.send(topic, "too far", properties={Property.TIMER_DELAY_MS: str(longest + 60_000)})

    @pytest.mark.parametrize("value", ["tomorrow", "1.5", ""])
    def test_a_malformed_deliver_time_is_refused(self, under_test: BrokerUnderTest, value: str) -> None:
        with pytest.raises(DelayError, match="TIMER_DELIVER_MS"):
            under_test.send(under_test.topic(), "when?", properties={Property.TIMER_DELIVER_MS: value})

    def test_a_delayed_message_keeps_tag_keys_properties_and_queue(self, under_test: BrokerUnderTest) -> None:
        queue = under_test.queue(3, of=4)
        properties = {Property.KEYS: "4466", "region": "EU", Property.TIMER_DELAY_MS: "300"}

        sent = under_test.send(queue.topic, "later", queue, properties, tag="paid")
        message = under_test.take_one(under_test.join("billing", queue.topic, "paid"))

        assert (message.message_queue, message.tags, message.keys) == (queue, "paid", "4466")
        assert (message.properties["region"], message.msg_id, message.reconsume_times) == ("EU", sent.msg_id, 0)

    def test_each_message_of_a_batch_has_its_own_delay(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.BATCH_DELAY)
        topic, member = under_test.joined()
        timer, sent_ms = {Property.TIMER_DELAY_MS: "1000"}, under_test.now_ms()

        under_test.broker.sends.send_batch(
            [Message(topic, b"level", _LEVEL_1), Message(topic, b"timer", timer), Message(topic, b"at once")]
        )
        stored_ms = {message.body: message.store_timestamp for message in under_test.take(member, 3)}

        assert stored_ms.keys() == {b"level", b"timer", b"at once"}
        assert stored_ms[b"at once"] < min(stored_ms[b"level"], stored_ms[b"timer"])
        assert min(stored_ms[b"level"], stored_ms[b"timer"]) >= sent_ms + _LEVEL_1_MS - under_test.early_ms

    def test_many_delayed_messages_are_delivered_once_each_and_never_early(self, under_test: BrokerUnderTest) -> None:
        topic, member = under_test.joined()
        chance = random.Random(4466)
        due_ms: dict[str, int] = {}
        for number in range(60):
            delay_ms = chance.choice([_LEVEL_1_MS, chance.randrange(1, 1_200)])
            delay = _LEVEL_1 if delay_ms == _LEVEL_1_MS else {Property.TIMER_DELAY_MS: str(delay_ms)}
            due_ms[str(number)] = under_test.now_ms() + delay_ms
            under_test.send(topic, str(number), properties=delay)

        under_test.pass_time(1_200)
        messages = under_test.take(member, 60)

        assert set(bodies(messages)) == due_ms.keys()
        stored = zip(bodies(messages), messages, strict=True)
        assert [body for body, each in stored if each.store_timestamp < due_ms[body] - under_test.early_ms] == []

    def test_delayed_messages_are_delivered_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic, sent_ms = under_test.topic(), under_test.now_ms()
        under_test.send(topic, "level", properties=_LEVEL_1)
        under_test.send(topic, "timer", properties={Property.TIMER_DELAY_MS: str(1_000 + under_test.early_ms)})

        under_test.reopen()
        messages = under_test.take(under_test.join("billing", topic), 2)

        assert set(bodies(messages)) == {"level", "timer"}
        assert min(message.store_timestamp for message in messages) >= sent_ms + 1_000


_PENDING_MS = 5_000
_DELAYS = {"level": {Property.DELAY: "2"}, "timer": {Property.TIMER_DELAY_MS: str(_PENDING_MS)}}
_CHANGES = {"level": Capability.SCHEDULE_CHANGE, "timer": Capability.TIMER_CHANGE}
_KINDS = pytest.mark.parametrize("kind", _DELAYS)


def _delayed(under_test: BrokerUnderTest, topic: str, body: str, kind: str = "level", **properties: str) -> SendResult:
    """Send a message with a delay of five seconds. Skip the test if it cannot be cancelled."""
    under_test.needs(_CHANGES[kind])
    return under_test.send(topic, body, properties={**_DELAYS[kind], **properties})


class ScheduleChangeContract:
    """Cancelling, rescheduling and listing pending messages."""

    @_KINDS
    def test_a_cancelled_message_is_never_delivered(self, under_test: BrokerUnderTest, kind: str) -> None:
        topic = under_test.topic()
        cancelled = _delayed(under_test, topic, "cancelled", kind)
        _delayed(under_test, topic, "kept", kind)

        result = under_test.broker.delayed.cancel(cancelled.handle)
        under_test.pass_time(_PENDING_MS + 1_000)
        member = under_test.join("billing", topic)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert under_test.take_one(member).body == b"kept"
        assert under_test.takes_nothing(member)

    @_KINDS
    def test_the_status_of_a_change_is_that_of_its_message(self, under_test: BrokerUnderTest, kind: str) -> None:
        topic = under_test.topic()
        delivered = _delayed(under_test, topic, "delivered", kind)
        under_test.pass_time(_PENDING_MS)
        under_test.take_one(under_test.join("billing", topic))
        cancelled = _delayed(under_test, topic, "cancelled", kind)
        under_test.broker.delayed.cancel(cancelled.handle)

        assert under_test.broker.delayed.cancel(delivered.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
        assert under_test.broker.delayed.cancel(cancelled.handle).status is ScheduleChangeStatus.CANCELLED
        assert under_test.broker.delayed.cancel(key=under_test.name("unknown")).status is ScheduleChangeStatus.UNKNOWN

    @_KINDS
    def test_a_key_selects_all_pending_messages_with_it(self, under_test: BrokerUnderTest, kind: str) -> None:
        topic, other = under_test.topic(), under_test.topic(stem="invoices")
        key = under_test.name("4466")
        for body in ("one", "two"):
            _delayed(under_test, topic, body, kind, KEYS=f"x {key}")
        _delayed(under_test, other, "of another topic", kind, KEYS=key)

        result = under_test.broker.delayed.cancel(key=key, topic=topic)
        under_test.pass_time(_PENDING_MS + 1_000)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 2)
        assert under_test.take_one(under_test.join("billing", other)).body == b"of another topic"
        assert under_test.takes_nothing(under_test.join("shipping", topic))

    @_KINDS
    @pytest.mark.parametrize("new_delay_ms", [0, 1_500, 8_000])
    def test_a_rescheduled_message_is_delivered_once_at_its_new_time(
        self, under_test: BrokerUnderTest, kind: str, new_delay_ms: int
    ) -> None:
        """The new time is now, earlier, or later than the old one."""
        topic = under_test.topic()
        sent = _delayed(under_test, topic, "moved", kind, TAGS="paid")
        new_ms = under_test.now_ms() + new_delay_ms

        result = under_test.broker.delayed.reschedule(sent.handle, new_ms)
        under_test.pass_time(9_000)
        member = under_test.join("billing", topic, "paid")
        message = under_test.take_one(member)

        assert (result.status, result.count) == (ScheduleChangeStatus.RESCHEDULED, 1)
        assert message.store_timestamp >= new_ms - under_test.early_ms
        assert message.msg_id == sent.msg_id
        assert under_test.takes_nothing(member)

    def test_a_batch_is_cancelled_by_its_handle(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.SCHEDULE_CHANGE, Capability.BATCH_DELAY)
        topic = under_test.topic()
        messages = [Message(topic, b"%d" % number, _DELAYS["level"]) for number in range(3)]

        result = under_test.broker.delayed.cancel(under_test.broker.sends.send_batch(messages).handle)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 3)

    def test_a_message_without_a_delay_has_no_handle(self, under_test: BrokerUnderTest) -> None:
        assert under_test.send(under_test.topic(), "now").handle is None

    def test_wrong_arguments_of_a_change_are_refused(self, under_test: BrokerUnderTest) -> None:
        sent = _delayed(under_test, under_test.topic(), "stays")
        broker = under_test.broker

        with pytest.raises(MessageError, match="is not a handle of a pending message"):
            broker.delayed.cancel("4466")
        with pytest.raises(MessageError, match="name the pending message by its handle or by key"):
            broker.delayed.cancel()
        with pytest.raises(DelayError, match="allowed are"):
            broker.delayed.reschedule(sent.handle, under_test.now_ms() + under_test.longest_delay_ms + 60_000)

    def test_changes_are_kept_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        for kind in _DELAYS:
            under_test.broker.delayed.cancel(_delayed(under_test, topic, f"{kind} cancelled", kind).handle)
            moved = _delayed(under_test, topic, f"{kind} moved", kind)
            under_test.broker.delayed.reschedule(moved.handle, under_test.now_ms() + 2 * _PENDING_MS)

        under_test.reopen()
        under_test.pass_time(2 * _PENDING_MS)
        messages = under_test.take(under_test.join("billing", topic), 2)

        assert sorted(bodies(messages)) == ["level moved", "timer moved"]

    # --- pending messages ----------------------------------------------------------------------

    def test_pending_messages_are_listed_by_their_due_time(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING)
        topic = under_test.topic()
        for body, delay_ms in (("third", 40_000), ("first", 20_000), ("fourth", 86_400_000)):
            under_test.send(topic, body, properties={Property.TIMER_DELAY_MS: str(delay_ms), Property.KEYS: body})
        under_test.send(topic, "second", properties={Property.DELAY: "4", Property.KEYS: "second"})
        query = PendingQuery(topic=topic)

        first = under_test.broker.delayed.pending(query, 3)
        rest = under_test.broker.delayed.pending(query, 3, first.cursor)

        assert [message.keys for message in (*first.messages, *rest.messages)] == ["first", "second", "third", "fourth"]
        assert rest.cursor is None
        assert under_test.broker.delayed.count_pending(query).total == 4

    @_KINDS
    @pytest.mark.parametrize("field", ["key", "tag"])
    def test_pending_messages_are_found_by_key_and_tag(
        self, under_test: BrokerUnderTest, field: str, kind: str
    ) -> None:
        under_test.needs(Capability.PENDING)
        topic, searched = under_test.topic(), under_test.name("searched")
        for value in (searched, "other"):
            _delayed(under_test, topic, value, kind, **{"KEYS" if field == "key" else "TAGS": value})
        query = PendingQuery(topic=topic, key=searched) if field == "key" else PendingQuery(topic=topic, tag=searched)

        [message] = under_test.broker.delayed.pending(query).messages

        assert searched in (message.keys, message.tags)
        assert message.delay_level == (2 if kind == "level" else 0)
        assert under_test.broker.delayed.cancel(message.handle).count == 1
        assert under_test.broker.delayed.pending(query).messages == ()
