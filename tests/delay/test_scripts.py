"""Golden scripts of both delay services: what messages leave in the files, and what a restart makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mqtemplate.delay.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.delay.settings import DEFAULT_DELAY_LEVELS
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.timer_log import MAX_DELIVER_MS, TIMER_UNIT_SIZE, Magic
from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.pending import PendingQuery
from mqtemplate.record.appends import PutResult
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.store.tables import read_table
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.delay_engine import SMALL_WHEEL, DelayEngine
from tests.delay.foreign_records import foreign_copy, foreign_level_message
from tests.golden import check_script, scripts_in
from tests.store.small_store import overwrite

FEATURES = {
    "level_progress": ("F9", "F10", "F12", "D9"),
    "level_files_of_rocketmq": ("F12", "F20"),
    "level_kill": ("G11",),
    "level_out_of_order": ("D8", "D10", "D11", "D29"),
    "level_after_rocketmq": ("D8", "D9", "D11"),
    "level_restart": ("D7", "D8", "D9", "D11", "X11"),
    "timer_files": ("A13",),
    "levels": ("B2", "B4", "B5", "B6", "B7", "E1", "E3", "E4", "E5", "E6", "E8", "E10", "F22", "G5", "G12"),
    "level_clock": ("D11", "F5", "F15", "F18", "F19", "G10", "X11"),
    "timers": ("A1", "A12", "A14", "A16", "A17", "A19", "D3", "D20", "D26", "G5"),
    "timer_clock": ("A14", "D18"),
}
PROPERTIES = {
    "level": "DELAY",
    "after": "TIMER_DELAY_MS",
    "at": "TIMER_DELIVER_MS",
    "starts_at": "__STARTDELIVERTIME",
}
TINY_WHEEL = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 600}
MAGIC = {Magic.ROLL: "roll", Magic.DELETE: "delete", Magic.DONE: "done"}


class DelayScript:
    """The commands of a script. Times are durations since the start."""

    def __init__(self, folder: Path) -> None:
        self.root = self.folder = folder
        self.wheel_sizes = SMALL_WHEEL
        self._begin(DEFAULT_DELAY_LEVELS)

    # --- what is done ------------------------------------------------------------------------------

    def _begin(self, levels: str) -> None:
        self.engine = DelayEngine(self.folder, levels=levels, timers=self.wheel_sizes)
        self.start_ms = self.engine.clock.now_ms()
        self.sent: dict[str, PutResult] = {}
        self.handles: dict[str, str] = {}

    def use(self, name: str, wheel: str = "small", levels: str = DEFAULT_DELAY_LEVELS) -> None:
        """Continue with another folder, at the start of the clock."""
        self.close()
        self.folder, self.wheel_sizes = self.root / name, {"small": SMALL_WHEEL, "tiny": TINY_WHEEL}[wheel]
        self._begin(levels)

    def open(self, levels: str = "1s 5s 10s 30s 1m") -> None:
        self.engine = DelayEngine(self.folder, levels=levels, timers=self.wheel_sizes, clock=self.engine.clock)

    def close(self) -> None:
        self.engine.close()

    def kill(self) -> None:
        self.engine.crash()

    def checkpoint(self) -> None:
        self.engine.store.take_checkpoint()

    def write(self, name: str, text: str) -> None:
        self.engine.store_files.write_bytes(name, text.encode())

    def delete(self, *names: str) -> None:
        for name in names:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def send(self, *bodies: str, topic: str = "orders", queue: str = "0", **options: str) -> None:
        """Send messages. Options: *level*, *after* or *at* a time, or properties by their names."""
        for body in bodies:
            properties: dict[str, object] = {"UNIQ_KEY": body}
            for name, value in options.items():
                if name in ("at", "starts_at"):
                    value = str(self.start_ms + duration_ms(value))
                elif name == "after":
                    value = str(duration_ms(value))
                properties[PROPERTIES.get(name, name)] = value
            self.sent[body] = self.engine.send(body.encode(), topic, int(queue), **properties)
            self.handles[body] = self.engine.handle(self.sent[body], topic)

    def cancel(self, *bodies: str, key: str | None = None, topic: str | None = None) -> list[str]:
        change = self.engine.control.cancel(self._handle(bodies), key, topic)
        return [f"{change.status.name} {change.count}"]

    def reschedule(self, *bodies: str, after: str, key: str | None = None) -> list[str]:
        deliver_ms = self.engine.clock.now_ms() + duration_ms(after)
        change = self.engine.control.reschedule(self._handle(bodies), deliver_ms, key)
        return [f"{change.status.name} {change.count}"]

    def _handle(self, bodies: Sequence[str]) -> str | None:
        return ",".join(self.handles[body] for body in bodies) if bodies else None

    def change_table(self, levels: str) -> None:
        self.engine.change_table(levels)

    def advance(self, *times: str) -> None:
        self.engine.advance(duration_ms(" ".join(times)))

    def clock(self, time: str) -> None:
        """Set the clock, without a step of the services."""
        self.engine.clock.move_ms(-duration_ms(time[1:]) if time.startswith("-") else duration_ms(time))

    def release(self) -> None:
        self.engine.release_due()

    def step(self, service: str) -> list[str]:
        """Step one service. Print when it is due again."""
        due_ms = {"level": self.engine.schedule, "timer": self.engine.timer}[service].step()
        return ["nothing waits" if due_ms is None else f"due at {self.since_start(due_ms)}"]

    def zero(self, name: str, start: str, end: str = "") -> None:
        """Set a part of a file to zeros, as a power failure leaves pages that were not written."""
        path = self.folder / name
        overwrite(path, int(start), bytes((int(end) if end else path.stat().st_size) - int(start)))

    def send_like_rocketmq(self, *bodies: str, level: str, after: str) -> None:
        """Store messages with a level as RocketMQ does: without the level's delay, and without a check."""
        for body in bodies:
            message = foreign_level_message(body.encode(), int(level), duration_ms(after), UNIQ_KEY=body)
            self.sent[body] = self.engine.put(message)

    def recall(self, key: str, at: str) -> None:
        """Send a delete marker as RocketMQ does: a timer whose property names the message to delete."""
        own = key.removeprefix("orders+")
        due_ms = self.start_ms + duration_ms(at)
        self.engine.send(b"0", UNIQ_KEY=own, BORN_TIMESTAMP=1, TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key)

    def copy_forward(self) -> list[str]:
        """Copy all pending messages to the end of the log, as retention does."""
        return [f"all copied: {self.engine.control.copy_forward(0, self.engine.store.end_offset)}"]

    def release_like_rocketmq(self, *bodies: str) -> None:
        """Append the copies of messages as RocketMQ does, without our services."""
        for body in bodies:
            put = self.sent[body]
            self.engine.put(foreign_copy(self.engine.store.read(put.physical_offset, put.size)))

    # --- what is printed ---------------------------------------------------------------------------

    def since_start(self, time_ms: int) -> str:
        return format_ms(time_ms - self.start_ms)

    def arrived(self, topic: str = "orders", queue: str = "0") -> Iterator[str]:
        for message in self.engine.arrived(topic, int(queue)):
            rolls = f", rolled {count} times" if (count := message.properties.get("TIMER_ROLL_TIMES")) else ""
            yield f"{message.body.decode()} at {self.since_start(message.at_ms)}{rolls}"
        if not self.engine.arrived(topic, int(queue)):
            yield "nothing arrived"

    def metric(self, *names: str) -> list[str]:
        found = self.engine.store.metrics.snapshot()
        return [f"{name} {found[name]}" for name in names]

    def folders(self, name: str) -> list[str]:
        return [" ".join(self.engine.store_files.list_folders(name))]

    def exist(self, *names: str) -> list[str]:
        return [f"{name}: {'yes' if (self.folder / name).exists() else 'no'}" for name in names]

    def pending(self, page: str = "100", **options: str) -> list[str]:
        """The message ids of all pages of a query. All counts must agree with them."""
        query = self._query(options)
        listed, cursor = list[str](), None
        while True:
            found = self.engine.view.page(query, int(page), cursor)
            assert len(found.messages) <= int(page)
            listed += [message.msg_id for message in found.messages]
            if (cursor := found.cursor) is None:
                break
        assert self.engine.view.count(query, 1_000).total == len(listed)
        if not options:
            metrics = self.engine.store.metrics.snapshot()
            assert self.engine.timer.count_pending() + self.engine.schedule.count_pending() == len(listed)
            assert metrics["delay.waiting.timer"] + metrics["delay.waiting.level"] == len(listed)
        return [" ".join(listed) or "nothing is pending"]

    def _query(self, options: dict[str, str]) -> PendingQuery:
        texts = {name: value for name, value in options.items() if name in ("topic", "tag", "key")}
        times = {
            f"{name}_ms": self.start_ms + duration_ms(options[name]) for name in ("after", "before") if name in options
        }
        return PendingQuery(**texts, **times)

    def counts(self, span: str) -> Iterator[str]:
        """The number of pending messages in each span of time."""
        for start_ms, count in self.engine.view.count(PendingQuery(), duration_ms(span)).buckets.items():
            yield f"from {self.since_start(start_ms)}: {count}"

    def progress(self) -> list[str]:
        """The next queue offset of each level: in the file, and in memory."""
        table = read_table(self.engine.store_files, DELAY_OFFSET_FILE).get("offsetTable", {})
        memory = {str(level): offset for level, offset in self.engine.schedule.positions.items()}
        return [f"file {shown(table)}; memory {shown(memory)}"]

    def level(self, number: str) -> Iterator[str]:
        """The units of a level's queue. The tags code of a delayed message is its due time."""
        queue = self.engine.store.consume_queue(SCHEDULE_TOPIC, int(number) - 1)
        for offset, (_, size, due_ms) in enumerate(queue.unit_tuples(0, 100)):
            yield f"{offset}: {'done' if size == DONE_SIZE_MARK else f'due {self.since_start(due_ms)}'}"

    @property
    def timer_files(self) -> TimerFiles:
        assert self.engine.timer._files is not None, "no timer was sent"
        return self.engine.timer._files

    def wheel(self) -> Iterator[str]:
        time_ms = self.start_ms
        while (slot := self.timer_files.wheel.get(time_ms := self.timer_files.wheel.next_live(time_ms))) is not None:
            yield f"slot {self.since_start(time_ms)}: units {slot.num}, first {slot.first_pos}, last {slot.last_pos}"
            time_ms += 1_000

    def timerlog(self) -> Iterator[str]:
        bodies = {put.physical_offset: body for body, put in self.sent.items()}
        for position in range(0, self.timer_files.log.end, TIMER_UNIT_SIZE):
            unit = self.timer_files.log.read(position)
            assert unit is not None
            bits = "".join(f" {name}" for bit, name in MAGIC.items() if unit.magic & bit)
            due = self.since_start(unit.tail & MAX_DELIVER_MS)
            yield f"{position}: {bodies.get(unit.physical_offset, '?')} due {due}, previous {unit.previous_pos}{bits}"

    def timercheck(self) -> list[str]:
        check = self.timer_files.checkpoint
        state = (
            f"read up to {self.since_start(check.last_read_time_ms)}, log {check.last_timer_log_flush_pos}, "
            f"queue {check.last_timer_queue_offset}, queue for RocketMQ {check.master_timer_queue_offset}"
        )
        return [state]


def shown(offsets: dict[str, int]) -> str:
    return " ".join(f"{level}:{offset}" for level, offset in sorted(offsets.items())) or "-"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.feature(*FEATURES.get(path.stem, ())), id=path.stem)
        for path in scripts_in(Path(__file__).parent / "scripts")
    ],
)
def test_the_script_prints_what_it_says(path: Path, tmp_path: Path) -> None:
    script = DelayScript(tmp_path)

    check_script(path, script)

    script.engine.close()
