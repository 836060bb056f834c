"""Cancelling and rescheduling levels and timers: a reported status stays true, also across kills and lost files."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.delay.copies import released_source
from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.divert import TimerLimits
from mqtemplate.engine.reader import QueueReader
from mqtemplate.errors import DelayError, MessageError, StoreFullError
from mqtemplate.message import MessageQueue
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import decode_properties
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.delay_engine import DelayEngine

DAY_MS = 86_400_000
HOUR_MS = 3_600_000

BY_LEVEL = {"DELAY": 5}  # a minute
BY_TIMER = {"TIMER_DELAY_MS": 60_000}
FAR = {"TIMER_DELAY_MS": 3 * HOUR_MS}  # beyond the window of the small wheel, so it is parked
BOTH_KINDS = pytest.mark.parametrize("delay", [BY_LEVEL, BY_TIMER, FAR], ids=["level", "timer", "parked"])


@pytest.fixture
def engine(tmp_path: Path) -> DelayEngine:
    return DelayEngine(tmp_path / "store")


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [0, 5, 500, 30_000, 61_000, 2 * HOUR_MS, 30 * DAY_MS])
def test_a_rescheduled_message_is_delivered_once_at_its_new_time(
    engine: DelayEngine, delay: dict[str, int], new_delay_ms: int
) -> None:
    handle = engine.send_for(b"moved", TAGS="paid", KEYS="4466", **delay)
    engine.advance(1_500)
    new_ms = engine.clock.now_ms() + new_delay_ms

    result = engine.control.reschedule(handle, new_ms)
    engine.advance(new_delay_ms + 4 * HOUR_MS)

    [arrived] = engine.arrived()
    assert (result.status, result.count) == (ScheduleChangeStatus.RESCHEDULED, 1)
    assert arrived.at_ms == new_ms
    assert arrived.properties["TIMER_DELIVER_MS"] == str(new_ms)
    assert arrived.properties["UNIQ_KEY"] == "moved"
    assert arrived.properties["TAGS"] == "paid"


@pytest.mark.parametrize("by_key", [False, True])
def test_a_message_that_is_rolled_while_it_is_searched_is_cancelled(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch, by_key: bool
) -> None:
    handle = engine.send_for(b"far", TIMER_DELAY_MS=10 * HOUR_MS)
    engine.advance(HOUR_MS)  # it was rolled before, too: else the handle names its record
    search = engine.control._lookup.by_key

    def search_then_roll(topic: str, key: str) -> Iterator[StoredRecord]:
        found = list(search(topic, key))
        if topic == TIMER_TOPIC:
            monkeypatch.undo()
            engine.clock.move_ms(HOUR_MS)
            engine.timer.step()
        return iter(found)

    monkeypatch.setattr(engine.control._lookup, "by_key", search_then_roll)
    result = engine.control.cancel(None, "far") if by_key else engine.control.cancel(handle)

    assert (result.status, result.count) == (ScheduleChangeStatus.CANCELLED, 1)


def test_a_time_that_is_too_far_away_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    engine = DelayEngine(tmp_path / "store", limits=TimerLimits(max_delay_ms=DAY_MS))
    handle = engine.send_for(b"kept", **BY_TIMER)

    with pytest.raises(DelayError, match="allowed are 1d; raise"):
        engine.control.reschedule(handle, engine.clock.now_ms() + DAY_MS + 1)
    engine.advance(60_000)

    assert engine.bodies() == [b"kept"]


def test_a_change_needs_either_a_handle_or_a_key(engine: DelayEngine) -> None:
    with pytest.raises(MessageError, match="name the pending message by its handle or by key"):
        engine.control.cancel(None)
    with pytest.raises(MessageError, match="by one of them"):
        engine.control.cancel("handle", "key")
    with pytest.raises(MessageError, match="key must be one word, got 'a b'"):
        engine.control.cancel(None, "a b")


@BOTH_KINDS
@pytest.mark.parametrize("new_delay_ms", [None, 0, 5_000, 2 * HOUR_MS])
@pytest.mark.parametrize("end", ["close", "crash", "checkpoint and crash"])
def test_a_change_survives_a_restart(tmp_path: Path, delay: dict[str, int], new_delay_ms: int | None, end: str) -> None:
    engine = DelayEngine(tmp_path / "store")
    handle = engine.send_for(b"moved", **delay)
    engine.send_for(b"kept", **delay)
    engine.advance(1_500)
    engine.store.take_checkpoint()
    if new_delay_ms is None:
        engine.control.cancel(handle)
    else:
        engine.control.reschedule(handle, engine.clock.now_ms() + new_delay_ms)
    if end == "checkpoint and crash":
        engine.store.take_checkpoint()
    engine.close() if end == "close" else engine.crash()

    again = DelayEngine(tmp_path / "store", clock=engine.clock)
    again.advance(4 * HOUR_MS)

    expected = [b"kept"] if new_delay_ms is None else [b"kept", b"moved"]
    assert sorted(again.bodies()) == expected
    again.close()


@BOTH_KINDS
def test_a_change_survives_the_loss_of_the_delay_services_files(tmp_path: Path, delay: dict[str, int]) -> None:
    """Wheel, timer log, queues and positions are derived from the commit log, which has the marker."""
    engine = DelayEngine(tmp_path / "store")
    gone = engine.send_for(b"gone", **delay)
    moved = engine.send_for(b"moved", **delay)
    engine.control.cancel(gone)
    engine.control.reschedule(moved, engine.clock.now_ms() + 2 * HOUR_MS)
    engine.close()
    for name in ("config/timercheck", "config/delayOffset.json", "config/delayOffset.json.bak", "timerwheel"):
        (tmp_path / "store" / name).unlink(missing_ok=True)
    for path in (tmp_path / "store" / "consumequeue").rglob("0*"):
        if path.is_file():
            path.unlink()

    again = DelayEngine(tmp_path / "store", clock=engine.clock)
    again.advance(4 * HOUR_MS)

    assert again.bodies() == [b"moved"]
    again.close()


def markers_of(engine: DelayEngine) -> list[StoredRecord]:
    records = [message.record for message in engine.arrived(TIMER_TOPIC)]
    return [record for record in records if "TIMER_DEL_UNIQKEY" in decode_properties(record.properties_bytes)]


@BOTH_KINDS
def test_a_marker_has_the_form_that_rocketmq_expects(engine: DelayEngine, delay: dict[str, int]) -> None:
    """So RocketMQ honours a cancel when it opens the store directory next. It cannot recall messages with a level."""
    handle = engine.send_for(b"gone", **delay)

    engine.control.cancel(handle)

    [marker] = markers_of(engine)
    assert (
        decode_properties(marker.properties_bytes)["TIMER_DEL_UNIQKEY"]
        == decode_properties(marker.properties_bytes)["UNIQ_KEY"]
        == "gone"
    )
    assert decode_properties(marker.properties_bytes)["TAGS"] == "_RECALL_TAG_"
    assert decode_properties(marker.properties_bytes)["REAL_TOPIC"] == "orders"
    assert marker.body == b"0"


def test_a_marker_in_the_slot_of_its_moved_message_has_no_key(engine: DelayEngine) -> None:
    """RocketMQ deletes by key within a slot, and would delete the moved message, too. Delivered twice is better."""
    handle = engine.send_for(b"moved", TIMER_DELIVER_MS=engine.clock.now_ms() + 60_100)

    engine.control.reschedule(handle, engine.clock.now_ms() + 60_900)
    engine.advance(120_000)

    assert [decode_properties(marker.properties_bytes)["TIMER_DEL_UNIQKEY"] for marker in markers_of(engine)] == ["-"]
    assert engine.bodies() == [b"moved"]


# --- races --------------------------------------------------------------------------------------

ROUNDS = 20
MAX_ROUNDS = 500
LEAST_WINS = 300  # on a busy machine one side wins most races, so there may be more rounds
GROUPS = 40
MESSAGES_OF_A_GROUP = 25


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def unformatted_log() -> Iterator[None]:
    """Collect log events without formatting them, which takes longer than a release."""
    with capture_logs():
        yield


@dataclass
class Group:
    """Messages that are due in one millisecond, and that one call cancels or moves.

    Attributes:
        handle: Handles of all messages, for a call by handle; None for a call by key.
        changed_count: The count that the call returned.
    """

    key: str
    handle: str | None
    is_cancelled: bool
    changed_count: int = 0


@pytest.mark.slow
@pytest.mark.usefixtures("frequent_thread_switches", "unformatted_log")
@pytest.mark.parametrize("kind", [pytest.param("level", marks=pytest.mark.thorough), "timer"])
def test_a_race_against_delivery_has_one_winner(kind: str) -> None:
    """At least 20,000 messages are changed and released at once: each has one winner, never both, never neither."""
    engine = DelayEngine(levels="2s", log_file_size=1 << 22)
    service: DelayStore = engine.schedule if kind == "level" else engine.timer
    delay = {"DELAY": 1} if kind == "level" else {"TIMER_DELAY_MS": 2_000}
    chance = Random(4)
    groups: list[Group] = []
    for number in range(MAX_ROUNDS):
        if number >= ROUNDS and LEAST_WINS <= len(markers_of(engine)) <= messages_of(groups) - LEAST_WINS:
            break
        sent = [send_group(engine, delay, f"{number}-{group}", chance) for group in range(GROUPS)]
        engine.release_due()
        engine.clock.move_ms(2_000 - GROUPS - 1)  # the first group is due a millisecond later
        race(engine, service, sent)
        groups += sent
    engine.advance(HOUR_MS)

    delivered = [message.record for message in engine.arrived()]
    markers = markers_of(engine)
    message_count = messages_of(groups)
    cancelled_count = sum(group.changed_count for group in groups if group.is_cancelled)
    moved_count = sum(group.changed_count for group in groups if not group.is_cancelled)
    assert message_count >= 20_000
    assert len(delivered) == len({record.body for record in delivered}) == message_count - cancelled_count
    assert len(markers) == cancelled_count + moved_count
    # One record replaces each message: its copy in the real topic, or a marker. A moved message is released later, too.
    replaced = Counter(map(released_source, [*delivered, *markers]))
    assert set(replaced.values()) == {1}, "one message is released and changed, or changed twice"
    assert len(replaced) == message_count + moved_count
    assert LEAST_WINS <= len(markers) <= message_count - LEAST_WINS, "no race: one side was always first"


def messages_of(groups: list[Group]) -> int:
    return len(groups) * MESSAGES_OF_A_GROUP


def send_group(engine: DelayEngine, delay: dict[str, int], key: str, chance: Random) -> Group:
    bodies = [b"%s-%d" % (key.encode(), index) for index in range(MESSAGES_OF_A_GROUP)]
    handles = [engine.send_for(body, KEYS=key, **delay) for body in bodies]
    engine.clock.move_ms(1)
    return Group(key, ",".join(handles) if chance.random() < 0.2 else None, chance.random() < 0.5)


def race(engine: DelayEngine, service: DelayStore, groups: list[Group]) -> None:
    """Cancel or move the messages of each group while another thread releases the same messages.

    Both threads start with a group when it becomes due. So each message is contested within the same millisecond.
    """
    due = threading.Semaphore(0)

    def release() -> None:
        for _ in groups:
            due.acquire()
            service.step()

    thread = threading.Thread(target=release)
    thread.start()
    later_ms = engine.clock.now_ms() + 1_800_000
    for group in groups:
        engine.clock.move_ms(1)
        key = group.key if group.handle is None else None
        due.release()
        if group.is_cancelled:
            change = engine.control.cancel(group.handle, key)
        else:
            change = engine.control.reschedule(group.handle, later_ms, key)
        assert change.status is not ScheduleChangeStatus.UNKNOWN
        group.changed_count = change.count
    thread.join()


def test_a_message_that_is_due_when_it_is_copied_forward_is_announced_when_it_is_readable(tmp_path: Path) -> None:
    """It was announced before the flush: a consumer that waited found nothing, and waited until its time was over."""
    engine = DelayEngine(tmp_path / "store", flush=FlushDiskType.SYNC_FLUSH)
    engine.send(b"due", DELAY=5)
    reader, readable = QueueReader(engine.store, "broker-a"), list[int]()
    orders = MessageQueue("orders", "broker-a", 0)
    engine.store.watch("orders", lambda: readable.append(reader.max_offset(orders)))
    engine.clock.move_ms(60_000)
    engine.store.cleaning.refusal = "the disk is full"  # then messages that are due are copied, too

    assert engine.control.copy_forward(0, engine.store.end_offset)

    assert engine.bodies() == [b"due"]
    assert readable == [1]


def test_messages_that_are_released_before_the_disk_is_full_are_announced(
    engine: DelayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails with the second message. The consumers of the first one did not learn of it."""
    announced: list[list[bytes]] = []
    for body in (b"first", b"second"):
        engine.send(body, KEYS="4466", TIMER_DELAY_MS=60_000)
    engine.store.watch("orders", lambda: announced.append(engine.bodies()))
    put, left = engine.store.put, iter([True])

    def put_one(*arguments: Any, **options: Any) -> Any:
        if not next(left, False):
            raise StoreFullError("no space")
        return put(*arguments, **options)

    monkeypatch.setattr(engine.store, "put", put_one)
    with pytest.raises(StoreFullError):
        engine.control.reschedule(None, engine.clock.now_ms(), "4466")

    assert len(engine.bodies()) == 1
    assert announced == [engine.bodies()]
