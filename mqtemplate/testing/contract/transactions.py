"""Contract for transactions and their checks, and for requests and replies.

A message is delivered if its transaction commits; open transactions are checked.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import ListenerError, MessageError, RequestTimeoutError, UnsupportedError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.results import SendStatus, TransactionState
from mqtemplate.testing.contract.under_test import BrokerUnderTest, bodies

_DELAY_MS = 1_000


class _Checker:
    """Registered checker that returns these states one after the other, the last one for ever, or raises them."""

    def __init__(self, under_test: BrokerUnderTest, *states: TransactionState | Exception) -> None:
        under_test.needs(Capability.TRANSACTION)
        self.states = list(states)
        self.checked: list[MessageExt] = []
        self.registration = under_test.broker.transactions.check_transactions(under_test.name("shop"), self._check)

    def _check(self, message: MessageExt) -> TransactionState:
        self.checked.append(message)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return state


class TransactionContract:
    """Commit, rollback, checks, and delays in transactions."""

    # --- commit and rollback -------------------------------------------------------------------

    def test_a_message_is_not_visible_before_the_commit(self, under_test: BrokerUnderTest) -> None:
        half = under_test.send_half(under_test.topic(queue_count=1), "unseen")
        under_test.pass_time(200)

        assert half.send_result.send_status is SendStatus.SEND_OK
        assert half.send_result.transaction_id == half.send_result.msg_id
        assert under_test.broker.reader.pull(half.send_result.message_queue, 0).messages == []

    def test_a_commit_delivers_the_message_as_it_was_sent(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        queue = under_test.queue(2, of=4)
        topic, consumer = queue.topic, under_test.join("billing", queue.topic)
        sent = Message(topic, b"paid", {Property.TAGS: "paid", Property.KEYS: "4466", "region": "EU"}, flag=7)

        half = under_test.broker.sends.send_half(sent, under_test.name("shop"), queue)
        under_test.broker.transactions.end_transaction(half, TransactionState.COMMIT)
        message = under_test.take_one(consumer)

        assert (message.topic, message.body, message.flag, message.message_queue) == (topic, b"paid", 7, queue)
        assert (message.tags, message.keys, message.user_properties) == ("paid", "4466", {"region": "EU"})
        assert message.msg_id == half.send_result.msg_id
        assert message.transaction_id == half.send_result.transaction_id

    def test_a_rollback_drops_the_message(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)
        dropped, kept = under_test.send_half(topic, "dropped"), under_test.send_half(topic, "kept")

        under_test.broker.transactions.end_transaction(dropped, TransactionState.ROLLBACK, "no money")
        under_test.broker.transactions.end_transaction(kept, TransactionState.COMMIT)

        consumer = under_test.join("billing", topic)
        assert under_test.take_one(consumer).body == b"kept"
        assert under_test.takes_nothing(consumer)

    def test_transactions_can_end_in_any_order(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)

        for half in reversed([under_test.send_half(topic, str(number)) for number in range(5)]):
            under_test.broker.transactions.end_transaction(half, TransactionState.COMMIT)

        messages = under_test.take(under_test.join("billing", topic), 5)
        assert sorted(bodies(messages)) == ["0", "1", "2", "3", "4"]

    # --- checks --------------------------------------------------------------------------------

    def test_an_open_transaction_is_checked(self, under_test: BrokerUnderTest) -> None:
        topic, checker = under_test.topic(queue_count=1), _Checker(under_test, TransactionState.COMMIT)
        half = under_test.send_half(topic, "open", {Property.TAGS: "paid", "order": "4466"})

        under_test.until(lambda: bool(checker.checked), "the transaction is checked", under_test.checks_within_ms)
        message = under_test.take_one(under_test.join("billing", topic))

        checker.registration.close()
        checked = checker.checked[0]
        assert (checked.topic, checked.body, checked.tags) == (topic, b"open", "paid")
        assert checked.properties["order"] == "4466"
        assert checked.transaction_id == checked.msg_id == half.send_result.msg_id
        assert (message.body, message.msg_id) == (b"open", half.send_result.msg_id)

    def test_a_transaction_is_checked_until_its_state_is_known(self, under_test: BrokerUnderTest) -> None:
        """A checker that raises an error counts as ``UNKNOWN``."""
        states = TransactionState.UNKNOWN, ValueError("no database"), TransactionState.ROLLBACK
        checker = _Checker(under_test, *states)
        half = under_test.send_half(under_test.topic(queue_count=1), "open")

        under_test.until(lambda: len(checker.checked) >= 3, "there are three checks", 3 * under_test.checks_within_ms)

        checker.registration.close()
        assert {message.msg_id for message in checker.checked} == {half.send_result.msg_id}
        assert under_test.broker.reader.pull(half.send_result.message_queue, 0).messages == []

    def test_a_transaction_that_has_ended_is_not_checked(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_virtual_time()
        topic, checker = under_test.topic(queue_count=1), _Checker(under_test, TransactionState.COMMIT)

        under_test.broker.transactions.end_transaction(under_test.send_half(topic, "one"), TransactionState.COMMIT)
        under_test.broker.transactions.end_transaction(under_test.send_half(topic, "two"), TransactionState.ROLLBACK)
        under_test.pass_time(10 * under_test.checks_within_ms)

        assert checker.checked == []

    def test_a_group_has_at_most_one_checker(self, under_test: BrokerUnderTest) -> None:
        first = _Checker(under_test, TransactionState.COMMIT)

        with pytest.raises(ListenerError, match=under_test.name("shop")):
            _Checker(under_test, TransactionState.COMMIT)

        first.registration.close()
        first.registration.close()
        _Checker(under_test, TransactionState.COMMIT).registration.close()

    def test_open_transactions_are_checked_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        """Transactions that ended before the restart stay committed or rolled back."""
        topic = under_test.topic(queue_count=1)
        under_test.broker.transactions.end_transaction(under_test.send_half(topic, "before"), TransactionState.COMMIT)
        under_test.broker.transactions.end_transaction(under_test.send_half(topic, "never"), TransactionState.ROLLBACK)
        under_test.send_half(topic, "after")

        under_test.reopen()
        checker = _Checker(under_test, TransactionState.COMMIT)
        under_test.until(lambda: bool(checker.checked), "the transaction is checked", under_test.checks_within_ms)
        messages = under_test.take(under_test.join("billing", topic), 2)

        checker.registration.close()
        assert bodies(messages) == ["before", "after"]
        assert bodies(checker.checked) == ["after"]

    # --- delays --------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "delay",
        [{Property.TIMER_DELAY_MS: str(_DELAY_MS)}, {Property.TIMER_DELAY_SEC: "1"}, {Property.DELAY: "1"}],
        ids=("milliseconds", "seconds", "level"),
    )
    def test_a_delay_in_a_transaction_counts_from_the_commit(
        self, under_test: BrokerUnderTest, delay: dict[str, str]
    ) -> None:
        under_test.needs(Capability.TRANSACTION_DELAY)
        topic, consumer = under_test.joined(queue_count=1)
        half = under_test.send_half(topic, "late", delay)
        under_test.pass_time(_DELAY_MS)

        committed_ms = under_test.now_ms()
        under_test.broker.transactions.end_transaction(half, TransactionState.COMMIT)
        message = under_test.take_one(consumer)

        assert message.body == b"late"
        assert message.store_timestamp >= committed_ms + _DELAY_MS - under_test.early_ms

    def test_a_message_with_a_past_deliver_time_is_delivered_with_the_commit(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION_DELAY)
        topic = under_test.topic(queue_count=1)
        half = under_test.send_half(topic, "due", {Property.TIMER_DELIVER_MS: str(under_test.now_ms() + 100)})
        under_test.pass_time(200)

        under_test.broker.transactions.end_transaction(half, TransactionState.COMMIT)

        assert under_test.take_one(under_test.join("billing", topic)).body == b"due"

    def test_a_broker_that_would_lose_a_delay_in_a_transaction_refuses_it(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        if Capability.TRANSACTION_DELAY in under_test.broker.capabilities:
            pytest.skip("this broker supports such delays")

        with pytest.raises(UnsupportedError, match="delay"):
            under_test.send_half(under_test.topic(), "late", {Property.DELAY: "3"})


def _request(
    under_test: BrokerUnderTest, topic: str, body: bytes, timeout_ms: int = 10_000, **properties: str
) -> Future[MessageExt]:
    """Send a request. Skip the test if the broker has no requests."""
    under_test.needs(Capability.REQUEST_REPLY)
    return under_test.broker.requests.request(Message(topic, body, properties), None, timeout_ms)


class ReplyContract:
    """Replies, timeouts, and delayed requests."""

    def test_a_request_gets_its_reply(self, under_test: BrokerUnderTest) -> None:
        topic, consumer = under_test.joined("answers", 1)

        future = _request(under_test, topic, b"how much?", TAGS="price")
        request = under_test.take_one(consumer)
        was_done = future.done()
        under_test.broker.requests.reply(request, b"12.50", {"currency": "EUR"})
        reply = under_test.result(future)

        assert (request.body, request.tags) == (b"how much?", "price")
        assert not was_done
        assert (reply.body, reply.properties["currency"]) == (b"12.50", "EUR")

    def test_replies_can_be_sent_in_any_order(self, under_test: BrokerUnderTest) -> None:
        topic, consumer = under_test.joined("answers", 1)

        futures = [_request(under_test, topic, body) for body in (b"a", b"b", b"c")]
        for request in reversed(under_test.take(consumer, 3)):
            under_test.broker.requests.reply(request, request.body.upper())

        assert [under_test.result(future).body for future in futures] == [b"A", b"B", b"C"]

    def test_a_request_without_a_reply_ends_with_a_timeout(self, under_test: BrokerUnderTest) -> None:
        topic = under_test.topic(queue_count=1)

        future = _request(under_test, topic, b"no consumer", timeout_ms=300)

        with pytest.raises(RequestTimeoutError, match=rf"{topic}.*300ms"):
            under_test.result(future)

    def test_a_reply_to_a_message_that_is_no_request_is_refused(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.REQUEST_REPLY)
        [message] = under_test.broker.reader.pull(under_test.filled("a plain message"), 0).messages

        with pytest.raises(MessageError, match="is not a request"):
            under_test.broker.requests.reply(message, b"no request")

    def test_a_request_can_be_delayed(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TIMER)
        topic, consumer = under_test.joined("answers", 1)

        future = _request(under_test, topic, b"later", TIMER_DELAY_MS="300")
        under_test.broker.requests.reply(under_test.take_one(consumer), b"done")

        assert under_test.result(future).body == b"done"
