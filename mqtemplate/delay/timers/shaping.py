"""The timers that are due next, in their order. The shape of a topic holds its timers until they may be released."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS, DueRecord, LatenessCauses
from mqtemplate.delay.settings import GRID_MS, HEAD_START_MS, TopicShape
from mqtemplate.event_log import get_logger
from mqtemplate.hashes import java_string_hash

if TYPE_CHECKING:
    from mqtemplate.delay.timers.fairness import FairTimers

_RECORD_KINDS = ("i8", "i8", "i4", "i8", "?", "?")
NEAR_DTYPE = np.dtype([*zip(DueRecord._fields, _RECORD_KINDS, strict=True), ("position", "i8"), ("is_gone", "?")])
"""The fields of `DueRecord`, the position of the unit in the timer log, and whether the message was removed: 39 bytes.

For a parked message ``due_ms`` is the time at which it is rolled."""
_RECORD_FIELDS = list(DueRecord._fields)


class NearTerm:
    """A queue of timers, ordered by due time, then by physical offset.

    - Slots are added as sorted arrays, not as objects: a slot of a million messages takes 50 MB.
    - Messages that arrive while their slot is open (late ones) are in a small heap.
    - ``take`` returns the next messages, ``drop`` forgets them. In between, the caller releases them.
    - ``take_dropped`` returns the positions of the dropped units.
    """

    def __init__(self) -> None:
        self._rows = np.empty(0, NEAR_DTYPE)
        self._due_ms = np.empty(0, np.int64)  # that column, contiguous: searching it is faster
        self._at = 0  # the rows before it are dropped
        self._gone_count = 0  # removed rows from there on
        self._late: list[DueRecord] = []
        # Physical offset -> position of the pending messages in the heap. A removed message stays in the heap only.
        self._late_positions: dict[int, int] = {}
        self._taken_late: list[DueRecord] = []  # late messages between `take` and `drop`
        self._dropped: list[np.ndarray] = []  # positions of dropped units

    # --- adding --------------------------------------------------------------------------------

    def add_slot(self, rows: np.ndarray) -> None:
        """Add the messages of one slot, in any order. A message that is in it twice counts once."""
        if not len(rows):
            return
        if self._at < len(self._rows):
            kept = self._rows[self._at :]
            rows = np.concatenate([kept[~kept["is_gone"]], rows])
        rows = rows[np.lexsort((rows["physical_offset"], rows["due_ms"]))]
        # RocketMQ may link one record twice, when it repeats a batch: the same due time, so adjacent after sorting.
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = rows["physical_offset"][1:] != rows["physical_offset"][:-1]
        self._set_rows(rows if is_first.all() else rows[is_first])

    def _set_rows(self, rows: np.ndarray) -> None:
        self._rows, self._at, self._gone_count = rows, 0, 0
        self._due_ms = np.ascontiguousarray(rows["due_ms"])

    def add_late(self, rows: np.ndarray) -> None:
        """Add messages whose slots are open already."""
        for item, position in zip(rows[_RECORD_FIELDS].tolist(), rows["position"].tolist(), strict=True):
            heapq.heappush(self._late, DueRecord._make(item))
            self._late_positions[item[1]] = position

    # --- taking --------------------------------------------------------------------------------

    @property
    def next_due_ms(self) -> int:
        """Due time of the first message; `NEVER_MS` without messages."""
        self._put_back()
        first_ms = int(self._due_ms[self._at]) if self._at < len(self._rows) else NEVER_MS
        return min(first_ms, self._late[0].due_ms) if self._late else first_ms

    def due_count(self, now_ms: int, max_count: int) -> int:
        """Return the number of due messages up to *max_count*, late ones left out."""
        return int(np.searchsorted(self._due_ms[self._at : self._at + max_count], now_ms, side="right"))

    def take(self, now_ms: int, max_count: int) -> list[DueRecord]:
        """Return up to *max_count* due messages, the earliest first. They stay in the queue until `drop`."""
        self._put_back()
        rows = self._rows[self._at : self._at + self.due_count(now_ms, max_count)]
        if self._gone_count:
            rows = rows[~rows["is_gone"]]
        taken = list(map(DueRecord._make, rows[_RECORD_FIELDS].tolist()))
        while self._late and self._late[0].due_ms <= now_ms and len(self._taken_late) < max_count:
            self._taken_late.append(heapq.heappop(self._late))
            self._skip_removed()
        return list(heapq.merge(taken, self._taken_late))[:max_count] if self._taken_late else taken

    def drop(self, taken: list[DueRecord]) -> None:
        """Forget the leading messages that the last `take` returned."""
        # *taken* may be shorter than that result. Both are sorted, so its last message shows how many are late ones.
        late_count = bisect_right(self._taken_late, taken[-1]) if taken else 0
        if late_count:
            positions = [self._late_positions.pop(item.physical_offset) for item in self._taken_late[:late_count]]
            self._dropped.append(np.array(positions, np.int64))
            del self._taken_late[:late_count]
        self._put_back()
        self._advance(len(taken) - late_count)

    def _advance(self, count: int) -> None:
        """Drop *count* rows that were not removed, and the removed rows among and right after them."""
        start = self._at
        while self._gone_count and self._at < len(self._rows):
            if self._rows["is_gone"][self._at]:
                self._gone_count -= 1
            elif count:
                count -= 1
            else:
                break
            self._at += 1
        if not self._gone_count:  # the usual case takes one step
            self._at += count
        passed = self._rows[start : self._at]
        self._dropped.append(passed["position"][~passed["is_gone"]])
        if self._at >= len(self._rows):
            self._set_rows(np.empty(0, NEAR_DTYPE))

    def take_dropped(self) -> np.ndarray:
        """Return the positions of the units that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return np.concatenate([np.empty(0, np.int64), *dropped])

    def _put_back(self) -> None:
        """Return late messages to the heap that were taken but not dropped, as after a full disk."""
        for item in self._taken_late:
            heapq.heappush(self._late, item)
        self._taken_late.clear()

    def _skip_removed(self) -> None:
        while self._late and self._late[0].physical_offset not in self._late_positions:
            heapq.heappop(self._late)

    # --- single messages -----------------------------------------------------------------------

    def contains(self, due_ms: int, physical_offset: int) -> bool:
        """Return True if a message with this ``due_ms`` field is in the queue."""
        return physical_offset in self._late_positions or self._find(due_ms, physical_offset) is not None

    def remove(self, due_ms: int, physical_offset: int) -> None:
        """Remove a message, if it is in the queue. Not allowed between `take` and `drop`."""
        self._put_back()
        index = self._find(due_ms, physical_offset)
        if index is not None:
            self._rows["is_gone"][index] = True
            self._gone_count += 1
            self._advance(0)
        elif physical_offset in self._late_positions:
            del self._late_positions[physical_offset]
            self._skip_removed()

    def _find(self, due_ms: int, physical_offset: int) -> int | None:
        """Return the row of a message. Rows with one due time are in the order of their physical offsets."""
        due = self._due_ms[self._at :]
        start, end = (int(np.searchsorted(due, due_ms, side)) + self._at for side in ("left", "right"))
        index = start + int(np.searchsorted(self._rows["physical_offset"][start:end], physical_offset))
        if index == end or self._rows["physical_offset"][index] != physical_offset or self._rows["is_gone"][index]:
            return None
        return index

    def physical_offsets(self) -> np.ndarray:
        """Return the physical offsets of all messages in the queue, ascending."""
        rows = self._rows[self._at :]
        late = np.fromiter(self._late_positions, np.int64, len(self._late_positions))
        return np.sort(np.concatenate([rows["physical_offset"][~rows["is_gone"]], late]))


