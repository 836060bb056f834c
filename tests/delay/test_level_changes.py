"""Changes of the level table, at run time and between runs: each message keeps the due time it was sent with."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.delay.settings import DelayLevels
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.delay_engine import DelayEngine
from tests.delay.killed_engine import Action, KilledEngine
from tests.thirds import examples

LONGEST_MS = 60_000

tables = st.lists(st.sampled_from(["1s", "2s", "5s", "30s", "1m"]), min_size=1, max_size=4).map(" ".join)
kills = st.one_of(st.none(), st.none(), st.integers(1, 30))
ends = st.sampled_from(["close", "kill", "lose queues"])


sends = st.builds(Action, st.just("send"), st.lists(st.integers(1, 5), min_size=1, max_size=5), kills)
actions = st.one_of(
    sends,
    sends,
    st.builds(Action, st.just("change"), tables),
    st.builds(Action, st.just("cancel"), st.integers(0, 100), kills),
    st.builds(Action, st.just("advance"), st.integers(0, 12_000), kills),
    st.builds(Action, st.just("checkpoint"), st.none(), kills),
    st.builds(Action, st.just("restart"), st.tuples(ends, tables)),
)


class Scenario(KilledEngine):
    """Actions on messages with levels, and when each acknowledged message is due."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = "1s 5s 30s"
        self.due: dict[bytes, int] = {}
        self.puts: dict[bytes, PutResult] = {}
        self.cancelled: set[bytes] = set()
        self.unsure: set[bytes] = set()  # a kill interrupted the send or the cancel
        self.count = 0
        super().__init__()

    def open(self) -> DelayEngine:
        engine = DelayEngine(
            self.folder, clock=self.clock, levels=self.table, log_file_size=20_000, queue_file_size=200
        )
        engine.levels = DelayLevels.parse(self.table, is_clamping=True)  # a table may have fewer levels than the sends
        return engine

    def do(self, action: Action) -> None:
        match action.name:
            case "send":
                self.run(lambda: [self.send(level) for level in action.argument], action)
            case "change":
                self.table = action.argument
                self.engine.levels = DelayLevels.parse(self.table, is_clamping=True)
            case "cancel":
                self.run(lambda: self.cancel(action.argument), action)
            case "advance":
                self.run(lambda: self.engine.advance(action.argument), action)
            case "checkpoint":
                self.run(self.engine.store.take_checkpoint, action)
            case "restart":
                self.restart(*action.argument)

    def send(self, level: int) -> None:
        body = b"%d" % self.count
        self.count += 1
        self.unsure.add(body)
        self.puts[body] = put = self.engine.send(body, DELAY=level)
        self.unsure.discard(body)
        levels = DelayLevels.parse(self.table)
        self.due[body] = put.store_timestamp + levels.delays_ms[min(level, levels.max_level) - 1]

    def cancel(self, number: int) -> None:
        """Cancel a message as `DelayController` does."""
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
                properties = decode_properties(record.properties_bytes) | {
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

    def has_correct_count(self) -> bool:
        arrived = self.engine.bodies()
        expected = self.due.keys() - self.cancelled - set(arrived)
        count = self.engine.schedule.count_pending()
        return len(expected - self.unsure) <= count <= len(expected | self.unsure)


@pytest.mark.feature("X11", "D11")
@given(st.lists(actions, max_size=30))
@settings(max_examples=examples(50))
def test_no_message_is_early_late_lost_or_repeated(plan: list[Action]) -> None:
    """On a virtual clock each message arrives exactly at its millisecond. A cancelled one never arrives."""
    with TemporaryDirectory() as folder:
        scenario = Scenario(Path(folder))
        for action in plan:
            scenario.do(action)
            assert scenario.has_correct_count()
        scenario.engine.advance(2 * LONGEST_MS)

        arrived = scenario.engine.arrived()
        scenario.engine.close()

    left_out = scenario.cancelled | scenario.unsure
    expected = {body: due_ms for body, due_ms in scenario.due.items() if body not in left_out}
    counts = Counter(message.body for message in arrived)
    assert {message.body: message.at_ms for message in arrived if message.body not in scenario.unsure} == expected
    assert [body for body, count in counts.items() if count > 1] == []
    assert [message.at_ms for message in arrived] == sorted(message.at_ms for message in arrived)
    assert all(message.at_ms >= scenario.due.get(message.body, 0) for message in arrived)


@pytest.mark.feature("X11", "D11")
def test_after_a_checkpoint_rocketmq_releases_exactly_the_pending_messages(tmp_path: Path) -> None:
    """RocketMQ reads the positions and the marks only. The other units are the pending ones."""
    scenario = Scenario(tmp_path)
    scenario.do(Action("send", [3, 1]))
    scenario.do(Action("change", "5s 1s"))
    scenario.do(Action("send", [1, 2, 1]))
    scenario.do(Action("advance", 2_000))
    scenario.do(Action("cancel", 4))
    store, schedule = scenario.engine.store, scenario.engine.schedule
    store.take_checkpoint()

    left = [
        store.read(int(unit["physical_offset"]), int(unit["size"])).body
        for level, position in schedule.positions.items()
        for unit in store.consume_queue("SCHEDULE_TOPIC_XXXX", level - 1).units(position, 100)
        if unit["size"] != DONE_SIZE_MARK
    ]

    assert sorted(left) == [b"0", b"2"]
    assert sorted(scenario.engine.bodies()) == [b"1", b"3"]
    scenario.engine.close()
