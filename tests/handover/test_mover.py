"""The move of pending messages from one broker to another, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase, HandOverState, ReserveFilter, TransitEnd
from mqtemplate.errors import BrokerError, SendError, UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.pace import FIRST_WINDOW
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult, TransactionState
from mqtemplate.topics import HAND_OVER_GROUP, HAND_OVER_MOVED_TOPIC, HAND_OVER_TOPIC
from tests.handover.two_brokers import TOPIC, TwoBrokers

ALL = PendingQuery()


@pytest.fixture
def brokers() -> Iterator[TwoBrokers]:
    brokers = TwoBrokers()
    yield brokers
    brokers.close()


def test_levels_and_timers_move_with_id_keys_properties_and_due_time(brokers: TwoBrokers) -> None:
    message = Message(TOPIC, b"body", {"TAGS": "paid", "KEYS": "a b", "colour": "red", "TIMER_DELAY_MS": "60000"}, 7)
    timer = brokers.old.sends.send(message, brokers.old.queues(TOPIC)[2])
    level = brokers.send(1, DELAY=5)
    before = {each.msg_id: each.deliver_ms for each in brokers.old.delayed.pending(ALL).messages}

    brokers.advance(1_000)

    after = {each.msg_id: each.deliver_ms for each in brokers.new.delayed.pending(ALL).messages}
    assert before == after == dict.fromkeys([timer.msg_id, level], brokers.clock.now_ms() + 59_000)
    assert brokers.old.delayed.count_pending(ALL).total == 0
    brokers.advance(60_000)
    [arrived] = [each for each in brokers.arrived() if each.msg_id == timer.msg_id]
    assert (arrived.body, arrived.tags, arrived.keys, arrived.flag, arrived.queue_id) == (b"body", "paid", "a b", 7, 2)
    assert arrived.user_properties == {"colour": "red"}


# --- messages with a pending key ------------------------------------------------------------------

KEYED = {Property.PENDING_KEY: "cart", "TIMER_DELAY_MS": "600000"}


def send_before_the_hand_over(brokers: TwoBrokers, message: Message) -> SendResult:
    brokers.old.hand_over.change(HandOverPhase.ABORTED)
    result = brokers.old.sends.send(message)
    brokers.old.hand_over.begin("new:9876")
    return result


def test_moved_messages_keep_their_pending_key_and_decide_nothing(brokers: TwoBrokers) -> None:
    """Whatever is pending in the new broker stays, and the next send under the key finds what was moved."""
    since_ms = brokers.clock.now_ms()
    moved = send_before_the_hand_over(brokers, Message(TOPIC, b"moved", KEYED))
    brokers.new.sends.send(Message(TOPIC, b"new", KEYED | {"TIMER_DELAY_MS": "700000"}))

    brokers.advance(1_000)
    assert brokers.old.delayed.count_pending(ALL).total == 0
    assert brokers.new.delayed.count_pending(ALL).total == 2

    limited = {Property.ON_PENDING: "postpone", Property.NO_LATER_THAN: "900000", "TIMER_DELAY_MS": "9000000"}
    later = brokers.new.sends.send(Message(TOPIC, b"later", KEYED | limited))
    assert later.msg_id == moved.msg_id
    [pending] = brokers.new.delayed.pending(PendingQuery(key=moved.msg_id)).messages
    assert pending.deliver_ms == since_ms + 900_000


def test_a_message_that_is_due_when_it_arrives_counts_as_delivered_there(brokers: TwoBrokers) -> None:
    moved = {Property.HAND_OVER: "1", Property.TIMER_DELIVER_MS: str(brokers.clock.now_ms() - 1_000)}
    brokers.new.sends.send(Message(TOPIC, b"moved late", {Property.PENDING_KEY: "cart"} | moved))

    later = brokers.new.sends.send(Message(TOPIC, b"later", KEYED))

    assert [each.body for each in brokers.arrived()] == [b"moved late"]
    assert later.pending is not None
    assert later.pending.already_delivered


@pytest.mark.parametrize("phase", [HandOverPhase.RUNNING, HandOverPhase.PAUSED, HandOverPhase.ABORTING])
def test_the_old_broker_refuses_a_pending_key_until_the_hand_over_is_aborted(
    brokers: TwoBrokers, phase: HandOverPhase
) -> None:
    """A client that knows only the old broker would store a second message beside the one that has moved."""
    send_before_the_hand_over(brokers, Message(TOPIC, b"first", KEYED))
    brokers.advance(1_000)
    if phase is not HandOverPhase.RUNNING:
        brokers.old.hand_over.change(phase)
    brokers.kill_old()  # the phase is known after a restart, too
    sends, message = brokers.old.sends, Message(TOPIC, b"second", KEYED)

    for send in (
        lambda: sends.send(message),
        lambda: sends.send_batch([Message(TOPIC, b"without a key"), message]),
        lambda: sends.send_async([message]).result(),
        lambda: sends.send_one_way(message),
        lambda: sends.send_half(message, "producers"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            send()
        assert str(caught.value) == (
            "pending_key='cart' of a message for 'orders': this broker hands its pending messages over to new:9876 "
            f"({phase.value}), so the message that is pending under the key may be there; send it without the key, or "
            "to that broker after the hand-over is confirmed"
        )
    assert brokers.old.delayed.count_pending(ALL).total == 0
    assert brokers.arrived() == []


@pytest.mark.parametrize("can_reserve", [True, False])
def test_after_an_abort_a_message_that_came_back_is_found_under_its_key(brokers: TwoBrokers, can_reserve: bool) -> None:
    """Also from a broker of RocketMQ, from which it is recalled; its first send counts on."""
    brokers.new_can_reserve = can_reserve
    brokers.mover = brokers._mover()
    since_ms = brokers.clock.now_ms()
    first = send_before_the_hand_over(brokers, Message(TOPIC, b"first", KEYED))
    brokers.advance(2_000)
    assert brokers.new.delayed.count_pending(ALL).total == 1
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.advance(60_000)
    state = brokers.old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.ABORTED

    limited = {Property.ON_PENDING: "postpone", Property.NO_LATER_THAN: "900000", "TIMER_DELAY_MS": "9000000"}
    later = brokers.old.sends.send(Message(TOPIC, b"later", KEYED | limited))

    assert later.msg_id == first.msg_id
    assert [each.deliver_ms for each in brokers.old.delayed.pending(ALL).messages] == [since_ms + 900_000]


def test_a_transaction_that_was_open_commits_during_the_hand_over(brokers: TwoBrokers) -> None:
    """The commit is never refused. It replaces what is still pending in the old broker."""
    brokers.old.hand_over.change(HandOverPhase.ABORTED)
    brokers.old.sends.send(Message(TOPIC, b"first", KEYED))
    half = brokers.old.sends.send_half(Message(TOPIC, b"second", KEYED), "producers")
    brokers.old.hand_over.begin("new:9876")

    brokers.old.transactions.end_transaction(half, TransactionState.COMMIT)
    brokers.advance(700_000)

    assert [each.body for each in brokers.arrived()] == [b"second"]


# --- the move -------------------------------------------------------------------------------------


def test_messages_of_one_sharding_key_move_to_the_queue_that_producers_choose(brokers: TwoBrokers) -> None:
    brokers.new.create_topic(TOPIC, 7)
    properties = {Property.SHARDING_KEY: "customer", "TIMER_DELAY_MS": "60000"}
    brokers.old.sends.send(Message(TOPIC, b"", properties), brokers.old.queues(TOPIC)[3])

    brokers.advance(61_000)

    [arrived] = brokers.arrived()
    assert arrived.broker_name == brokers.new.name
    assert arrived.queue_id == 606175198 % 7  # Java: abs("customer".hashCode()) % 7


def test_a_message_that_is_due_soon_stays_and_the_old_broker_releases_it(brokers: TwoBrokers) -> None:
    brokers.send(1, TIMER_DELAY_MS=4_000)

    brokers.advance(4_000)

    assert brokers.old.hand_over.counts().reserved == 0
    brokers.check()


def test_what_the_new_broker_cannot_keep_yet_stays_until_it_can(brokers: TwoBrokers) -> None:
    """RocketMQ keeps timers of three days."""
    brokers.new.settings = replace(brokers.new.settings, timer_max_delay_sec=100)
    brokers.send(1, TIMER_DELAY_MS=120_000)

    brokers.advance(20_000)
    assert brokers.new.delayed.count_pending(ALL).total == 0

    brokers.advance(20_000)
    assert brokers.new.delayed.count_pending(ALL).total == 1


def test_a_retry_is_not_moved(brokers: TwoBrokers) -> None:
    """Its group consumes it from the old broker."""
    brokers.old.sends.send(Message("%RETRY%billing", b"", {"TIMER_DELAY_MS": "60000"}))

    brokers.advance(2_000)

    assert brokers.old.delayed.count_pending(ALL).total == 1


@pytest.mark.parametrize("kind", ["TIMER_DELAY_MS", "DELAY"])
def test_a_reserved_message_is_neither_cancelled_nor_released_in_the_old_broker(brokers: TwoBrokers, kind: str) -> None:
    handle = brokers.old.sends.send(Message(TOPIC, b"", {kind: "5" if kind == "DELAY" else "60000"})).handle
    source = brokers.old.hand_over
    source.lock("me", 60_000)
    now_ms = brokers.clock.now_ms()
    assert source.reserve("me", 10, ReserveFilter(after_ms=0, before_ms=now_ms + 100_000)) == 1

    assert brokers.old.delayed.cancel(handle).status is ScheduleChangeStatus.MOVED
    assert brokers.old.delayed.reschedule(handle, now_ms).status is ScheduleChangeStatus.MOVED
    brokers.clock.move_ms(100_000)
    brokers._step_all(brokers.old)
    assert brokers.arrived() == []
    assert [each.deliver_ms for each in source.transit()] == [now_ms + 60_000]


def test_the_end_of_a_transit_is_found_by_the_old_id(brokers: TwoBrokers) -> None:
    msg_id = brokers.send(1, TIMER_DELAY_MS=60_000)
    assert brokers.old.hand_over.moved(msg_id) is None

    brokers.advance(1_000)

    ended = brokers.old.hand_over.moved(msg_id, TOPIC)
    assert ended is not None
    assert ended.end is TransitEnd.MOVED
    assert ended.broker_name == brokers.new.name
    assert brokers.new.delayed.cancel(ended.handle).status is ScheduleChangeStatus.CANCELLED
    assert not brokers.old.hand_over.is_reserved(msg_id)
    assert brokers.old.hand_over.moved(msg_id, "other") is None


def test_a_message_that_the_new_broker_refuses_is_pending_in_the_old_one_again(brokers: TwoBrokers) -> None:
    """It keeps id and due time, and is not tried again."""
    brokers.new.engine.drafts._max_message_size = 10
    body = b"more than ten bytes"
    handle = brokers.old.sends.send(Message(TOPIC, body, {"TIMER_DELAY_MS": "60000", "UNIQ_KEY": "M1"})).handle
    brokers.due["M1"] = brokers.clock.now_ms() + 60_000

    brokers.advance(10_000)

    counts = brokers.old.hand_over.counts()
    assert (counts.reserved, counts.returned, counts.in_transit, counts.pending) == (1, 1, 0, 1)
    ended = brokers.old.hand_over.moved("M1")
    assert ended is not None
    assert "allowed are 10" in (ended.reason or "")
    brokers.kill_old()
    assert brokers.old.delayed.reschedule(handle, brokers.due["M1"]).status is ScheduleChangeStatus.RESCHEDULED
    brokers.advance(60_000)
    brokers.check()


def test_a_topic_that_the_new_broker_does_not_have_stays_until_it_has(brokers: TwoBrokers) -> None:
    brokers.new.engine.routes.unknown._auto_create = False
    brokers.send(1, TIMER_DELAY_MS=600_000)
    brokers.advance(10_000)
    assert brokers.old.hand_over.counts().pending == 1

    brokers.new.expect_topics([TOPIC])
    brokers.advance(60_000)

    assert brokers.new.delayed.count_pending(ALL).total == 1


def test_a_move_keeps_its_rate(brokers: TwoBrokers) -> None:
    brokers.restart(MoverSettings(rate=10))
    for number in range(100):
        brokers.send(number, TIMER_DELAY_MS=3_600_000 + number)

    brokers.advance(5_000)

    assert 40 <= brokers.old.hand_over.counts().moved <= 70
    assert brokers.mover.progress().rate > 0


def test_the_first_ones_due_move_first(brokers: TwoBrokers) -> None:
    brokers.restart(MoverSettings(rate=1))
    for number in (3, 1, 2):
        brokers.send(number, TIMER_DELAY_MS=3_600_000 + 1_000 * number)

    brokers.advance(1_500)

    assert [each.msg_id for each in brokers.new.delayed.pending(ALL).messages] == ["M1", "M2"]


def test_a_target_that_is_down_delays_only_what_may_have_been_sent(brokers: TwoBrokers) -> None:
    """The others are pending in the old broker again, which releases them on time."""
    for number in range(150):
        brokers.send(number, TIMER_DELAY_MS=20_000)
    due_ms = brokers.clock.now_ms() + 20_000

    def refuse(*_: object) -> AwaitableFuture[SendResult]:
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_exception(SendError("connection refused"))
        return future

    brokers.mover._new.sends.send_async = refuse  # type: ignore[method-assign,assignment]
    brokers.advance(20_100)

    on_time = [each for each in brokers.arrived() if each.store_timestamp == due_ms]
    assert len(on_time) == 150 - FIRST_WINDOW
    assert brokers.mover.progress().error == "connection refused"
    del brokers.mover._new.sends.send_async
    brokers.advance(20_000)
    brokers.check()


def test_a_message_for_which_the_new_broker_always_fails_stays_and_holds_up_no_other(brokers: TwoBrokers) -> None:
    """RocketMQ fails for an empty body."""
    send_async = brokers.new.sends.send_async

    def fail(messages: list[Message], *arguments: object) -> AwaitableFuture[SendResult]:
        if messages[0].body == b"1":
            future: AwaitableFuture[SendResult] = AwaitableFuture()
            future.set_exception(SendError("SYSTEM_ERROR"))
            return future
        return send_async(messages, *arguments)  # type: ignore[arg-type]

    brokers.mover._new.sends.send_async = fail  # type: ignore[method-assign,assignment]
    for number in range(3):
        brokers.send(number, TIMER_DELAY_MS=100_000 + number)

    brokers.advance(60_000)

    assert brokers.new.delayed.count_pending(ALL).total == 2
    ended = brokers.old.hand_over.moved("M1")
    assert ended is not None
    assert ended.reason == "SYSTEM_ERROR"
    brokers.advance(50_000)
    brokers.check()


# --- kills --------------------------------------------------------------------------------------


def kills() -> list[tuple[int, bool, bool]]:
    """Number of the call, whether it is done before the interruption, and whether that is a kill."""
    return [(at, is_after, is_kill) for at in range(8) for is_after in (False, True) for is_kill in (False, True)]


@pytest.mark.parametrize(("at", "is_after", "is_kill"), kills())
def test_an_interruption_at_any_call_loses_and_repeats_nothing(at: int, is_after: bool, is_kill: bool) -> None:
    brokers = TwoBrokers()
    for number in range(3):
        brokers.send(number, **({"DELAY": 4} if number else {"TIMER_DELAY_MS": 20_000}))
    brokers.faults.at, brokers.faults.is_after, brokers.faults.kills = at, is_after, is_kill

    brokers.advance(14_000)
    assert brokers.old.hand_over.counts().moved == 3
    brokers.advance(17_000)

    brokers.check()
    brokers.close()


def test_a_message_that_was_sent_before_a_kill_is_found_by_its_id_and_not_sent_again(brokers: TwoBrokers) -> None:
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.faults.at, brokers.faults.is_after = 3, True  # lock, reserve, note_brokers, send

    brokers.advance(1_000)

    assert brokers.faults.calls.count("send_async") == 1
    assert brokers.old.hand_over.counts().moved == 1
    assert brokers.new.delayed.count_pending(ALL).total == 1


def test_a_broker_that_is_away_is_waited_for_before_a_message_is_sent_again(brokers: TwoBrokers) -> None:
    brokers.send(1, TIMER_DELAY_MS=300_000)
    source = brokers.old.hand_over
    brokers.faults.at, brokers.faults.is_after, brokers.faults.kills = 0, False, False
    source.lock("embedded", 60_000)
    source.note_brokers("embedded", ["broker-b"])  # a message may have been sent there

    brokers.advance(60_000)

    assert source.counts().in_transit == 1
    assert "broker-b, which is not in the cluster" in (brokers.mover.progress().error or "")
    assert "start that broker" in (source.state().last_error or "")  # type: ignore[union-attr]


def test_messages_are_reserved_again_after_an_abort_and_not_taken_for_moved(brokers: TwoBrokers) -> None:
    """The new broker has a record with the same id, from the first move: its property names another transit."""
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.advance(1_000)
    brokers.new.delayed.cancel(key="M1")
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.faults.at, brokers.faults.is_after, brokers.faults.kills = len(brokers.faults.calls) + 2, False, True

    brokers.advance(30_000)

    assert brokers.new.delayed.count_pending(ALL).total == 1


# --- state and lock -----------------------------------------------------------------------------


def test_one_mover_works_at_a_time(brokers: TwoBrokers) -> None:
    source = brokers.old.hand_over
    assert source.lock("first", 15_000)
    assert not source.lock("second", 15_000)

    with pytest.raises(HandOverError, match=r"second does not have the lock .*its last owner: first"):
        source.reserve("second", 1, ReserveFilter(after_ms=0, before_ms=1))
    brokers.clock.move_ms(15_000)
    with pytest.raises(HandOverError, match="first does not have the lock"):
        source.settle("first", [])
    assert source.lock("second", 15_000)


def test_a_slow_step_sends_nothing_when_its_lease_is_nearly_over(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another mover may have the lock then, and sends what is missing itself."""
    for number in range(3):
        brokers.send(number, TIMER_DELAY_MS=300_000)
    sends = brokers.mover._new.sends
    send, sent_ms = sends.send_async, list[int]()

    def slow(*arguments: Any) -> Any:
        sent_ms.append(brokers.clock.steady_ms())
        brokers.clock.move_ms(10_000)
        return send(*arguments)

    monkeypatch.setattr(sends, "send_async", slow)
    brokers.step()
    in_one_step = len(sent_ms)
    monkeypatch.setattr(sends, "send_async", send)
    brokers.advance(60_000)

    assert in_one_step == 2, "the lease of 15 s, less than 3 s for a send, ends before the third one"
    assert brokers.new.delayed.count_pending(ALL).total == 3


