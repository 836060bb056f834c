"""Release of spikes: copies built together equal copies built one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.delay import delay_store
from mqtemplate.delay.delay_store import Releaser, count_copies, read_rows
from mqtemplate.delay.pending_rows import DueRecord
from mqtemplate.message import HostAddress
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.properties import encode_properties
from mqtemplate.record.record_arrays import AlikeCopies
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, UNDELIVERABLE_TOPIC
from tests.delay.delay_engine import DelayEngine, full_disk
from tests.thirds import examples

SECOND = 1_000
NEVER = 1 << 40
"""A smallest run that no batch reaches."""


class Stretch(NamedTuple):
    """Messages that are sent one after the other."""

    length: int
    kind: str
    body_length: int
    tags: Sequence[str]
    queues: int
    spread_ms: int


STRETCHES = st.builds(
    Stretch,
    st.one_of(st.integers(1, 5), st.integers(30, 80)),
    st.sampled_from(["timer", "level", "v6", "open end", "twice", "no queue", "stamped", "prepared"]),
    st.integers(0, 40),
    st.sampled_from([(), ("a",), ("a", "b", "ü"), ("é", "ü"), ("",), ("Siblings", "Teheran!")]),
    st.integers(1, 12),
    st.sampled_from([0, 0, 3]),
)


def odd(kind: str, number: int, properties: dict[str, str]) -> tuple[bytes, dict[str, Any]]:
    """Return properties and fields of a record that another broker may have written."""
    encoded = encode_properties(properties)
    if kind == "v6":
        return encoded, {"born_host": pack_host(HostAddress("::1", 9))}
    if kind == "open end":
        return encoded[:-1], {}
    if kind == "twice":
        return b"TAGS\x01x\x02" + encoded, {}
    if kind == "no queue":
        return encoded.replace(b"REAL_QID\x010", b"REAL_QID\x01x"), {}
    if kind == "stamped":
        return b"TIMER_ENQUEUE_MS\x011\x02" + encoded, {}
    born_host = pack_host(HostAddress(f"10.0.0.{number % 256}", 9))
    return encoded, {"born_host": born_host, "sys_flag": 0x8 | 0x1, "flag": -number, "reconsume_times": number % 3}


def send(engine: DelayEngine, stretch: Stretch, due_ms: int) -> list[PutResult]:
    puts = []
    for number in range(stretch.length):
        tags = {"TAGS": stretch.tags[number % len(stretch.tags)]} if stretch.tags else {}
        if stretch.spread_ms and number % 7 == 6:  # the next ones are stored and put on the wheel at another time
            engine.timer.step()
            engine.clock.set_ms(engine.clock.now_ms() + 1)
        queue_id, due = number % stretch.queues, due_ms + number % (stretch.spread_ms + 1)
        body = (b"%d" % number * 40)[: stretch.body_length]
        if stretch.kind == "level":
            puts.append(engine.send(body, "orders", queue_id, UNIQ_KEY=f"{number:08}", DELAY=2, **tags))
        elif stretch.kind == "timer":
            puts.append(engine.send(body, "orders", queue_id, UNIQ_KEY=f"{number:08}", TIMER_DELIVER_MS=due, **tags))
        else:
            out = {"TIMER_DELIVER_MS": str(due), "TIMER_OUT_MS": str((due - 1) // SECOND * SECOND)}
            real = {"REAL_TOPIC": "orders", "REAL_QID": str(queue_id)}
            encoded, fields = odd(stretch.kind, number, tags | out | real)
            puts.append(engine.put(RecordDraft(TIMER_TOPIC, 0, body, encoded, born_timestamp=number, **fields)))
    return puts


def release(folder: Path, stretches: Sequence[Stretch], damaged: Sequence[tuple[int, float]]) -> dict[str, object]:
    """Return every file and all metrics after the messages were released."""
    engine = DelayEngine(folder, clock=VirtualClock())
    puts = [put for stretch in stretches for put in send(engine, stretch, engine.clock.now_ms() + 5 * SECOND)]
    engine.release_due()
    for number, share in damaged:
        engine.damage(puts[number % len(puts)], share)
    engine.clock.set_ms(engine.clock.now_ms() + 7 * SECOND)  # messages of several due times become one batch
    engine.release_due()
    counts = {name: count for name, count in engine.store.metrics.snapshot().items() if not name.endswith("_ns")}
    engine.close()
    return counts | {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def release_both_ways(
    folder: Path, stretches: Sequence[Stretch], damaged: Sequence[tuple[int, float]] = ()
) -> dict[str, object]:
    """Return files and metrics with copies built together. They are equal with copies built one by one."""
    with pytest.MonkeyPatch.context() as patched:
        together = release(folder / "together", stretches, damaged)
        patched.setattr(delay_store, "_FEWEST_ALIKE", NEVER)
        one_by_one = release(folder / "one by one", stretches, damaged)
    assert together.keys() == one_by_one.keys()
    assert [name for name in together if together[name] != one_by_one[name]] == []
    return together


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(STRETCHES, min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1, exclude_max=True)), max_size=3),
)
def test_files_are_equal_whether_copies_are_built_together_or_one_by_one(
    stretches: list[Stretch], damaged: list[tuple[int, float]]
) -> None:
    """Damaged and unusual records among them are reported or copied in the same way."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        release_both_ways(Path(folder), stretches, damaged)


