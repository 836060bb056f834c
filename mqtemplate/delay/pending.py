"""Queries of pending messages: pages in order of due time, and counts, at once or in steps of bounded work."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mqtemplate.delay.delay_store import MAX_RECORDS_OF_KEY, DelayStore, RecordLookup, has_key, is_marker
from mqtemplate.delay.pending_rows import PENDING_DTYPE, PendingPiece
from mqtemplate.delay.recall_handle import decode_handle, handle_of
from mqtemplate.durations import format_ms
from mqtemplate.errors import MessageError
from mqtemplate.hashes import java_string_hash
from mqtemplate.message import Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingCounts, PendingMessage, PendingPage, PendingQuery, check_page_size
from mqtemplate.record.codec import StoredRecord
from mqtemplate.record.properties import REAL_TOPIC, TAGS, decode_properties, find_property
from mqtemplate.store.message_store import MessageStore
from mqtemplate.topics import SCHEDULE_TOPIC, is_in_namespace
from mqtemplate.user_code import shown

_END_OF_TIME_MS = 1 << 62
_LAST_OFFSET = 10**18 - 1
_ROWS_PER_RECORD = 100
"""Rows that are compared in the time in which one record is read, about (measured)."""
_RECORDS_PER_REPORT = 256


class ScanLimit(NamedTuple):
    """Limit of the work of one call. The next call continues from its cursor.

    Attributes:
        max_records: Most records that it reads, 1 or more; None for all.
        on_read: Called after each some hundred records, with their number. It raises an error to end the call.
    """

    max_records: int | None = None
    on_read: Callable[[int], None] = lambda _: None


NO_LIMIT = ScanLimit()


class _PendingPosition(NamedTuple):
    """Position of a message in the order of the pages."""

    due_ms: int
    physical_offset: int
    size: int = 0
    topic_hash: int = 0


class PendingView:
    """Reads pending messages from the files of the delay services. It holds one page and one piece.

    - A message that is released, cancelled or moved between two pages may appear or not.
    - A message whose record cannot be read is pending, too: its release reports it. It is counted and listed, unless
      only the record could tell whether it matches.

    Args:
        delay_stores: The two delay services.
        topics: Returns all topics; two of them may have the same hash.
    """

    def __init__(
        self,
        store: MessageStore,
        delay_stores: Sequence[DelayStore],
        topics: Callable[[], Iterable[str]],
        broker_name: str,
    ) -> None:
        self._delay_stores = delay_stores
        self._lookup = RecordLookup(store)
        self._topics = topics
        self._broker_name = broker_name

    # --- pages ---------------------------------------------------------------------------------

    def page(self, query: PendingQuery, max_count: int, cursor: str | None, limit: ScanLimit = NO_LIMIT) -> PendingPage:
        """See `DelayedMessages.pending`.

        Args:
            limit: At its end the page is shorter, or empty, and has the cursor after the last compared message.
        """
        check_page_size(max_count)
        scan = _ScanWork(limit, query)
        needs_record = self._needs_record(query)
        messages: list[PendingMessage] = []
        last = _after(cursor)
        for block in self._blocks(query, last):
            for position in _positions(_in_order(block)):
                if scan.left < 1:
                    return PendingPage(tuple(messages), _cursor_text(last))
                scan.count(1)
                message = self._message(position, query, needs_record)
                last = position
                if message is None:
                    continue
                if len(messages) == max_count:
                    return PendingPage(tuple(messages), cursor_after(messages[-1]))
                messages.append(message)
        return PendingPage(tuple(messages), None)

    def _message(self, position: _PendingPosition, query: PendingQuery, needs_record: bool) -> PendingMessage | None:
        """Return a message for a page; None if it does not match."""
        record = self._lookup.at(position.physical_offset, position.size)
        if record is None:
            if needs_record or (query.topic is not None and not position.topic_hash):
                return None
            topic = query.topic or ""
            handle = handle_of(topic, self._broker_name, b"", position.due_ms, position.physical_offset)
            return PendingMessage(topic=topic, msg_id="", deliver_ms=position.due_ms, handle=handle)
        if not _matches(record, query):
            return None
        properties = decode_properties(record.properties_bytes)
        topic = properties.get(Property.REAL_TOPIC, "")
        raw = record.properties_bytes
        return PendingMessage(
            topic=topic,
            msg_id=properties.get(Property.UNIQ_KEY, ""),
            tags=properties.get(Property.TAGS),
            keys=properties.get(Property.KEYS),
            deliver_ms=position.due_ms,
            delay_level=record.queue_id + 1 if record.topic == SCHEDULE_TOPIC else 0,
            roll_count=max(parse_number(properties.get(Property.TIMER_ROLL_TIMES)) or 0, 0),
            born_timestamp=record.born_timestamp,
            store_timestamp=record.store_timestamp,
            body_size=len(record.body),
            handle=handle_of(topic, self._broker_name, raw, position.due_ms, position.physical_offset),
            pending_key=properties.get(Property.PENDING_KEY),
        )

    # --- counts --------------------------------------------------------------------------------

    def count(self, query: PendingQuery, bucket_ms: int, limit: ScanLimit = NO_LIMIT) -> PendingCounts:
        """See `DelayedMessages.count_pending`."""
        return self.count_step(query, bucket_ms, None, limit)[0]

    def count_step(
        self,
        query: PendingQuery,
        bucket_ms: int,
        cursor: str | None,
        limit: ScanLimit = NO_LIMIT,
        *,
        max_buckets: int | None = None,
    ) -> tuple[PendingCounts, str | None]:
        """Count the messages after *cursor*, up to *limit*. Return also the next cursor, None at the end."""
        if bucket_ms < 1:
            raise MessageError(f"the span to count by must be 1 ms or more, got {bucket_ms}")
        counts: Counter[int] = Counter()
        scan = _ScanWork(limit, query)
        needs_record = self._needs_record(query)
        end: str | None = None
        for block in self._blocks(query, _after(cursor)):
            rows = block
            scan.count_rows(len(rows))
            if needs_record or query.topic is not None:
                rows, end = self._matching(block, query, scan, needs_record=needs_record)
            starts, sizes = np.unique(rows["due_ms"] // bucket_ms * bucket_ms, return_counts=True)
            counts.update(dict(zip(starts.tolist(), sizes.tolist(), strict=True)))
            if max_buckets is not None and len(counts) > max_buckets:
                raise MessageError(
                    f"the counts have more than {max_buckets} spans of {format_ms(bucket_ms)}; count by a longer span, "
                    "or between two times"
                )
            if end is None and scan.left < 1:
                end = _cursor_text(_PendingPosition(int(block["due_ms"].max()), _LAST_OFFSET))
            if end is not None:
                break
        return PendingCounts(counts.total(), dict(sorted(counts.items()))), end

    def _matching(
        self, rows: np.ndarray, query: PendingQuery, scan: _ScanWork, *, needs_record: bool
    ) -> tuple[np.ndarray, str | None]:
        """Return the rows whose messages match, and a cursor if the scan ended before the last of them."""
        rows = _in_order(rows)
        unknown = np.flatnonzero(needs_record | (rows["topic_hash"] == 0))
        end = None
        if len(unknown) > max(scan.left, 1):
            rows = rows[: unknown[max(scan.left, 1)]]
            unknown = unknown[: max(scan.left, 1)]
            end = _cursor_text(next(_positions(rows[-1:])))
        others = []
        for position in _positions(rows[unknown]):
            scan.count(1)
            others.append(not self._matches_at(position, query))
        return np.delete(rows, unknown[others]), end

    # --- positions -----------------------------------------------------------------------------

    def positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> np.ndarray:
        """Return where the records of pending messages are: an array of `PENDING_DTYPE`, by due time and offset.

        Only the times of the query and, if it does not cost reading records, its topic are compared: the reader of the
        records compares the rest.

        Args:
            after: Due time and physical offset of the last position that the caller has; (-1, -1) for the first ones.
        """
        found, count = [np.empty(0, PENDING_DTYPE)], 0
        for block in self._blocks(query, _PendingPosition(*after)):
            found.append(_in_order(block))
            count += len(block)
            if count >= max_count:
                break
        return np.concatenate(found)[:max_count]

    # --- pages and counts ----------------------------------------------------------------------

    def _needs_record(self, query: PendingQuery) -> bool:
        """Return True if only the record of a message tells whether it matches.

        Else its row does: it has the hash of the topic. Two topics may share one.
        """
        if (query.tag, query.key, query.namespace, query.with_property) != (None,) * 4:
            return True
        if (topic := query.topic) is None:
            return False
        wanted = java_string_hash(topic)
        return any(other != topic and java_string_hash(other) == wanted for other in self._topics())

    def _matches_at(self, position: _PendingPosition, query: PendingQuery) -> bool:
        record = self._lookup.at(position.physical_offset, position.size)
        return record is not None and _matches(record, query)

    def _blocks(self, query: PendingQuery, after: _PendingPosition) -> Iterator[np.ndarray]:
        """Yield the rows of a query after a position, block by block: no row of a block is due after one of the next.

        Messages of one due time are in one block. Inside of it the rows have any order.
        """
        waiting = np.empty(0, PENDING_DTYPE)
        for piece in self._pieces(query, after.due_ms):
            is_complete = waiting["due_ms"] < piece.floor_ms
            if is_complete.any():
                yield waiting[is_complete]
                waiting = waiting[~is_complete]
            due_ms, offsets = piece.rows["due_ms"], piece.rows["physical_offset"]
            is_later = (due_ms > after.due_ms) | ((due_ms == after.due_ms) & (offsets > after.physical_offset))
            waiting = np.concatenate([waiting, piece.rows[is_later]])
        if len(waiting):
            yield waiting

    def _pieces(self, query: PendingQuery, from_ms: int) -> Iterator[PendingPiece]:
        """Yield what is pending in the query's span of time, floors ascending."""
        after_ms = max(from_ms, query.after_ms or 0, 0)
        before_ms = _END_OF_TIME_MS if query.before_ms is None else query.before_ms
        if query.key is not None:
            newest = min(query.newest or MAX_RECORDS_OF_KEY, MAX_RECORDS_OF_KEY)
            yield PendingPiece(after_ms, self._rows_of_key(query.key, newest, after_ms, before_ms))
            return
        pieces = [delay_store.pending(after_ms, before_ms) for delay_store in self._delay_stores]
        wanted = None if query.topic is None else java_string_hash(query.topic)
        for piece in heapq.merge(*pieces, key=lambda piece: piece.floor_ms):
            rows = piece.rows
            if wanted is not None:
                rows = rows[(rows["topic_hash"] == wanted) | (rows["topic_hash"] == 0)]
            yield PendingPiece(piece.floor_ms, rows)

    def _rows_of_key(self, key: str, newest: int, after_ms: int, before_ms: int) -> np.ndarray:
        rows = []
        for delay_store in self._delay_stores:
            for record in self._lookup.by_key(delay_store.source_topic, key, newest):
                with delay_store.lock:
                    delay_store.catch_up()
                    entry = delay_store.find(record)
                if entry is not None and after_ms <= entry.due_ms < before_ms:
                    rows.append((entry.due_ms, record.physical_offset, record.total_size, 0))
        return np.array(rows, PENDING_DTYPE)


