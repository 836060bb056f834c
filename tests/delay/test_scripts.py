"""Golden scripts of both delay services: what messages leave in the files, and what a restart makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.delay.schedule_message_service import DELAY_OFFSET_FILE
from mqtemplate.delay.timers.files import TimerFiles
from mqtemplate.delay.timers.timer_log import MAX_DELIVER_MS, TIMER_UNIT_SIZE, Magic
from mqtemplate.durations import duration_ms, format_ms
from mqtemplate.record.appends import PutResult
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.store.tables import read_table
from mqtemplate.topics import SCHEDULE_TOPIC
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import foreign_copy
from tests.golden import check_script, scripts_in

FEATURES = {
    "level_progress": ("F9", "F10", "F12", "D9"),
    "level_files_of_rocketmq": ("F12", "F20"),
    "level_kill": ("G11",),
    "level_out_of_order": ("D8", "D10", "D11", "D29"),
    "level_after_rocketmq": ("D8",),
    "timer_files": ("A13",),
}
MAGIC = {Magic.ROLL: "roll", Magic.DELETE: "delete", Magic.DONE: "done"}


class DelayScript:
    """The commands of a script. Times are durations since the start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = DelayEngine(folder)
        self.start_ms = self.engine.clock.now_ms()
        self.sent: dict[str, PutResult] = {}
        self.handles: dict[str, str] = {}

    # --- what is done ------------------------------------------------------------------------------

    def open(self, levels: str = "1s 5s 10s 30s 1m") -> None:
        self.engine = DelayEngine(self.folder, levels=levels, clock=self.engine.clock)

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

    def send(self, *bodies: str, **delay: str) -> None:
        for body in bodies:
            properties: dict[str, object] = {"UNIQ_KEY": body}
            if "level" in delay:
                properties["DELAY"] = delay["level"]
            else:
                properties["TIMER_DELAY_MS"] = duration_ms(delay["after"])
            self.sent[body] = self.engine.send(body.encode(), **properties)
            self.handles[body] = self.engine.handle(self.sent[body])

    def cancel(self, body: str) -> list[str]:
        return [self.engine.control.cancel(self.handles[body]).status.name]

    def reschedule(self, body: str, after: str) -> list[str]:
        deliver_ms = self.engine.clock.now_ms() + duration_ms(after)
        return [self.engine.control.reschedule(self.handles[body], deliver_ms).status.name]

    def change_table(self, levels: str) -> None:
        self.engine.change_table(levels)

    def advance(self, time: str) -> None:
        self.engine.advance(duration_ms(time))

    def release_like_rocketmq(self, *bodies: str) -> None:
        """Append the copies of messages as RocketMQ does, without our services."""
        for body in bodies:
            put = self.sent[body]
            self.engine.put(foreign_copy(self.engine.store.read(put.physical_offset, put.size)))

    # --- what is printed ---------------------------------------------------------------------------

    def since_start(self, time_ms: int) -> str:
        return format_ms(time_ms - self.start_ms)

    def arrived(self) -> Iterator[str]:
        for message in self.engine.arrived():
            yield f"{message.body.decode()} at {self.since_start(message.at_ms)}"

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
