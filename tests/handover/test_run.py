"""Hand-over of a stopped application: everything moves, step by step on the virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from mqtemplate.broker.hand_over import HandOverError, HandOverPhase
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.handover.run import HandOverRun, RunReport
from mqtemplate.message import Message, MessageQueue, Property
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.testing import Harness
from mqtemplate.topics import RETRY_TOPIC_PREFIX

START_MS = 1_764_547_200_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
FAST = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
THREE_DAYS = EmbeddedSettings(timer_max_delay_sec=3 * 86_400)


class World:
    """Both brokers, on one clock that this class steps."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock(START_MS)
        self.folder = folder
        self.old = EmbeddedBroker(folder, FAST, self.clock)
        self.new = EmbeddedBroker(settings=THREE_DAYS, clock=self.clock)
        self.old.start()
        self.new.start()
        self.harness = Harness(self.old, *self.new.services())

    def advance(self, span_ms: int) -> None:
        self.harness.advance(timedelta(milliseconds=span_ms))

    def run(self, stop: threading.Event | None = None) -> RunReport:
        """Run until nothing is left that can move now."""
        run = HandOverRun(self.old, self.new, "mq1:9876", stop=stop)
        while (next_ms := run.step()) is not None:
            self.advance(max(1, next_ms - self.clock.now_ms()))
        return run.run()

    def restart_old(self) -> None:
        """End the process of the old broker, and open the directory again."""
        self.old.close()
        self.old = EmbeddedBroker(self.folder, FAST, self.clock)
        self.old.start()
        self.harness = Harness(self.old, *self.new.services())

    def close(self) -> None:
        self.old.close()
        self.new.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path / "old")
    yield found
    found.close()


def delayed(broker: EmbeddedBroker, topic: str, delay_ms: int, key: str = "") -> str:
    properties = {Property.TIMER_DELAY_MS: str(delay_ms)} | ({Property.KEYS: key} if key else {})
    return broker.sends.send(Message(topic, b"x", properties)).msg_id


def pending(broker: EmbeddedBroker) -> list[PendingMessage]:
    return list(broker.delayed.pending(PendingQuery(), 1_000).messages)


def stored_ids(broker: EmbeddedBroker, topic: str) -> list[str]:
    found = []
    for span in broker.admin().queue_spans(topic):
        found += [each.msg_id for each in broker.reader.pull(span.queue, span.min_offset, 1_000).messages]
    return found


def test_ready_and_pending_messages_and_offsets_move(world: World) -> None:
    world.old.create_topic("orders", 1)
    [queue] = world.old.queues("orders")
    ready = [world.old.sends.send(Message("orders", b"x"), queue).msg_id for _ in range(5)]
    world.old.groups.commit_offset("billing", queue, 2)
    due = {delayed(world.old, "orders", hours * HOUR_MS, f"k{hours}"): hours * HOUR_MS for hours in (1, 2, 30)}

    report = world.run()

    assert (report.copied, report.moved, report.left) == (3, 3, 0)
    assert stored_ids(world.new, "orders") == ready[2:]
    assert {each.msg_id: each.deliver_ms - START_MS for each in pending(world.new)} == due
    assert pending(world.old) == []
    assert world.new.groups.committed_offset("billing", MessageQueue("orders", world.new.name, 0)) == 0
    assert world.old.hand_over.remaining() == []


def test_what_the_new_broker_cannot_hold_yet_stays_and_moves_in_a_later_run(world: World) -> None:
    delayed(world.old, "reminders", HOUR_MS)
    late = delayed(world.old, "reminders", 10 * DAY_MS)

    report = world.run()

    assert (report.moved, report.left) == (1, 1)
    assert report.in_range_ms == START_MS + 7 * DAY_MS
    world.restart_old()
    world.advance(7 * DAY_MS + HOUR_MS)
    assert world.run().left == 0
    assert late in {each.msg_id for each in pending(world.new)}


def test_what_falls_due_meanwhile_is_released_by_the_old_broker_and_copied(world: World) -> None:
    world.old.create_topic("reminders", 1)
    soon = delayed(world.old, "reminders", 3_000)
    later = delayed(world.old, "reminders", HOUR_MS)

    report = world.run()

    assert (report.copied, report.moved) == (1, 1)
    assert stored_ids(world.new, "reminders") == [soon]
    assert [each.msg_id for each in pending(world.new)] == [later]


def test_a_pending_retry_moves_with_its_topic(world: World) -> None:
    topic = f"{RETRY_TOPIC_PREFIX}billing"
    world.old.sends.send(Message(topic, b"x", {Property.DELAY: "18", Property.RETRY_TOPIC: "orders"}))

    assert world.run().moved == 1
    [found] = pending(world.new)
    assert (found.topic, found.deliver_ms) == (topic, START_MS + 2 * HOUR_MS)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_that_ended_without_notice_goes_on_without_loss_and_without_doubles(world: World, steps: int) -> None:
    world.old.create_topic("orders", 2)
    ready = [world.old.sends.send(Message("orders", b"x")).msg_id for _ in range(300)]
    waiting = [delayed(world.old, "orders", HOUR_MS) for _ in range(700)]
    run = HandOverRun(world.old, world.new, "mq1:9876")
    for _ in range(steps):
        run.step()
        world.advance(1)
    world.restart_old()

    world.run()

    assert sorted(stored_ids(world.new, "orders")) == sorted(ready)
    assert sorted(each.msg_id for each in pending(world.new)) == sorted(waiting)
    assert world.old.hand_over.remaining() == []


def test_a_stopped_run_says_so_and_leaves_the_rest(world: World) -> None:
    delayed(world.old, "orders", HOUR_MS)
    stop = threading.Event()
    stop.set()

    report = HandOverRun(world.old, world.new, "mq1:9876", stop=stop).run()

    assert (report.is_stopped, report.left) == (True, 1)


def test_a_paused_hand_over_moves_nothing(world: World) -> None:
    world.old.hand_over.begin("mq1:9876")
    world.old.hand_over.change(HandOverPhase.PAUSED)

    with pytest.raises(HandOverError, match=r"is PAUSED, so nothing moves; mqtemplate hand-over resume"):
        world.run()


def test_an_error_of_the_new_broker_is_reported_once_and_the_run_tries_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed(world.old, "orders", HOUR_MS)
    errors: list[str] = []
    run = HandOverRun(world.old, world.new, "mq1:9876", on_error=errors.append)
    with monkeypatch.context() as patch:
        patch.setattr(world.new.sends, "send_async", _refused)
        for _ in range(3):
            run.step()
            world.advance(1_000)

    assert errors == ["no answer"]
    assert world.run().moved == 1


def _refused(*_: object) -> object:
    from mqtemplate.errors import SendError
    from mqtemplate.futures import AwaitableFuture

    future: AwaitableFuture[object] = AwaitableFuture()
    future.set_exception(SendError("no answer"))
    return future
