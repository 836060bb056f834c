"""Listeners during a hand-over: they drain the old broker and read the new one. In whole applications."""

from __future__ import annotations

from typing import Any

import pytest

from mqtemplate import ConsumeMode, MessageModel, MessageRequestMode, message_listener
from mqtemplate.errors import ListenerError, RemoteConnectError
from mqtemplate.message import MessageExt
from mqtemplate.pending import PendingQuery
from mqtemplate.testing import Harness
from tests.handover.brokers import MOVES, TwoBrokers

Seen = list[str]


def listener(seen: Seen, group: str = "billing", topic: str = "orders", **attributes: Any) -> object:
    """Return a listener that notes the bodies. Of ``fails ...`` it notes each call, and raises."""

    @message_listener(topic=topic, consumer_group=group, **attributes)
    def bill(message: MessageExt) -> None:
        seen.append(message.body.decode())
        if seen[-1].startswith("fails"):
            raise ValueError(seen[-1])

    return bill


def keep_open(brokers: TwoBrokers, *components: object, **options: bool) -> Harness:
    """Start the application of the hand-over; the brokers' end stops it."""
    app = brokers.application(*components)
    app.start()
    brokers.apps.append(app)
    return brokers.harness(app, **options)


# --- CONCURRENTLY ---------------------------------------------------------------------------------


def test_a_concurrent_listener_reads_both_brokers_at_once(brokers: TwoBrokers) -> None:
    seen: Seen = []
    with brokers.before(listener(seen)) as app:
        brokers.harness(app.broker).run_until_idle()
    brokers.send_old("orders", "old 1", "old 2")
    harness = keep_open(brokers, listener(seen))
    brokers.send_new("orders", "new 1")

    harness.run_until_idle()

    assert sorted(seen) == ["new 1", "old 1", "old 2"]


def test_both_brokers_take_turns_while_both_have_many_messages(brokers: TwoBrokers) -> None:
    """A backlog in the old broker does not delay new messages until it is gone."""
    seen: Seen = []
    brokers.send_old("orders", *(f"old {number}" for number in range(300)))
    harness = keep_open(brokers, listener(seen, consume_from_where="CONSUME_FROM_FIRST_OFFSET"))
    brokers.send_new("orders", *(f"new {number}" for number in range(300)))

    harness.run_until_idle()

    assert len(seen) == 600
    assert 100 < sum(body.startswith("new") for body in seen[:300]) < 200


def test_each_message_is_handled_once_over_a_restart(brokers: TwoBrokers) -> None:
    """The progress in the queues of each broker is committed at that broker."""
    seen: Seen = []
    brokers.send_old("orders", "old 1")
    for number in (1, 2):
        with brokers.application(listener(seen)) as app:
            brokers.send_new("orders", f"new {number}")
            brokers.harness(app).run_until_idle()
        brokers.reopen_both()

    assert sorted(seen) == ["new 1", "new 2", "old 1"]


def test_a_group_of_the_old_broker_gets_what_was_sent_before_its_listener_started(brokers: TwoBrokers) -> None:
    """Another process sends first. The new topic had messages of others, which the group does not get."""
    seen: Seen = []
    with brokers.before(listener(seen)) as app:
        brokers.send_old("orders", "old 1")
        brokers.harness(app.broker, raise_handler_errors=True)
        Harness(app).run_until_idle()
    brokers.new.start()
    brokers.new.create_topic("orders", 4)
    brokers.fill_new("orders", 3)
    with brokers.application():
        brokers.send_new("orders", "new 1")
    brokers.reopen_both()

    keep_open(brokers, listener(seen)).run_until_idle()

    assert seen == ["old 1", "new 1"]


