"""Simulation: short lives of a store, with a power failure at every moment.

    python -m tests.store.power_loss_run [SEED STORES]

A life is a script of sends, pauses, checkpoints and restarts on a `PowerLossDisk`. At each call of the disk, images of
its possible content are built. The store and both delay services are opened on each image, time passes, and the
delivered messages are compared with the guarantees. The next life of the store starts with one of the images, so the
power also fails during a recovery.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MQTemplateError
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.settings import FlushDiskType
from tests.delay.delay_engine import Arrived, DelayEngine
from tests.store.power_loss_disk import Image, PowerLossDisk, RestartedDisk, subsets, write_image

TIMERS = {"slots_total": 200, "roll_window_slots": 100, "log_file_size": 536}
LEVELS = "1s 5s 10s"
LEVEL_MS = (1_000, 5_000, 10_000)
LONGEST_MS = 400_000

Act = tuple[str, Any]
_boots = itertools.count()


@dataclass
class Guarantees:
    """Messages that were acknowledged to producers, and messages that consumers have seen."""

    acknowledged: dict[bytes, int] = field(default_factory=dict)  # body -> earliest delivery
    ends: dict[bytes, int] = field(default_factory=dict)  # body -> physical end of its record
    seen: dict[bytes, int] = field(default_factory=dict)  # body -> queue offset in the real topic
    flushed: int = 0
    sent: int = 0

    def after_power_failure(self, mode: FlushDiskType) -> Guarantees:
        """Return the guarantees that hold after a power failure: with ``ASYNC_FLUSH``, for flushed messages only."""
        kept = deepcopy(self)
        if mode is FlushDiskType.ASYNC_FLUSH:
            kept.acknowledged = {
                body: due for body, due in self.acknowledged.items() if self.ends[body] <= self.flushed
            }
            kept.seen.clear()
        return kept


@dataclass
class Report:
    """Result of all images."""

    moments: int = 0
    cases: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Start:
    """Start of a life: an image that a power failure left, with guarantees to keep."""

    image: Image
    guarantees: Guarantees
    now_ms: int


class Life:
    """One store on a disk that may lose its power, and its guarantees.

    Args:
        folder: Created for this life.
        most: Number of images at each moment.
        start: By default an empty folder.
    """

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        mode: FlushDiskType,
        report: Report,
        *,
        most: int,
        log_file_size: int,
        start: Start | None = None,
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.mode = mode
        self.chance = chance
        self.report = report
        self.most = most
        self.log_file_size = log_file_size
        self.next_start: Start | None = None
        self._known: set[int] = set()
        self._is_testing = False
        self._doing = "opening"
        store = folder / "store"
        if start is None:
            store.mkdir()
            self.guarantees, self.clock = Guarantees(), VirtualClock()
        else:
            write_image(start.image, store)
            self.guarantees, self.clock = start.guarantees, VirtualClock(start.now_ms)
        self.disk = PowerLossDisk(store, chance.choice((4_096, 512)), self.on_event, f"boot-{next(_boots)}")
        self.room: DelayEngine | None = None

    # --- the script ----------------------------------------------------------------------------

    def open_on(self, disk: Disk, root: Path, clock: VirtualClock) -> DelayEngine:
        return DelayEngine(
            store_files=FolderStoreFiles(root, disk),
            levels=LEVELS,
            timers=TIMERS,
            clock=clock,
            flush=self.mode,
            log_file_size=self.log_file_size,
            queue_file_size=100,
        )

    def open(self) -> DelayEngine:
        self.room = None
        self.room = self.open_on(self.disk, self.disk.root, self.clock)
        return self.room

    def live(self, acts: Sequence[Act]) -> None:
        room = self.open()
        for number, (name, argument) in enumerate(acts):
            self._doing = f"act {number}, {name} {argument}"
            room = self.do(room, name, argument)
            self.note_seen(room)
        self.on_event()
        room.crash()

    def do(self, room: DelayEngine, name: str, argument: Any) -> DelayEngine:
        match name:
            case "send":
                for delay in argument:
                    self.send(room, delay)
            case "wait":
                room.advance(argument)
            case "flush":
                room.store.group_commit.wait(room.store.end_offset, 1_000)
            case "checkpoint":
                room.store.take_checkpoint()
            case "close":
                room.close()
                return self.open()
            case "kill":
                room.crash()
                return self.open()
        return room

    def send(self, room: DelayEngine, delay: dict[str, int]) -> None:
        guarantees, now_ms = self.guarantees, self.clock.now_ms()
        body = b"%05d" % guarantees.sent + bytes(self.chance.randrange(300))
        guarantees.sent += 1
        put = room.send(body, **delay)
        level = delay.get("DELAY")
        guarantees.acknowledged[body] = now_ms + (LEVEL_MS[level - 1] if level else delay.get("TIMER_DELAY_MS", 0))
        guarantees.ends[body] = put.end

    def note_seen(self, room: DelayEngine) -> None:
        """Note the messages that consumers can read."""
        for queue_offset, message in enumerate(room.arrived()):
            if message.record.physical_offset + message.record.total_size <= room.store.confirm_offset:
                self.guarantees.seen.setdefault(message.body, queue_offset)

    # --- the power fails -----------------------------------------------------------------------

    def on_event(self) -> None:
        """Let the power fail before a call of the disk."""
        if self._is_testing:
            return
        self._is_testing = True
        if self.room is not None:
            self.guarantees.flushed = max(self.guarantees.flushed, self.room.store.group_commit.flushed)
        self.report.moments += 1
        contents = self.disk.contents()
        choices = self.disk.choices(contents)
        for chosen in subsets(choices, self.chance, self.most):
            image = self.disk.image(contents, chosen)
            key = hash((image, len(self.guarantees.acknowledged), len(self.guarantees.seen)))
            if key not in self._known:
                self._known.add(key)
                self.report.cases += 1
                self.offer_start(image)
                if problem := self.try_image(image):
                    lost = [choice for choice in choices if choice not in chosen]
                    self.report.failures.append(f"{self._doing}, moment {self.report.moments}: {problem}; lost: {lost}")
        self._is_testing = False

    def offer_start(self, image: Image) -> None:
        """Keep one of all images, each with the same probability."""
        if self.chance.randrange(len(self._known)) == 0:
            self.next_start = Start(image, self.guarantees.after_power_failure(self.mode), self.clock.now_ms())

    def try_image(self, image: Image) -> str:
        """Open the image, let time pass and compare. Return what is wrong, or an empty text."""
        folder = self.folder / "image"
        write_image(image, folder)
        try:
            return self.try_folder(folder)
        finally:
            shutil.rmtree(folder)

    def try_folder(self, folder: Path) -> str:
        clock = VirtualClock(self.clock.now_ms())
        disk = RestartedDisk(f"boot-{next(_boots)}")
        with ExitStack() as last:
            try:
                room = self.open_on(disk, folder, clock)
                last.callback(room.crash)
                room.advance(LONGEST_MS)
                put = room.put(RecordDraft("orders", 0, b"after", encode_properties({})))
                arrived = room.arrived()
                room.close()
                again = self.open_on(disk, folder, clock)
                last.callback(again.crash)
                bodies = again.bodies()
                again.close()
            except (MQTemplateError, AssertionError, LookupError, ValueError) as exc:
                return f"{type(exc).__name__}: {exc}"
        if bodies != [message.body for message in arrived] or put.queue_offset != len(bodies) - 1:
            return "messages are missing after a clean restart"
        return self.compare([message for message in arrived if message.body != b"after"])

    def compare(self, arrived: Sequence[Arrived]) -> str:
        guarantees = self.guarantees.after_power_failure(self.mode)
        counts = Counter(message.body for message in arrived)
        offsets = {message.body: queue_offset for queue_offset, message in enumerate(arrived)}
        if lost := [body[:5] for body in guarantees.acknowledged if counts[body] == 0]:
            return f"lost {lost}"
        if doubled := [body[:5] for body, count in counts.items() if count > 1]:
            return f"doubled {doubled}"
        if early := [each.body[:5] for each in arrived if each.at_ms < self.guarantees.acknowledged.get(each.body, 0)]:
            return f"early {early}"
        if moved := [body[:5] for body, offset in guarantees.seen.items() if offsets[body] != offset]:
            return f"seen by a consumer, then at another queue offset {moved}"
        return ""


def script(chance: random.Random, length: int) -> list[Act]:
    """Return a random script with all kinds of acts."""
    names = chance.choices(("send", "wait", "flush", "checkpoint", "close", "kill"), (10, 5, 1, 3, 1, 1), k=length)
    return [(name, _argument(chance, name)) for name in names]


def _argument(chance: random.Random, name: str) -> Any:
    if name == "wait":
        return chance.choice((100, 1_000, 3_000, 12_000))
    if name == "send":
        return [_delay(chance) for _ in range(chance.choice((1, 1, 1, 3)))]
    return None


def _delay(chance: random.Random) -> dict[str, int]:
    kind = chance.randrange(5)
    if kind < 2:
        return {"DELAY": chance.randint(1, 3)}
    return {} if kind == 2 else {"TIMER_DELAY_MS": chance.choice((300, 2_500, 7_000, 150_000))}


def run(folder: Path, seed: int, mode: FlushDiskType, *, lives: int = 2, length: int = 12, most: int = 5) -> Report:
    """Run *lives* of one store with *length* acts each."""
    chance = random.Random(seed)
    report = Report()
    log_file_size = chance.choice((4_096, 8_192, 16_384))
    start = None
    for number in range(lives):
        life = Life(
            folder / f"life-{number}", chance, mode, report, most=most, log_file_size=log_file_size, start=start
        )
        life.live(script(chance, length))
        start = life.next_start
    return report


def main() -> None:
    seed, stores = (int(given) for given in sys.argv[1:3]) if len(sys.argv) > 2 else (1, 10)
    moments = cases = failures = 0
    for number in range(seed, seed + stores):
        for mode in FlushDiskType:
            with tempfile.TemporaryDirectory() as folder:
                report = run(Path(folder), number, mode, lives=3, length=20, most=10)
            moments, cases, failures = moments + report.moments, cases + report.cases, failures + len(report.failures)
            print(f"seed {number}, {mode.value}: {report.cases} images, {len(report.failures)} wrong", flush=True)
            for failure in report.failures[:3]:
                print(f"  {failure[:1_500]}")
    print(f"{cases} different images of {moments} moments, {failures} wrong")


if __name__ == "__main__":
    main()
