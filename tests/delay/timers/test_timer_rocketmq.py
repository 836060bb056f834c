"""Folders that RocketMQ wrote last: its wheel, its log, its checkpoint, and what it handed over without saying whence.

They are made from ours: the fields that upstream does not know are cleared, and its own ways are done by hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mqtemplate.delay.timers.files import TIMER_CHECKPOINT_FILE, TIMER_LOG_FOLDER, TIMER_WHEEL_FILE
from mqtemplate.delay.timers.timer_checkpoint import TimerCheckpoint, Writer
from mqtemplate.delay.timers.timer_unit import TIMER_UNIT_DTYPE, Magic
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine

LOG_FILE_SIZE = 5_216
DELAYS_MS = (2_000, 5_300, 5_900, 20_000, 70 * 60_000)


def send_all(engine: DelayEngine) -> None:
    for delay_ms in DELAYS_MS:
        engine.send(b"%d" % delay_ms, UNIQ_KEY=f"id-{delay_ms}", TIMER_DELAY_MS=delay_ms)
    engine.release_due()


def arrivals(engine: DelayEngine, start_ms: int) -> list[tuple[bytes, int]]:
    return [(message.body, message.at_ms - start_ms) for message in engine.arrived()]


def expected() -> list[tuple[bytes, int]]:
    return [(b"%d" % delay_ms, delay_ms) for delay_ms in DELAYS_MS]


def make_units_upstreams(folder: Path) -> None:
    for path in (folder / TIMER_LOG_FOLDER).iterdir():
        data = bytearray(path.read_bytes())
        units = np.frombuffer(data, TIMER_UNIT_DTYPE, len(data) // 52)
        units["tail"][units["size"] == 52] = 0
        path.write_bytes(data)


def write_checkpoint(folder: Path, **changes: int) -> None:
    """As upstream does: seven numbers, and zeros where it has nothing."""
    data = (folder / TIMER_CHECKPOINT_FILE).read_bytes()
    fields = [int.from_bytes(data[at : at + 8], "big", signed=True) for at in range(0, 56, 8)]
    checkpoint = TimerCheckpoint(*fields)._replace(**changes)
    front = b"".join(number.to_bytes(8, "big", signed=True) for number in checkpoint[:7])
    (folder / TIMER_CHECKPOINT_FILE).write_bytes(front.ljust(4_096, b"\0"))


def forget_checks(folder: Path) -> None:
    """Leave the records' check, which upstream does not write, as a property of another name."""
    for path in (folder / "commitlog").iterdir():
        path.write_bytes(path.read_bytes().replace(b"__CRC@\x01", b"__CRX@\x01"))


def release_as_upstream(engine: DelayEngine, number: int, **changes: str) -> None:
    """The copy of the n-th timer as RocketMQ makes it: all its properties, new ones, and no link."""
    record = engine.timer_records()[number]
    properties = record.properties | {"TIMER_ENQUEUE_MS": "1", "TIMER_DEQUEUE_MS": "2"} | changes
    topic = TIMER_TOPIC if changes else properties["REAL_TOPIC"]
    draft = RecordDraft(topic, 0, record.body, encode_properties(properties), body_crc=record.body_crc)
    engine.put(draft)


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_its_wheel_and_log_are_taken_over(open_engine: OpenEngine, tmp_path: Path, has_snapshot: bool) -> None:
    """With ``timerWheelSnapshotFlush`` the base file is all zero. Either way the log tells what the wheel must be."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.advance(3_000)
    engine.close()
    make_units_upstreams(tmp_path)
    write_checkpoint(tmp_path)
    wheel = tmp_path / TIMER_WHEEL_FILE
    if has_snapshot:
        (tmp_path / "timerwheel.208").write_bytes(wheel.read_bytes())
        (tmp_path / "timerwheel.260").write_bytes(wheel.read_bytes())
        wheel.write_bytes(bytes(wheel.stat().st_size))

    engine = open_engine()

    assert engine.timer._files is not None
    assert engine.timer._files.writer is Writer.ROCKETMQ
    engine.store.take_checkpoint()
    assert wheel.read_bytes().strip(b"\0")
    assert sorted(path.name for path in tmp_path.glob("timerwheel*")) == ["timerwheel"]
    engine.advance(2 * 3_600_000)
    assert arrivals(engine, start_ms) == expected()


def test_units_behind_its_checkpoint_are_found(open_engine: OpenEngine, tmp_path: Path) -> None:
    """It notes the log's end of the flush before, and the queue offset of now; the wheel in its file may be older."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.advance(1_000)
    engine.close()
    make_units_upstreams(tmp_path)
    write_checkpoint(tmp_path, last_timer_log_flush_pos=104)
    wheel = tmp_path / TIMER_WHEEL_FILE
    wheel.write_bytes(bytes(wheel.stat().st_size))

    engine = open_engine()
    engine.advance(2 * 3_600_000)

    assert arrivals(engine, start_ms) == expected()


