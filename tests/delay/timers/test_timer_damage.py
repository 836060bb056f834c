"""Wheel, timer log and checkpoint cut off anywhere, or with any wrong bit: every timer arrives once, at its time.

These files are derived. Damage is detected, and they are rebuilt from the commit log.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.files import TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER, TIMER_WHEEL_FILE, TimerFiles
from mqtemplate.delay.timers.timer_log import TimerLogDamageError
from mqtemplate.errors import StoreError, StoreFormatError
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from tests.delay.delay_engine import DelayEngine
from tests.store.power_loss_disk import RestartedDisk
from tests.thirds import THIRDS

TINY = {"slots_total": 70, "roll_window_slots": 10, "log_file_size": 276}
"""Five units a file, and a window of ten seconds: longer delays are parked."""
LOG_FILE_SIZE = 16_384
DELAYS_MS = (3_500, 3_700, 9_300, 9_000, 15_500)
SETTINGS = TimerSettings(slots_total=70, roll_window_slots=10, log_file_size=276)


class Original:
    """A store directory after a kill: of five timers one is released and one parked; a sixth is cancelled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        engine = open_tiny(folder, VirtualClock())
        self.start_ms = engine.clock.now_ms()
        for delay_ms in DELAYS_MS:
            engine.send(b"%d" % delay_ms, TIMER_DELAY_MS=delay_ms)
        cancelled = engine.send_for(b"cancelled", TIMER_DELAY_MS=9_400)
        assert engine.control.cancel(cancelled).count == 1
        engine.advance(3_600)
        engine.store.take_checkpoint()
        self.now_ms = engine.clock.now_ms()
        engine.crash()

    def copy(self, folder: Path) -> Path:
        if folder.exists():
            shutil.rmtree(folder)
        return Path(shutil.copytree(self.folder, folder))


def open_tiny(folder: Path, clock: VirtualClock) -> DelayEngine:
    return DelayEngine(folder, timers=TINY, clock=clock, log_file_size=LOG_FILE_SIZE)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("damage") / "store")


def outcome(original: Original, folder: Path) -> list[tuple[bytes, int]]:
    """Return the messages that arrive from a store directory, and their delays."""
    engine = open_tiny(folder, VirtualClock(original.now_ms))
    try:
        engine.advance(60_000)
        return [(message.body, message.at_ms - original.start_ms) for message in engine.arrived()]
    finally:
        engine.crash()


def expected(original: Original) -> list[tuple[bytes, int]]:
    return [(b"%d" % delay_ms, delay_ms) for delay_ms in sorted(DELAYS_MS)]


