"""The due timers of topics that are released fair by key: round robin over the values of a property."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS, DueRecord, LatenessCauses
from mqtemplate.delay.settings import GRID_MS, HEAD_START_MS, TopicShape, slot_of

MAX_FAIR_WEIGHT = 10_000_000
"""Due timers of fair topics, from which on no further overdue slot is read. A key weighs as much as 32 timers."""

_KEY_WEIGHT = 32
_MOST_BEHIND_MS = 20.0
"""If a step comes too late for the rate, the next releases catch up with it, up to this time: 2 % of a second."""
_MAX_CHUNKS = 32
_BLOCK_MS = 1_000  # due times are counted in blocks of this length

_READ_COUNT = 4_096
"""Timers whose keys are read in one step: about 10 ms in which no message is released (measured)."""

_COMING_DTYPE = np.dtype(
    [("release_ms", "i8"), ("block_ms", "i8"), ("position", "i8"), ("physical_offset", "i8"), ("size", "i4")]
)
_COMING_WEIGHT = 4


class TimerSource(Protocol):
    """The files of the timers."""

    def due_records(self, positions: np.ndarray) -> Sequence[DueRecord]:
        """Read the units at these positions of the timer log."""

    def keys_of(self, rows: np.ndarray, name: bytes) -> tuple[Sequence[bytes], np.ndarray]:
        """Return for each of *rows* the value of a property, empty without it, and the priority of the message."""


class _Rate:
    """The time of the next release of a topic or a key.

    Attributes:
        next_ms: The earliest time, with fractions of a millisecond.
        is_behind: A message was held until then: the rate counts from there, and not from the next message.
    """

    __slots__ = ("is_behind", "next_ms")

    def __init__(self) -> None:
        self.next_ms = 0.0
        self.is_behind = False

    def spend(self, now_ms: int, step_ms: float) -> None:
        """Count one release at *now_ms*."""
        earliest_ms = now_ms - _MOST_BEHIND_MS if self.is_behind else now_ms
        self.next_ms = max(self.next_ms, earliest_ms) + step_ms


class _Fifo:
    """Positions in the timer log in the order of their release, grouped by block of due time: 8 bytes each.

    Attributes:
        blocks: Block of due time and positions.
        at: Index of the first block with positions that were not taken.
        head: Index of the first of them in that block.
    """

    __slots__ = ("at", "blocks", "head")

    def __init__(self) -> None:
        self.blocks: list[tuple[int, array[int]]] = []
        self.at = self.head = 0

    def add(self, block_ms: int, positions: np.ndarray) -> None:
        if not self.blocks or self.blocks[-1][0] != block_ms:
            self.blocks.append((block_ms, array("q")))
        self.blocks[-1][1].frombytes(positions.astype(np.int64).tobytes())

    def peek(self) -> tuple[int, int] | None:
        """Return the block and the position that are next; None without one."""
        while self.at < len(self.blocks):
            block_ms, positions = self.blocks[self.at]
            if self.head < len(positions):
                return block_ms, positions[self.head]
            self.at, self.head = self.at + 1, 0
        return None

    def clean(self) -> None:
        """Forget the blocks that were taken as a whole."""
        if self.at:
            del self.blocks[: self.at]
            self.at = 0

    def rest(self) -> Iterator[np.ndarray]:
        """Yield the positions that were not taken."""
        for number, (_, positions) in enumerate(self.blocks[self.at :]):
            yield np.frombuffer(positions, np.int64)[0 if number else self.head :].copy()

    def remove(self, position: int) -> bool:
        """Remove a position that was not taken; return False if it is not here."""
        for number, each in enumerate(self.rest(), start=self.at):
            found = np.flatnonzero(each == position)
            if len(found):
                del self.blocks[number][1][int(found[0]) + (self.head if number == self.at else 0)]
                return True
        return False


class _FairKey:
    """One value of the property, with its timers that may be released.

    Attributes:
        round: The round in which its next message leaves.
        version: Number of its entry in a heap, which is its place in the round; other entries are stale.
        is_queued: True while it has an entry that is not stale.
        fifos: Priority -> timers; a higher one first.
    """

    __slots__ = ("fifos", "is_queued", "name", "rate", "round", "version")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.round = 0
        self.version = 0
        self.is_queued = False
        self.rate = _Rate()
        self.fifos: dict[int, _Fifo] = {}

    def fifo(self, priority: int) -> _Fifo:
        found = self.fifos.get(priority)
        if found is None:
            self.fifos[priority] = found = _Fifo()
            self.fifos = dict(sorted(self.fifos.items(), reverse=True))
        return found

    def first(self) -> tuple[_Fifo, int, int] | None:
        """Return the next timer: its queue, block of due time and position; None without one."""
        for fifo in self.fifos.values():
            if (found := fifo.peek()) is not None:
                return fifo, *found
        return None

    def clean(self) -> None:
        """Forget what was taken."""
        for priority, fifo in list(self.fifos.items()):
            fifo.clean()
            if fifo.peek() is None:
                del self.fifos[priority]


class _Taken(NamedTuple):
    """One timer between `take` and `drop`, and the state before it was taken."""

    key: _FairKey
    fifo: _Fifo
    block_ms: int
    position: int
    fifo_at: int
    fifo_head: int
    round: int
    place: int
    key_next_ms: float
    topic_next_ms: float
    topic_round: int


class FairQueue:
    """The timers of one topic in open slots. Those that may be released leave round robin over their keys.

    - In a round each key with messages has one. A key that gets its first message takes part in the current round.
    - A key at its rate takes no part until its next message may leave.
    - Within a key a higher priority of the message leaves first; then the order is that of release times.
    - ``take`` returns the next timers, ``drop`` forgets them: those that it does not name are next again.
    - A key without messages is forgotten as soon as its rate allows another message.

    Args:
        topic: Name of the topic, for causes of late releases.
        is_ahead: Among other topics a timer has the place of the earliest one that leaves after it; otherwise that of
            the latest one before it.
    """

    def __init__(self, topic: str, shape: TopicShape, causes: LatenessCauses, *, is_ahead: bool = False) -> None:
        self._is_ahead = is_ahead
        self._topic = topic
        self.shape = shape
        self._causes = causes
        self._step_ms = 0.0 if shape.max_rate is None else 1_000 / shape.max_rate
        self._key_step_ms = 0.0 if shape.max_rate_per_key is None else 1_000 / shape.max_rate_per_key
        self._rate = _Rate()
        self._round = 0
        self._numbers = itertools.count()
        self._keys: dict[bytes, _FairKey] = {}
        self._ready: list[tuple[int, int, _FairKey]] = []  # heap: round, version, key
        self._limited: list[tuple[float, int, _FairKey]] = []  # heap: time of the next release, version, key
        self._idle: list[tuple[float, int, _FairKey]] = []  # heap: keys without messages that are at their rate
        self._coming: list[np.ndarray] = []  # of `_COMING_DTYPE`: their keys are not read; in order of release time
        self._blocks: dict[int, int] = {}  # block of due time -> number of timers
        self._block_heap: list[int] = []
        self._taken: list[_Taken] = []
        self._taken_at: dict[int, int] = {}  # physical offset -> index in `_taken`
        self._dropped: list[int] = []
        self._now_ms = 0
        self.count = 0

    @property
    def weight(self) -> int:
        """Memory of the queue, in timers."""
        coming = sum([len(each) for each in self._coming])
        return self.count + _COMING_WEIGHT * coming + _KEY_WEIGHT * len(self._keys)

    # --- adding --------------------------------------------------------------------------------

    def add(self, rows: np.ndarray, release_ms: np.ndarray) -> None:
        """Add timers.

        Args:
            rows: Array of `NEAR_DTYPE`.
            release_ms: Time from which on each may be released.
        """
        self._put_back()
        order = np.lexsort((rows["physical_offset"], release_ms))
        order = order[np.unique(rows["physical_offset"][order], return_index=True)[1]]  # see `NearTerm.add_slot`
        order = order[np.argsort(release_ms[order], kind="stable")]
        coming = np.empty(len(order), _COMING_DTYPE)
        for name in ("position", "physical_offset", "size"):
            coming[name] = rows[name][order]
        coming["release_ms"], coming["block_ms"] = release_ms[order], slot_of(rows["due_ms"][order], _BLOCK_MS) + 1
        blocks, counts = np.unique(coming["block_ms"], return_counts=True)
        for each, count in zip(blocks.tolist(), counts.tolist(), strict=True):
            if each not in self._blocks:
                heapq.heappush(self._block_heap, each)
            self._blocks[each] = self._blocks.get(each, 0) + count
        self._coming.append(coming)
        self.count += len(coming)
        if len(self._coming) > _MAX_CHUNKS:
            merged = np.concatenate(self._coming)
            self._coming = [merged[np.argsort(merged["release_ms"], kind="stable")]]

    def _let_in(self, now_ms: int, source: TimerSource) -> None:
        """Read the keys of some timers that may be released from *now_ms* on, and add them to these keys."""
        room = _READ_COUNT
        for number, coming in enumerate(self._coming):
            end = min(int(np.searchsorted(coming["release_ms"], now_ms, "right")), room)
            if end:
                self._sort_in(coming[:end], source)
                self._coming[number] = coming[end:].copy() if 2 * end > len(coming) else coming[end:]
                room -= end
        self._coming = [coming for coming in self._coming if len(coming)]

    def _sort_in(self, arrived: np.ndarray, source: TimerSource) -> None:
        names, priorities = source.keys_of(arrived, self.shape.fair_property)
        if not self.shape.message_priority:
            priorities = np.zeros(len(arrived), np.int64)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        key_numbers = np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))
        order = np.lexsort((arrived["block_ms"], priorities, key_numbers))
        groups = np.stack([key_numbers, priorities, arrived["block_ms"]])[:, order]
        positions = arrived["position"][order]
        cuts = [0, *(np.flatnonzero((np.diff(groups) != 0).any(axis=0)) + 1).tolist(), len(order)]
        for start, end in itertools.pairwise(cuts):
            name, priority, block_ms = names[order[start]], int(groups[1, start]), int(groups[2, start])
            key = self._keys.get(name)
            if key is None:
                key = self._keys[name] = _FairKey(name)
            key.fifo(priority).add(block_ms, positions[start:end])
            if not key.is_queued:
                self._enter(key, self._now_ms)

    def _enter(self, key: _FairKey, now_ms: int, *, is_behind: bool = False, place: int | None = None) -> None:
        """Let a key take part in the rounds, or wait until its rate allows a message.

        Args:
            place: Its place in the round; None for the last.
        """
        key.version = next(self._numbers) if place is None else place
        key.is_queued = True
        key.rate.is_behind = is_behind
        if self._key_step_ms and key.rate.next_ms > now_ms:
            heapq.heappush(self._limited, (key.rate.next_ms, key.version, key))
        else:
            key.round = max(key.round, self._round)
            heapq.heappush(self._ready, (key.round, key.version, key))

    def _leave(self, key: _FairKey) -> None:
        """Let a key without messages take no part."""
        key.version = next(self._numbers)
        key.is_queued = False

    # --- taking --------------------------------------------------------------------------------

    def take(self, now_ms: int, max_count: int, source: TimerSource) -> list[tuple[int, DueRecord, int]]:
        """Return up to *max_count* timers that may be released: order among topics, timer, release time."""
        self._put_back()
        self._now_ms = now_ms
        self._let_in(now_ms, source)
        self._end_waits(now_ms)
        while len(self._taken) < max_count and (not self._step_ms or self._rate.next_ms <= now_ms):
            if (key := self._next_key()) is None:
                break
            self._take_one(key, now_ms)
        self._rate.is_behind = bool(self._step_ms) and self._next_key() is not None
        if self._rate.is_behind:
            self._causes.topic_held(self._topic, self.first_due_ms, self._limited_ms())
        if not self._taken:
            return []
        items = source.due_records(np.array([each.position for each in self._taken], np.int64))
        self._taken_at = {item.physical_offset: index for index, item in enumerate(items)}
        is_limited = self._step_ms or self._key_step_ms
        times = [item.due_ms for item in items]
        if self._is_ahead:
            order = list(itertools.accumulate(reversed(times), min))[::-1]
        else:
            order = list(itertools.accumulate(times, max))
        head_start_ms = self.shape.priority * HEAD_START_MS
        return [
            (order_ms - head_start_ms, item, now_ms if is_limited else item.due_ms)
            for order_ms, item in zip(order, items, strict=True)
        ]

    def _end_waits(self, now_ms: int) -> None:
        while self._limited and self._limited[0][0] <= now_ms:
            _, version, key = heapq.heappop(self._limited)
            if version == key.version:
                self._enter(key, now_ms, is_behind=key.rate.is_behind)
        while self._idle and self._idle[0][0] <= now_ms:
            self._retire(heapq.heappop(self._idle)[2])

    def _retire(self, key: _FairKey) -> None:
        """Forget a key without messages, at once or when its rate allows another message."""
        key.clean()
        if key.fifos or key.is_queued or self._keys.get(key.name) is not key:
            return
        if self._key_step_ms and key.rate.next_ms > self._now_ms:
            heapq.heappush(self._idle, (key.rate.next_ms, next(self._numbers), key))
        else:
            del self._keys[key.name]

    def _next_key(self) -> _FairKey | None:
        """Return the key whose turn it is; drop stale entries before it."""
        while self._ready:
            _, version, key = self._ready[0]
            if version == key.version:
                return key
            heapq.heappop(self._ready)
        return None

    def _take_one(self, key: _FairKey, now_ms: int) -> None:
        first = key.first()
        assert first is not None, "a key in the rounds has timers"
        fifo, block_ms, position = first
        before = (fifo.at, fifo.head, key.round, key.version, key.rate.next_ms, self._rate.next_ms, self._round)
        self._taken.append(_Taken(key, fifo, block_ms, position, *before))
        fifo.head += 1
        heapq.heappop(self._ready)
        self._round = key.round
        key.round += 1
        if self._step_ms:
            self._rate.spend(now_ms, self._step_ms)
        if self._key_step_ms:
            key.rate.spend(now_ms, self._key_step_ms)
        if key.first() is not None:
            self._enter(key, now_ms, is_behind=True)
        else:
            self._leave(key)

    def drop(self, items: Sequence[DueRecord]) -> list[DueRecord]:
        """Forget the timers of *items* that the last `take` returned. Return the others."""
        done: set[int] = set()
        others = []
        for item in items:
            index = self._taken_at.get(item.physical_offset)
            if index is None:
                others.append(item)
            else:
                done.add(index)
        # What leaves is a prefix of what was taken: `take` returns it in the order in which it has to leave.
        self._put_back(len(done))
        return others

    def _put_back(self, done: int = 0) -> None:
        """Undo what was taken after the first *done* timers."""
        if not self._taken:
            return
        for each in reversed(self._taken[done:]):
            key, fifo = each.key, each.fifo
            fifo.at, fifo.head, key.round, key.rate.next_ms = each.fifo_at, each.fifo_head, each.round, each.key_next_ms
            self._rate.next_ms, self._round = each.topic_next_ms, each.topic_round
        again = {each.key: each.place for each in reversed(self._taken[done:])}
        for each in self._taken[:done]:
            self._dropped.append(each.position)
            self._count_down(each.block_ms)
        for key, place in again.items():
            self._enter(key, self._now_ms, is_behind=key.rate.is_behind, place=place)
        for key in dict.fromkeys(each.key for each in self._taken):
            self._retire(key)
        self._taken, self._taken_at = [], {}

    def _count_down(self, block_ms: int) -> None:
        self.count -= 1
        self._blocks[block_ms] -= 1
        if not self._blocks[block_ms]:
            del self._blocks[block_ms]

    def take_dropped(self) -> list[int]:
        """Return the positions of the units that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # --- times ---------------------------------------------------------------------------------

    @property
    def first_due_ms(self) -> int:
        """A time before which none of the timers is due; `NEVER_MS` without one."""
        while self._block_heap and self._block_heap[0] not in self._blocks:
            heapq.heappop(self._block_heap)
        return self._block_heap[0] if self._block_heap else NEVER_MS

    def next_release_ms(self) -> int:
        """Return the time at which the next timer may be released; `NEVER_MS` without one."""
        times = [int(each["release_ms"][0]) for each in self._coming]
        if self._next_key() is not None:
            times.append(self._limited_ms())
        elif self._first_limited() is not None:
            times.append(_on_grid(max(self._limited[0][0], self._rate.next_ms)))
        return min(times, default=NEVER_MS)

    def _first_limited(self) -> _FairKey | None:
        """Return the key at its rate that may have the next message; drop stale entries before it."""
        while self._limited:
            _, version, key = self._limited[0]
            if version == key.version:
                return key
            heapq.heappop(self._limited)
        return None

    def _limited_ms(self) -> int:
        """Return the time from which on the topic's rate allows a message."""
        return _on_grid(self._rate.next_ms) if self._step_ms else 0

    def clock_set_back(self, moved_ms: int) -> None:
        """Keep the rates when the clock was set back: else the next release would be in years."""
        self._put_back()
        self._rate.next_ms += moved_ms
        for key in self._keys.values():
            key.rate.next_ms += moved_ms
        self._limited = [(at_ms + moved_ms, version, key) for at_ms, version, key in self._limited]
        self._idle = [(at_ms + moved_ms, number, key) for at_ms, number, key in self._idle]

    # --- single timers -------------------------------------------------------------------------

    def contains(self, position: int) -> bool:
        """Return True if the timer at this position of the log is held."""
        return any(np.any(each == position) for each in self._pieces())

    def remove(self, position: int, due_ms: int) -> bool:
        """Remove a timer; return False if it is not held."""
        self._put_back()
        is_held = self._remove(position)
        if is_held:
            self._count_down(slot_of(due_ms, _BLOCK_MS) + 1)
        return is_held

    def _remove(self, position: int) -> bool:
        for number, coming in enumerate(self._coming):
            kept = coming["position"] != position
            if not kept.all():
                self._coming[number] = coming[kept]
                self._coming = [each for each in self._coming if len(each)]
                return True
        for key in self._keys.values():
            if any(fifo.remove(position) for fifo in key.fifos.values()):
                if key.first() is None:
                    self._leave(key)
                    self._retire(key)
                return True
        return False

    def positions(self) -> np.ndarray:
        """Return the positions of all timers."""
        return np.concatenate([np.empty(0, np.int64), *self._pieces()])

    def _pieces(self) -> Iterator[np.ndarray]:
        self._put_back()
        for coming in self._coming:
            yield coming["position"]
        for key in self._keys.values():
            for fifo in key.fifos.values():
                yield from fifo.rest()


