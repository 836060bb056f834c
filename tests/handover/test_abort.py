"""An abort while the application goes on sending: its sends go to the old broker again, and keep their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from mqtemplate import ConsumeMode, MessageRequestMode, ScheduledRun, Schedules, scheduled, transaction_listener
from mqtemplate.broker.hand_over import HandOverPhase, HandOverState
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import RemoteConnectError
from mqtemplate.handover import HandOverBroker
from mqtemplate.message import Message, MessageExt, MessageQueue, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import TransactionState
from mqtemplate.testing import Harness
from tests.handover.brokers import MOVES, TwoBrokers, bodies
from tests.handover.test_listeners_of_both import keep_open, listener

ALL = PendingQuery()
HOUR = 3_600_000
ORDERLY: dict[str, Any] = {"consume_mode": ConsumeMode.ORDERLY, "consume_from_where": "CONSUME_FROM_FIRST_OFFSET"}
POP: dict[str, Any] = {**ORDERLY, "request_mode": MessageRequestMode.POP}


@pytest.fixture
def moving() -> Iterator[TwoBrokers]:
    """Both brokers, of which the new one has another name, and a mover."""
    brokers = TwoBrokers(options=MOVES)
    brokers.new = EmbeddedBroker(None, EmbeddedSettings(broker_name="broker-n"), brokers.clock)
    brokers.reopen_both()
    yield brokers
    brokers.close()


def phase_of(brokers: TwoBrokers) -> HandOverPhase:
    state = brokers.old.hand_over.state()
    assert isinstance(state, HandOverState)
    return state.phase


def abort(brokers: TwoBrokers) -> None:
    brokers.old.hand_over.change(HandOverPhase.ABORTING)


def resume(brokers: TwoBrokers) -> None:
    brokers.old.hand_over.change(HandOverPhase.RUNNING)


def stored(brokers: TwoBrokers, topic: str) -> dict[str, list[str]]:
    """Return the bodies of a topic by broker."""
    return {
        name: sorted(
            text
            for queue in broker.queues(topic)
            for text in bodies(broker.reader.pull(queue, broker.reader.min_offset(queue)).messages)
        )
        for name, broker in (("old", brokers.old), ("new", brokers.new))
        if topic in broker.topic_names()
    }


# --- sends ----------------------------------------------------------------------------------------


def test_an_abort_ends_while_the_application_goes_on_sending(moving: TwoBrokers) -> None:
    """Each second it sends one delayed message. None is lost, and in the end all are in the old broker."""
    handle = moving.delay_old("orders", "before", HOUR)
    with moving.application() as app:
        harness = moving.harness(app)
        handles = [handle]
        for second in range(30):
            if second == 5:
                abort(moving)
            result = app.template.sync_send("orders", f"{second}", delay="1h")
            assert result.message_queue.broker_name == ("broker-n" if second < 5 else "old:broker-a")
            assert result.handle is not None
            handles.append(result.handle)
            harness.advance("1s")

        assert phase_of(moving) is HandOverPhase.ABORTED
        assert moving.new.delayed.count_pending(ALL).total == 0
        assert moving.old.delayed.count_pending(ALL).total == 31
        assert [app.template.cancel(each).status for each in handles] == [ScheduleChangeStatus.CANCELLED] * 31


def test_all_kinds_of_sends_go_to_the_old_broker_once_the_hand_over_is_aborted(moving: TwoBrokers) -> None:
    moving.old.create_topic("orders", 4)
    with moving.application() as app:
        of_new = moving.both.queues("orders")[2]
        abort(moving)
        queues = moving.both.queues("orders")
        results = [
            app.template.sync_send("orders", "1"),
            app.template.async_send("orders", "2").result(),
            app.template.sync_send("orders", ["3", "4"]),
            moving.both.sends.send(Message("orders", b"5"), queues[3]),
            moving.both.sends.send(Message("orders", b"6"), of_new),  # chosen before the abort
        ]
        app.template.send_one_way("orders", "7")

        assert {queue.broker_name for queue in queues} == {"old:broker-a"}
        assert {result.message_queue.broker_name for result in results} == {"old:broker-a"}
        assert results[-2].message_queue.queue_id == 3
        assert results[-1].message_queue.queue_id == 2
        found = stored(moving, "orders")
        assert (found["old"], found["new"]) == ([f"{number}" for number in range(1, 8)], [])

        resume(moving)
        result = moving.both.sends.send(Message("orders", b"8"), queues[1])
        assert result.message_queue == MessageQueue("orders", "broker-n", 1)


def test_what_arrives_late_at_the_new_broker_comes_back_too(moving: TwoBrokers) -> None:
    """Another process may learn of the abort later, and a send that is under way may arrive later."""
    moving.old.create_topic("orders", 4)
    with moving.application() as app:
        harness = moving.harness(app)
        abort(moving)
        harness.advance("9s")
        assert phase_of(moving) is HandOverPhase.ABORTING
        moving.new.sends.send(Message("orders", b"late", {Property.TIMER_DELAY_MS: str(HOUR)}))
        harness.advance("10s")

        assert phase_of(moving) is HandOverPhase.ABORTED
        [message] = app.template.pending().messages
        assert message.broker == "old:broker-a"


def test_a_topic_that_only_the_new_broker_has_stays_there(moving: TwoBrokers) -> None:
    """The listeners of this application do not read it at the old broker."""
    seen: list[str] = []
    harness = keep_open(moving, listener(seen, topic="news"))
    abort(moving)
    moving.both.sends.send(Message("news", b"1"))
    harness.advance("20s")

    assert seen == ["1"]
    assert phase_of(moving) is HandOverPhase.ABORTED
    assert "news" not in moving.old.topic_names()


@pytest.mark.parametrize("phase", [HandOverPhase.ABORTING, HandOverPhase.ABORTED])
def test_a_process_that_starts_after_the_abort_sends_to_the_old_broker(
    moving: TwoBrokers, phase: HandOverPhase
) -> None:
    moving.old.create_topic("orders", 4)
    moving.old.hand_over.begin(moving.options.target)
    abort(moving)
    moving.old.hand_over.change(phase)

    with moving.application() as app:
        assert app.template.sync_send("orders", "1").message_queue.broker_name == "old:broker-a"


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attributes", [ORDERLY, POP], ids=["ORDERLY", "ORDERLY by POP"])
def test_no_key_overtakes_itself_over_changes_of_the_broker(moving: TwoBrokers, attributes: dict[str, Any]) -> None:
    """Nothing is read before the last change: each stretch waits for the one before it, in the other broker."""
    moving.send_old("orders", "1", "2", queue=1)
    seen: list[str] = []
    moving.both.start()
    for change, texts in ((None, "34"), (abort, "56"), (resume, "78"), (abort, "9")):
        if change is not None:
            moving.clock.set_ms(moving.clock.now_ms() + 20_000)
            change(moving)
        for text in texts:
            moving.clock.set_ms(moving.clock.now_ms() + 1)
            moving.both.sends.send(Message("orders", text.encode()), moving.both.queues("orders")[1])
    assert stored(moving, "orders") == {"old": list("12569"), "new": list("3478")}

    harness = keep_open(moving, listener(seen, **attributes))
    harness.advance("1m")

    assert seen == list("123456789")


@pytest.mark.parametrize("attributes", [ORDERLY, POP], ids=["ORDERLY", "ORDERLY by POP"])
def test_what_is_sent_after_an_abort_waits_for_late_messages(moving: TwoBrokers, attributes: dict[str, Any]) -> None:
    """Within ten seconds another process may still send to the new broker."""
    moving.old.create_topic("orders", 4)
    seen: list[str] = []
    harness = keep_open(moving, listener(seen, **attributes))
    harness.advance("1s")
    abort(moving)
    moving.send_new("orders", "2", queue=1)
    harness.advance("9s")
    assert seen == []
    moving.new.sends.send(Message("orders", b"1"), moving.new.queues("orders")[1])
    harness.advance("5s")

    assert seen == ["1", "2"]


def test_messages_that_fail_in_the_new_broker_hold_back_what_is_sent_after_the_abort(moving: TwoBrokers) -> None:
    moving.old.create_topic("orders", 4)
    seen: list[str] = []
    harness = keep_open(moving, listener(seen, max_reconsume_times=60, **ORDERLY), raise_handler_errors=False)
    moving.send_new("orders", "fails, new", queue=1)
    harness.advance("1s")
    abort(moving)
    moving.send_new("orders", "old", queue=1)

    harness.advance("30s")
    assert set(seen) == {"fails, new"}
    harness.advance("1h")

    assert seen[-1] == "old"


def test_an_ordered_listener_reads_what_the_old_broker_had_while_the_new_one_is_away(
    moving: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to the old broker from then on waits: what the new one has left is unknown."""
    moving.send_old("orders", "1", queue=1)
    seen: list[str] = []
    moving.both.start()
    moving.send_new("orders", "2", queue=1)
    moving.clock.set_ms(moving.clock.now_ms() + 1)
    abort(moving)
    moving.send_new("orders", "3", queue=1)

    def refuse(*_: object) -> int:
        raise RemoteConnectError("the server does not answer")

    harness = keep_open(moving, listener(seen, **ORDERLY))
    with monkeypatch.context() as patched:
        patched.setattr(moving.new.reader, "max_offset", refuse)
        patched.setattr(moving.new.groups, "committed_offset", refuse)
        harness.advance("30s")
        assert "3" not in seen
    harness.advance("30s")

    assert seen == ["1", "2", "3"]


