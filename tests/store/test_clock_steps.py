"""Store timestamps where the clock was set back, beside the golden script."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.services import AfterChangeService
from mqtemplate.spark.location.folder import StoreFolder
from mqtemplate.store.checkpoint import ClockStep, ClockSteps
from mqtemplate.store.files.layout import MAX_CLOCK_STEPS
from tests.store.small_store import OpenStore, draft

YEARS = 10 * 365 * 86_400_000


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