def test_a_start_honours_the_lease_of_the_owner_before(brokers: TwoBrokers) -> None:
    """A mover in another process may still send what it reserved."""
    brokers.old.hand_over.lock("other process", 15_000)
    brokers.kill_old()

    assert not brokers.old.hand_over.lock("me", 15_000)
    assert brokers.old.hand_over.lock("other process", 15_000)


def test_the_state_survives_a_kill(brokers: TwoBrokers) -> None:
    source = brokers.old.hand_over
    source.change(HandOverPhase.PAUSED)
    state = source.state()
    brokers.kill_old()

    assert brokers.old.hand_over.state() == state


def test_a_paused_hand_over_reserves_nothing_more_and_settles_what_is_in_transit(brokers: TwoBrokers) -> None:
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.faults.at, brokers.faults.is_after = 1, True
    brokers.step()
    brokers.old.hand_over.change(HandOverPhase.PAUSED)
    brokers.send(2, TIMER_DELAY_MS=300_000)

    brokers.advance(20_000)

    counts = brokers.old.hand_over.counts()
    assert (counts.moved, counts.in_transit, counts.pending) == (1, 0, 1)


def test_a_second_hand_over_to_another_broker_is_refused(brokers: TwoBrokers) -> None:
    assert brokers.old.hand_over.begin("new:9876") == brokers.old.hand_over.state()
    with pytest.raises(HandOverError, match=r"to new:9876 is RUNNING, so none to else:9876 can start; abort"):
        brokers.old.hand_over.begin("else:9876")


