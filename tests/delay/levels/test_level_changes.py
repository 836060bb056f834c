"""The level table changes, at run time and between runs: each message keeps the time it was promised."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.delay import DelayLevels
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.store import PutResult
from mqtemplate.store.layout import DONE_SIZE_MARK
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.delay_engine import DelayEngine
from tests.delay.test_exactly_once import Killed, MortalClock

LONGEST_MS = 60_000

tables = st.lists(st.sampled_from(["1s", "2s", "5s", "30s", "1m"]), min_size=1, max_size=4).map(" ".join)
kills = st.one_of(st.none(), st.none(), st.integers(1, 30))
ends = st.sampled_from(["close", "kill", "lose queues"])


@dataclass(frozen=True)
class Act:
    """One thing that happens, and after how many looks at the clock a kill interrupts it, if one does."""

    name: str
    argument: Any = None
    killed_after: int | None = None


sends = st.builds(Act, st.just("send"), st.lists(st.integers(1, 5), min_size=1, max_size=5), kills)
acts = st.one_of(
    sends,
    sends,
    st.builds(Act, st.just("change"), tables),
    st.builds(Act, st.just("cancel"), st.integers(0, 100), kills),
    st.builds(Act, st.just("wait"), st.integers(0, 12_000), kills),
    st.builds(Act, st.just("checkpoint"), st.none(), kills),
    st.builds(Act, st.just("restart"), st.tuples(ends, tables)),
)


class Life:
    """A folder, the processes that own it one after the other, and what they promised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = MortalClock()
        self.table = "1s 5s 30s"
        self.due: dict[bytes, int] = {}  # of acknowledged messages
        self.puts: dict[bytes, PutResult] = {}
        self.cancelled: set[bytes] = set()
        self.unsure: set[bytes] = set()  # a kill came while it was sent or cancelled
        self.count = 0
        self.engine = self.open()

    def open(self) -> DelayEngine:
        return DelayEngine(self.folder, clock=self.clock, levels=self.table, log_file_size=20_000, queue_file_size=200)

    def do(self, act: Act) -> None:
        match act.name:
            case "send":
                self.mortally(lambda: [self.send(level) for level in act.argument], act.killed_after)
            case "change":
                self.table = act.argument
                self.engine.levels = DelayLevels.parse(self.table)
            case "cancel":
                self.mortally(lambda: self.cancel(act.argument), act.killed_after)
            case "wait":
                self.mortally(lambda: self.engine.advance(act.argument), act.killed_after)
            case "checkpoint":
                self.mortally(self.engine.store.take_checkpoint, act.killed_after)
            case "restart":
                self.restart(*act.argument)

    def mortally(self, action: Callable[[], object], killed_after: int | None) -> None:
        self.clock.looks_left = killed_after
        try:
            action()
        except Killed:
            self.engine.crash()
            self.engine = self.open()
        self.clock.looks_left = None

    def send(self, level: int) -> None:
        body = b"%d" % self.count
        self.count += 1
        self.unsure.add(body)
        self.puts[body] = put = self.engine.send(body, DELAY=level)
        self.unsure.discard(body)
        levels = DelayLevels.parse(self.table)
        self.due[body] = put.store_timestamp + levels.delays_ms[min(level, levels.max_level) - 1]

    def cancel(self, number: int) -> None:
        """What `DelayController` does, on some message."""
        body = b"%d" % (number % max(self.count, 1))
        schedule, store = self.engine.schedule, self.engine.store
        if body not in self.due:
            return
        record = store.read(self.puts[body].physical_offset, self.puts[body].size)
        with schedule.lock:
            schedule.catch_up()
            entry = schedule.find(record)
            assert (entry is not None) == (body not in self.cancelled and body not in self.engine.bodies())
            if entry is not None:
                assert entry.due_ms == self.due[body]
                self.unsure.add(body)
                properties = record.properties | {
                    "TIMER_DELIVER_MS": str(entry.due_ms),
                    "TIMER_OUT_MS": str(entry.slot_ms),
                    "TIMER_DEL_UNIQKEY": "-",
                    "__STEERED": str(record.queue_id + 1),
                }
                source = record.physical_offset
                marker = RecordDraft(
                    TIMER_TOPIC, 0, b"0", encode_properties(properties), prepared_transaction_offset=source + 1
                )
                store.put(marker)
                schedule.remove(record)
        self.unsure.discard(body)
        if entry is not None:
            self.cancelled.add(body)

    def restart(self, end: str, table: str) -> None:
        self.table = table
        if end == "close":
            self.engine.close()
        else:
            self.engine.crash()
        if end == "lose queues":
            shutil.rmtree(self.folder / "consumequeue", ignore_errors=True)
        self.engine = self.open()

    def counts_what_waits(self) -> bool:
        arrived = self.engine.bodies()
        expected = self.due.keys() - self.cancelled - set(arrived)
        count = self.engine.schedule.count_pending()
        return len(expected - self.unsure) <= count <= len(expected | self.unsure)


@pytest.mark.feature("X11", "D11")
@given(st.lists(acts, max_size=30))
@settings(max_examples=50)
def test_no_message_is_early_late_lost_or_repeated(plan: list[Act]) -> None:
    """On a virtual clock on time means: exactly at the millisecond. Cancelled ones never come."""
    with TemporaryDirectory() as folder:
        life = Life(Path(folder))
        for act in plan:
            life.do(act)
            assert life.counts_what_waits()
        life.engine.advance(2 * LONGEST_MS)

        arrived = life.engine.arrived()
        life.engine.close()

    expected = {body: due_ms for body, due_ms in life.due.items() if body not in life.cancelled | life.unsure}
    counts = Counter(message.body for message in arrived)
    assert {message.body: message.at_ms for message in arrived if message.body not in life.unsure} == expected
    assert [body for body, count in counts.items() if count > 1] == []
    assert [message.at_ms for message in arrived] == sorted(message.at_ms for message in arrived)
    assert all(message.at_ms >= life.due.get(message.body, 0) for message in arrived)


@pytest.mark.feature("X11", "D11")
def test_a_closed_folder_tells_upstream_what_it_need_not_hand_over(tmp_path: Path) -> None:
    """It reads position and marks, and nothing of ours besides: what they leave is what waits."""
    life = Life(tmp_path)
    life.do(Act("send", [3, 1]))
    life.do(Act("change", "5s 1s"))
    life.do(Act("send", [1, 2, 1]))
    life.do(Act("wait", 2_000))
    life.do(Act("cancel", 4))
    store, schedule = life.engine.store, life.engine.schedule
    store.take_checkpoint()

    left = [
        store.read(int(unit["physical_offset"]), int(unit["size"])).body
        for level, position in schedule.positions.items()
        for unit in store.consume_queue("SCHEDULE_TOPIC_XXXX", level - 1).units(position, 100)
        if unit["size"] != DONE_SIZE_MARK
    ]

    assert sorted(left) == [b"0", b"2"]
    assert sorted(life.engine.bodies()) == [b"1", b"3"]
    life.engine.close()