# --- transactions, requests, pending messages, schedules -----------------------------------------------


class Transactions:
    """Transaction listener whose local transactions are open until a check."""

    def execute_local_transaction(self, message: Message, arg: object) -> TransactionState:
        return arg if isinstance(arg, TransactionState) else TransactionState.UNKNOWN

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


def test_a_transaction_ends_at_the_broker_where_it_began(moving: TwoBrokers) -> None:
    moving.old.create_topic("orders", 4)
    app = moving.application(transaction_listener()(Transactions), **{"rocketmq.producer.group": "shop"})
    with app:
        app.template.send_in_transaction("orders", "open before")
        abort(moving)
        app.template.send_in_transaction("orders", "open after")
        app.template.send_in_transaction("orders", "at once", TransactionState.COMMIT)
        assert stored(moving, "orders") == {"old": ["at once"], "new": []}
        moving.harness(app).advance("1m")

        assert stored(moving, "orders") == {"old": ["at once", "open after"], "new": ["open before"]}


def test_a_request_gets_its_reply_whichever_broker_it_was_sent_to(moving: TwoBrokers) -> None:
    moving.old.create_topic("prices", 1)
    moving.both.start()
    before = moving.both.requests.request(Message("prices", b"before"), timeout_ms=60_000)
    abort(moving)
    after = moving.both.requests.request(Message("prices", b"after"), timeout_ms=60_000)
    assert stored(moving, "prices") == {"old": ["after"], "new": ["before"]}

    for span in moving.both.admin().queue_spans("prices"):
        for request in moving.both.reader.pull(span.queue, 0).messages:
            moving.both.requests.reply(request, b"reply to " + request.body)
    moving.harness().run_until_idle()

    assert (before.result(0).body, after.result(0).body) == (b"reply to before", b"reply to after")