def _on_grid(time_ms: float) -> int:
    return math.ceil(time_ms / GRID_MS) * GRID_MS


class FairTimers:
    """The queues of all fair topics; see `FairQueue`.

    Attributes:
        queues: Hash of the topic -> its queue.
    """

    def __init__(self, queues: Mapping[int, FairQueue]) -> None:
        self.queues = dict(queues)
        self._all = list(queues.values())

    def add(self, topic_hash: int, queue: FairQueue) -> None:
        """Add a queue."""
        self.queues[topic_hash] = queue
        self._all.append(queue)

    def __len__(self) -> int:
        """Return the number of timers."""
        return sum([queue.count for queue in self._all])

    @property
    def is_full(self) -> bool:
        """True if no further overdue slot may be read."""
        return sum([queue.weight for queue in self._all]) >= MAX_FAIR_WEIGHT

    @property
    def first_due_ms(self) -> int:
        """A time before which none of the timers is due; `NEVER_MS` without one."""
        return min([queue.first_due_ms for queue in self._all], default=NEVER_MS)

    @property
    def next_release_ms(self) -> int:
        """Time at which the next timer may be released; `NEVER_MS` without one."""
        return min([queue.next_release_ms() for queue in self._all], default=NEVER_MS)

    def take(self, now_ms: int, max_count: int, source: TimerSource) -> list[tuple[int, DueRecord, int]]:
        """Return the next timers of each topic; see `FairQueue.take`."""
        found = [queue.take(now_ms, max_count, source) for queue in self._all]
        return list(heapq.merge(*found, key=lambda each: each[0]))

    def drop(self, items: Sequence[DueRecord]) -> list[DueRecord]:
        """Forget the timers of *items* that the last `take` returned. Return the others."""
        others = list(items)
        for queue in self._all:
            others = queue.drop(others)
        return others

    def take_dropped(self) -> np.ndarray:
        """Return the positions of the units that were dropped since the last call."""
        return np.array([position for queue in self._all for position in queue.take_dropped()], np.int64)

    def clock_set_back(self, moved_ms: int) -> None:
        """Keep the rates when the clock was set back."""
        for queue in self._all:
            queue.clock_set_back(moved_ms)

    def contains(self, position: int) -> bool:
        """Return True if the timer at this position of the log is held."""
        return any(queue.contains(position) for queue in self._all)

    def remove(self, position: int, due_ms: int) -> bool:
        """Remove a timer; return False if it is not held. Not allowed between `take` and `drop`."""
        return any(queue.remove(position, due_ms) for queue in self._all)

    def positions(self) -> np.ndarray:
        """Return the positions of all timers."""
        return np.concatenate([np.empty(0, np.int64), *[queue.positions() for queue in self._all]])
