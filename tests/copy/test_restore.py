"""Restore of a copy: the state of a model at random moments, and texts of errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy.restore import restore_store
from mqtemplate.engine.settings import CopyOptions
from tests.copy.recorded import RecordedRun, State, opened_state, small_settings, state_of


def copied(folder: Path, clock: VirtualClock, **options: object) -> CopiedBroker:
    """Return a broker on a directory that is copied beside it."""
    place = CopyOptions(to=f"file://{folder / 'copy'}", **options)  # type: ignore[arg-type]
    return CopiedBroker(folder / "store", small_settings(), clock, copy=place)


def restored(folder: Path, name: str, until_ms: int | None, clock: VirtualClock, *, fork: bool = True) -> State:
    url = f"file://{folder / 'copy'}"
    restore_store(url, folder / name, until_ms, fork=fork, settings=small_settings(), clock=clock)
    return opened_state(folder / name, clock.now_ms() if until_ms is None else until_ms)


@pytest.mark.parametrize("seed", range(2))
def test_a_restore_has_the_state_of_each_moment(tmp_path: Path, seed: int) -> None:
    """Sends, levels, timers, cancels, reschedules, releases: each moment of a recorded run is restored exactly."""
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        run = RecordedRun(broker, clock, seed)
        run.run(50)
        moments = random.Random(seed).sample(sorted(run.history), 6)
        for moment in moments:
            found = restored(tmp_path, f"at-{moment}", moment, clock)
            expected = run.history[moment]

            assert (found.delivered, found.pending) == (expected.delivered, expected.pending)
            # Offsets are as of the last copy: never ahead of what the group had consumed.
            assert all(found.committed[queue] <= expected.committed[queue] for queue in found.committed)


def test_a_restore_without_a_moment_has_all_that_was_copied(tmp_path: Path) -> None:
    clock = VirtualClock()
    with copied(tmp_path, clock) as broker:
        RecordedRun(broker, clock, seed=7).run(30)
        state = state_of(broker)

    assert restored(tmp_path, "restored", None, clock, fork=False) == state