_MAX_CHUNKS = 32
_WINDOW = 1_024


class _Chunk:
    """Timers that were added together, ordered by release time.

    Attributes:
        rows: Array of `NEAR_DTYPE`.
        release_ms: Time from which on each may be released, ascending.
        order_ms: Key of the order among those that may be released.
        at: Index of the first row that is not gone.
        first_due_ms: Earliest due time of the rows when the chunk was created.
    """

    __slots__ = ("at", "first_due_ms", "order_ms", "release_ms", "rows")

    def __init__(self, rows: np.ndarray, release_ms: np.ndarray, order_ms: np.ndarray) -> None:
        order = np.lexsort((rows["physical_offset"], release_ms))
        self.rows, self.release_ms, self.order_ms = rows[order], release_ms[order], order_ms[order]
        self.first_due_ms = int(rows["due_ms"].min())
        self.at = 0

    @property
    def next_ms(self) -> int:
        return int(self.release_ms[self.at]) if self.at < len(self.rows) else NEVER_MS

    def eligible(self, now_ms: int) -> np.ndarray:
        """Return the indices of the rows that may be released."""
        end = int(np.searchsorted(self.release_ms, now_ms, "right"))
        found = np.arange(self.at, end)
        return np.asarray(found[~self.rows["is_gone"][self.at : end]])

    def skip_gone(self) -> None:
        """Move to the first row that is not gone, a window at a time: a step drops a few of many."""
        while self.at < len(self.rows):
            gone = self.rows["is_gone"][self.at : self.at + _WINDOW]
            if not gone.all():
                self.at += int(np.argmin(gone))
                return
            self.at += len(gone)


