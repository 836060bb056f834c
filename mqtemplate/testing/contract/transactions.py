"""The contract: a message in a transaction is delivered if it commits, and the broker asks where the end never came."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.results import HalfMessage, SendStatus, TransactionState
from mqtemplate.testing.contract.under_test import BrokerUnderTest

_DELAY_MS = 2_000


class _Answers:
    """A checker that gives its answers one after the other, the last one for ever."""

    def __init__(self, *answers: TransactionState | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[MessageExt] = []

    def __call__(self, message: MessageExt) -> TransactionState:
        self.asked.append(message)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class TransactionContract:
    # --- the end -------------------------------------------------------------------------------

    def test_a_message_in_a_transaction_is_seen_by_nobody_before_the_commit(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)

        half = _half(under_test, topic, b"unseen")

        queue = half.send_result.message_queue
        under_test.pass_time(500)
        assert half.send_result.send_status is SendStatus.SEND_OK
        assert half.send_result.transaction_id == half.send_result.msg_id
        assert under_test.broker.pull(queue, 0).messages == []

    def test_the_commit_of_a_transaction_delivers_the_message_as_it_was_sent(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic()
        queue = under_test.broker.queues(topic)[2]
        consumer = under_test.join("billing", topic)
        sent = Message(topic, b"paid", {Property.TAGS: "paid", Property.KEYS: "4466", "region": "EU"}, flag=7)

        half = under_test.broker.send_half(sent, under_test.name("shop"), queue)
        under_test.broker.end_transaction(half, TransactionState.COMMIT)
        message = under_test.take_one(consumer)

        assert (message.topic, message.body, message.flag, message.message_queue) == (topic, b"paid", 7, queue)
        assert (message.tags, message.keys, message.user_properties) == ("paid", "4466", {"region": "EU"})
        assert message.msg_id == half.send_result.msg_id
        assert message.transaction_id == half.send_result.transaction_id

    def test_the_rollback_of_a_transaction_drops_the_message(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)
        dropped, kept = _half(under_test, topic, b"dropped"), _half(under_test, topic, b"kept")

        under_test.broker.end_transaction(dropped, TransactionState.ROLLBACK, "no money")
        under_test.broker.end_transaction(kept, TransactionState.COMMIT)

        consumer = under_test.join("billing", topic)
        assert under_test.take_one(consumer).body == b"kept"
        assert under_test.takes_nothing(consumer)

    def test_transactions_end_in_any_order(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)
        halves = [_half(under_test, topic, b"%d" % number) for number in range(5)]

        for half in reversed(halves):
            under_test.broker.end_transaction(half, TransactionState.COMMIT)

        messages = under_test.take(under_test.join("billing", topic), 5)
        assert sorted(message.body for message in messages) == [b"0", b"1", b"2", b"3", b"4"]

    # --- the questions -------------------------------------------------------------------------

    def test_a_transaction_without_an_end_is_asked_for(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)
        checker = _Answers(TransactionState.COMMIT)
        registration = under_test.broker.check_transactions(under_test.name("shop"), checker)
        half = under_test.broker.send_half(
            Message(topic, b"asked for", {Property.TAGS: "paid", "order": "4466"}), under_test.name("shop")
        )

        under_test.until(lambda: bool(checker.asked), "the broker asks", under_test.asks_within_ms)
        message = under_test.take_one(under_test.join("billing", topic))

        registration.close()
        asked = checker.asked[0]
        assert (asked.topic, asked.body, asked.tags) == (topic, b"asked for", "paid")
        assert asked.properties["order"] == "4466"
        assert asked.transaction_id == asked.msg_id == half.send_result.msg_id
        assert (message.body, message.msg_id) == (b"asked for", half.send_result.msg_id)

    def test_a_transaction_is_asked_for_until_its_state_is_known(self, under_test: BrokerUnderTest) -> None:
        """An answer of UNKNOWN, and a checker that fails, are as good as none."""
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)
        checker = _Answers(TransactionState.UNKNOWN, ValueError("no database"), TransactionState.ROLLBACK)
        registration = under_test.broker.check_transactions(under_test.name("shop"), checker)
        half = _half(under_test, topic, b"asked for")

        under_test.until(lambda: len(checker.asked) >= 3, "it asks three times", 3 * under_test.asks_within_ms)

        registration.close()
        assert {message.msg_id for message in checker.asked} == {half.send_result.msg_id}
        assert under_test.broker.pull(half.send_result.message_queue, 0).messages == []

    def test_a_transaction_that_ended_is_not_asked_for(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        under_test.needs_virtual_time()
        topic = under_test.topic(queue_count=1)
        checker = _Answers(TransactionState.COMMIT)
        under_test.broker.check_transactions(under_test.name("shop"), checker)

        under_test.broker.end_transaction(_half(under_test, topic, b"one"), TransactionState.COMMIT)
        under_test.broker.end_transaction(_half(under_test, topic, b"two"), TransactionState.ROLLBACK)
        under_test.pass_time(10 * under_test.asks_within_ms)

        assert checker.asked == []

    def test_a_group_has_one_checker_of_its_transactions(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        group = under_test.name("shop")
        first = under_test.broker.check_transactions(group, _Answers(TransactionState.COMMIT))

        with pytest.raises(ListenerError, match=group):
            under_test.broker.check_transactions(group, _Answers(TransactionState.COMMIT))

        first.close()
        first.close()
        under_test.broker.check_transactions(group, _Answers(TransactionState.COMMIT)).close()

    def test_transactions_are_open_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        """What ended before it stays as it is, and the rest is asked for."""
        under_test.needs(Capability.TRANSACTION)
        topic = under_test.topic(queue_count=1)
        under_test.broker.end_transaction(_half(under_test, topic, b"before"), TransactionState.COMMIT)
        under_test.broker.end_transaction(_half(under_test, topic, b"never"), TransactionState.ROLLBACK)
        _half(under_test, topic, b"after")

        under_test.reopen()
        checker = _Answers(TransactionState.COMMIT)
        registration = under_test.broker.check_transactions(under_test.name("shop"), checker)
        under_test.until(lambda: bool(checker.asked), "the broker asks", under_test.asks_within_ms)
        messages = under_test.take(under_test.join("billing", topic), 2)

        registration.close()
        assert [message.body for message in messages] == [b"before", b"after"]
        assert [message.body for message in checker.asked] == [b"after"]

    # --- delays --------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "delay",
        [
            pytest.param({Property.TIMER_DELAY_MS: str(_DELAY_MS)}, id="milliseconds"),
            pytest.param({Property.TIMER_DELAY_SEC: "2"}, id="seconds"),
            pytest.param({Property.DELAY: "2"}, id="level"),
        ],
    )
    def test_a_delay_in_a_transaction_counts_from_the_commit(
        self, under_test: BrokerUnderTest, delay: dict[str, str]
    ) -> None:
        under_test.needs(Capability.TRANSACTION_DELAY)
        topic = under_test.topic(queue_count=1)
        consumer = under_test.join("billing", topic)
        half = under_test.broker.send_half(Message(topic, b"late", delay), under_test.name("shop"))
        under_test.pass_time(_DELAY_MS)

        committed_ms = under_test.now_ms()
        under_test.broker.end_transaction(half, TransactionState.COMMIT)
        delay_ms = 5_000 if Property.DELAY in delay else _DELAY_MS
        under_test.pass_time(delay_ms // 2)
        was_early = not under_test.takes_nothing(consumer)
        under_test.pass_time(delay_ms // 2)
        message = under_test.take_one(consumer)

        assert not was_early
        assert message.body == b"late"
        assert message.store_timestamp >= committed_ms + delay_ms - under_test.early_ms

    def test_a_deliver_time_in_a_transaction_that_has_come_means_now(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION_DELAY)
        topic = under_test.topic(queue_count=1)
        properties = {Property.TIMER_DELIVER_MS: str(under_test.now_ms() + 1_000)}
        half = under_test.broker.send_half(Message(topic, b"due", properties), under_test.name("shop"))
        under_test.pass_time(_DELAY_MS)

        under_test.broker.end_transaction(half, TransactionState.COMMIT)

        assert under_test.take_one(under_test.join("billing", topic)).body == b"due"

    def test_a_delay_in_a_transaction_is_refused_where_it_would_be_lost(self, under_test: BrokerUnderTest) -> None:
        under_test.needs(Capability.TRANSACTION)
        if Capability.TRANSACTION_DELAY in under_test.broker.capabilities:
            pytest.skip("this broker keeps it")

        with pytest.raises(UnsupportedError, match="delay"):
            under_test.broker.send_half(
                Message(under_test.topic(), b"late", {Property.DELAY: "3"}), under_test.name("shop")
            )


def _half(under_test: BrokerUnderTest, topic: str, body: bytes) -> HalfMessage:
    return under_test.broker.send_half(Message(topic, body), under_test.name("shop"))
