"""The queue of one level, whose due times ascend in segments only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.delay.level_queue import LevelQueue
from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.store.consume_queue import ConsumeQueue
from mqtemplate.store.files.layout import DONE_SIZE_MARK
from mqtemplate.store.files.store_files import MemoryStoreFiles
from tests.thirds import examples

UNIT_BYTES = 20
PER_FILE = 8


def queue_of(due_times: Sequence[int]) -> ConsumeQueue:
    """Return a queue in which unit i points at physical offset 100 i."""
    queue = ConsumeQueue(MemoryStoreFiles().mapped_queue("consumequeue/topic/0", PER_FILE * UNIT_BYTES))
    for due_ms in due_times:
        add(queue, due_ms)
    return queue


def add(queue: ConsumeQueue, due_ms: int) -> None:
    queue.reserve(1)
    queue.append(100 * queue.max_offset, 91, due_ms)


def opened(queue: ConsumeQueue, position: int = 0) -> LevelQueue:
    level = LevelQueue(queue, position)
    level.catch_up()
    return level


def level_of(due_times: Sequence[int], position: int = 0) -> LevelQueue:
    return opened(queue_of(due_times), position)


def release(level: LevelQueue, now_ms: int, max_count: int = 1_000) -> list[int]:
    """Release due units in order of due time, as the service does. Return their queue offsets."""
    rows = []
    for units in list(level.due(now_ms, max_count)):
        rows += units.rows[["due_ms", "physical_offset", "size"]].tolist()
        level.advance(units, len(units.rows))
    return [offset // 100 for _, offset, size in sorted(rows) if size]


def numbers(rows: np.ndarray) -> list[int]:
    return (rows["physical_offset"] // 100).tolist()


# --- order ------------------------------------------------------------------------------------------


@pytest.mark.feature("D11")
def test_a_unit_with_a_later_time_does_not_block_those_after_it() -> None:
    """After a delay was shortened, the second message is due first."""
    level = level_of([60, 10])

    assert level.due_ms == 10
    assert release(level, 10) == [1]
    assert level.due_ms == 60
    assert level.position == 0
    assert release(level, 60) == [0]
    assert (level.position, level.due_ms) == (2, NEVER_MS)


def test_no_unit_is_due_before_its_time() -> None:
    level = level_of([10, 20, 15])

    assert release(level, 9) == []
    assert release(level, 14) == [0]
    assert release(level, 19) == [2]


def test_units_are_read_across_files() -> None:
    """Otherwise units of another segment would be released before those in the next file."""
    level = level_of(range(3 * PER_FILE))

    [units] = level.due(NEVER_MS - 1, 1_000)

    assert units.rows["due_ms"].tolist() == list(range(3 * PER_FILE))


def test_the_number_of_due_units_is_limited() -> None:
    level = level_of([1] * 20)

    assert release(level, 1, max_count=5) == [0, 1, 2, 3, 4]
    assert level.position == 5


def test_new_units_are_read() -> None:
    """A unit that is due earlier than the last one starts a segment. Another one continues it."""
    queue = queue_of([10])
    level = opened(queue)
    add(queue, 20)
    add(queue, 5)
    assert level.due_ms == 10

    level.catch_up()

    assert level.due_ms == 5
    assert level.pending_count == 3
    assert release(level, 20) == [2, 0, 1]
    add(queue, 1)
    level.catch_up()
    assert release(level, 1) == [3]
    assert level.position == 4


def test_units_before_the_position_are_done() -> None:
    level = level_of([10, 20, 30], position=2)

    assert level.pending_count == 1
    assert release(level, 99) == [2]


@pytest.mark.feature("F20")
def test_a_position_outside_the_queue_is_corrected() -> None:
    assert level_of([10, 20], position=7).position == 2


# --- single messages --------------------------------------------------------------------------------


def test_a_removed_unit_is_skipped() -> None:
    level = level_of([10, 20, 30])
    assert level.find(1, 100) == 20

    level.remove(1)

    assert level.find(1, 100) is None
    assert level.pending_count == 2
    assert release(level, 99) == [0, 2]
    assert level.position == 3


def test_removing_the_first_unit_moves_the_position_past_all_done_units() -> None:
    level = level_of([10, 20, 30])
    level.remove(1)
    assert level.position == 0

    level.remove(0)

    assert (level.position, level.due_ms) == (2, 30)


def test_a_unit_is_found_only_with_its_own_record() -> None:
    """A record with the queue offset of another one is not pending there."""
    level = level_of([10, 20])

    assert level.find(1, 101) is None
    assert level.find(7, 700) is None


def test_released_units_are_not_pending() -> None:
    level = level_of([60, 10, 20])
    release(level, 10)

    assert [level.find(number, 100 * number) is not None for number in range(3)] == [True, False, True]


# --- deleted files -------------------------------------------------------------------------------------------


@pytest.mark.feature("D7")
def test_units_that_were_deleted_before_they_were_due_are_counted() -> None:
    """Done units do not count. The units that are left are released."""
    queue = queue_of([100, 10, 20, 30, 5, 6])
    level = opened(queue)
    level.remove(1)
    assert release(level, 5) == [4]
    queue.delete_before(300)

    assert level.catch_up() == 2

    assert (level.position, level.pending_count, level.due_ms) == (3, 2, 6)
    assert release(level, 100) == [5, 3]


def test_deleted_units_that_were_done_are_not_lost() -> None:
    queue = queue_of([10, 20])
    level = opened(queue)
    release(level, 10)
    queue.delete_before(100)

    assert level.catch_up() == 0


# --- pending rows ----------------------------------------------------------------------------------------


def test_rows_are_the_pending_messages_of_a_part_of_the_queue() -> None:
    level = level_of([60, 10, 20, 70])
    release(level, 10)
    level.remove(2)

    rows = level.rows(0, 4)

    assert rows[["due_ms", "physical_offset", "size"]].tolist() == [(60, 0, 91), (70, 300, 91)]
    assert numbers(level.rows(1, 4)) == [3]
    assert numbers(level.rows_between(0, 300)) == [0]
    assert len(level.rows(2, 2)) == 0


def test_spans_start_with_the_first_unit_due_at_a_time_or_later() -> None:
    level = level_of([10, 20, 30, 5, 25])

    assert level.spans(20) == [(20, 1, 3), (25, 4, 5)]
    assert level.spans(31) == []


# --- marks ------------------------------------------------------------------------------------------


def test_units_that_are_done_out_of_order_are_marked_on_disk() -> None:
    """So neither the next process nor RocketMQ releases them again."""
    queue = queue_of([60, 10, 20, 30])
    level = opened(queue)
    release(level, 10)
    level.remove(3)
    marks = level.marks()
    assert DONE_SIZE_MARK not in queue.units(0, 4)["size"]

    level.mark(marks)
    level.forget(marks)

    assert queue.units(0, 4)["size"].tolist() == [91, DONE_SIZE_MARK, 91, DONE_SIZE_MARK]
    assert queue.units(0, 4)["tags_code"].tolist() == [60, 10, 20, 30]
    assert release(level, 99) == [2, 0]
    assert level.marks() == ([], frozenset())


def test_a_unit_that_is_done_while_marks_are_written_is_marked_the_next_time() -> None:
    queue = queue_of([60, 10, 20, 30, 40])
    level = opened(queue)
    release(level, 10)
    marks = level.marks()
    release(level, 20)
    level.remove(4)

    level.mark(marks)
    level.forget(marks)
    assert level.find(4, 400) is None
    assert queue.units(0, 5)["size"].tolist() == [91, DONE_SIZE_MARK, 91, 91, 91]

    level.mark(level.marks())
    assert queue.units(0, 5)["size"].tolist() == [91, DONE_SIZE_MARK, DONE_SIZE_MARK, 91, DONE_SIZE_MARK]


@dataclass
class Model:
    """A plain model of the queue: the due time of every unit, and the units that are done."""

    due: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    @property
    def pending(self) -> list[int]:
        return [number for number in range(len(self.due)) if number not in self.done]

    def release(self, now_ms: int) -> list[int]:
        found = sorted((self.due[number], number) for number in self.pending if self.due[number] <= now_ms)
        self.done |= {number for _, number in found}
        return [number for _, number in found]


actions = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 50), min_size=1, max_size=12)),
    st.tuples(st.just("release"), st.integers(0, 50)),
    st.tuples(st.just("remove"), st.integers(0, 60)),
    st.tuples(st.just("mark"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
)


@pytest.mark.feature("D11")
@given(st.lists(actions, max_size=30))
@settings(max_examples=examples(200))
def test_the_queue_agrees_with_a_plain_model(plan: list[tuple[str, object]]) -> None:
    """For any due times, and any removed units."""
    queue, model = queue_of([]), Model()
    level = LevelQueue(queue, 0)
    for name, argument in plan:
        match name, argument:
            case "add", list(due_times):
                for due_ms in due_times:
                    add(queue, due_ms)
                model.due += due_times
            case "release", int(now_ms):
                level.catch_up()
                assert release(level, now_ms) == model.release(now_ms)
            case "remove", int(number):
                level.catch_up()
                is_pending = number in model.pending
                assert level.find(number, 100 * number) == (model.due[number] if is_pending else None)
                if is_pending:
                    level.remove(number)
                    model.done.add(number)
            case "mark", _:
                marks = level.marks()
                level.mark(marks)
                level.forget(marks)
            case "reopen", _:
                level.mark(level.marks())
                level = LevelQueue(queue, level.position)
        assert level.catch_up() == 0
        pending = model.pending
        assert level.pending_count == len(pending)
        assert level.position == (pending[0] if pending else len(model.due))
        assert level.due_ms == min((model.due[number] for number in pending), default=NEVER_MS)
        assert numbers(level.rows(0, queue.max_offset)) == pending
        assert sum(end - begin for _, begin, end in level.spans(0)) >= len(pending)


@pytest.mark.parametrize("cut", [0, 1, 5, 8, 9, 16])
def test_the_rows_of_two_parts_are_the_rows_of_the_whole_queue(cut: int) -> None:
    level = level_of([20, 30, 1, 2, 40, 3, 50, 60, 4, 70, 80, 5, 6, 7, 8, 90])
    release(level, 5)
    level.remove(9)

    halves = numbers(level.rows(0, cut)) + numbers(level.rows(cut, 16))

    assert halves == numbers(level.rows(0, 16)) == [0, 1, 4, 6, 7, 10, 12, 13, 14, 15]