def used_bits(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield each bit of the bytes that are written, and of some bytes around them."""
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    near = np.unique(np.clip(np.concatenate([used, used + 9]), 0, len(data) - 1))
    for at in near.tolist():
        for bit in range(8):
            yield at, bit


def files_of(original: Original) -> list[str]:
    logs = sorted(path.name for path in (original.folder / TIMER_LOG_FOLDER).iterdir())
    return [TIMER_WHEEL_FILE, TIMER_CHECKPOINT_FILE, *(f"{TIMER_LOG_FOLDER}/{name}" for name in logs)]


def test_undamaged_files_release_all_timers_on_time(original: Original, tmp_path: Path) -> None:
    assert outcome(original, original.copy(tmp_path / "store")) == expected(original)
    assert len(files_of(original)) >= 4


def state_of(folder: Path) -> object:
    """Return all pending state of wheel, log and checkpoint; None if the files must be rebuilt."""
    files = TimerFiles(FolderStoreFiles(folder, RestartedDisk()), SETTINGS)
    try:
        if not files.recover():
            return None
        read_ms = files.checkpoint.last_read_time_ms
        slots = np.concatenate(list(files.wheel.live(read_ms, 1 << 50)))
        units = [files.log.chain(int(slot["last_pos"]), int(slot["time"]) * 1_000)[1].tobytes() for slot in slots]
        return files.checkpoint, files.log.end, slots.tolist(), units
    finally:
        files.close()


@pytest.mark.parametrize("third", THIRDS)
@pytest.mark.parametrize("kind", [TIMER_WHEEL_FILE, TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER])
def test_every_single_wrong_bit_is_detected_or_harmless(
    original: Original, tmp_path: Path, kind: str, third: int
) -> None:
    """For each written bit: the files have the same state as undamaged, or are rebuilt."""
    folder = original.copy(tmp_path / "store")
    contents = {name: (folder / name).read_bytes() for name in files_of(original)}
    undamaged = state_of(folder)
    assert undamaged is not None

    harmless = rebuilt = 0
    with capture_logs():  # thousands of warnings
        for name in [name for name in contents if name.startswith(kind)]:
            for at, bit in islice(used_bits(contents[name]), third, None, 3):
                for other, data in contents.items():
                    (folder / other).write_bytes(data)
                damaged = bytearray(contents[name])
                damaged[at] ^= 1 << bit
                (folder / name).write_bytes(damaged)
                state = state_of(folder)
                assert state in (None, undamaged), f"{name}: bit {bit} of byte {at}"
                harmless, rebuilt = harmless + (state is not None), rebuilt + (state is None)
    assert harmless + rebuilt > 100


@pytest.mark.parametrize("kind", [TIMER_WHEEL_FILE, TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER])
def test_timers_arrive_once_and_on_time_with_any_wrong_bit(original: Original, tmp_path: Path, kind: str) -> None:
    """Some of those bits, until all timers are released."""
    for name in [name for name in files_of(original) if name.startswith(kind)]:
        data = (original.folder / name).read_bytes()
        for at, bit in list(used_bits(data))[::173]:
            folder = original.copy(tmp_path / "store")
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            (folder / name).write_bytes(damaged)
            assert outcome(original, folder) == expected(original), f"{name}: bit {bit} of byte {at}"


@pytest.mark.parametrize("kind", [TIMER_WHEEL_FILE, TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER])
def test_a_file_cut_off_at_any_byte_is_detected_or_harmless(original: Original, tmp_path: Path, kind: str) -> None:
    """For each length: the files have the same state, or are rebuilt, or an error names the file. If they have another
    state, all timers arrive once and on time nevertheless."""
    folder = original.copy(tmp_path / "store")
    contents = {name: (folder / name).read_bytes() for name in files_of(original)}
    undamaged = state_of(folder)

    seen: object = undamaged
    with capture_logs():
        for name in [name for name in contents if name.startswith(kind)]:
            for length in range(len(contents[name])):
                if seen is not REFUSED:  # a refused file is left unchanged
                    for other, data in contents.items():
                        (folder / other).write_bytes(data)
                (folder / name).write_bytes(contents[name][:length])
                seen = unless_refused(partial(state_or_damage, folder), name)
                if seen is not REFUSED and seen not in (None, undamaged):
                    cut = original.copy(tmp_path / "cut")
                    (cut / name).write_bytes(contents[name][:length])
                    assert outcome(original, cut) == expected(original), f"{name} cut to {length} bytes"
            (folder / name).write_bytes(contents[name])


def state_or_damage(folder: Path) -> object:
    try:
        return state_of(folder)
    except TimerLogDamageError as exc:
        return exc


@pytest.mark.parametrize("kind", [TIMER_WHEEL_FILE, TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER])
def test_a_file_cut_off_anywhere_is_refused_or_rebuilt(original: Original, tmp_path: Path, kind: str) -> None:
    """Some of those lengths, until all timers are released: none is lost, repeated, or early."""
    for name in [name for name in files_of(original) if name.startswith(kind)]:
        data = (original.folder / name).read_bytes()
        step = max(len(data) // 24, 1)
        for length in [0, 1, *range(step, len(data), step), len(data) - 1]:
            folder = original.copy(tmp_path / "store")
            (folder / name).write_bytes(data[:length])
            seen = unless_refused(partial(outcome, original, folder), name)
            assert seen in (expected(original), REFUSED), f"{name} cut to {length} bytes"


REFUSED = "refused, with the file's name"


def unless_refused(read: Callable[[], object], name: str) -> object:
    """Return the result of *read*, or `REFUSED` if an error names the file."""
    kind = name.split("/", maxsplit=1)[0].removeprefix("config") or "timercheck"
    try:
        return read()
    except StoreFormatError as exc:
        return REFUSED if kind in str(exc).replace("timer log", "timerlog") else str(exc)


def test_damage_that_is_detected_while_the_broker_runs_is_reported(original: Original, tmp_path: Path) -> None:
    """No timer is released then. The next start rebuilds the files, and no timer is lost."""
    folder = original.copy(tmp_path / "store")
    clock = VirtualClock(original.now_ms)
    engine = open_tiny(folder, clock)
    backlog = engine.timer._backlog
    assert backlog is not None
    for file in backlog.files.log._files.files:
        file.view[30] ^= 1

    with pytest.raises(
        StoreError, match="timers are not released until the broker is started again: then wheel and timer log"
    ):
        engine.advance(60_000)
    engine.close()

    engine = open_tiny(folder, clock)
    engine.advance(60_000)
    assert [message.body for message in engine.arrived()] == [body for body, _ in expected(original)]
    engine.close()