class _ScanWork:
    """The work of one call, up to its limit.

    Attributes:
        left: Records that it may still read.
    """

    def __init__(self, limit: ScanLimit, query: PendingQuery) -> None:
        # The index has a limit of its own: a step by key would look up all of them again.
        self.left = _END_OF_TIME_MS if limit.max_records is None or query.key is not None else limit.max_records
        self._on_read = limit.on_read
        self._unreported = 0

    def count(self, records: int) -> None:
        """Count records that are read."""
        self.left -= records
        self._unreported += records
        if self._unreported >= _RECORDS_PER_REPORT:
            unreported, self._unreported = self._unreported, 0
            self._on_read(unreported)

    def count_rows(self, rows: int) -> None:
        """Count rows that are compared without their records."""
        self.count(rows // _ROWS_PER_RECORD)


def cursor_after(message: PendingMessage) -> str:
    """Return the cursor of the page that starts after *message*, a message of a page of this broker."""
    return f"{message.deliver_ms}-{decode_handle(message.handle).physical_offset}"


def _cursor_text(position: _PendingPosition) -> str:
    return f"{position.due_ms}-{position.physical_offset}"


def _after(cursor: str | None) -> _PendingPosition:
    return _PendingPosition(-1, -1) if cursor is None else _parse_cursor(cursor)


def _in_order(rows: np.ndarray) -> np.ndarray:
    in_order: np.ndarray = rows[np.lexsort((rows["physical_offset"], rows["due_ms"]))]
    return in_order


def _positions(rows: np.ndarray) -> Iterator[_PendingPosition]:
    columns = (rows[name].tolist() for name in rows.dtype.names or ())
    return map(_PendingPosition, *columns)


def _matches(record: StoredRecord, query: PendingQuery) -> bool:
    """Return True if a pending record matches *query*. Its due time was compared before."""
    properties = record.properties_bytes
    if is_marker(record):
        return False
    topic = find_property(properties, REAL_TOPIC) or ""
    if query.topic is not None and topic != query.topic:
        return False
    if query.namespace is not None and not is_in_namespace(topic, query.namespace):
        return False
    if query.tag is not None and find_property(properties, TAGS) != query.tag:
        return False
    if query.with_property is not None:
        name, value = query.with_property
        if find_property(properties, name.encode()) != value:
            return False
    return query.key is None or has_key(record, query.key)


def _parse_cursor(cursor: str) -> _PendingPosition:
    due_ms, _, physical_offset = map(parse_number, cursor.partition("-"))
    if due_ms is None or physical_offset is None:
        raise MessageError(f"{shown(cursor)} is not a cursor; pass PendingPage.cursor unchanged")
    return _PendingPosition(due_ms, physical_offset)
