"""Store timestamps where the clock was set back: searches by time, retention and recovery."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.services import AfterChangeService
from mqtemplate.spark.location.folder import StoreFolder
from mqtemplate.store.checkpoint import ClockStep, ClockSteps
from mqtemplate.store.files.layout import MAX_CLOCK_STEPS
from mqtemplate.store.message_store import MessageStore
from tests.store.small_store import OpenStore, draft, kill

HOUR, DAY = 3_600_000, 86_400_000
YEARS = 10 * 365 * DAY
BODY = bytes(1_500)  # two of them fill a file


def search(store: MessageStore, timestamp: int) -> int:
    queue = store.consume_queue("orders", 0)

    def time_at(at: int) -> int:
        return store.read(queue.unit(at).physical_offset, queue.unit(at).size).store_timestamp

    offsets = range(queue.min_offset, queue.max_offset)
    first_from = lambda physical_offset: queue.first_at("physical_offset", physical_offset)  # noqa: E731
    return store.clock_steps.search(offsets, timestamp, store.clock.now_ms(), time_at, first_from)


@pytest.mark.parametrize("end", ["open", "closed", "killed"])
@pytest.mark.parametrize("ahead_ms", [HOUR, DAY, YEARS])
def test_one_message_of_the_future_misleads_no_search_by_time(
    open_store: OpenStore, clock: VirtualClock, ahead_ms: int, end: str
) -> None:
    """It was stored between the records around it: a search for a time before the next one finds it."""
    store, start_ms = open_store(), clock.now_ms()
    for number in range(10):
        if number == 4:
            clock.move_ms(ahead_ms)
        store.put(draft(b"%d" % number))
        if number == 4:
            clock.move_ms(-ahead_ms)
        clock.move_ms(1_000)
    if end != "open":
        store.close() if end == "closed" else kill(store)
        store = open_store()

    found = [search(store, start_ms + second * 1_000) for second in range(11)]

    assert found == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10]


def test_a_reader_of_the_folder_is_not_misled_either(
    open_store: OpenStore, clock: VirtualClock, tmp_path: Path
) -> None:
    """Such as Spark: it reads the steps in the checkpoint."""
    store, start_ms = open_store(), clock.now_ms()
    for number, ahead_ms in enumerate([0, 100 * YEARS, 0, 0]):
        clock.move_ms(ahead_ms)
        store.put(draft(b"%d" % number))
        clock.move_ms(1_000 - ahead_ms)
    store.close()

    folder = StoreFolder(tmp_path)

    found = [folder.search_offset("orders", 0, start_ms + second * 1_000) for second in range(5)]
    assert found == [0, 1, 1, 3, 4]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 0, 0, 1_000, -1_000, 100_000])), max_size=12),
    st.integers(0, 3_000),
)
def test_a_search_by_time_skips_no_message_of_that_time_or_later(plan: list[tuple[int, int]], wanted: int) -> None:
    """Compared with a search that looks at each message."""
    times, steps, clock_ms, lead_ms = list[int](), ClockSteps(), 1_000, 0
    for passed_ms, lead_ms in plan:
        clock_ms += passed_ms
        if times and clock_ms + lead_ms < times[-1]:
            steps.note(len(times), times[-1], clock_ms + lead_ms)
        times.append(clock_ms + lead_ms)
    now_ms = clock_ms + lead_ms

    found = steps.search(range(len(times)), wanted, now_ms, times.__getitem__, lambda at: at)

    assert [at for at, time_ms in enumerate(times) if wanted <= time_ms <= now_ms and at < found] == []
    assert found == len(times) or times[found] >= wanted


def test_more_steps_than_the_checkpoint_holds_keep_the_largest() -> None:
    steps = ClockSteps()
    for number in range(MAX_CLOCK_STEPS + 50):
        steps.note(number, 1_000 + number, 1_000)

    assert len(list(steps)) == MAX_CLOCK_STEPS
    assert ClockStep(MAX_CLOCK_STEPS + 49, 1_000 + MAX_CLOCK_STEPS + 49, 1_000) in steps


@pytest.mark.parametrize("end", ["open", "closed", "killed"])
def test_a_key_is_found_by_the_time_that_its_record_has(open_store: OpenStore, clock: VirtualClock, end: str) -> None:
    """The chain of a key is newest first, and here the newest record has the earliest time."""
    store = open_store()
    clock.move_ms(YEARS)
    ahead = store.put(draft(b"ahead", properties=b"KEYS\x01k\x02"))
    clock.move_ms(-YEARS)
    right = store.put(draft(b"right", properties=b"KEYS\x01k\x02"))
    if end != "open":
        store.close() if end == "closed" else kill(store)
        store = open_store()

    for put in (ahead, right):
        found = store.index.find("orders", "k", put.store_timestamp - 1, put.store_timestamp + 1)
        assert put.physical_offset in found


# --- services ---------------------------------------------------------------------------------------


def test_a_service_that_was_due_by_a_clock_that_was_ahead_works_after_its_interval() -> None:
    """Else no checkpoint would be taken for ten years."""
    clock, done = VirtualClock(), list[int]()
    service = AfterChangeService("test", lambda: done.append(clock.now_ms()), clock, 1_000)
    clock.move_ms(YEARS)
    service.changed()
    clock.move_ms(-YEARS)

    due_ms = service.step()
    assert due_ms == clock.now_ms() + 1_000
    clock.set_ms(due_ms)
    service.step()

    assert done == [due_ms]


# --- recovery ---------------------------------------------------------------------------------------


def test_damage_after_a_step_of_the_clock_ends_no_log(open_store: OpenStore, clock: VirtualClock) -> None:
    """The records after it are older than the newest one, and still no leftovers."""
    store = open_store()
    clock.move_ms(YEARS)
    store.put(draft(b"ahead"))
    clock.move_ms(-YEARS)
    puts = [store.put(draft(b"%d" % number)) for number in range(3)]
    store.take_checkpoint()
    file, start = store._commit_log.files.find(puts[1].physical_offset)  # type: ignore[misc]
    file.write(puts[1].physical_offset - start, b"\xff" * 40)
    kill(store)

    store = open_store()

    assert store.end_offset == puts[2].end
    assert store.read(puts[2].physical_offset, puts[2].size).body == b"2"
