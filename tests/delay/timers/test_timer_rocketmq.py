"""Store directories that RocketMQ wrote last: its wheel, log and checkpoint, and its copies without a source.

The tests derive them from our files: they clear the fields that RocketMQ does not write, and append copies as it does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.delay.timers.files import (
    TIMER_CHECKPOINT_FILE,
    TIMER_LOG_FOLDER,
    TIMER_WHEEL_FILE,
    TimerCheckpoint,
    Writer,
)
from mqtemplate.delay.timers.timer_log import Magic
from mqtemplate.record.codec import RecordDraft
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.topics import TIMER_TOPIC
from tests.delay.conftest import OpenEngine
from tests.delay.delay_engine import DelayEngine
from tests.delay.foreign_records import clear_tails

LOG_FILE_SIZE = 5_216
DELAYS_MS = (2_000, 5_300, 5_900, 20_000, 70 * 60_000)


def send_all(engine: DelayEngine) -> None:
    for delay_ms in DELAYS_MS:
        engine.send(b"%d" % delay_ms, UNIQ_KEY=f"id-{delay_ms}", TIMER_DELAY_MS=delay_ms)
    engine.release_due()


def assert_all_arrive(engine: DelayEngine, start_ms: int) -> None:
    engine.advance(2 * 3_600_000)
    arrived = [(message.body, message.at_ms - start_ms) for message in engine.arrived()]
    assert arrived == [(b"%d" % delay_ms, delay_ms) for delay_ms in DELAYS_MS]


def write_checkpoint(folder: Path, **changes: int) -> None:
    """Write the checkpoint as RocketMQ does: seven numbers, then zeros."""
    data = (folder / TIMER_CHECKPOINT_FILE).read_bytes()
    fields = [int.from_bytes(data[at : at + 8], "big", signed=True) for at in range(0, 56, 8)]
    checkpoint = TimerCheckpoint(*fields)._replace(**changes)
    front = b"".join(number.to_bytes(8, "big", signed=True) for number in checkpoint[:7])
    (folder / TIMER_CHECKPOINT_FILE).write_bytes(front.ljust(4_096, b"\0"))


def close_like_rocketmq(engine: DelayEngine, folder: Path, **changes: int) -> None:
    engine.close()
    clear_tails(folder)
    write_checkpoint(folder, **changes)


def rename_checks(folder: Path) -> None:
    """Turn the check of each record, which RocketMQ does not write, into a property of another name."""
    for path in (folder / "commitlog").iterdir():
        path.write_bytes(path.read_bytes().replace(b"__CRC@\x01", b"__CRX@\x01"))


def release_like_rocketmq(engine: DelayEngine, number: int, **changes: str) -> None:
    """Append the copy of the n-th timer as RocketMQ does: with all its properties, new ones, and no link."""
    record = engine.timer_records()[number]
    stamps = {"TIMER_ENQUEUE_MS": "1", "TIMER_DEQUEUE_MS": "2"}
    properties = decode_properties(record.properties_bytes) | stamps | changes
    topic = TIMER_TOPIC if changes else properties["REAL_TOPIC"]
    draft = RecordDraft(topic, 0, record.body, encode_properties(properties), body_crc=record.body_crc)
    engine.put(draft)


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_wheel_and_log_of_rocketmq_are_used(open_engine: OpenEngine, tmp_path: Path, has_snapshot: bool) -> None:
    """With ``timerWheelSnapshotFlush`` the base file is all zero. The wheel is rebuilt from the log in both cases."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.advance(3_000)
    close_like_rocketmq(engine, tmp_path)
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
    assert_all_arrive(engine, start_ms)


