"""Timers after a kill, a power failure, lost files: no message is lost, none is released again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.delay.timers.files import TIMER_CHECKPOINT_FILE, TimerCheckpoint
from mqtemplate.errors import StoreFormatError
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import SMALL_WHEEL, DelayEngine


def send_three(engine: DelayEngine) -> None:
    for delay_s in (5, 10, 15):
        engine.send(b"%d" % delay_s, TIMER_DELAY_SEC=delay_s)
    engine.release_due()


def checkpoint_of(engine: DelayEngine) -> TimerCheckpoint:
    assert engine.timer._files is not None
    return engine.timer._files.checkpoint


def test_a_kill_while_the_files_are_rebuilt_is_harmless(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A wheel with a part of the topic is useless: the rebuild starts again."""
    engine = open_engine()
    for number in range(1_500):
        engine.send(b"%d" % number, TIMER_DELAY_MS=1_000 + number)
    engine.advance(1_700)
    engine.crash()
    (tmp_path / TIMER_CHECKPOINT_FILE).unlink()
    engine = open_engine()
    engine.timer.step()
    engine.store.take_checkpoint()
    engine.crash()

    engine = open_engine()
    engine.advance(60_000)

    assert engine.bodies() == [b"%d" % number for number in range(1_500)]


def test_a_checkpoint_is_written_only_when_something_changed(open_engine: OpenEngine) -> None:
    """An idle broker writes nothing."""
    engine = open_engine()
    send_three(engine)
    engine.store.take_checkpoint()
    before = checkpoint_of(engine)

    engine.store.take_checkpoint()
    assert checkpoint_of(engine) is before
    engine.advance(5_000)
    engine.store.take_checkpoint()
    assert checkpoint_of(engine).counter == before.counter + 1


def test_an_idle_broker_needs_no_replay(open_engine: OpenEngine) -> None:
    """While nothing is due, all releases are before the checkpoint: a restart has nothing to replay."""
    engine = open_engine()
    send_three(engine)
    engine.advance(7_000)
    engine.store.take_checkpoint()

    assert engine.timer.persist() == engine.store.end_offset
    assert engine.schedule.persist() == engine.store.end_offset


def test_a_wheel_of_another_size_is_refused(open_engine: OpenEngine) -> None:
    engine = open_engine()
    send_three(engine)
    engine.close()

    with pytest.raises(StoreFormatError, match="timerwheel"):
        open_engine(timers=SMALL_WHEEL | {"slots_total": 5_000})
    open_engine()


class RacingLock:
    """A lock that another thread's work precedes, each time it is acquired."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __enter__(self) -> None:
        self._work()

    def __exit__(self, *_: object) -> None:
        pass


def test_a_checkpoint_covers_a_first_timer_that_is_released_at_its_start(engine: DelayEngine) -> None:
    """The files are created and the message is released after `persist` has started, but before it has the lock."""

    def release_first_timer() -> None:
        engine.send(b"first", TIMER_DELAY_MS=5)
        engine.advance(5)

    engine.timer._saving = RacingLock(release_first_timer)  # type: ignore[assignment]

    replay_offset = engine.timer.persist()

    [copy] = engine.arrived()
    assert replay_offset is not None
    assert replay_offset <= copy.record.physical_offset, "a recovery must see the copy"
