"""A short life of a store, and the power failing at every moment of it.

    python -m tests.store.power_loss_run [SEED] [LIVES]

A life is a script of sends, waits, checkpoints and restarts on a `PowerLossDisk`. At each of its calls, images are made
of what the disk may hold; the store is opened on each, both delay services with it, time goes on, and what arrived is
compared with what was promised.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import MQTemplateError
from mqtemplate.record import RecordDraft, encode_properties
from mqtemplate.store import FlushDiskType, FolderHome
from mqtemplate.store.recovery import QueueGapError
from tests.delay.waiting_room import WaitingRoom
from tests.store.power_loss_disk import PowerLossDisk, RestartedDisk, subsets

TIMERS = {"slots_total": 200, "roll_window_slots": 100, "timer_log_file_size": 536}
LEVELS = "1s 5s 10s"
LEVEL_MS = (1_000, 5_000, 10_000)
LONGEST_MS = 400_000


@dataclass
class Promises:
    """What the senders were told, and what readers saw."""

    acknowledged: dict[bytes, int] = field(default_factory=dict)  # body -> not before
    ends: dict[bytes, int] = field(default_factory=dict)  # body -> physical end of its record
    seen: dict[bytes, int] = field(default_factory=dict)  # body -> place in the real topic's queue
    sent: int = 0


@dataclass
class Report:
    """What the images showed."""

    events: int = 0
    cases: int = 0
    failures: list[str] = field(default_factory=list)


class Life:
    """One store on a disk that may lose power, and what it promised.

    Args:
        most: Images at each event.
        every: Look at every n-th event only.
        recovers_too: At some images let the power fail during the recovery as well.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        mode: FlushDiskType,
        *,
        most: int = 8,
        every: int = 1,
        sector: int = 4_096,
        log_file_size: int = 4_096,
        depth: int = 0,
    ) -> None:
        self.folder = folder
        self.mode = mode
        self.most = most
        self.every = every
        self.depth = depth
        self.log_file_size = log_file_size
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.promises = Promises()
        self.report = Report()
        self._known: set[object] = set()
        self._is_looking = False
        self._script_at = "start"
        (folder / "store").mkdir(parents=True)
        self.disk = PowerLossDisk(folder / "store", sector, self.on_event)
        self.room: WaitingRoom | None = None

    # --- the life ------------------------------------------------------------------------------

    def open(self) -> None:
        self.room = None
        self.room = open_room(self.disk, self.mode, self.clock, self.log_file_size)

    def live(self, acts: list[tuple[str, Any]]) -> None:
        self.open()
        for number, (name, argument) in enumerate(acts):
            self._script_at = f"act {number}, {name} {argument}"
            self.do(name, argument)
            self.look_at_queue()
        self.on_event()
        if self.room is not None:
            self.room.crash()

    def do(self, name: str, argument: Any) -> None:
        assert self.room is not None
        match name:
            case "send":
                self.send([argument])
            case "batch":
                self.send(argument)
            case "wait":
                self.room.advance(argument)
            case "flush":
                self.room.store.group_commit.wait(self.room.store.end_offset, 1_000)
            case "checkpoint":
                self.room.store.take_checkpoint()
            case "close":
                self.room.close()
                self.open()
            case "kill":
                self.room.crash()
                self.open()

    def send(self, delays: list[dict[str, int]]) -> None:
        room, promises = self.room, self.promises
        assert room is not None
        for delay in delays:
            body = b"%05d" % promises.sent + bytes(self.chance.randrange(300))
            promises.sent += 1
            now_ms = self.clock.now_ms()
            put = room.send(body, **delay)
            due_ms = delay.get("TIMER_DELAY_MS", 0)
            if level := delay.get("DELAY"):
                due_ms = LEVEL_MS[level - 1]
            promises.acknowledged[body] = now_ms + due_ms
            promises.ends[body] = put.end

    def look_at_queue(self) -> None:
        """What a consumer sees: as far as readers may look."""
        assert self.room is not None
        store = self.room.store
        for place, message in enumerate(self.room.arrived()):
            if message.record.physical_offset + message.record.total_size <= store.confirm_offset:
                self.promises.seen.setdefault(message.body, place)

    # --- the power fails -----------------------------------------------------------------------

    def on_event(self) -> None:
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self.report.events += 1
            if self.report.events % self.every == 0:
                self._try_images()
        finally:
            self._is_looking = False

    def _try_images(self) -> None:
        contents = self.disk.contents()
        choices = self.disk.choices(contents)
        flushed = self.room.store.group_commit.flushed if self.room is not None else None
        for chosen in subsets(choices, self.chance, self.most):
            image = self.folder / "image"
            self.disk.make_image(image, contents, chosen)
            key = hash((tree_of(image), len(self.promises.acknowledged), len(self.promises.seen)))
            if key not in self._known:
                self._known.add(key)
                self.report.cases += 1
                problem = self.try_image(image, flushed)
                if problem:
                    self.report.failures.append(
                        f"{self._script_at}, event {self.report.events}: {problem}; lost: "
                        f"{[choice for choice in choices if choice not in chosen]}"
                    )
            shutil.rmtree(image)

    def try_image(self, image: Path, flushed: int | None) -> str:
        """Open the image, let time go by, compare; gives what is wrong, or nothing."""
        clock = VirtualClock(self.clock.now_ms())
        with ExitStack() as last:
            try:
                room = open_room(RestartedDisk(), self.mode, clock, self.log_file_size, image)
                last.callback(room.crash)
                room.advance(LONGEST_MS)
                put = room.put(RecordDraft("orders", 0, b"after", encode_properties({})))
                arrived = room.arrived()
                room.close()
                again = open_room(RestartedDisk(), self.mode, clock, self.log_file_size, image)
                last.callback(again.crash)
                bodies = again.bodies()
                again.close()
            except (MQTemplateError, AssertionError, LookupError, ValueError, QueueGapError) as exc:
                return f"{type(exc).__name__}: {exc}"
        if bodies != [message.body for message in arrived] or put.queue_offset != len(bodies) - 1:
            return "what was there is not there after a clean restart"
        return self._compare(arrived, flushed)

    def _compare(self, arrived: list[Any], flushed: int | None) -> str:
        counts = Counter(message.body for message in arrived)
        places = {message.body: place for place, message in enumerate(arrived)}
        promises = self.promises
        is_sync = self.mode is FlushDiskType.SYNC_FLUSH
        if flushed is None and not is_sync:
            flushed = 0  # in the middle of an opening
        expected = [
            body for body in promises.acknowledged if is_sync or promises.ends[body] <= (flushed or 0)
        ]
        if lost := [body[:5] for body in expected if counts[body] == 0]:
            return f"lost {lost}"
        if doubled := [body[:5] for body, count in counts.items() if count > 1]:
            return f"doubled {doubled}"
        early = [m.body[:5] for m in arrived if m.at_ms < promises.acknowledged.get(m.body, 0)]
        if early:
            return f"early {early}"
        if is_sync and (moved := [body[:5] for body, place in promises.seen.items() if places[body] != place]):
            return f"seen, then moved {moved}"
        return ""