def test_a_hand_over_is_confirmed_once_the_old_broker_is_empty_and_then_it_refuses_messages(
    brokers: TwoBrokers,
) -> None:
    brokers.send(1, TIMER_DELAY_MS=300_000)
    queue = brokers.old.sends.send(Message(TOPIC, b"")).message_queue
    brokers.old.groups.commit_offset("billing", queue, 0)
    with pytest.raises(HandOverError) as refused:
        brokers.old.hand_over.change(HandOverPhase.CONFIRMED)
    assert "1 message is pending here; group billing has not consumed 1 message of orders" in str(refused.value)

    brokers.advance(1_000)
    brokers.old.groups.commit_offset("billing", queue, 1)
    brokers.old.hand_over.change(HandOverPhase.CONFIRMED)

    for _ in range(2):
        with pytest.raises(SendError, match=r"has moved to new:9876, and takes no messages any more; send them there"):
            brokers.old.sends.send(Message(TOPIC, b""))
        brokers.kill_old()
    with pytest.raises(HandOverError, match=r"is CONFIRMED, which RUNNING cannot follow; allowed: none"):
        brokers.old.hand_over.change(HandOverPhase.RUNNING)


def test_no_message_is_taken_while_a_hand_over_is_being_confirmed(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stored after the look at what is left stayed in the old broker, which stores nothing any more."""
    hand_over = brokers.old.hand_over
    save, refused = hand_over._save, list[SendError]()

    def save_while_a_producer_sends(state: HandOverState) -> HandOverState:
        with pytest.raises(SendError) as caught:
            brokers.send(1, TIMER_DELAY_MS=300_000)
        refused.append(caught.value)
        return save(state)

    monkeypatch.setattr(hand_over, "_save", save_while_a_producer_sends)
    hand_over.change(HandOverPhase.CONFIRMED)

    assert len(refused) == 1
    assert hand_over.counts().pending == 0


def test_a_message_that_arrives_before_the_last_look_keeps_a_hand_over_from_being_confirmed(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker takes messages as before."""
    hand_over = brokers.old.hand_over
    remaining = hand_over.remaining

    def remaining_before_a_send() -> list[str]:
        found = remaining()
        if not found:
            brokers.send(1, TIMER_DELAY_MS=300_000)
        return found

    monkeypatch.setattr(hand_over, "remaining", remaining_before_a_send)
    with pytest.raises(HandOverError, match="cannot be confirmed yet: 1 message is pending here"):
        hand_over.change(HandOverPhase.CONFIRMED)

    brokers.send(2, TIMER_DELAY_MS=300_000)
    assert hand_over.counts().pending == 2


def test_a_broker_without_a_hand_over_says_how_to_start_one() -> None:
    brokers = TwoBrokers()
    assert brokers.new.hand_over.state() is None
    with pytest.raises(HandOverError, match=r"mqtemplate\.hand-over\.from .* or with: mqtemplate hand-over start"):
        brokers.new.hand_over.change(HandOverPhase.PAUSED)
    brokers.close()


# --- abort --------------------------------------------------------------------------------------


def test_an_abort_moves_back_what_was_moved_and_what_was_sent_since(brokers: TwoBrokers) -> None:
    for number in range(3):
        brokers.send(number, TIMER_DELAY_MS=60_000 + number)
    brokers.advance(2_000)
    sent = brokers.new.sends.send(Message(TOPIC, b"later", {"TIMER_DELAY_MS": "90000", "UNIQ_KEY": "later"}))
    brokers.due["later"] = brokers.clock.now_ms() + 90_000
    other = brokers.new.sends.send(Message("of_others", b"", {"TIMER_DELAY_MS": "90000"}))
    before = brokers.due.copy()

    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.advance(12_000)

    state = brokers.old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.ABORTED
    assert {each.msg_id: each.deliver_ms for each in brokers.old.delayed.pending(ALL).messages} == before
    assert [each.msg_id for each in brokers.new.delayed.pending(ALL).messages] == [other.msg_id]
    assert brokers.new.delayed.cancel(sent.handle).status is ScheduleChangeStatus.MOVED
    brokers.advance(100_000)
    brokers.check()


@pytest.mark.parametrize("at", range(0, 12, 2))
@pytest.mark.parametrize("is_after", [False, True])
def test_a_kill_during_an_abort_loses_and_repeats_nothing(brokers: TwoBrokers, at: int, is_after: bool) -> None:
    for number in range(3):
        brokers.send(number, TIMER_DELAY_MS=40_000 + number)
    brokers.advance(2_000)
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.faults.at, brokers.faults.is_after = len(brokers.faults.calls) + at, is_after

    brokers.advance(30_000)

    state = brokers.old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.ABORTED
    brokers.advance(20_000)
    brokers.check()


@pytest.mark.parametrize("at", [None, *range(0, 12, 2)])
@pytest.mark.parametrize("is_after", [False, True])
def test_an_abort_recalls_messages_from_a_broker_that_cannot_reserve_them(at: int | None, is_after: bool) -> None:
    """As from RocketMQ, with a kill at any call. A message that is cancelled meanwhile does not come back."""
    brokers = TwoBrokers()
    brokers.new_can_reserve = False
    brokers.mover = brokers._mover()
    for number in range(4):
        brokers.send(number, TIMER_DELAY_MS=90_000 + number)
    brokers.advance(2_000)
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.advance(2_000)
    assert brokers.old.hand_over.counts().in_transit == 4
    brokers.cancel_in_new("M0")
    brokers.faults.at, brokers.faults.is_after = None if at is None else len(brokers.faults.calls) + at, is_after

    brokers.advance(60_000)

    state = brokers.old.hand_over.state()
    assert state is not None
    assert state.phase is HandOverPhase.ABORTED
    assert {each.msg_id: each.deliver_ms for each in brokers.old.delayed.pending(ALL).messages} == brokers.due
    assert brokers.new.delayed.count_pending(ALL).total == 0
    if at is None:  # a kill between the store of a message and that of its count leaves the count behind
        counts = brokers.old.hand_over.counts()
        assert (counts.moved, counts.in_transit, counts.pending, counts.returned) == (1, 0, 3, 3)  # one was cancelled
    brokers.advance(40_000)
    brokers.check()
    brokers.close()


def test_a_hand_over_that_was_aborted_starts_again_and_moves_the_same_messages_once_more(brokers: TwoBrokers) -> None:
    """The records of the first move have the same ids, but name another transit."""
    brokers.send(1, TIMER_DELAY_MS=90_000)
    brokers.advance(2_000)
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.advance(12_000)

    assert brokers.old.hand_over.counts().moved == 0
    brokers.old.hand_over.begin("new:9876")
    assert brokers.old.hand_over.counts().moved == 0
    brokers.faults.at, brokers.faults.is_after = len(brokers.faults.calls) + 1, True  # reserved, not sent
    brokers.advance(20_000)

    assert brokers.old.hand_over.counts().moved == 1
    assert brokers.new.delayed.count_pending(ALL).total == 1
    brokers.advance(90_000)
    brokers.check()


# --- idle, lock, and phases -----------------------------------------------------------------------


def test_an_idle_mover_sleeps_until_a_message_comes_into_the_range_of_the_new_broker(brokers: TwoBrokers) -> None:
    brokers.new.settings = replace(brokers.new.settings, timer_max_delay_sec=100)
    brokers.send(1, TIMER_DELAY_MS=130_000)
    brokers.mover.start()

    now_ms = brokers.clock.now_ms()
    assert brokers.mover.step() == now_ms + 40_001  # a tenth of the longest delay is left for clocks that differ

    brokers.clock.move_ms(40_001)
    brokers.mover.step()
    assert brokers.new.delayed.count_pending(ALL).total == 1
    brokers.clock.move_ms(1_000)
    now_ms = brokers.clock.now_ms()
    assert brokers.mover.step() == now_ms + 60_000  # nothing is left


def test_an_idle_mover_works_at_once_when_an_operator_changes_the_phase(brokers: TwoBrokers) -> None:
    woken: list[int] = []
    brokers.mover.on_wake(lambda: woken.append(brokers.clock.now_ms()))
    brokers.old.hand_over.change(HandOverPhase.PAUSED)
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.mover.start()
    assert brokers.mover.step() == brokers.clock.now_ms() + 60_000

    brokers.old.hand_over.change(HandOverPhase.RUNNING)
    brokers.mover.step()

    assert woken == [brokers.clock.now_ms()]
    assert brokers.old.hand_over.counts().moved == 1


def test_a_pause_between_two_calls_of_a_step_is_no_failure(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers.send(1, TIMER_DELAY_MS=300_000)
    part = brokers.old.hand_over
    reserve = part.reserve

    def paused(*arguments: object) -> int:
        part.change(HandOverPhase.PAUSED)
        return reserve(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(part, "reserve", paused)
    with capture_logs() as logs:
        brokers.step()

    assert brokers.mover.progress().error is None
    assert [each for each in logs if each["event"] == "hand_over.stalled"] == []


def test_a_mover_that_is_paused_or_done_asks_nothing_of_a_new_broker_that_is_away(brokers: TwoBrokers) -> None:
    class Away:
        def __getattr__(self, name: str) -> object:
            raise BrokerError("the new broker is away")

    brokers.mover._new = Away()  # type: ignore[assignment]
    brokers.mover.start()
    with capture_logs() as logs:
        for phase in (HandOverPhase.PAUSED, HandOverPhase.CONFIRMED):
            brokers.old.hand_over.change(phase)
            assert brokers.mover.step() == brokers.clock.now_ms() + 60_000

    assert [each for each in logs if each["event"] == "hand_over.stalled"] == []


def test_a_step_that_takes_longer_than_the_lease_settles_what_was_sent(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renews its lock, also if it starts and closes in turns."""
    send_async = brokers.new.sends.send_async

    def slow(*arguments: object) -> object:
        brokers.clock.move_ms(20_000)
        return send_async(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(brokers.new.sends, "send_async", slow)
    with capture_logs() as logs:
        for number in range(3):
            brokers.send(number, TIMER_DELAY_MS=300_000)
            brokers.step()
            brokers.restart(MoverSettings())
            brokers.clock.move_ms(30_000)
        brokers.step()

    counts = brokers.old.hand_over.counts()
    assert (counts.moved, counts.in_transit) == (3, 0)
    assert [each for each in logs if each["event"] == "hand_over.stalled"] == []


def test_a_mover_that_closes_returns_what_it_has_not_sent(brokers: TwoBrokers) -> None:
    """Else it would be pending in no broker until the next start."""
    brokers.send(1, TIMER_DELAY_MS=300_000)
    brokers.mover._is_closing = True  # as `close` in another thread sets it, while the step reserves

    brokers.step()

    counts = brokers.old.hand_over.counts()
    assert (counts.in_transit, counts.pending) == (0, 1)


# --- abort, taken back --------------------------------------------------------------------------


@pytest.mark.parametrize("can_reserve", [True, False], ids=["our server", "RocketMQ"])
def test_an_abort_that_is_taken_back_leaves_nothing_on_its_way(can_reserve: bool) -> None:
    """What was on its way back arrives, and moves again."""
    brokers = TwoBrokers()
    brokers.new_can_reserve = can_reserve
    brokers.mover = brokers._mover()
    for number in range(4):
        brokers.send(number, TIMER_DELAY_MS=120_000 + number)
    brokers.advance(2_000)
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    if can_reserve:  # the process is killed between the reservation in the new broker and the send to the old one
        brokers.faults.at, brokers.faults.is_after = len(brokers.faults.calls) + 2, True
    brokers.advance(1_000)
    leaving = brokers.new if can_reserve else brokers.old
    assert leaving.hand_over.counts().in_transit == 4

    brokers.old.hand_over.change(HandOverPhase.RUNNING)
    brokers.advance(60_000)

    assert leaving.hand_over.counts().in_transit == 0
    assert brokers.new.delayed.count_pending(ALL).total == 4
    brokers.advance(70_000)
    brokers.check()
    brokers.close()


def test_a_message_that_rocketmq_has_recalled_moves_again_to_another_slot() -> None:
    """RocketMQ deletes all that is in the slot of a recall, also what is stored there later."""
    brokers = TwoBrokers()
    brokers.new_can_reserve = False
    brokers.mover = brokers._mover()
    brokers.send(1, TIMER_DELAY_MS=120_000)
    due_ms = brokers.due["M1"]
    brokers.advance(2_000)
    brokers.old.hand_over.change(HandOverPhase.ABORTING)
    brokers.advance(30_000)
    assert brokers.old.delayed.count_pending(ALL).total == 1

    brokers.old.hand_over.change(HandOverPhase.RUNNING)
    brokers.advance(2_000)

    [moved] = brokers.new.delayed.pending(ALL).messages
    assert moved.deliver_ms == due_ms + 1  # the precision of this broker is a millisecond
    brokers.advance(120_000)
    brokers.check()
    brokers.close()


# --- a new broker without timers ------------------------------------------------------------------


def without_timers(brokers: TwoBrokers, max_early_ms: int) -> None:
    """Let the new broker be like RocketMQ 4: it has delay levels only."""
    brokers.new.settings = replace(brokers.new.settings, timer_wheel_enable=False)
    brokers.restart(MoverSettings(max_early_ms=max_early_ms))


def test_a_broker_without_timers_gets_no_message_that_it_would_deliver_early(brokers: TwoBrokers) -> None:
    without_timers(brokers, max_early_ms=0)
    brokers.send(1, TIMER_DELAY_MS=60_500)
    brokers.send(2, DELAY=5)

    brokers.advance(100_000)

    assert brokers.old.hand_over.counts().reserved == 0
    brokers.check()
    assert {each.broker_name for each in brokers.arrived()} == {brokers.old.name}
    assert {each.store_timestamp - brokers.due[each.msg_id] for each in brokers.arrived()} == {0}


def test_a_message_moves_to_a_level_that_delivers_it_early_by_max_early_ms_at_most(brokers: TwoBrokers) -> None:
    without_timers(brokers, max_early_ms=2_000)
    brokers.send(1, TIMER_DELAY_MS=75_000)
    due_ms = brokers.due["M1"]

    brokers.advance(12_000)
    assert brokers.old.hand_over.counts().reserved == 0  # a minute is more than two seconds too short

    brokers.advance(3_000)
    [moved] = brokers.new.delayed.pending(ALL).messages
    assert moved.delay_level == 5
    assert due_ms - 2_000 <= moved.deliver_ms <= due_ms
    brokers.advance(60_000)
    assert [each.msg_id for each in brokers.arrived()] == ["M1"]


def test_a_message_between_two_levels_stays_until_it_fits_or_is_released(brokers: TwoBrokers) -> None:
    """One that is due in 4 s is too close to move, and one of more than an hour waits for the level of an hour."""
    without_timers(brokers, max_early_ms=1_000)
    for number, delay_ms in enumerate((4_000, 31_000, 3_700_000)):
        brokers.send(number, TIMER_DELAY_MS=delay_ms)

    brokers.advance(1_000)
    assert [each.msg_id for each in brokers.new.delayed.pending(ALL).messages] == ["M1"]

    brokers.advance(3_000)
    [released] = brokers.arrived()
    assert (released.msg_id, released.store_timestamp) == ("M0", brokers.due["M0"])
    brokers.advance(100_000)
    assert [each.msg_id for each in brokers.new.delayed.pending(ALL).messages] == ["M2"]


# --- retention ----------------------------------------------------------------------------------


def test_retention_keeps_what_is_in_transit_and_the_ends_that_old_ids_are_looked_up_in(brokers: TwoBrokers) -> None:
    brokers.send(1, TIMER_DELAY_MS=90_000)
    brokers.advance(2_000)
    brokers.send(2, TIMER_DELAY_MS=90_000)
    source = brokers.old.hand_over
    source.reserve("embedded", 1, ReserveFilter(after_ms=0, before_ms=1 << 60))

    def kept() -> dict[str, int]:
        spans = brokers.old.engine.retention._protected.before(brokers.old.store.end_offset)
        return {span.topic: span.message_count for span in spans if span.group == HAND_OVER_GROUP}

    assert kept() == {HAND_OVER_TOPIC: 1, HAND_OVER_MOVED_TOPIC: 1}
    source.change(HandOverPhase.ABORTED)
    assert kept() == {HAND_OVER_TOPIC: 1}