@pytest.mark.parametrize("by", ["handle", "key"])
@pytest.mark.parametrize("after", ["1s", "30s"])
def test_a_message_that_was_sent_to_the_new_broker_is_changed_on_its_way_back_and_after_it(
    moving: TwoBrokers, by: str, after: str
) -> None:
    moving.old.create_topic("orders", 4)
    with moving.application() as app:
        harness = moving.harness(app)
        handle = app.template.sync_send("orders", "1", delay="2h", keys="o-1").handle
        assert handle is not None
        abort(moving)
        harness.advance(after)
        due_ms = moving.clock.now_ms() + HOUR

        delayed = moving.both.delayed
        moved = delayed.reschedule(handle if by == "handle" else None, due_ms, key=None if by == "handle" else "o-1")
        harness.advance("30s")
        [pending] = delayed.pending(ALL).messages
        cancelled = delayed.cancel(handle) if by == "handle" else delayed.cancel(key="o-1")

    assert moved.status is ScheduleChangeStatus.RESCHEDULED
    assert (pending.deliver_ms, pending.broker) == (due_ms, "old:broker-a")
    assert (cancelled.status, cancelled.broker) == (ScheduleChangeStatus.CANCELLED, "old:broker-a")


def test_a_schedule_runs_each_time_once_over_an_abort_and_its_end(moving: TwoBrokers) -> None:
    """The next run is sent to the old broker again. In the end the application has that broker only."""
    runs: list[int] = []

    @scheduled(every="10s", name="tick")
    def tick(run: ScheduledRun) -> None:
        runs.append(int(run.scheduled_at.timestamp()))

    with moving.before(tick) as app:
        Harness(app).advance("15s")
    with moving.application(tick) as app:
        harness = moving.harness(app)
        harness.advance("20s")
        abort(moving)
        harness.advance("40s")
        assert phase_of(moving) is HandOverPhase.ABORTED
    with moving.before(tick) as app:
        Harness(app).advance("20s")

    assert [later - earlier for earlier, later in itertools.pairwise(runs)] == [10] * (len(runs) - 1)
    assert len(runs) == 9


