"""POP in the broker: deliveries, expiry, retry topics, dead letters, order, sessions, and one group that also pulls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.pop.holds import HeldPop
from mqtemplate.engine.pop.pop import PopRequest, PopResult
from mqtemplate.errors import BrokerClosedError, DestinationError
from mqtemplate.key_limits import KeyLimits
from mqtemplate.message import MessageQueue, Property
from mqtemplate.record import dead_letter
from mqtemplate.record.properties import decode_properties
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.testing import messages_in
from mqtemplate.topics import POP_PROGRESS_TOPIC
from tests.engine.pop.consumer import GROUP, TOPIC, Shop, bodies, ignore

RETRY, DEAD = f"%RETRY%{GROUP}_{TOPIC}", f"%DLQ%{GROUP}"


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    yield shop
    shop.broker.close()


def test_a_message_is_delivered_once_and_its_acknowledgement_ends_it(shop: Shop) -> None:
    shop.send("a", "b")

    first, second = shop.pop()
    assert shop.pop() == []
    assert shop.ack(second, first) == [True, True]

    shop.harness.advance("1h")
    assert shop.pop() == []
    assert shop.committed() == 2
    assert shop.number("pop.popped") == shop.number("pop.acked") == 2
    assert shop.number("pop.in_flight") == 0


def test_many_messages_are_acknowledged_with_one_record_and_one_confirmation(shop: Shop) -> None:
    """A message that is given twice is acknowledged once, and one that cannot be acknowledged refuses no other one."""
    shop.send("a", "b", "c")
    a, b, c = shop.pop()
    stale = a.handle
    assert shop.change(a, 60_000) is not None
    journal = shop.broker.store.consume_queue(POP_PROGRESS_TOPIC, 0)
    records, confirmed = journal.max_offset, list[Exception | None]()

    handles = [b.handle, stale, c.handle, b.handle]
    results = shop.pop_service.ack_all(GROUP, TOPIC, handles, confirmed.append)

    assert results == [True, False, True, True]
    assert (journal.max_offset - records, confirmed) == (1, [None])
    assert shop.number("pop.acked") == 2
    assert shop.pop_service.ack_all(GROUP, TOPIC, [stale], confirmed.append) == [False]
    assert confirmed == [None]


def test_the_committed_offset_is_the_first_message_that_is_not_done(shop: Shop) -> None:
    shop.send("a", "b", "c")
    a, b, c = shop.pop()

    shop.ack(b, c)
    assert shop.committed() == 0
    shop.ack(a)
    assert shop.committed() == 3


def test_an_unacknowledged_message_comes_again_when_its_time_is_over_and_not_before(shop: Shop) -> None:
    shop.send("a", KEYS="4466")
    (first,) = shop.pop(invisible_ms=10_000)

    shop.harness.advance("9999ms")
    assert shop.pop() == []
    shop.harness.advance("1ms")
    (again,) = shop.pop()

    properties = decode_properties(again.record.properties_bytes)
    before = decode_properties(first.record.properties_bytes)
    assert (again.attempt, again.record.topic, again.record.reconsume_times) == (2, RETRY, 1)
    assert again.handle.real_topic(TOPIC, GROUP) == RETRY
    assert properties.items() >= before.items()
    assert properties[Property.FIRST_POP_TIME] == str(first.handle.pop_ms)
    assert properties[Property.ORIGIN_GROUP] == GROUP
    assert shop.committed() == 1
    assert shop.number("pop.expired") == 1


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_invisible_time_begins_with_the_delivery_also_if_the_clock_advances_meanwhile(is_ordered: bool) -> None:
    class Advancing(VirtualClock):
        advances_by_ms = 0

        def now_ms(self) -> int:
            self._now_ms += self.advances_by_ms
            return self._now_ms

    clock = Advancing()
    shop = Shop(clock=clock)
    shop.send("a")
    clock.advances_by_ms = 1

    (message,) = shop.pop(invisible_ms=10_000, is_ordered=is_ordered)

    clock.advances_by_ms = 0
    shop.harness.advance(timedelta(milliseconds=message.handle.expires_ms - 1 - clock.now_ms()))
    assert shop.number("pop.in_flight") == 1
    shop.harness.advance("1ms")
    assert shop.number("pop.in_flight") == 0
    shop.broker.close()


def test_a_message_that_fails_again_stays_in_its_retry_topic(shop: Shop) -> None:
    shop.send("a")
    (again,) = shop.pop()
    for attempt in (2, 3, 4):
        shop.harness.advance("30s")
        (again,) = shop.pop()
        assert (again.attempt, again.record.topic) == (attempt, RETRY)

    first_pop_ms = decode_properties(again.record.properties_bytes)[Property.FIRST_POP_TIME]
    assert again.handle.pop_ms - int(first_pop_ms) == 90_000


def test_after_its_last_attempt_a_message_is_a_dead_letter(shop: Shop) -> None:
    shop.send("a")
    (first,) = shop.pop(max_attempts=2)
    shop.harness.advance("30s")
    (second,) = shop.pop(max_attempts=2)
    assert second.attempt == 2

    shop.harness.advance("30s")

    assert shop.pop(max_attempts=2) == []
    (dead,) = messages_in(shop.broker, DEAD)
    assert dead.body == b"a"
    assert dead.properties[Property.DLQ_ORIGIN_TOPIC] == TOPIC
    assert dead.properties[Property.UNIQ_KEY] == decode_properties(first.record.properties_bytes)[Property.UNIQ_KEY]
    cause = {name: dead.properties[name] for name in dead_letter.CAUSES if name in dead.properties}
    assert cause == {
        dead_letter.MESSAGE: "its invisible time was over, and no member had acknowledged it",
        dead_letter.ATTEMPTS: "2",
        dead_letter.FAILED_AT: dead_letter.iso_time(shop.clock.now_ms()),
        dead_letter.FIRST_FAILED_AT: dead_letter.iso_time(first.handle.pop_ms),
    }
    assert shop.committed(RETRY) == 1
    assert shop.number("pop.dead_lettered") == 1


def test_a_message_with_more_attempts_than_allowed_is_not_delivered(shop: Shop) -> None:
    """The number of attempts of the group was reduced."""
    shop.send("a")
    for _ in range(3):
        shop.pop()
        shop.harness.advance("30s")

    assert shop.pop(max_attempts=3) == []

    shop.harness.advance("0s")
    assert len(messages_in(shop.broker, DEAD)) == 1


def test_a_client_sends_a_message_to_the_dead_letters(shop: Shop) -> None:
    shop.send("a")
    (message,) = shop.pop()

    results: list[Exception | None] = []
    assert shop.pop_service.dead_letter(GROUP, TOPIC, message.handle, results.append)
    assert shop.pop_service.dead_letter(GROUP, TOPIC, message.handle, results.append)
    assert results == [None, None]

    shop.harness.advance("1h")
    assert shop.pop() == []
    assert len(messages_in(shop.broker, DEAD)) == 1


def test_a_late_acknowledgement_is_refused_since_the_message_has_a_copy(shop: Shop) -> None:
    shop.send("a", "b")
    a, b = shop.pop(invisible_ms=10_000)
    assert shop.ack(b, b) == [True, True]

    shop.harness.advance("10s")

    assert shop.ack(a, b) == [False, False]
    assert bodies(shop.pop()) == ["a"]


# --- invisible time --------------------------------------------------------------------------------


def test_a_changed_invisible_time_counts_from_now_and_replaces_the_handle(shop: Shop) -> None:
    shop.send("a")
    (message,) = shop.pop(invisible_ms=10_000)
    shop.harness.advance("9s")

    changed = shop.change(message, 60_000)

    assert changed is not None
    assert changed.expires_ms == shop.clock.now_ms() + 60_000
    assert shop.ack(message) == [False]
    assert shop.change(message, 1_000) is None
    shop.harness.advance("59s")
    assert shop.pop() == []
    assert shop.pop_service.ack(GROUP, TOPIC, changed, ignore)
    shop.harness.advance("1h")
    assert shop.pop() == []


@pytest.mark.parametrize(("counts", "attempt"), [(True, 2), (False, 1)])
def test_a_message_is_visible_at_once_and_counts_unless_its_client_says_otherwise(
    shop: Shop, counts: bool, attempt: int
) -> None:
    shop.send("a")
    (message,) = shop.pop()

    assert shop.change(message, 0, counts=counts) is not None
    shop.harness.advance("0s")

    assert [each.attempt for each in shop.pop()] == [attempt]


def test_a_session_renews_its_deliveries_until_it_ends(shop: Shop) -> None:
    shop.send("a")
    (message,) = shop.pop(session="client", invisible_ms=60_000)

    shop.harness.advance("2h")
    assert shop.pop() == []
    shop.pop_service.end_session("client")
    shop.harness.advance("999ms")
    assert shop.pop() == []
    shop.harness.advance("1ms")

    assert [each.attempt for each in shop.pop()] == [2]
    assert shop.ack(message) == [False]


def test_a_session_renews_a_delivery_from_the_moment_on_at_which_its_client_has_it(shop: Shop) -> None:
    """Until then the delivery has the time of its pop: the client may wait for a response that is lost."""
    shop.send("received", "changed", "acked", "lost")
    received, changed, acked, _ = found = shop.pop(session="client", awaits_receipt=True)
    handles = [each.handle for each in found]
    assert shop.pop_service.is_awaiting_receipt(GROUP, TOPIC, handles)

    shop.change(changed, 20_000)
    shop.ack(acked)
    shop.pop_service.received(GROUP, TOPIC, [each.handle for each in (received, changed, acked)])
    assert not shop.pop_service.is_awaiting_receipt(GROUP, TOPIC, handles[:3])

    shop.harness.advance("20s")
    assert bodies(shop.pop()) == ["changed"]
    shop.harness.advance("10s")
    assert bodies(shop.pop()) == ["lost"]
    shop.pop_service.received(GROUP, TOPIC, handles)  # too late
    shop.harness.advance("2h")
    assert "received" not in bodies(shop.pop())
    shop.harness.advance("1h")
    assert "received" in bodies(shop.pop())


def test_what_its_client_may_not_have_is_visible_too_when_the_session_ends(shop: Shop) -> None:
    shop.send("a")
    shop.pop(session="client", awaits_receipt=True)

    shop.pop_service.end_session("client")
    shop.harness.advance("1s")

    assert bodies(shop.pop()) == ["a"]


def test_a_receipt_does_not_bring_back_a_group_that_is_deleted(shop: Shop) -> None:
    shop.send("a")
    (message,) = shop.pop(session="client", awaits_receipt=True)
    shop.pop_service.forget_group(GROUP)

    shop.pop_service.received(GROUP, TOPIC, [message.handle])

    assert shop.pop_service.deliveries(GROUP) is None


def test_no_session_renews_for_longer_than_three_hours(shop: Shop) -> None:
    shop.send("a")
    shop.pop(session="client")

    shop.harness.advance("3h")

    assert bodies(shop.pop()) == ["a"]


def test_the_first_handle_of_a_renewed_delivery_stays_valid(shop: Shop) -> None:
    shop.send("a")
    (message,) = shop.pop(session="client", invisible_ms=60_000)

    shop.harness.advance("1h")

    assert shop.ack(message) == [True]
    shop.pop_service.end_session("client")
    shop.harness.advance("1h")
    assert shop.pop() == []


# --- selectors and queues --------------------------------------------------------------------------


def test_messages_that_are_not_selected_are_done(shop: Shop) -> None:
    for number in range(6):
        shop.send(str(number), TAGS="paid" if number % 2 else "open")

    found = shop.pop(selector=TagSelector("paid"))

    assert bodies(found) == ["1", "3", "5"]
    shop.ack(*found)
    assert shop.committed() == 6


def test_a_selector_finds_a_message_after_many_others(shop: Shop) -> None:
    for number in range(5_000):
        shop.send(str(number), TAGS="open")
    shop.send("found", TAGS="paid", price="7")

    results: list[PopResult] = []
    shop.hold(5_000, results, selector=Sql92Selector("TAGS = 'paid' AND price = '7'"))
    shop.harness.advance("0s")

    assert bodies(results[0].messages) == ["found"]


def test_all_queues_of_a_topic_are_read() -> None:
    shop = Shop(default_topic_queue_nums=4)
    shop.send(*map(str, range(20)))

    first = shop.pop(max_count=7)
    rest = shop.pop(max_count=32)

    assert len(first) == 7
    assert sorted(bodies([*first, *rest]), key=int) == list(map(str, range(20)))
    assert shop.pop_service.pop(shop.request()).rest == 0


def test_one_queue_can_be_named() -> None:
    shop = Shop(default_topic_queue_nums=4)
    shop.send(*map(str, range(8)))

    found = shop.pop(queue_id=2)

    assert {message.record.queue_id for message in found} == {2}
    assert len(found) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topic": "nothing"}, "topic 'nothing' does not exist; create it, or send a message to it first"),
        ({"queue_id": 1}, "topic 'orders' has queues 0..0, got 1"),
    ],
)
def test_a_pop_of_something_missing_is_refused(shop: Shop, options: dict[str, object], text: str) -> None:
    with pytest.raises(DestinationError, match=text):
        shop.pop(**options)


def test_a_group_whose_retry_topic_would_have_no_legal_name_is_refused(shop: Shop) -> None:
    with pytest.raises(DestinationError, match="has 308 characters, allowed are 255"):
        shop.pop(group="g" * 294)


def test_messages_in_the_retry_topic_of_other_brokers_are_read(shop: Shop) -> None:
    topic = f"%RETRY%{GROUP}+{TOPIC}"
    shop.broker.engine.topics.create(topic, 1)
    shop.send("retried")
    shop.ack(*shop.pop())
    draft, _ = shop.broker.engine.drafts.make(messages_in(shop.broker, TOPIC)[0], 0, shop.clock.now_ms())
    draft.topic = topic
    store = shop.broker.engine.store
    store.confirm(store.put(draft).end, (topic,))

    (message,) = shop.pop()

    assert message.handle.topic_type == 2
    assert shop.ack(message) == [True]
    assert shop.committed(topic) == 1


def test_a_queue_delivers_no_more_than_the_limit_until_some_are_done() -> None:
    shop = Shop(pop_in_flight_max=3)
    shop.send("a", "b", "c", "d")
    found = shop.pop()

    assert bodies(found) == ["a", "b", "c"]
    assert shop.pop() == []
    shop.ack(found[0])
    assert bodies(shop.pop()) == ["d"]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_pop_has_no_more_bytes_than_requested_but_at_least_one_message(shop: Shop, is_ordered: bool) -> None:
    shop.send("a" * 2_000, "b" * 500, "c" * 500, "d" * 500)
    shop.ack(*(large := shop.pop(max_bytes=1_500, is_ordered=is_ordered)))
    shop.ack(*(two := shop.pop(max_bytes=1_500, is_ordered=is_ordered)))

    assert [message[0] for message in bodies(large)] == ["a"]
    assert [message[0] for message in bodies(two)] == ["b", "c"]
    assert [message[0] for message in bodies(shop.pop(max_bytes=1_500, is_ordered=is_ordered))] == ["d"]


def test_a_message_that_was_not_handled_is_delivered_again_without_a_copy(shop: Shop) -> None:
    shop.send("a", "b")
    a, b = shop.pop()
    results: list[PopResult] = []
    shop.hold(20_000, results)

    assert shop.change(a, 0, counts=False) is not None
    shop.harness.advance("0s")

    (again,) = results[0].messages
    assert (*bodies([again]), again.attempt, again.record.topic) == ("a", 1, TOPIC)
    assert shop.ack(a) == [False]
    assert shop.ack(again, b) == [True, True]
    assert shop.committed() == 2


# --- the first offset ------------------------------------------------------------------------------


def test_a_new_group_reads_a_young_topic_from_its_first_message(shop: Shop) -> None:
    shop.send("a", "b")

    assert bodies(shop.pop(from_last=True)) == ["a", "b"]


def test_a_group_that_also_pulls_continues_at_the_higher_offset(shop: Shop) -> None:
    shop.send("a", "b", "c", "d")
    (a,) = shop.pop(max_count=1)

    shop.broker.engine.offsets.commit(GROUP, TOPIC, 0, 3)

    assert bodies(shop.pop()) == ["d"]
    assert shop.committed() == 3
    shop.harness.advance("30s")
    assert sorted(bodies(shop.pop())) == ["a", "d"]
    assert shop.ack(a) == [False]


def test_an_offset_of_a_member_that_pulls_moves_nothing_back(shop: Shop) -> None:
    shop.send("a", "b")
    shop.ack(*shop.pop())

    shop.broker.engine.offsets.commit(GROUP, TOPIC, 0, 1)

    assert shop.pop() == []


# --- order -----------------------------------------------------------------------------------------


def send_ordered(shop: Shop, *bodies: str) -> None:
    """Send messages whose first letter is their message group."""
    for body in bodies:
        shop.send(body, **{Property.SHARDING_KEY: body[0]})


def test_a_slow_message_group_does_not_block_the_others_of_its_queue(shop: Shop) -> None:
    send_ordered(shop, "a1", "b1", "a2", "b2", "c1")
    (a1,) = shop.pop(is_ordered=True, max_count=1)

    (b1, b2, c1) = shop.pop(is_ordered=True)

    assert bodies([a1, b1, b2, c1]) == ["a1", "b1", "b2", "c1"]
    shop.ack(b1, b2, c1)
    assert shop.pop(is_ordered=True) == []
    shop.ack(a1)
    assert bodies(shop.pop(is_ordered=True)) == ["a2"]


def test_ordered_messages_without_a_group_are_one_group(shop: Shop) -> None:
    shop.send("1", "2")
    (first,) = shop.pop(is_ordered=True, max_count=1)

    assert shop.pop(is_ordered=True) == []
    shop.ack(first)
    assert bodies(shop.pop(is_ordered=True)) == ["2"]


def test_an_expired_ordered_message_comes_again_from_its_queue_before_the_later_ones(shop: Shop) -> None:
    send_ordered(shop, "a1", "a2", "a3")
    a1, a2 = shop.pop(is_ordered=True, max_count=2)
    shop.ack(a2)

    shop.harness.advance("30s")
    again = shop.pop(is_ordered=True)

    assert [(*bodies([each]), each.attempt, each.record.topic) for each in again] == [
        ("a1", 2, TOPIC),
        ("a3", 1, TOPIC),
    ]
    assert shop.ack(a1) == [False]
    assert shop.ack(*again) == [True, True]
    assert shop.committed() == 3


def test_the_same_attempt_gets_the_same_messages_with_the_same_count(shop: Shop) -> None:
    """The client did not get the response to its first request."""
    send_ordered(shop, "a1", "b1", "a2")
    first = shop.pop(is_ordered=True, attempt_id="one", max_count=2)

    again = shop.pop(is_ordered=True, attempt_id="one", max_count=2)

    assert bodies(again) == bodies(first) == ["a1", "b1"]
    assert [each.attempt for each in again] == [1, 1]
    assert shop.ack(*first) == [False, False]
    assert shop.ack(*again) == [True, True]
    assert bodies(shop.pop(is_ordered=True, attempt_id="one")) == ["a2"]


def test_a_repeated_attempt_gets_its_messages_first() -> None:
    shop = Shop(default_topic_queue_nums=8)
    shop.send(*map(str, range(16)))
    first = shop.pop(is_ordered=True, attempt_id="one", max_count=2)

    again = shop.pop(is_ordered=True, attempt_id="one", max_count=2)

    assert bodies(again) == bodies(first)


def test_an_ordered_message_is_a_dead_letter_after_its_last_attempt_and_its_group_goes_on(shop: Shop) -> None:
    send_ordered(shop, "a1", "a2")
    for attempt in (1, 2):
        (message,) = shop.pop(is_ordered=True, max_count=1, max_attempts=2)
        assert (*bodies([message]), message.attempt) == ("a1", attempt)
        shop.harness.advance("30s")

    assert [message.body for message in messages_in(shop.broker, DEAD)] == [b"a1"]
    assert bodies(shop.pop(is_ordered=True, max_attempts=2)) == ["a2"]


def test_the_changed_time_of_an_ordered_message_keeps_its_identity(shop: Shop) -> None:
    send_ordered(shop, "a1")
    (message,) = shop.pop(is_ordered=True)

    changed = shop.change(message, 5_000)

    assert changed is not None
    assert changed.pop_ms == message.handle.pop_ms
    shop.harness.advance("5s")
    assert [each.attempt for each in shop.pop(is_ordered=True)] == [2]


# --- pops that wait --------------------------------------------------------------------------------


def test_a_waiting_pop_gets_the_next_message(shop: Shop) -> None:
    results: list[PopResult] = []
    shop.hold(20_000, results)
    assert shop.number("pop.held") == 1

    shop.send("a")
    shop.harness.advance("0s")

    assert [bodies(result.messages) for result in results] == [["a"]]
    assert shop.number("pop.held") == 0


def test_a_waiting_pop_ends_empty_in_time(shop: Shop) -> None:
    results: list[PopResult] = []
    shop.hold(20_000, results)

    shop.harness.advance("19999ms")
    assert results == []
    shop.harness.advance("1ms")

    assert results == [PopResult(())]


def test_messages_are_divided_among_waiting_pops_in_their_order(shop: Shop) -> None:
    first: list[PopResult] = []
    second: list[PopResult] = []
    shop.hold(20_000, first, max_count=1)
    shop.hold(20_000, second, max_count=1)

    shop.send("a", "b")
    shop.harness.advance("0s")

    assert [bodies(result.messages) for result in (*first, *second)] == [["a"], ["b"]]


def test_a_cancelled_pop_takes_nothing(shop: Shop) -> None:
    results: list[PopResult] = []
    cancel = shop.hold(20_000, results)

    cancel()
    shop.send("a")
    shop.harness.advance("1h")

    assert results == []
    assert bodies(shop.pop()) == ["a"]


def test_messages_that_were_popped_for_a_cancelled_pop_are_delivered_to_the_next_one(shop: Shop) -> None:
    """The client disconnects at the moment at which its messages are read."""
    results: list[PopResult] = []
    held = shop.pop_service.hold(shop.request(), 20_000, results.append)
    shop.send("a")
    result = shop.pop_service.pop(shop.request())

    held.cancel()
    shop.pop_service._finish(held, result)

    assert results == []
    assert [(*bodies([each]), each.attempt) for each in shop.pop()] == [("a", 1)]


def test_a_waiting_pop_gets_a_message_whose_time_is_over(shop: Shop) -> None:
    shop.send("a")
    shop.pop(invisible_ms=10_000)
    results: list[PopResult] = []
    shop.hold(20_000, results)

    shop.harness.advance("10s")

    assert [message.attempt for message in results[0].messages] == [2]


def test_a_waiting_ordered_pop_gets_the_next_message_of_a_group_when_the_one_before_is_acknowledged(shop: Shop) -> None:
    send_ordered(shop, "a1", "a2")
    (a1,) = shop.pop(is_ordered=True, max_count=1)
    results: list[PopResult] = []
    shop.hold(20_000, results, is_ordered=True)

    shop.ack(a1)
    shop.harness.advance("0s")

    assert bodies(results[0].messages) == ["a2"]


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_waiting_pop_gets_the_next_message_when_a_queue_is_below_its_limit_again(is_dead: bool) -> None:
    """It waited for a new message, or until its time was over."""
    shop, results = Shop(pop_in_flight_max=1), list[PopResult]()
    shop.send("a", "b")
    (a,) = shop.pop()
    shop.hold(20_000, results)

    if is_dead:
        assert shop.pop_service.dead_letter(GROUP, TOPIC, a.handle, ignore)
    else:
        shop.ack(a)
    shop.harness.advance("0s")

    assert bodies(results[0].messages) == ["b"]


def test_a_waiting_pop_gets_the_next_message_of_a_key_when_a_retry_becomes_a_dead_letter(shop: Shop) -> None:
    """Dead letters come from the retry topic. The pop that waits reads it, but for messages of another topic."""
    options = {"key_limits": KeyLimits("tenant", max_in_flight=1), "max_attempts": 2, "invisible_ms": 30_000}
    results: list[PopResult] = []
    shop.send("a", tenant="x")
    shop.pop(**options)
    shop.harness.advance("30s")
    assert [each.attempt for each in shop.pop(**options)] == [2]
    shop.send("b", tenant="x")
    shop.hold(60_000, results, **options)

    shop.harness.advance("30s")

    assert [each.body for each in messages_in(shop.broker, DEAD)] == [b"a"]
    assert bodies(results[0].messages) == ["b"]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_message_that_did_not_reach_its_client_keeps_its_key(shop: Shop, is_cancelled: bool) -> None:
    """Without the key it was delivered beside another message of the tenant, of which one may be in flight."""
    options = {"key_limits": KeyLimits("tenant", max_in_flight=1)}
    shop.send("a", "b", tenant="x")
    for _ in range(2):
        if is_cancelled:
            held = HeldPop(shop.pop_service._holds, shop.request(**options), 20_000, lambda result: None)
            held.cancel()
            shop.pop_service._finish(held, shop.pop_service.pop(held.request))
        else:
            (a,) = shop.pop(**options)
            shop.change(a, 0, counts=False)

    assert bodies(shop.pop(**options)) == ["a"]
    assert shop.pop(**options) == []


def test_too_many_waiting_pops_are_refused_at_once() -> None:
    shop = Shop(max_held_pops=1)
    results: list[PopResult] = []
    cancel = shop.hold(20_000, results)
    shop.hold(20_000, results)
    assert results == [PopResult((), is_full=True)]

    cancel()
    shop.hold(20_000, results)
    assert len(results) == 1


def test_a_stop_ends_waiting_pops(shop: Shop) -> None:
    results: list[PopResult] = []
    shop.hold(20_000, results)

    shop.broker.close()

    assert results == [PopResult(())]
    with pytest.raises(BrokerClosedError):
        shop.pop_service.pop(PopRequest(group=GROUP, topic=TOPIC))


# --- administration --------------------------------------------------------------------------------


def test_the_progress_of_a_group_can_be_read(shop: Shop) -> None:
    shop.send("a", "b", "c")
    a, b, _ = shop.pop()
    shop.ack(b)

    (progress,) = shop.pop_service.in_flight(GROUP, TOPIC)

    queue = MessageQueue(TOPIC, shop.broker.name, 0)
    assert progress == (queue, 0, 3, 2, 0, a.handle.pop_ms)


def test_a_reset_delivers_from_there_and_forgets_deliveries(shop: Shop) -> None:
    shop.send("a", "b", "c")
    found = shop.pop()

    shop.broker.admin().set_offsets(GROUP, {MessageQueue(TOPIC, shop.broker.name, 0): 1})

    assert shop.committed() == 1
    assert bodies(shop.pop()) == ["b", "c"]
    assert shop.ack(found[0]) == [True]
    shop.harness.advance("30s")
    assert bodies(shop.pop()) == ["b", "c"]


def test_a_deleted_topic_has_no_deliveries_left(shop: Shop) -> None:
    shop.send("a")
    shop.pop()

    shop.broker.admin().delete_topic(TOPIC)
    shop.harness.advance("1h")

    assert shop.pop_service.in_flight(GROUP) == []
    assert not shop.broker.engine.topics.has(RETRY)


def test_a_forgotten_group_starts_again(shop: Shop) -> None:
    shop.send("a")
    shop.ack(*shop.pop())

    shop.broker.admin().forget_group(GROUP)

    assert bodies(shop.pop()) == ["a"]


def test_a_group_whose_offsets_were_deleted_starts_again_without_copies(shop: Shop) -> None:
    """The tool that deleted them knows nothing of POP."""
    shop.send("a")
    shop.pop()

    shop.broker.engine.offsets.forget(group=GROUP)
    shop.harness.advance("1h")

    assert not shop.broker.engine.topics.has(RETRY)
    assert [each.attempt for each in shop.pop()] == [1]


# --- priorities ------------------------------------------------------------------------------------


def make_priorities(shop: Shop, count: int = 4) -> None:
    numbers = {"readQueueNums": count, "writeQueueNums": count}
    shop.broker.engine.topics.update(TOPIC, {"attributes": {"message.type": "PRIORITY"}, **numbers})
    shop.broker.engine.routes.refresh(TOPIC)


def test_the_most_urgent_messages_of_a_topic_with_priorities_are_delivered_first(shop: Shop) -> None:
    """A priority above the last queue has the last queue, and a message that failed comes after all others."""
    make_priorities(shop)
    shop.send("failed", _SYS_MSG_PRIORITY_="3")
    shop.pop(invisible_ms=1_000)
    shop.harness.advance("1s")
    for priority in (0, 2, 1, 7):
        shop.send(str(priority), _SYS_MSG_PRIORITY_=str(priority))

    assert [bodies(shop.pop(max_count=1)) for _ in range(5)] == [["7"], ["2"], ["1"], ["0"], ["failed"]]


def test_messages_without_urgency_wait_while_there_are_urgent_ones(shop: Shop) -> None:
    """As with RocketMQ: `priority_factor` is the remedy."""
    make_priorities(shop)
    shop.send("low", _SYS_MSG_PRIORITY_="0")
    for number in range(20):
        shop.send(f"high {number}", _SYS_MSG_PRIORITY_="3")
        assert bodies(shop.pop(max_count=1)) == [f"high {number}"]

    assert bodies(shop.pop(max_count=1)) == ["low"]


def test_a_share_of_the_pops_may_ignore_the_priorities(shop: Shop) -> None:
    make_priorities(shop)
    for number in range(100):
        shop.send(f"low {number}", _SYS_MSG_PRIORITY_="0")
        shop.send(f"high {number}", _SYS_MSG_PRIORITY_="3")

    found = [bodies(shop.pop(max_count=1, priority_factor=50))[0] for _ in range(50)]

    assert {text.split()[0] for text in found} == {"low", "high"}
    assert [text.split()[0] for text in found].count("high") > 25


def test_an_ordered_pop_ignores_the_priorities(shop: Shop) -> None:
    make_priorities(shop)
    for number in range(4):
        shop.send(str(number), _SYS_MSG_PRIORITY_=str(number))

    found = [bodies(shop.pop(max_count=1, is_ordered=True))[0] for _ in range(4)]

    assert found != ["3", "2", "1", "0"]
    assert sorted(found) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "properties", [{"DELAY": "1"}, {"__SHARDINGKEY": "4466"}, {"_SYS_MSG_PRIORITY_": "-1"}, {"_SYS_MSG_PRIORITY_": "x"}]
)
def test_a_message_of_another_type_takes_the_queues_in_turn(shop: Shop, properties: dict[str, str]) -> None:
    make_priorities(shop)
    for _ in range(4):
        shop.send("a", **{"_SYS_MSG_PRIORITY_": "3", **properties})
    shop.harness.advance("2s")

    ends = [shop.broker.engine.queues.max_offset(MessageQueue(TOPIC, shop.broker.name, each)) for each in range(4)]
    assert ends == [1, 1, 1, 1]


# --- what is deleted meanwhile ---------------------------------------------------------------------


def set_queues(shop: Shop, count: int) -> None:
    shop.broker.engine.topics.update(TOPIC, {"readQueueNums": count, "writeQueueNums": count})
    shop.broker.engine.routes.refresh(TOPIC)


def test_a_message_of_a_removed_queue_can_be_acknowledged_and_comes_again_if_it_is_not() -> None:
    shop = Shop(default_topic_queue_nums=2)
    shop.send("a", "b")
    popped = sorted(shop.pop(), key=lambda message: message.handle.queue_id)
    set_queues(shop, 1)
    shop.send("c")

    assert shop.ack(popped[1]) == [True]
    set_queues(shop, 2)
    shop.send("d", "e")
    found = {message.record.body: message for message in shop.pop()}
    set_queues(shop, 1)
    shop.harness.advance("30s")

    assert found.keys() == {b"c", b"d", b"e"}
    assert sorted(bodies(shop.pop())) == ["a", "c", "d", "e"]  # all four from the retry topic
    assert shop.number("pop.in_flight") == 4
    shop.broker.close()


def test_an_ordered_message_of_a_removed_queue_waits_until_the_queue_is_back() -> None:
    shop = Shop(default_topic_queue_nums=2)
    shop.send("a", "b")
    last = max(shop.pop(is_ordered=True), key=lambda message: message.handle.queue_id)
    set_queues(shop, 1)
    shop.harness.advance("30s")
    assert last.record.body.decode() not in bodies(shop.pop(is_ordered=True))

    set_queues(shop, 2)

    assert bodies(shop.pop(is_ordered=True)) == [last.record.body.decode()]
    shop.broker.close()


def test_a_waiting_pop_of_a_removed_queue_ends_with_the_next_message() -> None:
    shop, results = Shop(default_topic_queue_nums=2), list[PopResult]()
    shop.hold(20_000, results, queue_id=1)
    set_queues(shop, 1)

    shop.send("a")
    shop.harness.advance("0s")

    assert results == [PopResult(())]
    shop.broker.close()


def test_a_deleted_topic_ends_the_waiting_pops_and_its_retries(shop: Shop) -> None:
    results: list[PopResult] = []
    shop.send("a")
    shop.pop(invisible_ms=1_000)
    shop.harness.advance("1s")
    shop.pop()
    shop.hold(20_000, results)

    shop.broker.admin().delete_topic(TOPIC)

    assert results == [PopResult(())]
    assert not shop.broker.engine.topics.has(RETRY)
    assert (shop.committed(), shop.committed(RETRY)) == (None, None)
    shop.harness.advance("1h")
    assert (shop.committed(), shop.committed(RETRY), shop.number("pop.in_flight")) == (None, None, 0)


def test_a_topic_that_is_created_again_ignores_the_deliveries_before(shop: Shop) -> None:
    """In the same millisecond, too, and whether its messages were delivered again or not."""
    shop.send("a", "b")
    a, b = shop.pop()
    shop.broker.admin().delete_topic(TOPIC)
    shop.broker.engine.routes.queues(TOPIC)

    assert shop.ack(b) == [False]
    (again,) = shop.pop(max_count=1)
    assert (bodies([again]), shop.ack(a)) == (["a"], [False])
    assert shop.change(a, 60_000) is None
    assert shop.ack(again) == [True]
    assert bodies(shop.pop()) == ["b"]


def test_a_deleted_group_ends_its_waiting_pops_and_its_deliveries(shop: Shop) -> None:
    results: list[PopResult] = []
    shop.send("a")
    (a,) = shop.pop()
    shop.hold(20_000, results)

    shop.broker.admin().forget_group(GROUP)

    assert results == [PopResult(())]
    assert shop.ack(a) == [False]
    shop.harness.advance("1h")
    assert bodies(shop.pop()) == ["a"]
    assert shop.number("pop.expired") == 0


@pytest.mark.parametrize("is_ordered", [False, True])
def test_no_delivery_from_before_a_reset_can_be_acknowledged(shop: Shop, is_ordered: bool) -> None:
    """A reset and pops in one millisecond: the deliveries have other times."""
    shop.send("a", "b")
    a, b = shop.pop(is_ordered=is_ordered)

    shop.pop_service.reset(GROUP, MessageQueue(TOPIC, shop.broker.name, 0), 0)
    (again,) = shop.pop(max_count=1, is_ordered=is_ordered)

    assert (shop.ack(a, b), shop.change(a, 60_000)) == ([False, False], None)
    assert not shop.pop_service.dead_letter(GROUP, TOPIC, a.handle, ignore)
    assert shop.ack(again) == [True]
    assert bodies(shop.pop(is_ordered=is_ordered)) == ["b"]


def test_resets_in_one_millisecond_have_deliveries_with_different_times(shop: Shop) -> None:
    shop.send("a")
    messages = []
    for _ in range(3):
        messages += shop.pop()
        shop.pop_service.reset(GROUP, MessageQueue(TOPIC, shop.broker.name, 0), 0)

    assert shop.ack(*messages, *shop.pop()) == [False, False, False, True]


# --- what an operator sees -------------------------------------------------------------------------


def test_an_operator_sees_which_message_is_held_by_whom_since_when_and_until_when(shop: Shop) -> None:
    """An extension keeps the time since which the client has the message."""
    shop.send("a", KEYS="4466", UNIQ_KEY="A1")
    shop.send("b", UNIQ_KEY="B2")
    start_ms = shop.clock.now_ms()
    (a,) = shop.pop(max_count=1, client="10.0.0.7:4711", invisible_ms=60_000)
    shop.harness.advance("10s")
    shop.pop(session="worker-2")
    shop.harness.advance("20s")
    shop.change(a, 60_000)
    shop.hold(20_000, [])

    found = shop.pop_service.deliveries(GROUP)

    assert found is not None
    assert (found.in_flight, found.waiting, found.expired, found.held) == (2, 0, 0, 1)
    first, second = found.messages
    assert (first.msg_id, first.keys, first.topic, first.client) == ("A1", "4466", TOPIC, "10.0.0.7:4711")
    assert (first.since_ms, first.until_ms, first.is_renewed) == (start_ms, start_ms + 90_000, False)
    assert (second.msg_id, second.client, second.since_ms) == ("B2", "worker-2", start_ms + 10_000)
    assert (second.is_renewed, second.attempt, second.message_group) == (True, 1, None)
    assert shop.number("pop.oldest_ms") == 30_000


def test_an_operator_sees_which_message_blocks_its_order(shop: Shop) -> None:
    for body in ("a1", "a2", "a3", "b1"):
        shop.send(body, **{Property.SHARDING_KEY: body[0]})
    shop.pop(is_ordered=True, max_count=1)
    shop.pop(is_ordered=True)

    found = shop.pop_service.deliveries(GROUP)

    assert found is not None
    assert [(each.message_group, each.blocked) for each in found.blocking] == [("a", 2)]
    assert (found.in_flight, found.waiting, shop.number("pop.waiting")) == (2, 2, 2)


def test_an_operator_sees_the_attempt_and_the_topic_of_a_message_that_comes_again(shop: Shop) -> None:
    shop.send("a")
    shop.pop()
    shop.harness.advance("30s")
    shop.pop()

    found = shop.pop_service.deliveries(GROUP)

    assert found is not None
    assert [(each.topic, each.queue.topic, each.attempt) for each in found.messages] == [(TOPIC, RETRY, 2)]
    assert found.expired == 1


def test_of_many_messages_in_flight_the_oldest_are_shown(shop: Shop) -> None:
    shop.send(*map(str, range(150)))
    for _ in range(5):
        shop.pop(max_count=30)
        shop.harness.advance("1s")

    found = shop.pop_service.deliveries(GROUP)

    assert found is not None
    assert (found.in_flight, len(found.messages)) == (150, 100)
    assert found.messages[0].since_ms < found.messages[-1].since_ms


def test_a_group_that_never_popped_has_no_deliveries(shop: Shop) -> None:
    assert shop.pop_service.deliveries("others") is None
