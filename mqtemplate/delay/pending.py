"""Looking at what waits: pages of messages in the order they fall due, and counts."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.control import KeyIndex, handle_of, has_key, is_marker
from mqtemplate.delay.delay_store import WAITING_DTYPE, DelayStore, WaitingPiece
from mqtemplate.errors import CorruptRecordError, MessageError
from mqtemplate.java_hash import java_string_hash
from mqtemplate.message import Property
from mqtemplate.pending import PendingCounts, PendingMessage, PendingPage, PendingQuery
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REAL_TOPIC, TAGS, decode_properties, find_property
from mqtemplate.store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC

_END_OF_TIME_MS = 1 << 62
_MOST_OF_A_KEY = 100_000


class _Place(NamedTuple):
    """Where a message stands in the order of a page."""

    due_ms: int
    physical_offset: int
    size: int = 0


class PendingView:
    """Reads the delay services' own files; what it holds in memory is a page, and one piece of those files.

    A message that is handed over, cancelled or moved while somebody turns pages may be shown or not.

    Args:
        delay_stores: The two delay services.
        index: Finds messages by key.
        topics: The topics there are; two of them could share a hash.
    """

    def __init__(
        self,
        store: MessageStore,
        delay_stores: Sequence[DelayStore],
        index: KeyIndex,
        topics: Callable[[], Iterable[str]],
        broker_name: str,
    ) -> None:
        self._store = store
        self._keepers = delay_stores
        self._index = index
        self._topics = topics
        self._broker_name = broker_name

    # --- pages ---------------------------------------------------------------------------------

    def page(self, query: PendingQuery, max_count: int, cursor: str | None) -> PendingPage:
        """See `Broker.pending`."""
        if max_count < 1:
            raise MessageError(f"max_count must be 1 or more, got {max_count}")
        behind = _Place(-1, -1) if cursor is None else _read_cursor(cursor)
        found: list[tuple[_Place, StoredRecord]] = []  # the first of all so far, one more than the page takes
        for piece in self._pieces(query, behind.due_ms):
            if len(found) > max_count and found[-1][0].due_ms < piece.floor_ms:
                break
            self._take(piece.rows, query, behind, max_count + 1, found)
        shown = found[:max_count]
        messages = tuple(self._message(place, record) for place, record in shown)
        last = shown[-1][0] if len(found) > max_count else None
        return PendingPage(messages, None if last is None else f"{last.due_ms}-{last.physical_offset}")

    def _take(
        self,
        rows: np.ndarray,
        query: PendingQuery,
        behind: _Place,
        most: int,
        found: list[tuple[_Place, StoredRecord]],
    ) -> None:
        """Put the rows that belong there into *found*, which stays sorted and no longer than *most*."""
        for place in _sorted_places(rows):
            if len(found) >= most and place > found[-1][0]:
                return
            if place[:2] <= behind[:2]:
                continue
            record = self._read(place)
            if record is not None and _agrees(record, query):
                insort(found, (place, record), key=lambda item: item[0])
                del found[most:]

    def _message(self, place: _Place, record: StoredRecord) -> PendingMessage:
        properties = decode_properties(record.properties_bytes)
        topic = properties.get(Property.REAL_TOPIC, "")
        rolls = properties.get(Property.TIMER_ROLL_TIMES, "0")
        raw = record.properties_bytes
        return PendingMessage(
            topic=topic,
            msg_id=properties.get(Property.UNIQ_KEY, ""),
            tags=properties.get(Property.TAGS),
            keys=properties.get(Property.KEYS),
            deliver_ms=place.due_ms,
            delay_level=record.queue_id + 1 if record.topic == SCHEDULE_TOPIC else 0,
            roll_count=int(rolls) if rolls.isdecimal() else 0,
            born_timestamp=record.born_timestamp,
            store_timestamp=record.store_timestamp,
            body_size=len(record.body),
            handle=handle_of(topic, self._broker_name, raw, place.due_ms, place.physical_offset),
        )

    # --- counts --------------------------------------------------------------------------------

    def count(self, query: PendingQuery, bucket_ms: int) -> PendingCounts:
        """See `Broker.count_pending`."""
        if bucket_ms < 1:
            raise MessageError(f"the span to count by must be 1 ms or more, got {bucket_ms}")
        counts: Counter[int] = Counter()
        needs_records = query.tag is not None or query.key is not None or self._shares_its_hash(query.topic)
        for piece in self._pieces(query, -1):
            rows = piece.rows
            if needs_records or (query.topic is not None and not rows["topic_hash"].all()):
                rows = rows[[self._is_meant(place, query) for place in _places(rows)]]
            begins, sizes = np.unique(rows["due_ms"] // bucket_ms * bucket_ms, return_counts=True)
            counts.update(dict(zip(begins.tolist(), sizes.tolist(), strict=True)))
        return PendingCounts(counts.total(), dict(sorted(counts.items())))

    def _shares_its_hash(self, topic: str | None) -> bool:
        """Whether another topic's hash is that of *topic*, so that the hash alone does not tell them apart."""
        if topic is None:
            return False
        wanted = java_string_hash(topic)
        return any(other != topic and java_string_hash(other) == wanted for other in self._topics())

    def _is_meant(self, place: _Place, query: PendingQuery) -> bool:
        record = self._read(place)
        return record is not None and _agrees(record, query)

    # --- what both read ------------------------------------------------------------------------

    def _pieces(self, query: PendingQuery, from_ms: int) -> Iterator[WaitingPiece]:
        """What waits in the query's span, piece by piece, floors ascending."""
        after_ms = max(from_ms, query.after_ms or 0, 0)
        before_ms = _END_OF_TIME_MS if query.before_ms is None else query.before_ms
        if query.key is not None:
            yield WaitingPiece(after_ms, self._rows_of_key(query.key, after_ms, before_ms))
            return
        pieces = [delay_store.waiting(after_ms, before_ms) for delay_store in self._keepers]
        wanted = None if query.topic is None else java_string_hash(query.topic)
        for piece in heapq.merge(*pieces, key=lambda piece: piece.floor_ms):
            rows = piece.rows
            if wanted is not None:
                rows = rows[(rows["topic_hash"] == wanted) | (rows["topic_hash"] == 0)]
            yield WaitingPiece(piece.floor_ms, rows)

    def _rows_of_key(self, key: str, after_ms: int, before_ms: int) -> np.ndarray:
        rows = []
        for delay_store in self._keepers:
            for physical_offset in self._index.find(delay_store.source_topic, key, 0, _END_OF_TIME_MS, _MOST_OF_A_KEY):
                record = self._read(_Place(0, physical_offset))
                if record is None or record.topic != delay_store.source_topic:
                    continue
                with delay_store.lock:
                    delay_store.catch_up()
                    due_ms = delay_store.due_ms(record) if delay_store.is_waiting(record) else -1
                if after_ms <= due_ms < before_ms:
                    rows.append((due_ms, physical_offset, record.total_size, 0))
        return np.array(rows, WAITING_DTYPE)

    def _read(self, place: _Place) -> StoredRecord | None:
        try:
            if place.size:
                return self._store.read(place.physical_offset, place.size)
            return self._store.read_at(place.physical_offset)
        except CorruptRecordError:
            return None  # the delay service reports it when it is due


def _sorted_places(rows: np.ndarray) -> Iterator[_Place]:
    return _places(rows[np.lexsort((rows["physical_offset"], rows["due_ms"]))])


def _places(rows: np.ndarray) -> Iterator[_Place]:
    columns = (rows[name].tolist() for name in ("due_ms", "physical_offset", "size"))
    return map(_Place, *columns)


def _agrees(record: StoredRecord, query: PendingQuery) -> bool:
    """Whether a waiting record is one that *query* means; its time was looked at before."""
    properties = record.properties_bytes
    if is_marker(record):
        return False
    if query.topic is not None and find_property(properties, REAL_TOPIC) != query.topic:
        return False
    if query.tag is not None and find_property(properties, TAGS) != query.tag:
        return False
    return query.key is None or has_key(record, query.key)


def _read_cursor(cursor: str) -> _Place:
    due_ms, _, physical_offset = cursor.partition("-")
    if not (due_ms.isdecimal() and physical_offset.isdecimal()):
        raise MessageError(f"{cursor!r} is no cursor; pass PendingPage.cursor as it came")
    return _Place(int(due_ms), int(physical_offset))
