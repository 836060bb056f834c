"""Restore of a copy: the state of a model at random moments, and texts of errors."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy.catalogue import Epoch, to_json
from mqtemplate.copy.objects import FolderObjects
from mqtemplate.copy.restore import restore_store, verify_copy
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.errors import CopyError, StoreError, StoreLockedError
from mqtemplate.message import Message, Property
from mqtemplate.operations.doctor import examine
from mqtemplate.testing import Harness
from tests.copy.recorded import RecordedRun, State, opened_state, small_settings, state_of
from tests.store.small_store import overwrite


def copied(folder: Path, clock: VirtualClock, **options: object) -> CopiedBroker:
    """Return a broker on a directory that is copied beside it."""
    place = CopyOptions(to=f"file://{folder / 'copy'}", **options)  # type: ignore[arg-type]
    return CopiedBroker(folder / "store", small_settings(), clock, copy=place)


def restored(folder: Path, name: str, until_ms: int | None, clock: VirtualClock, *, fork: bool = True) -> State:
    url = f"file://{folder / 'copy'}"
    restore_store(url, folder / name, until_ms, fork=fork, settings=small_settings(), clock=clock)
    return opened_state(folder / name, clock.now_ms() if until_ms is None else until_ms)


def send(broker: EmbeddedBroker, key: str, properties: Mapping[str, str]) -> None:
    broker.sends.send(Message("orders", key.encode(), {Property.KEYS: key, **properties}))


def positive(offsets: Mapping[int, int]) -> dict[int, int]:
    """Return the offsets of the queues of which a group has done something."""
    return {queue: offset for queue, offset in offsets.items() if offset}


@pytest.mark.parametrize("seed", range(2))
def test_a_restore_has_the_state_of_each_moment(tmp_path: Path, seed: int) -> None:
    """Sends, levels, timers, cancels, reschedules, releases, POP, transactions: each moment is restored exactly."""
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        run = RecordedRun(broker, clock, seed)
        run.run(50)
        run.harness.advance("30s")  # until a sign of life says that the last moment is in the copy
        moments = random.Random(seed).sample(sorted(run.history), 6)
        for moment in moments:
            found = restored(tmp_path, f"at-{moment}", moment, clock)
            expected = run.history[moment]

            # Offsets are as of the last copy: never ahead of what the group had consumed. Those of POP are in the log.
            assert all(found.committed[queue] <= expected.committed[queue] for queue in found.committed)
            assert positive(found.done) == positive(expected.done)
            assert replace(found, committed={}, done={}) == replace(expected, committed={}, done={})
        assert any(state.in_flight for state in run.history.values())
        assert any(state.retries for state in run.history.values())
        assert any(state.half for state in run.history.values())


def test_a_restore_without_a_moment_has_all_that_was_copied(tmp_path: Path) -> None:
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        RecordedRun(broker, clock, seed=7).run(30)
        state = state_of(broker)

    assert restored(tmp_path, "restored", None, clock, fork=False) == state


# --- what happens again -------------------------------------------------------------------------


def test_the_report_counts_what_happened_after_the_moment(tmp_path: Path) -> None:
    """Two are released later, a level and a timer that was rolled; one is cancelled later; one is due later."""
    clock = VirtualClock()
    with copied(tmp_path, clock, interval=900_000) as broker:
        harness = Harness(broker)
        send(broker, "level", {Property.DELAY: "5"})
        send(broker, "timer", {Property.TIMER_DELAY_MS: str(3 * 86_400_000)})
        send(broker, "cancelled", {Property.TIMER_DELAY_MS: str(3 * 86_400_000)})
        send(broker, "due-later", {Property.TIMER_DELAY_MS: str(30 * 86_400_000)})
        harness.advance("5m")
        send(broker, "gone-by-then", {Property.DELAY: "5"})
        send(broker, "cancelled-by-then", {Property.DELAY: "9"})
        broker.delayed.cancel(key="cancelled-by-then", topic="orders")
        harness.advance("61s")
        moment_ms = clock.now_ms()
        send(broker, "level-again", {Property.DELAY: "5"})
        harness.advance("1h")
        broker.delayed.cancel(key="cancelled", topic="orders")
        harness.advance("80h")
        now_ms = clock.now_ms()

    url = f"file://{tmp_path / 'copy'}"
    report = restore_store(url, tmp_path / "restored", moment_ms - 1, settings=small_settings(), clock=clock)

    assert (report.released_later, report.cancelled_later) == (1, 1)
    assert (report.store.message_count, report.store.pending_count, report.store.overdue_count) == (2, 3, 2)
    assert sorted(opened_state(tmp_path / "restored", now_ms).pending) == ["cancelled", "due-later", "timer"]


def test_a_restored_folder_releases_what_it_has_and_nothing_that_was_cancelled(tmp_path: Path) -> None:
    """The folder goes on where the moment was: each message once, at its time or at the start."""
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        send(broker, "released", {Property.DELAY: "1"})
        send(broker, "level", {Property.DELAY: "5"})
        send(broker, "cancelled-level", {Property.DELAY: "5"})
        send(broker, "timer", {Property.TIMER_DELAY_MS: "90000"})
        broker.delayed.cancel(key="cancelled-level", topic="orders")
        Harness(broker).advance("5s")
    url = f"file://{tmp_path / 'copy'}"
    restore_store(url, tmp_path / "restored", settings=small_settings(), clock=clock)

    with EmbeddedBroker(tmp_path / "restored", small_settings(), clock) as broker:
        Harness(broker).advance("54s")
        assert state_of(broker).delivered == ["released"]
        Harness(broker).advance("60s")
        assert state_of(broker).delivered == ["released", "level", "timer"]


# --- one history --------------------------------------------------------------------------------


def test_a_restore_beside_a_living_original_needs_a_fork(tmp_path: Path) -> None:
    clock = VirtualClock()
    url = f"file://{tmp_path / 'copy'}"
    with copied(tmp_path, clock) as broker:
        send(broker, "one", {})
        Harness(broker).advance("2s")
        with pytest.raises(
            StoreLockedError, match=r"the original .*store is in use by process \d+; two brokers with one"
        ):
            restore_store(url, tmp_path / "second", settings=small_settings(), clock=clock)
        report = restore_store(url, tmp_path / "fork", fork=True, settings=small_settings(), clock=clock)

    assert report.is_fork
    place = CopyOptions(to=url)
    with CopiedBroker(tmp_path / "fork", small_settings(), clock, copy=place) as broker:
        Harness(broker).advance("2s")
        assert "has the copy of another store directory" in (broker.copy_health().error or "")


def test_an_original_on_another_machine_is_alive_for_a_minute(tmp_path: Path) -> None:
    clock = VirtualClock()
    url = f"file://{tmp_path / 'copy'}"
    with copied(tmp_path, clock) as broker:
        Harness(broker).advance("2s")
    objects = FolderObjects(url)
    elsewhere = Epoch(2, 0, clock.now_ms(), 16_384, "machine-b", 4711, "/srv/data")
    objects.create(elsewhere.object, to_json(elsewhere))

    with pytest.raises(CopyError, match=r"the original is alive: process 4711 on machine-b copied /srv/data at"):
        restore_store(url, tmp_path / "restored", settings=small_settings(), clock=clock)
    clock.move_ms(61_000)
    restore_store(url, tmp_path / "restored", settings=small_settings(), clock=clock)


# --- bad input ----------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> tuple[str, VirtualClock]:
    """A copy with some segments, whose original has ended."""
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        for number in range(5):
            send(broker, f"message {number}", {})
            Harness(broker).advance("2s")
    return f"file://{tmp_path / 'copy'}", clock


def test_a_moment_outside_of_the_copy_is_an_error_that_says_what_there_is(
    tmp_path: Path, copy: tuple[str, VirtualClock]
) -> None:
    url, clock = copy
    with pytest.raises(CopyError, match=r"has no such moment: the copy begins at 20\d\d-"):
        restore_store(url, tmp_path / "early", clock.now_ms() - 86_400_000, clock=clock)
    with pytest.raises(CopyError, match=r"has no such moment: the copy ends at 20\d\d-.*; leave --until out"):
        restore_store(url, tmp_path / "late", clock.now_ms() + 86_400_000, clock=clock)
    assert not (tmp_path / "early").exists()
    assert not (tmp_path / "late").exists()


def test_a_target_that_is_not_empty_is_left_as_it_is(tmp_path: Path, copy: tuple[str, VirtualClock]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "letter.txt").write_text("keep me")

    with pytest.raises(StoreError, match="used is not empty; give a folder that does not exist yet"):
        restore_store(copy[0], tmp_path / "used", clock=copy[1])
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["letter.txt"]


def test_a_damaged_segment_stops_a_restore_and_is_found_by_the_check(
    tmp_path: Path, copy: tuple[str, VirtualClock]
) -> None:
    url, clock = copy
    path = sorted((tmp_path / "copy" / "segments" / "00000001").iterdir())[2]
    overwrite(path, path.stat().st_size - 9, b"damage")

    with pytest.raises(CopyError, match=rf"{path.name} is damaged: its content does not match its checksum"):
        restore_store(url, tmp_path / "restored", settings=small_settings(), clock=clock)
    [problem] = verify_copy(url).problems
    assert f"{path.name} is damaged" in problem
    assert not (tmp_path / "restored" / "commitlog").exists(), "no broker takes the rest for a store"


def test_a_missing_segment_stops_a_restore_and_is_named(tmp_path: Path, copy: tuple[str, VirtualClock]) -> None:
    url, clock = copy
    sorted((tmp_path / "copy" / "segments" / "00000001").iterdir())[1].unlink()

    with pytest.raises(
        CopyError, match=r"the bytes of the commit log from physical offset \d+ on are missing; see what"
    ):
        restore_store(url, tmp_path / "restored", settings=small_settings(), clock=clock)


# --- a killed owner -----------------------------------------------------------------------------


def test_after_a_kill_and_the_loss_of_the_folder_at_most_the_reported_lag_is_lost(tmp_path: Path) -> None:
    """A process sends as fast as it can, and reports what its copy lacks. bench/copy_restore.py has the long form."""
    url = f"file://{tmp_path / 'copy'}"
    command = [sys.executable, "-m", "tests.copy.owner", str(tmp_path / "store"), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        copied_end = acknowledged = 0
        while copied_end == 0 or acknowledged < 200:
            acknowledged, copied_end = map(int, owner.stdout.readline().split())
        owner.kill()
        for line in owner.stdout:  # what it had printed by then
            if line.endswith("\n"):
                acknowledged, copied_end = map(int, line.split())
    shutil.rmtree(tmp_path / "store")

    report = restore_store(url, tmp_path / "restored", settings=small_settings())

    assert report.store.end_offset >= copied_end
    bodies = opened_state(tmp_path / "restored", report.moment_ms).delivered
    assert bodies == [str(number) for number in range(len(bodies))]
    assert not examine(tmp_path / "restored", small_settings()).is_damaged
