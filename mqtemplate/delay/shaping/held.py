"""The due timers of topics with a shape, in the order in which they may be released."""

from __future__ import annotations

import numpy as np

from mqtemplate.delay.pending_rows import NEVER_MS
from mqtemplate.delay.release import DueRecord
from mqtemplate.delay.timers.near_term import NEAR_DTYPE

_RECORD_FIELDS = list(DueRecord._fields)
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
        """Forget those of *taken* that the last `take` returned. Return the others."""
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