class HeldTimers:
    """Timers of open slots whose topics have a shape. The rows are numbers: a million takes 60 MB.

    ``take`` returns the next timers, ``drop`` forgets them, as in `NearTerm`.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._count = 0
        self._taken: list[tuple[_Chunk, int]] = []
        self._taken_at: dict[int, int] = {}  # physical offset -> index in `_taken`
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return self._count

    def add(self, rows: np.ndarray, release_ms: np.ndarray, head_start_ms: int) -> None:
        """Add timers of one topic.

        Args:
            rows: Array of `NEAR_DTYPE`.
            release_ms: Time from which on each may be released.
            head_start_ms: Lead over those that may be released at the same time.
        """
        if not len(rows):
            return
        self._chunks.append(_Chunk(rows, release_ms, release_ms - head_start_ms))
        self._count += len(rows)
        if len(self._chunks) > _MAX_CHUNKS:
            self._merge()

    def _merge(self) -> None:
        """Make one chunk of all, so that a look at each chunk stays cheap."""
        kept = [(each, np.flatnonzero(~each.rows["is_gone"])) for each in self._chunks]
        self._forget_taken()
        self._chunks = [
            _Chunk(
                np.concatenate([each.rows[index] for each, index in kept]),
                np.concatenate([each.release_ms[index] for each, index in kept]),
                np.concatenate([each.order_ms[index] for each, index in kept]),
            )
        ]

    def set_back(self, moved_ms: int) -> None:
        """Move the release times by *moved_ms*, as the clock was set back, but none before the due time.

        Not allowed between `take` and `drop`.
        """
        self._forget_taken()
        for number, each in enumerate(self._chunks):
            kept = np.flatnonzero(~each.rows["is_gone"])
            rows, release_ms = each.rows[kept], each.release_ms[kept]
            head_start_ms = release_ms - each.order_ms[kept]
            release_ms = np.maximum(release_ms + moved_ms, np.minimum(rows["due_ms"], release_ms))
            self._chunks[number] = _Chunk(rows, release_ms, release_ms - head_start_ms)

    # --- taking --------------------------------------------------------------------------------

    @property
    def next_release_ms(self) -> int:
        """Time at which the next timer may be released; `NEVER_MS` without one."""
        return min([each.next_ms for each in self._chunks]) if self._chunks else NEVER_MS

    @property
    def first_due_ms(self) -> int:
        """A time before which no held timer is due; `NEVER_MS` without one."""
        return min([each.first_due_ms for each in self._chunks]) if self._chunks else NEVER_MS

    def take(self, now_ms: int, max_count: int) -> list[tuple[int, DueRecord, int]]:
        """Return up to *max_count* timers that may be released, each as order, timer, release time; in this order."""
        self._forget_taken()
        found = [(each, index) for each in self._chunks if len(index := each.eligible(now_ms))]
        if not found:
            return []
        orders = np.concatenate([each.order_ms[index] for each, index in found])
        offsets = np.concatenate([each.rows["physical_offset"][index] for each, index in found])
        owners = np.repeat(np.arange(len(found)), [len(index) for _, index in found])
        indices = np.concatenate([index for _, index in found])
        if len(orders) > max_count:  # a full sort of a large backlog in each step would cost more than the release
            nearest = np.argpartition(orders, max_count - 1)[:max_count]
            orders, offsets, owners, indices = orders[nearest], offsets[nearest], owners[nearest], indices[nearest]
        taken = []
        for position in np.lexsort((offsets, orders)).tolist():
            chunk, row = found[owners[position]][0], int(indices[position])
            item = DueRecord._make(chunk.rows[row][_RECORD_FIELDS].tolist())
            self._taken_at[item.physical_offset] = len(self._taken)
            self._taken.append((chunk, row))
            taken.append((int(orders[position]), item, int(chunk.release_ms[row])))
        return taken

    def drop(self, taken: list[DueRecord]) -> list[DueRecord]:
        """Forget the messages of *taken* that the last `take` returned. Return the others."""
        others = []
        for item in taken:
            at = self._taken_at.get(item.physical_offset)
            if at is None:
                others.append(item)
                continue
            chunk, index = self._taken[at]
            self._dropped.append(int(chunk.rows["position"][index]))
            self._remove(chunk, index)
        self._clean()
        return others

    def _remove(self, chunk: _Chunk, index: int) -> None:
        chunk.rows["is_gone"][index] = True
        self._count -= 1

    def _clean(self) -> None:
        self._forget_taken()
        for chunk in self._chunks:
            chunk.skip_gone()
        self._chunks = [chunk for chunk in self._chunks if chunk.at < len(chunk.rows)]

    def _forget_taken(self) -> None:
        self._taken.clear()
        self._taken_at.clear()

    def take_dropped(self) -> np.ndarray:
        """Return the positions of the units that were dropped since the last call."""
        dropped, self._dropped = np.array(self._dropped, np.int64), []
        return dropped

    # --- single timers -------------------------------------------------------------------------

    def contains(self, physical_offset: int) -> bool:
        """Return True if this timer is held."""
        return self._find(physical_offset) is not None

    def remove(self, physical_offset: int) -> bool:
        """Remove a timer; return False if it is not held. Not allowed between `take` and `drop`."""
        found = self._find(physical_offset)
        if found is None:
            return False
        self._remove(*found)
        self._clean()
        return True

    def _find(self, physical_offset: int) -> tuple[_Chunk, int] | None:
        for chunk in self._chunks:
            matches = np.flatnonzero(chunk.rows["physical_offset"] == physical_offset)
            for index in matches.tolist():
                if not chunk.rows["is_gone"][index]:
                    return chunk, index
        return None

    def physical_offsets(self) -> np.ndarray:
        """Return the physical offsets of all held timers."""
        pieces = [each.rows["physical_offset"][~each.rows["is_gone"]] for each in self._chunks]
        return np.concatenate([np.empty(0, NEAR_DTYPE["physical_offset"]), *pieces])


_log = get_logger("mqtemplate.delay")

MAX_HELD = 1_000_000
"""Held timers from which on no further overdue slot is read: memory stays bounded, and other topics are late."""

_URGENT = 1 << 32
"""Key of the queue of timers with a priority; hashes of topics have 32 bits."""
_MILLISECOND = timedelta(milliseconds=1)
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2**64 divided by the golden ratio: multiples are spread evenly


class _Limit:
    """The shape of one topic, and the time of its next release.

    Attributes:
        next_ms: The earliest time of the next message, with fractions of a millisecond.
    """

    __slots__ = ("next_ms", "shape", "topic")

    def __init__(self, topic: str, shape: TopicShape) -> None:
        self.topic = topic
        self.shape = shape
        self.next_ms = 0.0

    def release_times(self, due_ms: np.ndarray, physical_offsets: np.ndarray, now_ms: int) -> np.ndarray:
        """Return the release times of timers, in the order of which they use up the rate.

        Jitter and spread depend on the physical offset only. So a restart computes the same times again.
        """
        whole_ms, max_rate = self.earliest_times(due_ms, physical_offsets), self.shape.max_rate
        return whole_ms if max_rate is None else self._limited(whole_ms, 1_000 / max_rate, now_ms)

    def earliest_times(self, due_ms: np.ndarray, physical_offsets: np.ndarray) -> np.ndarray:
        """Return the release times of timers if there is no limit of the rate."""
        shape, release_ms = self.shape, due_ms.astype(np.float64)
        if shape.jitter:
            release_ms = release_ms + _shares(physical_offsets) * (shape.jitter / _MILLISECOND)
        if shape.spread:
            release_ms = release_ms + _evenly(physical_offsets) * (shape.spread / _MILLISECOND)
        return np.asarray(np.ceil(release_ms).astype(np.int64))

    def _limited(self, release_ms: np.ndarray, step_ms: float, now_ms: int) -> np.ndarray:
        """Return times at least *step_ms* apart, none earlier than it was, or than the messages before it."""
        order = np.argsort(release_ms, kind="stable")
        # What is overdue is released from now on: the rate holds after an outage, too.
        earliest = np.maximum(release_ms[order], now_ms)
        steps = np.arange(len(order)) * step_ms
        start_ms = np.maximum(earliest - steps, self.next_ms)
        times = np.maximum.accumulate(start_ms) + steps
        self.next_ms = float(times[-1]) + step_ms
        is_held = times > earliest
        grid = np.where(is_held, np.ceil(times / GRID_MS) * GRID_MS, earliest)
        limited = np.empty(len(order), np.int64)
        limited[order] = grid.astype(np.int64)
        return limited


class Shaper:
    """Moves the timers of topics with a shape from the near term to the held ones.

    Topics are known by the hash that a timer unit has. Two topics with one Java hash would share a shape: with n shaped
    topics the chance for another topic is n in four billion.

    Args:
        shapes: Topic -> shape.
        causes: Notes when topics are held.

    Attributes:
        held: The held timers of topics that are not fair.
        fair: Those of topics that are fair by key, or by priority, and those of other topics that have a priority; None
            without any.
    """

    def __init__(self, shapes: Mapping[str, TopicShape], causes: LatenessCauses) -> None:
        for topic, shape in shapes.items():
            shape.check(topic)
        self.fair = _fair_timers({topic: shape for topic, shape in shapes.items() if shape.is_fair}, causes)
        self._limits = {java_string_hash(topic): _Limit(topic, shape) for topic, shape in shapes.items()}
        self._hashes = np.array(sorted(self._limits), np.int64)
        self._causes = causes
        self._is_reported = False
        self.held = HeldTimers()

    def keep_unshaped(
        self, rows: np.ndarray, topic_hashes: np.ndarray, prioritized: np.ndarray, now_ms: int
    ) -> np.ndarray:
        """Hold the timers of topics with a shape, and those with a priority; return the others.

        Args:
            rows: Array of `NEAR_DTYPE`.
            topic_hashes: Hash of the real topic of each.
            prioritized: True for each whose message has a priority above 0.
        """
        if prioritized.any():
            is_urgent = prioritized & ~np.isin(topic_hashes, self._hashes) & ~rows["rolls"] & ~rows["is_poison"]
            self._add_urgent(rows[is_urgent])
            rows, topic_hashes = rows[~is_urgent], topic_hashes[~is_urgent]
        if not len(self._hashes) or not len(rows):
            return rows
        is_shaped = np.isin(topic_hashes, self._hashes) & ~rows["rolls"] & ~rows["is_poison"]
        if not is_shaped.any():
            return rows
        for topic_hash in np.unique(topic_hashes[is_shaped]).tolist():
            shaped, limit = rows[is_shaped & (topic_hashes == topic_hash)], self._limits[topic_hash]
            queue = None if self.fair is None else self.fair.queues.get(topic_hash)
            if queue is None:
                self._hold(limit, shaped, now_ms)
            else:
                queue.add(shaped, limit.earliest_times(shaped["due_ms"], shaped["physical_offset"]))
        return np.asarray(rows[~is_shaped])

    def _add_urgent(self, rows: np.ndarray) -> None:
        """Let timers of topics without a shape leave by priority."""
        if not len(rows):
            return
        from mqtemplate.delay.timers.fairness import FairQueue, FairTimers

        if self.fair is None:
            self.fair = FairTimers({})
        queue = self.fair.queues.get(_URGENT)
        if queue is None:
            queue = FairQueue("", TopicShape(message_priority=True), self._causes, is_ahead=True)
            self.fair.add(_URGENT, queue)
        queue.add(rows, rows["due_ms"])

    def _hold(self, limit: _Limit, rows: np.ndarray, now_ms: int) -> None:
        release_ms = limit.release_times(rows["due_ms"], rows["physical_offset"], now_ms)
        is_late = release_ms > np.maximum(rows["due_ms"], now_ms)
        if is_late.any():
            first_ms = int(rows["due_ms"][is_late].min())
            self._causes.topic_held(limit.topic, first_ms, int(release_ms[is_late].max()))
        self.held.add(rows, release_ms, limit.shape.priority * HEAD_START_MS)

    def clock_moved(self, moved_ms: int) -> None:
        """Keep the rates when the clock was set by *moved_ms*: back, else the next release would be in years."""
        if moved_ms < 0:
            for limit in self._limits.values():
                limit.next_ms += moved_ms
            self.held.set_back(moved_ms)
            if self.fair is not None:
                self.fair.clock_set_back(moved_ms)

    @property
    def count(self) -> int:
        """Number of held timers."""
        return len(self.held) + len(self.fair or ())

    def is_full(self) -> bool:
        """Return True if no further overdue slot may be read. It is logged once."""
        is_full = len(self.held) >= MAX_HELD or (self.fair is not None and self.fair.is_full)
        if is_full and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "shaping.overloaded",
                held=self.count,
                allowed=MAX_HELD,
                reason="more is due than the shapes of the topics let go, so messages of other topics are late too; "
                "raise max-rate in mqtemplate.broker.topic-shapes",
            )
        elif not is_full and len(self.held) < MAX_HELD // 2:
            self._is_reported = False
        return is_full


def _fair_timers(shapes: Mapping[str, TopicShape], causes: LatenessCauses) -> FairTimers | None:
    if not shapes:
        return None
    from mqtemplate.delay.timers.fairness import FairQueue, FairTimers

    return FairTimers({java_string_hash(topic): FairQueue(topic, shape, causes) for topic, shape in shapes.items()})


def _shares(physical_offsets: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1 for each offset, as if by chance (splitmix64)."""
    mixed = physical_offsets.astype(np.uint64) + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _evenly(physical_offsets: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1 for each offset; the numbers of adjacent records are evenly apart."""
    return (physical_offsets.astype(np.uint64) * _GOLDEN >> np.uint64(11)).astype(np.float64) / float(1 << 53)
