"""Contract of POP consumption: each message has one member at a time, and is acknowledged by itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mqtemplate.broker import Capability, ConsumeFromWhere, ConsumerSpec, PopConsumers, ReceivedMessage
from mqtemplate.errors import BrokerClosedError, InvalidReceiptHandleError
from mqtemplate.key_limits import KeyLimits
from mqtemplate.message import MessageQueue, Property
from mqtemplate.selectors.tags import Selector, TagSelector
from mqtemplate.testing.contract.under_test import BrokerUnderTest
from mqtemplate.topics import DLQ_TOPIC_PREFIX

_INVISIBLE_MS = 60_000
_SHORT_MS = 10_000  # the shortest time of RocketMQ's proxy
_WAIT_MS = 5_000
_NOTHING_MS = 200
_LATE_MS = 1_500  # of a redelivery, on a real clock


class _Group:
    """One group that receives from one topic by POP."""

    def __init__(self, under_test: BrokerUnderTest, queue_count: int, selector: Selector | None, **spec: Any) -> None:
        under_test.needs(Capability.POP)
        self._under_test = under_test
        self.name = under_test.name("billing")
        self.topic = under_test.topic(queue_count)
        self._selector = selector
        self._spec = {"consume_from_where": ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, **spec}
        self.member = self.join()

    @property
    def pop(self) -> PopConsumers:
        return self._under_test.broker.pop

    def join(self) -> Any:
        selector = self._selector or TagSelector("*")
        return self.pop.join(ConsumerSpec(group=self.name, subscriptions={self.topic: selector}, **self._spec))

    def receive(self, max_count: int = 32, invisible_ms: int = _INVISIBLE_MS, **options: Any) -> list[ReceivedMessage]:
        """Receive what is there within a short time."""
        wait_ms = options.pop("wait_ms", 0 if self._under_test.broker.clock.is_virtual else _NOTHING_MS)
        return self.pop.receive(self.name, self.topic, max_count, invisible_ms, wait_ms, self._selector, **options)

    def take(self, count: int = 1, invisible_ms: int = _INVISIBLE_MS, **options: Any) -> list[ReceivedMessage]:
        """Receive until so many messages have arrived."""
        return self._under_test.gather(lambda missing: self.receive(missing, invisible_ms, **options), count)

    def ack(self, *received: ReceivedMessage) -> None:
        for each in received:
            self.pop.ack(self.name, each.message.topic, each.receipt)

    def change(self, received: ReceivedMessage, invisible_ms: int, *, counts: bool = True) -> str:
        return self.pop.change_invisible(
            self.name, received.message.topic, received.receipt, invisible_ms, counts=counts
        )

    def send(self, *bodies: str, **properties: str) -> None:
        for body in bodies:
            self._under_test.send(self.topic, body, properties=properties)

    def until_visible(self, invisible_ms: int) -> None:
        """Let this time pass; on a real clock a broker may be late."""
        is_virtual = self._under_test.broker.clock.is_virtual
        self._under_test.pass_time(invisible_ms + (0 if is_virtual else _LATE_MS))


def _bodies(received: Sequence[ReceivedMessage]) -> list[str]:
    return sorted(each.message.body.decode() for each in received)


class PopContract:
    """Receiving with an invisible time, acknowledgement, changes of the time, and order by key."""

    def test_a_received_message_is_invisible_to_other_members(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 4, None)
        group.send("a", "b", "c")

        received = group.take(3)

        assert _bodies(received) == ["a", "b", "c"]
        assert {(each.attempt, each.message.reconsume_times, each.message.topic) for each in received} == {
            (1, 0, group.topic)
        }
        assert group.receive() == []

    def test_an_acknowledged_message_is_not_delivered_again(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.send("a", "b")
        first, second = group.take(2, _SHORT_MS)

        group.ack(second)
        group.ack(second)  # has no further effect
        group.until_visible(_SHORT_MS)

        assert _bodies(group.take(1)) == ["a"]
        assert group.receive() == []
        assert first.message.body == b"a"

    def test_a_message_that_is_not_acknowledged_in_time_is_delivered_again(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 4, None)
        group.send("a", KEYS="4466")
        [first] = group.take(1, _SHORT_MS)

        group.until_visible(_SHORT_MS)
        [again] = group.take(1)

        assert (again.attempt, again.message.reconsume_times) == (2, 1)
        assert (again.message.topic, again.message.keys) == (group.topic, "4466")
        assert again.message.msg_id == first.message.msg_id

    def test_the_invisible_time_is_exact_on_a_virtual_clock(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_virtual_time()
        group = _Group(under_test, 1, None)
        group.send("a")
        group.take(1, _SHORT_MS)

        under_test.pass_time(_SHORT_MS - 1)
        assert group.receive() == []
        under_test.pass_time(1)

        assert _bodies(group.receive()) == ["a"]

    def test_the_receipt_of_an_older_delivery_is_not_valid(self, under_test: BrokerUnderTest) -> None:
        """Else a slow member would acknowledge what another one is handling."""
        group = _Group(under_test, 1, None)
        group.send("a")
        [first] = group.take(1, _SHORT_MS)
        group.until_visible(_SHORT_MS)
        [again] = group.take(1)

        with pytest.raises(InvalidReceiptHandleError):
            group.change(first, _INVISIBLE_MS)

        group.ack(again)
        assert group.receive() == []

    def test_a_longer_invisible_time_counts_from_now(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_virtual_time()
        group = _Group(under_test, 1, None)
        group.send("a")
        [first] = group.take(1, _SHORT_MS)

        under_test.pass_time(_SHORT_MS - 1)
        receipt = group.change(first, _INVISIBLE_MS)
        under_test.pass_time(_INVISIBLE_MS - 1)
        assert group.receive() == []
        group.pop.ack(group.name, group.topic, receipt)
        under_test.pass_time(_INVISIBLE_MS)

        assert group.receive() == []

    def test_with_no_invisible_time_left_a_message_is_delivered_at_once(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.send("a", "b")
        first, second = sorted(group.take(2), key=lambda each: each.message.body)

        group.change(first, 0)
        group.change(second, 0, counts=False)

        again = sorted(group.take(2), key=lambda each: each.message.body)
        assert [(each.message.body, each.attempt) for each in again] == [(b"a", 2), (b"b", 1)]

    def test_several_messages_are_acknowledged_together(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 4, None)
        group.send("a", "b", "c")
        a, b, c = sorted(group.take(3, _SHORT_MS), key=lambda each: each.message.body)

        results = group.pop.ack_all(group.name, group.topic, [c.receipt, a.receipt])
        group.until_visible(_SHORT_MS)

        assert results == [None, None]
        assert [each.message.msg_id for each in group.take(1)] == [b.message.msg_id]
        assert group.receive() == []

    def test_times_of_several_messages_are_changed_together_and_each_has_its_result(
        self, under_test: BrokerUnderTest
    ) -> None:
        group = _Group(under_test, 1, None)
        group.send("a")
        [late] = group.take(1, _SHORT_MS)
        group.until_visible(_SHORT_MS)
        [again] = group.take(1)
        group.send("b")
        [other] = group.take(1)

        receipts = [other.receipt, late.receipt, again.receipt]
        changed = group.pop.change_all(group.name, group.topic, receipts, 0, counts=False)

        assert [isinstance(each, InvalidReceiptHandleError) for each in changed] == [False, True, False]
        assert sorted((each.message.body, each.attempt) for each in group.take(2)) == [(b"a", 2), (b"b", 1)]

    def test_after_the_last_retry_a_message_is_a_dead_letter(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None, max_reconsume_times=1)
        group.send("hopeless")
        for _ in range(2):
            [received] = group.take(1)
            group.change(received, 0)

        audit = under_test.join("audit", f"{DLQ_TOPIC_PREFIX}{group.name}")
        assert group.receive() == []
        assert [message.body for message in under_test.take(audit, 1)] == [b"hopeless"]

    def test_a_dead_letter_is_acknowledged(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.send("poison")
        [received] = group.take(1, _SHORT_MS)

        group.pop.dead_letter(group.name, group.topic, received, {"dead_letter_message": "no such customer"})
        group.until_visible(_SHORT_MS)

        dead = under_test.take_one(under_test.join("audit", f"{DLQ_TOPIC_PREFIX}{group.name}"))
        assert (dead.body, dead.properties[Property.DLQ_ORIGIN_TOPIC]) == (b"poison", group.topic)
        assert group.receive() == []

    def test_a_selector_leaves_messages_out(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, TagSelector("paid"))
        group.send("a", TAGS="paid")
        group.send("b", TAGS="refunded")
        group.send("c", TAGS="paid")

        assert _bodies(group.take(2)) == ["a", "c"]
        assert group.receive() == []

    def test_messages_of_one_key_are_delivered_in_order_and_do_not_block_others(
        self, under_test: BrokerUnderTest
    ) -> None:
        group = _Group(under_test, 1, None)
        queue = MessageQueue(group.topic, under_test.broker.name, 0)
        for body in ("a1", "b1", "a2"):
            under_test.send(group.topic, body, queue, {Property.SHARDING_KEY: body[0]})
        [first] = group.take(1, is_ordered=True)
        assert first.message.body == b"a1"

        assert _bodies(group.take(1, is_ordered=True)) == ["b1"]
        assert group.receive(is_ordered=True) == []
        group.ack(first)

        assert _bodies(group.take(1, is_ordered=True)) == ["a2"]

    def test_a_failed_message_comes_again_before_the_later_ones_of_its_key(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.send("a1", "a2", **{Property.SHARDING_KEY: "a"})
        [first] = group.take(1, is_ordered=True)

        group.change(first, 0)
        [again] = group.take(1, is_ordered=True)

        assert (again.message.body, again.attempt, again.message.reconsume_times) == (b"a1", 2, 1)
        group.ack(again)
        assert _bodies(group.take(1, is_ordered=True)) == ["a2"]

    def test_a_receive_waits_for_a_message_until_it_is_woken(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_real_time()
        group = _Group(under_test, 1, None)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(group.receive, wait_ms=60_000)
            group.send("a")
            assert _bodies(waiting.result(60)) == ["a"]

            waiting = thread.submit(group.receive, wait_ms=60_000)

            def is_woken() -> bool:
                group.pop.wake(group.name)
                return waiting.done()

            under_test.until(is_woken, "the receive returns")
            assert waiting.result() == []

    def test_a_group_without_a_member_receives_nothing(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.member.close()
        group.member.close()  # has no further effect

        with pytest.raises(BrokerClosedError):
            group.receive()

    def test_a_restart_keeps_acknowledgements_and_delivers_the_rest_again(self, under_test: BrokerUnderTest) -> None:
        group = _Group(under_test, 1, None)
        group.send("a", "b")
        received = group.take(2, _SHORT_MS)
        group.ack(*(each for each in received if each.message.body == b"a"))

        under_test.reopen()
        group.join()
        group.until_visible(_SHORT_MS)

        assert _bodies(group.take(1)) == ["b"]
        assert group.receive() == []


class KeyLimitContract:
    """Keys take turns, and each has its limits over all members of the group."""

    def _group(self, under_test: BrokerUnderTest, *limits: float | None) -> _Group:
        under_test.needs(Capability.KEY_LIMITS)
        return _Group(under_test, 1, None, key_limits=KeyLimits("tenant", *limits))  # type: ignore[arg-type]

    def _send(self, under_test: BrokerUnderTest, group: _Group, tenants: str) -> None:
        for number, tenant in enumerate(tenants):
            under_test.send(group.topic, f"{tenant}{number}", properties={"tenant": tenant})

    def test_a_key_has_no_more_in_flight_than_its_limit_over_all_members(self, under_test: BrokerUnderTest) -> None:
        group = self._group(under_test, 2)
        other = group.join()
        self._send(under_test, group, "aaaab")

        first = group.take(3)
        assert _bodies(first) == ["a0", "a1", "b4"]
        assert group.receive() == []
        group.ack(next(each for each in first if each.message.body == b"a0"))

        assert _bodies(group.take(1)) == ["a2"]
        assert group.receive() == []
        other.close()

    def test_the_keys_take_turns(self, under_test: BrokerUnderTest) -> None:
        """A tenant with many messages does not delay another one by more than a round."""
        group = self._group(under_test)
        self._send(under_test, group, "aaaaaabc")

        assert _bodies(group.take(3)) == ["a0", "b6", "c7"]

    def test_a_message_that_fails_frees_its_key(self, under_test: BrokerUnderTest) -> None:
        group = self._group(under_test, 1)
        self._send(under_test, group, "aa")
        [first] = group.take(1)
        assert group.receive() == []

        group.change(first, 0)

        [next_one] = group.take(1)
        group.ack(next_one)
        [last] = group.take(1)
        assert _bodies([next_one, last]) == ["a0", "a1"]

    def test_the_rate_of_a_key_is_exact_on_a_virtual_clock(self, under_test: BrokerUnderTest) -> None:
        under_test.needs_virtual_time()
        group = self._group(under_test, None, 10)
        self._send(under_test, group, "aaaaab")

        received = [_bodies(group.receive())]
        for _ in range(3):
            under_test.pass_time(99)
            assert group.receive() == []
            under_test.pass_time(1)
            received.append(_bodies(group.receive()))

        assert [body for body in received[0] if body.startswith("b")] == ["b5"]
        assert [len(each) for each in received[1:]] == [1, 1, 1]

    def test_what_is_in_flight_counts_after_a_restart(self, under_test: BrokerUnderTest) -> None:
        group = self._group(under_test, 1)
        self._send(under_test, group, "aab")
        assert _bodies(group.take(2, _SHORT_MS)) == ["a0", "b2"]

        under_test.reopen()
        group.join()
        assert group.receive() == []
        group.until_visible(_SHORT_MS)

        # One of each tenant; without an order of keys "a1" may be before "a0", which is delivered again.
        assert [body[0] for body in _bodies(group.take(2))] == ["a", "b"]