@pytest.mark.parametrize("kind", ["timer", "level", "stamped", "prepared"])
@pytest.mark.parametrize("spread_ms", [0, 3])
def test_each_copy_of_a_run_has_its_own_fields(tmp_path: Path, kind: str, spread_ms: int) -> None:
    """Queue and tags, born host and time, times on the wheel, due time."""
    together = release_both_ways(tmp_path, [Stretch(120, kind, 20, ("a", "b"), 8, spread_ms)])

    assert together["delay.released"] == 120


def test_a_large_spike_is_released_across_files(tmp_path: Path) -> None:
    """A queue file has a thousand units, a file of the log one MiB."""
    together = release_both_ways(tmp_path, [Stretch(4_000, "timer", 40, ("a", "b"), 3, 0)])

    assert "consumequeue/orders/2/00000000000000020000" in together
    assert "commitlog/00000000000001048576" in together
    assert together["delay.released"] == 4_000


def test_a_full_disk_delays_a_spike(engine: DelayEngine) -> None:
    """A batch is appended completely or not at all. Then it is due again."""

    send(engine, Stretch(50, "timer", 5, (), 1, 0), engine.clock.now_ms() + 5 * SECOND)
    with full_disk(engine):
        engine.advance(6 * SECOND)
        assert engine.bodies() == []
    engine.advance(2 * SECOND)

    assert len(engine.bodies()) == 50


def due(puts: Sequence[PutResult], due_ms: int) -> list[DueRecord]:
    return [DueRecord(due_ms, put.physical_offset, put.size, due_ms - 5 * SECOND) for put in puts]


@pytest.mark.parametrize(
    ("kind", "topic", "count", "expected"),
    [
        ("timer", TIMER_TOPIC, 300, [300]),
        ("level", SCHEDULE_TOPIC, 300, [300]),
        ("timer", TIMER_TOPIC, 31, [1] * 31),
    ],
)
def test_a_spike_is_one_run_and_few_records_are_copied_one_by_one(
    engine: DelayEngine, kind: str, topic: str, count: int, expected: list[int]
) -> None:
    """Queues and tags may differ, if their texts have one length."""
    puts = send(engine, Stretch(count, kind, 20, ("a", "b"), 8, 0), engine.clock.now_ms() + 5 * SECOND)
    due_ms = engine.clock.now_ms() + 5 * SECOND

    copies = Releaser(engine.store, topic, "delay").copies(due(puts, due_ms), due_ms)

    assert [len(each) if isinstance(each, AlikeCopies) else 1 for each in copies] == expected


def test_a_damaged_record_ends_a_run_and_is_reported(engine: DelayEngine) -> None:
    """The next run starts a few records after it."""
    due_ms = engine.clock.now_ms() + 5 * SECOND
    puts = send(engine, Stretch(200, "timer", 20, (), 1, 0), due_ms)
    engine.damage(puts[100])
    release = Releaser(engine.store, TIMER_TOPIC, "delay")

    copies = release.copies(due(puts, due_ms), due_ms)

    assert count_copies(copies) == 199
    assert [len(each) for each in copies if isinstance(each, AlikeCopies)] == [100, 32, 36]
    assert engine.poison_count == 1


def test_rows_are_read_at_any_offsets(engine: DelayEngine) -> None:
    """They may be adjacent or not. A first offset that equals the size is not adjacent to offset 0."""
    engine.put(RecordDraft("orders", 0, bytes(200), b""))
    data = engine.store.read_bytes(0, 300)

    for offsets in ([9, 19, 29, 50, 40], [10, 20], [19], [30, 20, 10]):
        rows = read_rows(engine.store, np.array(offsets), 10)
        assert rows is not None
        assert [row.tobytes() for row in rows] == [data[offset : offset + 10] for offset in offsets]
    assert read_rows(engine.store, np.array([0, (1 << 20) - 5]), 10) is None


def test_alternating_shapes_are_copied_one_by_one_in_their_order(engine: DelayEngine) -> None:
    """Bodies and topics have one length: only the topic's name differs."""
    due_ms = engine.clock.now_ms() + 5 * SECOND
    for number in range(100):
        engine.send(b"%02d" % number, ("orders", "offers")[number % 2], TIMER_DELIVER_MS=due_ms)
    engine.advance(6 * SECOND)

    assert engine.bodies("orders") == [b"%02d" % number for number in range(0, 100, 2)]
    assert engine.bodies("offers") == [b"%02d" % number for number in range(1, 100, 2)]


def test_a_spike_without_a_valid_queue_goes_to_the_dead_letters(engine: DelayEngine) -> None:
    """The first record has the fault of all others."""
    send(engine, Stretch(90, "no queue", 5, (), 1, 0), engine.clock.now_ms() + 5 * SECOND)
    engine.advance(6 * SECOND)

    assert len(engine.bodies(UNDELIVERABLE_TOPIC)) == 90
    assert engine.poison_count == 90
