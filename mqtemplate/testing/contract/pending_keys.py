"""Contract of pending keys, and of changes of pending messages together with sends.

A broker with `Capability.PENDING_KEYS` decides in one step. One with `Capability.PENDING_KEY_STEPS` looks up and sends:
it has the same rules for single messages with a timer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import MessageError, PendingKeyError
from mqtemplate.message import Message, Property
from mqtemplate.pending import (
    OnPending,
    PendingDecision,
    PendingMessage,
    PendingOutcome,
    PendingQuery,
    PendingState,
    ScheduleChangeStatus,
)
from mqtemplate.results import SendResult, TransactionState
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies

_KEY = "cart 17"
_SHORT_MS = 5_000
_HOUR_MS = 3_600_000
_REPLACE, _KEEP, _POSTPONE, _REFUSE = OnPending.REPLACE, OnPending.KEEP, OnPending.POSTPONE, OnPending.REFUSE


def _needs_keys(under_test: BrokerUnderTest) -> None:
    """Skip the test if the broker has no pending keys, in one step or in two."""
    if under_test.broker.capabilities.isdisjoint({Capability.PENDING_KEYS, Capability.PENDING_KEY_STEPS}):
        pytest.skip(f"this broker has no {Capability.PENDING_KEYS.value}")


def _properties(rule: OnPending, delay_ms: int, key: str, **more: str) -> dict[str, str]:
    names = {Property.TIMER_DELAY_MS: str(delay_ms), Property.PENDING_KEY: key, Property.ON_PENDING: rule.value}
    return names | more


def _send(
    under_test: BrokerUnderTest,
    topic: str,
    body: str,
    rule: OnPending = _REPLACE,
    delay_ms: int = _HOUR_MS,
    key: str = _KEY,
    **more: str,
) -> SendResult:
    return under_test.send(topic, body, properties=_properties(rule, delay_ms, key, **more))


def _outcome(result: SendResult) -> PendingOutcome:
    assert result.pending is not None, "a send with a pending key has an outcome"
    return result.pending


def _pending(under_test: BrokerUnderTest, topic: str) -> list[PendingMessage]:
    return list(under_test.broker.delayed.pending(PendingQuery(topic=topic), 1_000).messages)


class PendingKeyContract:
    """At most one pending message for a key, and changes together with sends."""

    # --- one message after the other -----------------------------------------------------------

    def test_a_message_replaces_the_one_that_is_pending_under_its_key(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        old = _send(under_test, topic, "old", delay_ms=_SHORT_MS)

        new = _send(under_test, topic, "new", delay_ms=_SHORT_MS)
        listed = _pending(under_test, topic)
        under_test.pass_time(_SHORT_MS + 1_000)
        member = under_test.join("billing", topic)

        assert (_outcome(old).decision, old.replaced) == (PendingDecision.STORED, ())
        assert (_outcome(new).decision, new.replaced) == (PendingDecision.REPLACED, (old.handle,))
        assert [(each.msg_id, each.pending_key) for each in listed] == [(new.msg_id, _KEY)]
        assert under_test.take_one(member).msg_id == new.msg_id
        assert under_test.takes_nothing(member)

    def test_without_a_rule_a_message_replaces_the_pending_one(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        properties = _properties(_REPLACE, _HOUR_MS, _KEY)
        del properties[Property.ON_PENDING]

        old, new = (under_test.send(topic, body, properties=properties) for body in ("old", "new"))

        assert new.replaced == (old.handle,)

    def test_a_pending_message_is_kept(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        first = _send(under_test, topic, "first", _KEEP, delay_ms=_SHORT_MS)

        kept = _send(under_test, topic, "second", _KEEP, delay_ms=1)
        under_test.pass_time(_SHORT_MS + 1_000)
        member = under_test.join("billing", topic)

        assert _outcome(first).decision is PendingDecision.STORED
        assert _outcome(kept) == PendingOutcome(PendingDecision.KEPT)
        assert (kept.msg_id, kept.handle, kept.message_queue) == (first.msg_id, first.handle, first.message_queue)
        assert under_test.take_one(member).body == b"first"
        assert under_test.takes_nothing(member)

    def test_a_postponed_message_has_its_body_and_the_new_due_time(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        first = _send(under_test, topic, "first", _POSTPONE, delay_ms=2_000)

        due_ms = under_test.now_ms() + 2 * _SHORT_MS
        postponed = _send(under_test, topic, "second", _POSTPONE, delay_ms=2 * _SHORT_MS)
        under_test.pass_time(2 * _SHORT_MS + 1_000)
        member = under_test.join("billing", topic)
        message = under_test.take_one(member)

        assert _outcome(postponed) == PendingOutcome(PendingDecision.POSTPONED)
        assert (message.body, message.msg_id, postponed.msg_id) == (b"first", first.msg_id, first.msg_id)
        assert message.store_timestamp >= due_ms - under_test.early_ms
        assert under_test.takes_nothing(member)

    def test_a_message_is_not_postponed_beyond_its_limit_after_the_first_send(
        self, under_test: BrokerUnderTest
    ) -> None:
        """The limit counts from the first send, also after an earlier postponement."""
        _needs_keys(under_test)
        topic, limit = under_test.topic(), {Property.NO_LATER_THAN: str(2 * _HOUR_MS)}
        before_ms = under_test.now_ms()
        _send(under_test, topic, "first", _POSTPONE, _HOUR_MS // 2, **limit)
        after_ms = under_test.now_ms()

        for delay_ms in (_HOUR_MS, 5 * _HOUR_MS):
            _send(under_test, topic, "later", _POSTPONE, delay_ms, **limit)
        [message] = _pending(under_test, topic)

        first_ms, last_ms = (each + 2 * _HOUR_MS for each in (before_ms, after_ms))
        assert first_ms - max(under_test.early_ms, 1) <= message.deliver_ms <= last_ms

    def test_the_handle_of_a_postponed_message_cancels_it(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        _send(under_test, topic, "first")

        postponed = _send(under_test, topic, "second", _POSTPONE, 2 * _HOUR_MS)
        change = under_test.broker.delayed.cancel(postponed.handle)

        assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert _pending(under_test, topic) == []

    def test_a_refused_message_is_not_stored_and_the_error_names_the_pending_one(
        self, under_test: BrokerUnderTest
    ) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        first = _send(under_test, topic, "first", _REFUSE)

        with pytest.raises(PendingKeyError, match=f"pending_key '{_KEY}' is pending for topic '{topic}'") as caught:
            _send(under_test, topic, "second", _REFUSE, 2 * _HOUR_MS)
        [message] = _pending(under_test, topic)

        error = caught.value
        assert (error.key, error.topic, error.msg_id, error.handle) == (_KEY, topic, first.msg_id, first.handle)
        assert message.msg_id == first.msg_id
        assert abs(error.deliver_ms - message.deliver_ms) <= under_test.early_ms

    @pytest.mark.parametrize("rule", OnPending)
    def test_a_cancelled_message_is_not_pending_for_its_key(self, under_test: BrokerUnderTest, rule: OnPending) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        under_test.broker.delayed.cancel(_send(under_test, topic, "cancelled").handle)

        result = _send(under_test, topic, "new", rule)

        assert (_outcome(result).decision, result.replaced) == (PendingDecision.STORED, ())
        assert [message.msg_id for message in _pending(under_test, topic)] == [result.msg_id]

    def test_other_keys_and_other_topics_are_not_touched(self, under_test: BrokerUnderTest) -> None:
        """A business key with the same text is another key."""
        _needs_keys(under_test)
        topic, other = under_test.topic(), under_test.topic(stem="invoices")
        same_text = {Property.TIMER_DELAY_MS: str(_HOUR_MS), Property.KEYS: "cart"}
        plain = under_test.send(topic, "plain", properties=same_text)

        results = [
            _send(under_test, to, "x", key=key) for to, key in ((topic, "cart"), (topic, "cart 1"), (other, "cart"))
        ]

        assert [_outcome(each).decision for each in results] == [PendingDecision.STORED] * 3
        expected = {plain.msg_id, results[0].msg_id, results[1].msg_id}
        assert {message.msg_id for message in _pending(under_test, topic)} == expected
        assert [message.msg_id for message in _pending(under_test, other)] == [results[2].msg_id]

    def test_a_key_names_its_message_after_a_reschedule_and_a_restart(self, under_test: BrokerUnderTest) -> None:
        _needs_keys(under_test)
        topic = under_test.topic()
        old = _send(under_test, topic, "old")
        under_test.broker.delayed.reschedule(old.handle, under_test.now_ms() + 2 * _HOUR_MS)

        under_test.reopen()
        new = _send(under_test, topic, "new")

        assert (_outcome(new).decision, len(new.replaced)) == (PendingDecision.REPLACED, 1)
        assert [message.msg_id for message in _pending(under_test, topic)] == [new.msg_id]

    def test_sends_at_the_same_time_leave_one_message(self, under_test: BrokerUnderTest) -> None:
        """Each of the others is replaced once."""
        _needs_keys(under_test)
        topic = under_test.topic()

        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(_send, under_test, topic, str(number)) for number in range(8)]
            results = [each.result() for each in sends]
        [last] = _pending(under_test, topic)

        replaced = [handle for result in results for handle in result.replaced]
        assert sorted(replaced) == sorted(str(each.handle) for each in results if each.msg_id != last.msg_id)

    # --- what only a broker does that decides in one step ---------------------------------------

    @pytest.mark.parametrize("rule", OnPending)
    def test_the_result_says_that_the_last_message_was_delivered(
        self, under_test: BrokerUnderTest, rule: OnPending
    ) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic = under_test.topic()
        _send(under_test, topic, "delivered", delay_ms=1)
        under_test.take_one(under_test.join("billing", topic))

        results = [_send(under_test, topic, "new", rule), _send(under_test, topic, "newer")]

        assert _outcome(results[0]) == PendingOutcome(PendingDecision.STORED, already_delivered=True)
        assert _outcome(results[1]) == PendingOutcome(PendingDecision.REPLACED, (str(results[0].handle),))

    @pytest.mark.parametrize("name", [Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS])
    @pytest.mark.parametrize("rule", OnPending)
    def test_a_message_that_is_due_when_it_arrives_was_delivered(
        self, under_test: BrokerUnderTest, rule: OnPending, name: str
    ) -> None:
        """After a restart too. It has no handle, and it is not late."""
        under_test.needs(Capability.PENDING_KEYS)
        topic = under_test.topic()
        due = {Property.TIMER_DELAY_MS: "0", Property.TIMER_DELIVER_MS: str(under_test.now_ms() - _HOUR_MS)}
        properties = {name: due[name], Property.PENDING_KEY: _KEY, Property.ON_PENDING: rule.value}

        at_once = under_test.send(topic, "at once", properties=properties)
        message = under_test.take_one(under_test.join("billing", topic))
        under_test.reopen()
        result = _send(under_test, topic, "new", rule)

        assert (_outcome(at_once), at_once.handle) == (PendingOutcome(PendingDecision.STORED), None)
        assert (message.msg_id, message.deliver_timestamp) == (at_once.msg_id, None)
        assert _outcome(result) == PendingOutcome(PendingDecision.STORED, already_delivered=True)

    def test_a_message_that_is_due_when_it_arrives_replaces_the_pending_one(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic = under_test.topic()
        old = _send(under_test, topic, "old")

        at_once = _send(under_test, topic, "at once", delay_ms=0)
        listed = _pending(under_test, topic)
        newer = _send(under_test, topic, "newer")

        assert _outcome(at_once) == PendingOutcome(PendingDecision.REPLACED, (str(old.handle),))
        assert listed == []
        assert _outcome(newer) == PendingOutcome(PendingDecision.STORED, already_delivered=True)
        assert under_test.take_one(under_test.join("billing", topic)).msg_id == at_once.msg_id

    def test_levels_and_timers_replace_each_other(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic = under_test.topic()
        level = {Property.DELAY: "10", Property.PENDING_KEY: _KEY}

        timer = _send(under_test, topic, "timer")
        second = under_test.send(topic, "level", properties=level)
        third = _send(under_test, topic, "last")

        assert (second.replaced, third.replaced) == ((timer.handle,), (second.handle,))
        assert [message.msg_id for message in _pending(under_test, topic)] == [third.msg_id]

    def test_each_message_of_a_batch_has_its_outcome(self, under_test: BrokerUnderTest) -> None:
        """Also two with one key: the later one sees the earlier one."""
        under_test.needs(Capability.PENDING_KEYS, Capability.BATCH_DELAY)
        topic = under_test.topic()
        old = _send(under_test, topic, "old")
        kept = _send(under_test, topic, "kept", key="cart 18")

        batch = [
            Message(topic, b"plain", {Property.TIMER_DELAY_MS: str(_HOUR_MS)}),
            Message(topic, b"first", _properties(_REPLACE, _HOUR_MS, _KEY)),
            Message(topic, b"no", _properties(_KEEP, _HOUR_MS, "cart 18")),
            Message(topic, b"second", _properties(_REPLACE, _HOUR_MS, _KEY)),
        ]
        result = under_test.broker.sends.send_batch(batch)

        ids, handles = result.msg_id.split(","), str(result.handle).split(",")
        assert _outcome(result).each == (
            None,
            PendingOutcome(PendingDecision.REPLACED, (str(old.handle),)),
            PendingOutcome(PendingDecision.KEPT),
            PendingOutcome(PendingDecision.REPLACED, (handles[1],)),
        )
        assert result.replaced == (old.handle, handles[1])
        assert (ids[2], handles[2]) == (kept.msg_id, kept.handle)
        assert {each.msg_id for each in _pending(under_test, topic)} == {ids[0], ids[2], ids[3]}

    def test_a_batch_with_one_refused_message_says_which(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS, Capability.BATCH_DELAY)
        topic = under_test.topic()
        first = _send(under_test, topic, "first")

        batch = [Message(topic, b"x", _properties(_REFUSE, _HOUR_MS, key)) for key in ("cart 18", _KEY)]
        with pytest.raises(PendingKeyError, match=f"pending_key '{_KEY}'") as caught:
            under_test.broker.sends.send_batch(batch)

        assert caught.value.msg_id == first.msg_id
        assert [each.msg_id for each in _pending(under_test, topic)] == [first.msg_id]

    def test_a_message_of_a_transaction_replaces_with_the_commit(self, under_test: BrokerUnderTest) -> None:
        """Before it, and after a rollback, the old message is pending."""
        under_test.needs(Capability.PENDING_KEYS, Capability.TRANSACTION_DELAY)
        topic = under_test.topic()
        old = _send(under_test, topic, "old")

        for state, body in ((TransactionState.ROLLBACK, "no"), (TransactionState.COMMIT, "new")):
            half = under_test.send_half(topic, body, _properties(_REPLACE, _HOUR_MS, _KEY))
            assert [each.msg_id for each in _pending(under_test, topic)] == [old.msg_id]
            under_test.broker.transactions.end_transaction(half, state)

        def replaced() -> bool:  # a server ends a transaction after the request for it
            return [each.msg_id for each in _pending(under_test, topic)] == [half.send_result.msg_id]

        under_test.until(replaced, "the committed message is the one that is pending")

    # --- changes together with sends ------------------------------------------------------------

    def test_messages_are_stored_together_with_a_cancel(self, under_test: BrokerUnderTest) -> None:
        """At once or later. A second cancel stores nothing."""
        under_test.needs(Capability.PENDING_KEYS)
        topic, mails = under_test.topic(), under_test.broker.queues(under_test.topic(1, "mails"))[0]
        sent = under_test.send(topic, "old", properties={Property.TIMER_DELAY_MS: str(_HOUR_MS)})
        later = Message(mails.topic, b"later", {Property.TIMER_DELAY_MS: "1"})

        change = under_test.broker.delayed.cancel(
            sent.handle, then=[(Message(mails.topic, b"now"), mails), (later, None)]
        )
        again = under_test.broker.delayed.cancel(sent.handle, then=[(Message(mails.topic, b"no"), None)])

        assert (change.status, change.count) == (ScheduleChangeStatus.CANCELLED, 1)
        assert (again.status, again.count, again.sent) == (ScheduleChangeStatus.CANCELLED, 0, ())
        messages = under_test.take(under_test.join("mailing", mails.topic), 2)
        assert sorted(bodies(messages)) == ["later", "now"]
        assert {message.msg_id for message in messages} == {result.msg_id for result in change.sent}
        assert [result.handle is None for result in change.sent] == [True, False]
        assert _pending(under_test, topic) == []

    def test_nothing_is_stored_if_the_cancel_comes_too_late(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic, mails = under_test.topic(), under_test.broker.queues(under_test.topic(1, "mails"))[0]
        sent = under_test.send(topic, "delivered", properties={Property.TIMER_DELAY_MS: "1"})
        under_test.take_one(under_test.join("billing", topic))

        change = under_test.broker.delayed.cancel(sent.handle, then=[(Message(mails.topic, b"no"), None)])

        assert (change.status, change.sent) == (ScheduleChangeStatus.ALREADY_DELIVERED, ())
        assert under_test.broker.reader.max_offset(mails) == 0

    def test_messages_are_stored_together_with_a_new_time(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic, key = under_test.topic(), under_test.name("4466")
        under_test.send(topic, "moved", properties={Property.TIMER_DELAY_MS: "1000", Property.KEYS: key})
        mails = under_test.topic(stem="mails")
        due_ms = under_test.now_ms() + _HOUR_MS

        change = under_test.broker.delayed.reschedule(
            None, due_ms, key=key, topic=topic, then=[(Message(mails, b"now"), None)]
        )

        assert (change.status, change.count, len(change.sent)) == (ScheduleChangeStatus.RESCHEDULED, 1, 1)
        assert [(each.deliver_ms, each.handle) for each in _pending(under_test, topic)] == [(due_ms, change.handles[0])]
        assert under_test.take_one(under_test.join("mailing", mails)).msg_id == change.sent[0].msg_id

    def test_a_message_is_sent_if_another_one_is_in_a_state(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.PENDING_KEYS)
        topic, mails = under_test.topic(), under_test.topic(stem="mails")
        delayed = under_test.broker.delayed
        delivered = under_test.send(topic, "x", properties={Property.TIMER_DELAY_MS: "1"}).handle
        under_test.take_one(under_test.join("billing", topic))
        pending, cancelled = (
            under_test.send(topic, "x", properties={Property.TIMER_DELAY_MS: str(_HOUR_MS)}).handle for _ in range(2)
        )
        delayed.cancel(cancelled)

        for handle, state in (
            (pending, PendingState.PENDING),
            (delivered, PendingState.DELIVERED),
            (cancelled, PendingState.CANCELLED),
        ):
            for wanted in (PendingState.PENDING, PendingState.DELIVERED):
                message = Message(mails, f"{state} {wanted}".encode())
                result = delayed.send_if([(message, None)], wanted, handle)
                assert (result.state, len(result.sent)) == (state, state is wanted)

        messages = under_test.take(under_test.join("mailing", mails), 2)
        assert sorted(bodies(messages)) == ["delivered delivered", "pending pending"]
        unknown = delayed.send_if(
            [(Message(mails, b"x"), None)], PendingState.PENDING, key=under_test.name("unknown"), topic=topic
        )
        assert (unknown.state, unknown.sent) == (PendingState.UNKNOWN, ())

    def test_a_message_of_a_change_has_no_pending_key(self, under_test: BrokerUnderTest) -> None:
        """The change is not made either."""
        under_test.needs(Capability.PENDING_KEYS)
        topic = under_test.topic()
        sent = under_test.send(topic, "stays", properties={Property.TIMER_DELAY_MS: str(_HOUR_MS)})
        keyed = Message(topic, b"x", _properties(_REPLACE, _HOUR_MS, _KEY))

        with pytest.raises(MessageError, match="pending key"):
            under_test.broker.delayed.cancel(sent.handle, then=[(keyed, None)])

        assert [each.msg_id for each in _pending(under_test, topic)] == [sent.msg_id]