def test_what_fails_is_retried_by_the_broker_that_had_it(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.send_old("orders", "fails, old")
    harness = keep_open(brokers, listener(seen, max_reconsume_times=2), raise_handler_errors=False)
    brokers.send_new("orders", "fails, new")

    harness.advance("1h")

    assert sorted(seen) == ["fails, new"] * 3 + ["fails, old"] * 3
    admin = brokers.both.admin()
    spans = {span.queue.broker_name: span.message_count for span in admin.queue_spans("%DLQ%billing")}
    assert spans == {"old:broker-a": 1, "broker-a": 1}


def test_retries_and_dead_letters_that_wait_in_the_old_broker_are_drained(brokers: TwoBrokers) -> None:
    """They were sent back before the hand-over."""
    seen: Seen = []
    brokers.send_old("orders", "fails, old")
    with brokers.before(listener(seen, max_reconsume_times=2)) as app:
        Harness(app, raise_handler_errors=False).run_until_idle()
    assert seen == ["fails, old"]

    keep_open(brokers, listener(seen, max_reconsume_times=2), raise_handler_errors=False).advance("1h")

    assert seen == ["fails, old"] * 3
    [span] = brokers.both.admin().queue_spans("%DLQ%billing")
    letters = brokers.both.reader.pull(span.queue, 0).messages
    assert [letter.body for letter in letters] == [b"fails, old"]
    assert letters[0].broker_name == "old:broker-a"


def test_retries_do_not_move() -> None:
    """The number of retries of a message is counted by the broker that has it."""
    seen: Seen = []
    brokers = TwoBrokers(options=MOVES)
    brokers.send_old("orders", "fails, old")
    harness = keep_open(brokers, listener(seen, max_reconsume_times=1), raise_handler_errors=False)

    harness.advance("1m")

    assert seen == ["fails, old"] * 2
    [span] = brokers.both.admin().queue_spans("%DLQ%billing")
    assert span.queue.broker_name == "old:broker-a"
    brokers.close()


def test_a_delayed_message_that_is_not_moved_is_delivered_by_the_old_broker(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.delay_old("orders", "pending", 3_600_000)
    harness = keep_open(brokers, listener(seen))

    harness.advance("59m 59s")
    assert seen == []
    harness.advance("1s")

    assert seen == ["pending"]


def test_a_moved_message_is_delivered_once_at_its_due_time() -> None:
    seen: Seen = []
    brokers = TwoBrokers(options=MOVES)
    brokers.delay_old("orders", "pending", 60_000)
    harness = keep_open(brokers, listener(seen))

    harness.advance("59s")
    assert seen == []
    assert brokers.old.delayed.count_pending(PendingQuery()).total == 0
    harness.advance("1m")

    assert seen == ["pending"]
    brokers.close()


def test_receive_reads_both_brokers(brokers: TwoBrokers) -> None:
    brokers.send_old("orders", "old 1", "old 2")
    app = brokers.application(**{"rocketmq.pull-consumer.group": "reports", "rocketmq.pull-consumer.topic": "orders"})
    with app:
        brokers.send_new("orders", "new 1")

        received = [text for _ in range(4) for text in app.template.receive(str, max_count=1, timeout=0)]

    assert sorted(received) == ["new 1", "old 1", "old 2"]


# --- ORDERLY --------------------------------------------------------------------------------------


def orderly(seen: Seen, **attributes: Any) -> object:
    return listener(seen, consume_mode=ConsumeMode.ORDERLY, **attributes)


def test_an_ordered_listener_reads_the_old_queues_first(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.send_old("orders", "o-1", "o-2", "o-3", queue=1)
    harness = keep_open(brokers, orderly(seen))
    brokers.send_new("orders", "o-4", "o-5", queue=1)

    harness.run_until_idle()

    assert seen == ["o-1", "o-2", "o-3", "o-4", "o-5"]


def test_no_key_overtakes_itself_if_the_number_of_queues_differs(brokers: TwoBrokers) -> None:
    """All old queues of the topic come before all new ones, whatever queue a key has."""
    seen: Seen = []
    brokers.old.create_topic("orders", 2)
    brokers.send_old("orders", "a-1", "a-2", queue=0)
    brokers.send_old("orders", "b-1", "b-2", queue=1)
    brokers.new.start()
    brokers.new.create_topic("orders", 8)
    harness = keep_open(brokers, orderly(seen))
    brokers.send_new("orders", "a-3", queue=7)
    brokers.send_new("orders", "b-3", queue=3)

    harness.run_until_idle()

    assert [each for each in seen if each.startswith("a")] == ["a-1", "a-2", "a-3"]
    assert [each for each in seen if each.startswith("b")] == ["b-1", "b-2", "b-3"]


def test_a_failing_message_of_the_old_broker_holds_back_the_new_one(brokers: TwoBrokers) -> None:
    """It is retried in its place; new messages of its topic wait until it is a dead letter."""
    seen: Seen = []
    brokers.send_old("orders", "fails, old", "old 2")
    harness = keep_open(brokers, orderly(seen, max_reconsume_times=3), raise_handler_errors=False)
    brokers.send_new("orders", "new 1")

    harness.run_until_idle()
    assert seen == ["fails, old"]
    harness.advance("1m")

    assert seen == ["fails, old"] * 4 + ["old 2", "new 1"]


def test_another_member_of_the_group_holds_back_the_new_queues_too(brokers: TwoBrokers) -> None:
    """Drained means: over all members of the group. The second member gets the queue that is not drained."""
    seen: Seen = []
    brokers.send_old("orders", "fails, old", queue=3)
    first, second = (orderly(seen, id=name, max_reconsume_times=60) for name in ("first", "second"))
    harness = keep_open(brokers, first, second, raise_handler_errors=False)
    brokers.send_new("orders", "new 1", queue=0)

    harness.advance("30s")
    assert set(seen) == {"fails, old"}
    harness.advance("1h")

    assert seen[-1] == "new 1"


def test_the_retry_topic_of_the_group_is_drained_first_as_well(brokers: TwoBrokers) -> None:
    """It has messages if the listener was CONCURRENTLY before."""
    seen: Seen = []
    brokers.send_old("orders", "fails once")
    with brokers.before(listener(seen)) as app:
        before = Harness(app, raise_handler_errors=False)
        before.run_until_idle()
    Harness(brokers.old).advance("10s")
    harness = keep_open(brokers, orderly(seen, max_reconsume_times=1), raise_handler_errors=False)
    brokers.send_new("orders", "new 1")

    harness.advance("1h")

    assert seen == ["fails once"] * 2 + ["new 1"]


def test_a_later_release_of_the_old_broker_comes_before_newer_messages(brokers: TwoBrokers) -> None:
    """A delayed message that stays in the old broker: what was handled before stays handled, and later ones wait."""
    seen: Seen = []
    brokers.delay_old("orders", "released late", 60_000)
    harness = keep_open(brokers, orderly(seen))
    brokers.send_new("orders", "new 1")
    harness.advance("59s")
    assert seen == ["new 1"]

    brokers.clock.set_ms(brokers.clock.now_ms() + 1_000)
    Harness(brokers.old).run_until_idle()
    brokers.send_new("orders", "new 2")
    brokers.harness(brokers.apps[0]).run_until_idle()

    assert seen == ["new 1", "released late", "new 2"]


def test_ordered_listeners_may_wait_for_pending_messages_too(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.with_options(orderly_waits_for_pending=True)
    brokers.delay_old("orders", "pending", 60_000)
    harness = keep_open(brokers, orderly(seen))
    brokers.send_new("orders", "new 1")

    harness.advance("59s")
    assert seen == []
    harness.advance("5s")

    assert seen == ["pending", "new 1"]


def test_other_topics_do_not_wait(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.send_old("orders", "fails, old")
    orders, invoices = orderly(seen, id="orders"), orderly(seen, id="invoices", group="mail", topic="invoices")
    harness = keep_open(brokers, orders, invoices, raise_handler_errors=False)
    brokers.send_new("invoices", "invoice 1")

    harness.run_until_idle()

    assert sorted(seen) == ["fails, old", "invoice 1"]


def test_an_order_that_a_moved_message_would_lose_is_refused(brokers: TwoBrokers) -> None:
    brokers.old.create_topic("orders", 2)
    brokers.delay_old("orders", "pending", 60_000)
    brokers.new.start()
    brokers.new.create_topic("orders", 8)

    with pytest.raises(ListenerError) as refused:
        brokers.application(orderly([])).start()

    text = str(refused.value)
    assert "group 'billing' reads topic 'orders' in its order (ORDERLY), and the topic has 2 queues in the old" in text
    assert "and 8 in the new one, while 1 delayed messages of it are pending in the old one" in text
    assert "Give the topic 2 queues at the new broker, or wait until these messages are delivered" in text
    assert "set mqtemplate.hand-over.allow-other-queue-count: true" in text


def test_an_order_that_does_not_matter_is_given_up_by_a_setting(brokers: TwoBrokers) -> None:
    seen: Seen = []
    brokers.with_options(allow_other_queue_count=True)
    brokers.old.create_topic("orders", 2)
    brokers.delay_old("orders", "pending", 60_000)
    brokers.new.start()
    brokers.new.create_topic("orders", 8)

    keep_open(brokers, orderly(seen)).advance("2m")

    assert seen == ["pending"]


# --- broadcasting and POP -------------------------------------------------------------------------


def test_each_broadcasting_member_reads_both_brokers(brokers: TwoBrokers) -> None:
    """A member that has offsets in the old broker gets all that is sent to the new one from the hand-over on."""
    first: Seen = []
    second: Seen = []
    brokers.old.create_topic("orders", 1)
    everywhere: dict[str, Any] = {"message_model": MessageModel.BROADCASTING}
    members = [
        listener(seen, id=name, instance_name=name, **everywhere) for seen, name in ((first, "one"), (second, "two"))
    ]
    with brokers.before(*members) as app:
        Harness(app).run_until_idle()
    brokers.send_old("orders", "old 1")
    brokers.new.start()
    brokers.new.create_topic("orders", 1)
    brokers.fill_new("orders", 3)
    brokers.clock.set_ms(brokers.clock.now_ms() + 1)
    app = brokers.application(*members)
    brokers.both.start()
    brokers.send_new("orders", "new 1")
    brokers.apps.append(app)
    app.start()

    brokers.harness(app).run_until_idle()

    assert sorted(first) == sorted(second) == ["new 1", "old 1"]


@pytest.mark.parametrize("mode", [ConsumeMode.CONCURRENTLY, ConsumeMode.ORDERLY])
def test_a_listener_by_pop_receives_from_both_brokers(brokers: TwoBrokers, mode: ConsumeMode) -> None:
    seen: Seen = []
    brokers.send_old("orders", "old 1", "fails, old")
    harness = keep_open(
        brokers,
        listener(
            seen,
            request_mode=MessageRequestMode.POP,
            consume_mode=mode,
            max_reconsume_times=1,
            consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        ),
        raise_handler_errors=False,
    )
    brokers.send_new("orders", "new 1")

    harness.advance("1h")

    assert sorted(seen) == ["fails, old", "fails, old", "new 1", "old 1"]
    if mode is ConsumeMode.ORDERLY:
        assert seen[-1] == "new 1"
    [span] = brokers.both.admin().queue_spans("%DLQ%billing")
    assert span.queue.broker_name == "old:broker-a"


# --- one of them is away ---------------------------------------------------------------------------


@pytest.mark.parametrize("away", ["old", "new"])
def test_a_listener_by_pop_goes_on_with_the_broker_that_is_there(
    brokers: TwoBrokers, away: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = []
    brokers.send_old("orders", "old 1")
    pops = {"old": brokers.old.pop, "new": brokers.new.pop}
    first = "CONSUME_FROM_FIRST_OFFSET"
    harness = keep_open(brokers, listener(seen, request_mode=MessageRequestMode.POP, consume_from_where=first))
    brokers.send_new("orders", "new 1")

    def refuse(*_: object, **__: object) -> list[object]:
        raise RemoteConnectError("the server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(pops[away], "receive", refuse)
        harness.run_until_idle()
    there = "old 1" if away == "new" else "new 1"
    assert seen == [there]

    harness.advance("6s")
    brokers.send_new("orders", "new 2")  # wakes the listener
    harness.run_until_idle()

    assert sorted(seen) == ["new 1", "new 2", "old 1"]


def test_an_ordered_listener_waits_for_an_old_broker_that_is_away(
    brokers: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has left there is unknown. A topic that was drained before goes on."""
    seen: Seen = []
    brokers.send_old("orders", "old 1")
    harness = keep_open(brokers, orderly(seen))

    def refuse(*_: object) -> int:
        raise RemoteConnectError("the server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(brokers.old.reader, "max_offset", refuse)
        brokers.send_new("orders", "new 1")
        harness.advance("1m")
        assert seen == ["old 1"]
    harness.advance("20s")
    assert seen == ["old 1", "new 1"]
    with monkeypatch.context() as patched:
        patched.setattr(brokers.old.reader, "max_offset", refuse)
        brokers.send_new("orders", "new 2")
        harness.advance("1m")

    assert seen == ["old 1", "new 1", "new 2"]