@pytest.mark.feature("D12")
def test_a_log_with_a_record_twice_is_made_anew(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A batch that it repeats leaves two units for one message."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.close()
    make_units_upstreams(tmp_path)
    log = tmp_path / TIMER_LOG_FOLDER / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[260:312] = data[208:260]
    log.write_bytes(data)
    write_checkpoint(tmp_path)

    engine = open_engine()
    engine.advance(2 * 3_600_000)

    assert arrivals(engine, start_ms) == expected()


@pytest.mark.feature("D8", "D9")
@pytest.mark.parametrize("lost", [False, True], ids=["killed", "checkpoint-lost"])
def test_what_it_handed_over_is_not_handed_over_again(open_engine: OpenEngine, tmp_path: Path, lost: bool) -> None:
    """Its copies do not name their sources. Upstream itself delivers them again."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.store.take_checkpoint()
    engine.clock.move_ms(2_000)
    release_as_upstream(engine, 0)
    engine.clock.move_ms(3_900)
    release_as_upstream(engine, 1)
    release_as_upstream(engine, 2)
    engine.crash()
    make_units_upstreams(tmp_path)
    forget_checks(tmp_path)
    if lost:
        (tmp_path / TIMER_CHECKPOINT_FILE).unlink()
    else:
        write_checkpoint(tmp_path)

    engine = open_engine()
    engine.advance(2 * 3_600_000)

    assert [body for body, _ in arrivals(engine, start_ms)] == [body for body, _ in expected()]


def test_what_it_set_on_again_is_not_there_twice(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A parked message that it rolled waits in its copy; the original is done."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.store.take_checkpoint()
    engine.clock.move_ms(1_000)
    release_as_upstream(engine, 4, TIMER_ROLL_TIMES="1")
    release_as_upstream(engine, 5, TIMER_ROLL_TIMES="2")
    engine.crash()
    forget_checks(tmp_path)
    (tmp_path / TIMER_CHECKPOINT_FILE).unlink()

    engine = open_engine()
    engine.advance(2 * 3_600_000)

    assert arrivals(engine, start_ms) == expected()


def test_a_marker_of_ours_is_one_to_rocketmq_and_nothing_to_us(open_engine: OpenEngine) -> None:
    """In the slot where it finds the target, parked or not. Here the target is gone already."""
    engine = open_engine()
    send_all(engine)
    handle = engine.send_for(b"unwanted", TIMER_DELAY_MS=70 * 60_000)
    engine.release_due()
    target = engine.timer_records()[-1]

    engine.control.cancel(handle)
    engine.release_due()

    backlog = engine.timer._backlog
    assert backlog is not None
    found = backlog.files.log.find(target.physical_offset)
    marker = backlog.files.log.read(backlog.files.log.last_position())
    assert found is not None
    assert marker is not None
    assert marker.slot_ms == found[1].slot_ms
    assert marker.magic == 1 | 4 | Magic.DONE
    engine.store.take_checkpoint()
    assert [unit.magic & Magic.DONE for _, unit in [backlog.files.log.find(target.physical_offset) or found]] == [8]


@pytest.mark.feature("D20")
@pytest.mark.parametrize("key", ["id-far", "orders+id-far"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_marker_meets_its_target_wherever_both_were_parked(open_engine: OpenEngine, key: str, restarts: bool) -> None:
    """Both come to their final slot in the end, also after an outage in which all of it fell due."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 5 * 3_600_000
    engine.send(b"unwanted", UNIQ_KEY="id-far", TIMER_DELIVER_MS=due_ms)
    engine.advance(30 * 60_000)
    engine.send(b"0", UNIQ_KEY="id-far", TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key)
    engine.send(b"wanted", UNIQ_KEY="id-else", TIMER_DELIVER_MS=due_ms)
    engine.release_due()
    if restarts:
        engine.crash()
        engine.clock.move_ms(6 * 3_600_000)
        engine = open_engine()

    engine.advance(6 * 3_600_000)

    assert engine.bodies() == [b"wanted"]