def test_parked_timers_of_rocketmq_are_listed_by_their_due_times(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Their units do not have the due time: it is read from the records."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    delays_ms = [minutes * 60_000 for minutes in (300, 2, 90, 61, 200)]
    for delay_ms in delays_ms:
        engine.send(b"", TIMER_DELAY_MS=delay_ms)
    engine.release_due()
    close_like_rocketmq(engine, tmp_path)

    engine = open_engine()

    def listed(after_ms: int, before_ms: int) -> list[int]:
        pieces = engine.timer.pending(start_ms + after_ms, start_ms + before_ms)
        return [int(due_ms) - start_ms for piece in pieces for due_ms in piece.rows["due_ms"]]

    assert sorted(listed(0, 1 << 60)) == sorted(delays_ms)
    assert sorted(listed(61 * 60_000, 200 * 60_000)) == [61 * 60_000, 90 * 60_000]
    assert listed(200 * 60_000, 200 * 60_000 + 1) == [200 * 60_000]


def test_units_after_the_checkpoint_of_rocketmq_are_found(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Its checkpoint has the log's end at the flush before, and the current queue offset. Its wheel may be older."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.advance(1_000)
    close_like_rocketmq(engine, tmp_path, last_timer_log_flush_pos=104)
    wheel = tmp_path / TIMER_WHEEL_FILE
    wheel.write_bytes(bytes(wheel.stat().st_size))

    assert_all_arrive(open_engine(), start_ms)


@pytest.mark.feature("D12")
def test_a_log_with_two_units_of_one_record_is_rebuilt(open_engine: OpenEngine, tmp_path: Path) -> None:
    """RocketMQ writes two units for a message if it repeats a batch."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.close()
    clear_tails(tmp_path)
    log = tmp_path / TIMER_LOG_FOLDER / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[260:312] = data[208:260]
    log.write_bytes(data)
    write_checkpoint(tmp_path)

    assert_all_arrive(open_engine(), start_ms)


@pytest.mark.feature("D8", "D9")
@pytest.mark.parametrize("lost", [False, True], ids=["killed", "checkpoint-lost"])
def test_timers_that_rocketmq_released_are_not_released_again(
    open_engine: OpenEngine, tmp_path: Path, lost: bool
) -> None:
    """Its copies do not name their sources. RocketMQ itself releases them again."""
    engine = open_engine()
    send_all(engine)
    engine.store.take_checkpoint()
    engine.clock.move_ms(2_000)
    release_like_rocketmq(engine, 0)
    engine.clock.move_ms(3_900)
    release_like_rocketmq(engine, 1)
    release_like_rocketmq(engine, 2)
    engine.crash()
    clear_tails(tmp_path)
    rename_checks(tmp_path)
    if lost:
        (tmp_path / TIMER_CHECKPOINT_FILE).unlink()
    else:
        write_checkpoint(tmp_path)

    engine = open_engine()
    engine.advance(2 * 3_600_000)

    assert engine.bodies() == [b"%d" % delay_ms for delay_ms in DELAYS_MS]


def test_a_timer_that_rocketmq_rolled_is_released_once(open_engine: OpenEngine, tmp_path: Path) -> None:
    """The copy of a rolled message is pending. The original is done."""
    engine = open_engine()
    start_ms = engine.clock.now_ms()
    send_all(engine)
    engine.store.take_checkpoint()
    engine.clock.move_ms(1_000)
    release_like_rocketmq(engine, 4, TIMER_ROLL_TIMES="1")
    release_like_rocketmq(engine, 5, TIMER_ROLL_TIMES="2")
    engine.crash()
    rename_checks(tmp_path)
    (tmp_path / TIMER_CHECKPOINT_FILE).unlink()

    assert_all_arrive(open_engine(), start_ms)


def test_our_delete_marker_is_for_rocketmq_only(open_engine: OpenEngine) -> None:
    """It is linked to the slot of its message, parked or not. Here the message is removed already."""
    engine = open_engine()
    send_all(engine)
    handle = engine.send_for(b"deleted", TIMER_DELAY_MS=70 * 60_000)
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
def test_a_marker_deletes_its_message_wherever_both_were_parked(
    open_engine: OpenEngine, key: str, restarts: bool
) -> None:
    """Both reach their final slot, also after an outage in which both became due."""
    engine = open_engine()
    due_ms = engine.clock.now_ms() + 5 * 3_600_000
    engine.send(b"deleted", UNIQ_KEY="id-far", TIMER_DELIVER_MS=due_ms)
    engine.advance(30 * 60_000)
    engine.send(b"0", UNIQ_KEY="id-far", TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key)
    engine.send(b"kept", UNIQ_KEY="id-else", TIMER_DELIVER_MS=due_ms)
    engine.release_due()
    if restarts:
        engine.crash()
        engine.clock.move_ms(6 * 3_600_000)
        engine = open_engine()

    engine.advance(6 * 3_600_000)

    assert engine.bodies() == [b"kept"]
