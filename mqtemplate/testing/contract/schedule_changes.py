"""Contract for schedule changes (cancel and reschedule), and for queries of pending messages."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies

_DELAY_MS = 5_000
_DELAYS = {"level": {Property.DELAY: "2"}, "timer": {Property.TIMER_DELAY_MS: str(_DELAY_MS)}}
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

        result = under_test.broker.cancel(cancelled.handle)
        under_test.pass_time(_DELAY_MS + 1_000)
        member = under_test.join("billing", topic)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert under_test.take_one(member).body == b"kept"
        assert under_test.takes_nothing(member)

    @_KINDS
    def test_the_status_of_a_change_is_that_of_its_message(self, under_test: BrokerUnderTest, kind: str) -> None:
        topic = under_test.topic()
        delivered = _delayed(under_test, topic, "delivered", kind)
        under_test.pass_time(_DELAY_MS)
        under_test.take_one(under_test.join("billing", topic))
        cancelled = _delayed(under_test, topic, "cancelled", kind)
        under_test.broker.cancel(cancelled.handle)

        assert under_test.broker.cancel(delivered.handle).status is ScheduleChangeStatus.ALREADY_DELIVERED
        assert under_test.broker.cancel(cancelled.handle).status is ScheduleChangeStatus.CANCELLED
        assert under_test.broker.cancel(key=under_test.name("unknown")).status is ScheduleChangeStatus.UNKNOWN

    @_KINDS
    def test_a_key_selects_all_pending_messages_with_it(self, under_test: BrokerUnderTest, kind: str) -> None:
        topic, other = under_test.topic(), under_test.topic(stem="invoices")
        key = under_test.name("4466")
        for body in ("one", "two"):
            _delayed(under_test, topic, body, kind, KEYS=f"x {key}")
        _delayed(under_test, other, "of another topic", kind, KEYS=key)

        result = under_test.broker.cancel(key=key, topic=topic)
        under_test.pass_time(_DELAY_MS + 1_000)

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

        result = under_test.broker.reschedule(sent.handle, new_ms)
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

        result = under_test.broker.cancel(under_test.broker.send_batch(messages).handle)

        assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 3)

    def test_a_message_without_a_delay_has_no_handle(self, under_test: BrokerUnderTest) -> None:
        assert under_test.send(under_test.topic(), "now").handle is None

    def test_wrong_arguments_of_a_change_are_refused(self, under_test: BrokerUnderTest) -> None:
        sent = _delayed(under_test, under_test.topic(), "stays")
        broker = under_test.broker

        with pytest.raises(MessageError, match="is not a handle of a pending message"):
            broker.cancel("4466")
        with pytest.raises(MessageError, match="name the pending message by its handle or by key"):
            broker.cancel()
        with pytest.raises(DelayError, match="allowed are"):
            broker.reschedule(sent.handle, under_test.now_ms() + under_test.longest_delay_ms + 60_000)

    def test_changes_are_kept_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic()
        for kind in _DELAYS:
            under_test.broker.cancel(_delayed(under_test, topic, f"{kind} cancelled", kind).handle)
            moved = _delayed(under_test, topic, f"{kind} moved", kind)
            under_test.broker.reschedule(moved.handle, under_test.now_ms() + 2 * _DELAY_MS)

        under_test.reopen()
        under_test.pass_time(2 * _DELAY_MS)
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

        first = under_test.broker.pending(query, 3)
        rest = under_test.broker.pending(query, 3, first.cursor)

        assert [message.keys for message in (*first.messages, *rest.messages)] == ["first", "second", "third", "fourth"]
        assert rest.cursor is None
        assert under_test.broker.count_pending(query).total == 4

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

        [message] = under_test.broker.pending(query).messages

        assert searched in (message.keys, message.tags)
        assert message.delay_level == (2 if kind == "level" else 0)
        assert under_test.broker.cancel(message.handle).count == 1
        assert under_test.broker.pending(query).messages == ()