def test_a_schedule_that_was_paused_during_the_hand_over_stays_paused_after_the_abort(moving: TwoBrokers) -> None:
    runs: list[int] = []

    @scheduled(every="10s", name="tick")
    def tick() -> None:
        runs.append(1)

    with moving.before(tick) as app:
        Harness(app).advance("1s")
    with moving.application(tick) as app:
        app.get(Schedules).pause("tick")
        abort(moving)
        moving.harness(app).advance("20s")
    with moving.before(tick) as app:
        Harness(app).advance("1m")
        assert runs == []
        app.get(Schedules).resume("tick")
        Harness(app).advance("15s")
    assert runs


def test_the_lock_of_a_schedule_is_held_at_both_brokers(moving: TwoBrokers) -> None:
    """Two run messages of one schedule, one in each broker, and a process that knows one of them."""
    moving.old.create_topic("runs", 1)
    both = moving.both
    both.start()
    [of_old], [of_new] = moving.old.queues("runs"), moving.new.queues("runs")

    lock = both.groups.lock_queue("runs-tick-done", MessageQueue("runs", "old:broker-a", 0))
    assert lock is not None
    assert lock.is_held
    assert both.groups.lock_queue("runs-tick-done", of_new) is None
    assert moving.old.groups.lock_queue("runs-tick-done", of_old) is None
    assert moving.new.groups.lock_queue("runs-tick-done", of_new) is None
    lock.release()

    of_one = moving.new.groups.lock_queue("runs-tick-done", of_new)
    assert of_one is not None
    assert both.groups.lock_queue("runs-tick-done", MessageQueue("runs", "old:broker-a", 0)) is None
    of_one.release()
    again = both.groups.lock_queue("runs-tick-done", of_new)
    assert again is not None
    again.release()


def test_a_schedule_is_locked_at_the_broker_that_has_its_run_while_the_other_one_is_away(
    moving: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving.old.create_topic("runs", 1)
    both = moving.both
    assert isinstance(both, HandOverBroker)
    both.start()

    def refuse(*_: object) -> None:
        raise RemoteConnectError("the server does not answer")

    monkeypatch.setattr(moving.old.groups, "lock_queue", refuse)
    lock = both.groups.lock_queue("runs-tick-done", moving.new.queues("runs")[0])
    assert lock is not None
    lock.release()
    with pytest.raises(RemoteConnectError, match="the server does not answer"):
        both.groups.lock_queue("runs-tick-done", MessageQueue("runs", "old:broker-a", 0))