def open_room(
    disk: PowerLossDisk | RestartedDisk, mode: FlushDiskType, clock: VirtualClock, log_file_size: int,
    root: Path | None = None,
) -> WaitingRoom:
    home = FolderHome(root or disk.root, disk)  # type: ignore[union-attr]
    return WaitingRoom(
        home=home, levels=LEVELS, timers=TIMERS, clock=clock, flush=mode, log_file_size=log_file_size,
        queue_file_size=100,
    )


def tree_of(folder: Path) -> tuple[tuple[str, bytes], ...]:
    paths = sorted(folder.rglob("*"))
    return tuple((str(path.relative_to(folder)), b"" if path.is_dir() else path.read_bytes()) for path in paths)


def script(chance: random.Random, length: int) -> list[tuple[str, Any]]:
    """Something of everything, by chance."""

    def delay() -> dict[str, int]:
        kind = chance.randrange(5)
        if kind < 2:
            return {"DELAY": chance.randint(1, 3)}
        return {} if kind == 2 else {"TIMER_DELAY_MS": chance.choice((300, 2_500, 7_000, 150_000))}

    acts: list[tuple[str, Any]] = []
    for _ in range(length):
        kind = chance.choices(("send", "batch", "wait", "flush", "checkpoint", "close", "kill"), (8, 2, 5, 1, 3, 1, 1))[0]
        match kind:
            case "send":
                acts.append((kind, delay()))
            case "batch":
                acts.append((kind, [delay() for _ in range(chance.randint(2, 4))]))
            case "wait":
                acts.append((kind, chance.choice((100, 1_000, 3_000, 12_000))))
            case _:
                acts.append((kind, None))
    return acts


def run(folder: Path, seed: int, mode: FlushDiskType, length: int = 14, **options: Any) -> Report:
    """One life from *seed*."""
    chance = random.Random(seed)
    acts = script(chance, length)
    life = Life(folder, seed, mode, sector=chance.choice((4_096, 4_096, 512)), **options)
    life.live(acts)
    return life.report


def main() -> None:
    seed, lives = (int(argument) for argument in (*sys.argv[1:], *("1", "10")[len(sys.argv) - 1 :]))
    events = cases = 0
    for number in range(seed, seed + lives):
        for mode in FlushDiskType:
            with tempfile.TemporaryDirectory() as folder:
                report = run(Path(folder), number, mode, length=30, most=16)
            events, cases = events + report.events, cases + report.cases
            for failure in report.failures[:3]:
                print(f"seed {number}, {mode.value}: {failure[:1500]}")
    print(f"{events} moments, {cases} different images")


if __name__ == "__main__":
    main()
