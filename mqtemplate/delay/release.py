"""Handing a message over that is due: the copy under its real topic, and how a copy tells of its source.

The commit log is the only truth about progress. A copy keeps, in ``prepared_transaction_offset``, one more than
the physical offset of the record that waited; ordinary records do not use the field. So a recovery sees exactly
which waiting records were handed over already, and appending the copy *is* the hand-over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import structlog

from mqtemplate.delay.release_run import read_rows
from mqtemplate.errors import CorruptRecordError, DestinationError, MessageError
from mqtemplate.java_hash import tags_code
from mqtemplate.message import Property
from mqtemplate.metrics import Histogram
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import (
    LEVEL_DELAY_MS,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    TIMER_DELIVER_MS,
    TIMER_DEQUEUE_MS,
    TIMER_ENQUEUE_MS,
    decode_properties,
    encode_properties,
    find_property,
    property_format,
)
from mqtemplate.record.run import RecordRun, RecordShape
from mqtemplate.store import MessageStore
from mqtemplate.topics import DLQ_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC, check_topic

_log = structlog.stdlib.get_logger("mqtemplate.delay")

DEAD_LETTER_TOPIC = DLQ_TOPIC_PREFIX + "SCHEDULE"
"""Where a waiting message goes that cannot be brought to its real topic."""

MAX_RELEASE_COUNT = 1_000
"""Messages in one append; more that are due wait for the next step."""
_MAX_RELEASE_BYTES = 4 << 20
_SHORTEST_RUN = 32
"""So many of one shape are worth the price of copying them together."""

_KEPT_FLAGS = ~SysFlag.TRANSACTION_MASK
_DELIVER_START = TIMER_DELIVER_MS + NAME_VALUE_SEPARATOR
_ENQUEUE_START = TIMER_ENQUEUE_MS + NAME_VALUE_SEPARATOR
_DELIVER_FORMAT = property_format(TIMER_DELIVER_MS)
_TIMER_FORMAT = property_format(TIMER_ENQUEUE_MS) + property_format(TIMER_DEQUEUE_MS)
_DELIVER_PAIR, _LEVEL_DELAY_PAIR, _REAL_TOPIC_PAIR, _REAL_QID_PAIR = (
    PROPERTY_SEPARATOR + name + NAME_VALUE_SEPARATOR
    for name in (TIMER_DELIVER_MS, LEVEL_DELAY_MS, REAL_TOPIC, REAL_QID)
)
_LONGEST_TAIL = 200  # bytes of properties worth remembering
_HIGHEST_QUEUE_ID = 0x7FFF_FFFF


class PoisonError(Exception):
    """A waiting record that cannot be handed over; the text says why."""


class WaitingRecord(NamedTuple):
    """One record that is due.

    Attributes:
        enqueue_ms: When a timer was put on the wheel; -1 for a level.
        rolls: It is parked, and goes back into the timer topic.
        is_poison: Nobody can tell when it is due.
    """

    due_ms: int
    physical_offset: int
    size: int
    enqueue_ms: int = -1
    rolls: bool = False
    is_poison: bool = False


def _target(properties: bytes) -> tuple[str, int]:
    """The real topic and queue, if they can be what a broker wrote."""
    # Our front door writes the two last, so that what stands there is the same for many messages.
    tail = properties[properties.rfind(_REAL_TOPIC_PAIR) + 1 :]
    if len(tail) <= _LONGEST_TAIL and _REAL_QID_PAIR in tail:
        return _target_in_tail(tail)
    return _read_target(properties)


def _read_target(properties: bytes) -> tuple[str, int]:
    topic, queue_id = find_property(properties, REAL_TOPIC), find_property(properties, REAL_QID)
    if not topic or topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
        raise PoisonError(f"its real topic is {topic!r}")
    try:
        check_topic(topic)
    except DestinationError as exc:
        raise PoisonError(f"its real topic is no topic: {exc}") from exc
    if not (queue_id and queue_id.isascii() and queue_id.isdecimal() and int(queue_id) <= _HIGHEST_QUEUE_ID):
        raise PoisonError(f"its real queue id is {queue_id!r}")
    return topic, int(queue_id)


_target_in_tail = lru_cache(maxsize=4_096)(_read_target)


@lru_cache(maxsize=4_096)
def _target_behind_delay(tail: bytes) -> tuple[str, int, bytes] | None:
    """The same where properties end as `divert` writes them, from the level's delay on, and that end without it; None
    for another end."""
    rest = tail[tail.find(b"\x02") + 1 :]
    if not rest.startswith(_REAL_TOPIC_PAIR[1:]) or len(tail) > _LONGEST_TAIL:
        return None
    return *_read_target(rest), rest


def released_draft(record: StoredRecord, due_ms: int, stamps: bytes = b"") -> RecordDraft:
    """The copy of a waiting record for its real topic.

    The properties stay as they are, ``DELAY`` and ``REAL_*`` too, as upstream leaves them, but for the level's delay,
    which nobody has a use for any more. The due time is added where it is missing.

    Args:
        stamps: Encoded properties to add.

    Raises:
        PoisonError: Its real topic or queue is missing or is none, or its properties are too many.
    """
    properties = record.properties_bytes
    at = properties.rfind(_LEVEL_DELAY_PAIR) + 1 if record.topic == SCHEDULE_TOPIC else 0
    promised = _target_behind_delay(properties[at:]) if at else None
    if promised is None:
        topic, queue_id = _target(properties)
    else:
        topic, queue_id, tail = promised
        properties = properties[:at] + tail
    if not _tells_due_time(properties):
        stamps += _DELIVER_FORMAT % due_ms
    return RecordDraft(
        topic,
        queue_id,
        record.body,
        _with_stamps(properties, stamps),
        tags_code(find_property(properties, TAGS)),
        -1,
        record.flag,
        record.sys_flag & _KEPT_FLAGS,
        record.born_timestamp,
        record.born_host,
        record.reconsume_times,
        record.physical_offset + 1,
        record.body_crc,
    )


def _tells_due_time(properties: bytes) -> bool:
    return _DELIVER_PAIR in properties or properties.startswith(_DELIVER_START)


def _with_stamps(properties: bytes, stamps: bytes) -> bytes:
    if not stamps or len(properties) + len(stamps) >= MAX_PROPERTIES_BYTES:
        if len(properties) > MAX_PROPERTIES_BYTES:  # RocketMQ's limit is a little higher
            raise PoisonError(f"its properties take {len(properties)} bytes, {MAX_PROPERTIES_BYTES} can be copied")
        return properties  # what only informs must not make a message impossible
    separator = b"" if properties.endswith(b"\x02") or not properties else b"\x02"
    return properties + separator + stamps


def timer_stamps(record: StoredRecord, enqueue_ms: int, now_ms: int) -> bytes:
    """When a timer was put on the wheel and taken off, encoded; nothing for one that has been stamped by a roll."""
    if _ENQUEUE_START in record.properties_bytes:
        return b""
    return _TIMER_FORMAT % (enqueue_ms, now_ms)


def _stamps(record: StoredRecord, item: WaitingRecord, now_ms: int) -> bytes:
    """All that the properties of a released copy have more, if there is room for it."""
    stamps = timer_stamps(record, item.enqueue_ms, now_ms) if item.enqueue_ms >= 0 else b""
    if not _tells_due_time(record.properties_bytes):
        stamps += _DELIVER_FORMAT % item.due_ms
    return stamps


def _stamp_rows(record: StoredRecord, waiting: Sequence[WaitingRecord], now_ms: int) -> np.ndarray | None:
    """The stamps of copies of records like *record*, one row for all or one for each; None if their lengths differ."""
    times = [(item.due_ms, item.enqueue_ms) for item in waiting]
    first = dict(zip(times, waiting, strict=True))
    stamps = {each: _stamps(record, item, now_ms) for each, item in first.items()}
    if len(set(map(len, stamps.values()))) > 1:
        return None
    rows = [stamps[each] for each in times] if len(set(stamps.values())) > 1 else list(stamps.values())[:1]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def _gap(properties: bytes, copied: bytes, stamps: bytes) -> slice | None:
    """Which of *properties* were left out where they were copied with *stamps*; None if more than that was changed."""
    length = len(properties) + len(stamps) - len(copied)
    at = properties.rfind(_LEVEL_DELAY_PAIR) + 1 if length else len(properties)
    kept = properties[:at] + properties[at + length :]
    return slice(at, at + length) if length >= 0 and copied == kept + stamps else None


def rolled_draft(record: StoredRecord, enqueue_ms: int, now_ms: int) -> RecordDraft:
    """The copy of a parked record for the timer topic, where it is put on the wheel again.

    Raises:
        PoisonError: Its properties are too many.
    """
    properties = decode_properties(record.properties_bytes)
    times = properties.get(Property.TIMER_ROLL_TIMES, "0")
    properties[Property.TIMER_ROLL_TIMES] = str(int(times) + 1 if times.isdecimal() else 1)
    properties[Property.TIMER_ENQUEUE_MS] = str(enqueue_ms)
    properties[Property.TIMER_DEQUEUE_MS] = str(now_ms)
    encoded = encode_properties(properties)
    if len(encoded) > MAX_PROPERTIES_BYTES:
        encoded = _with_stamps(record.properties_bytes, b"")
    return copy_of(record, TIMER_TOPIC, 0, encoded)


def dead_letter_draft(record: StoredRecord) -> RecordDraft:
    """The copy of a poisoned record for people to look at; where its properties are too many, without the longest."""
    properties = record.properties_bytes
    if len(properties) > MAX_PROPERTIES_BYTES:
        kept = decode_properties(properties)
        while len(properties) > MAX_PROPERTIES_BYTES:
            del kept[max(kept, key=lambda name: len(kept[name]))]
            properties = encode_properties(kept)
    return copy_of(record, DEAD_LETTER_TOPIC, 0, properties)


def copy_of(record: StoredRecord, topic: str, queue_id: int, properties: bytes) -> RecordDraft:
    """A copy of *record* that takes its place: elsewhere, with other properties, the rest as it is."""
    return RecordDraft(
        topic,
        queue_id,
        record.body,
        properties,
        tags_code=tags_code(find_property(properties, TAGS)),
        flag=record.flag,
        sys_flag=record.sys_flag & _KEPT_FLAGS,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.physical_offset + 1,
        body_crc=record.body_crc,
    )


def released_source(record: StoredRecord) -> int | None:
    """The physical offset of the waiting record that this one was copied from; None if it is no such copy.

    A committed transaction uses the same field, and says so in its flags.
    """
    if record.prepared_transaction_offset <= 0 or record.sys_flag & SysFlag.TRANSACTION_MASK:
        return None
    is_copy = record.topic in (TIMER_TOPIC, DEAD_LETTER_TOPIC, find_property(record.properties_bytes, REAL_TOPIC))
    return record.prepared_transaction_offset - 1 if is_copy else None


def observe_all(histogram: Histogram, values: np.ndarray) -> None:
    """`Histogram.observe` each of *values*, at the price of a few."""
    values = np.maximum(values, 0)
    bits = np.frexp(values.astype(np.float64))[1]  # as int.bit_length
    for size in np.unique(bits).tolist():
        same = values[bits == size]
        # the same buckets, and the same sum, by two values that are almost their mean
        mean, rest = divmod(int(same.sum()), len(same))
        histogram.observe(mean, len(same) - rest)
        histogram.observe(mean + 1, rest)


def count_copies(copies: Iterable[RecordDraft | RecordRun]) -> int:
    """How many records they are."""
    return sum([1 if isinstance(each, RecordDraft) else len(each) for each in copies])


class Releaser:
    """Turns records that are due into copies, and appends those.

    A record that cannot be handed over is logged with its offsets, counted, and copied to the dead-letter topic if
    it can be read at all; it holds nobody up.

    Args:
        source_topic: The topic the records wait in; a record of another one is not touched.

    Attributes:
        poison_count: Records so far that were not handed over.
        dead: Physical offsets of records that have a copy in the dead-letter topic already.
    """

    def __init__(self, store: MessageStore, source_topic: str) -> None:
        self._store = store
        self._source_topic = source_topic
        self._max_bytes = min(_MAX_RELEASE_BYTES, store.settings.mapped_file_size_commit_log // 4)
        self.poison_count = 0
        self._poison = store.metrics.counter("delay.poison")
        self.dead: set[int] = set()

    def fitting(self, sizes: Sequence[int]) -> int:
        """How many records of these sizes go into one append; at least one."""
        total = 0
        for count, size in enumerate(sizes[:MAX_RELEASE_COUNT]):
            total += size + 256  # what a copy may have more: its topic's name, stamps
            if total > self._max_bytes and count:
                return count
        return min(len(sizes), MAX_RELEASE_COUNT)

    def drafts(self, waiting: Sequence[WaitingRecord], now_ms: int) -> list[RecordDraft | RecordRun]:
        """The copies of these records, in their order; those of a spike, one like the other, as runs."""
        copies: list[RecordDraft | RecordRun] = []
        sizes = np.array([0 if item.rolls or item.is_poison else item.size for item in waiting], np.int64)
        bounds = np.flatnonzero(np.diff(sizes, prepend=-1, append=-1)).tolist()
        for begin, end in pairwise(bounds):
            of_one_size = waiting[begin:end]
            copies += self._copies(of_one_size, now_ms) if sizes[begin] else self._one_by_one(of_one_size, now_ms)
        return copies

    def _copies(self, waiting: Sequence[WaitingRecord], now_ms: int) -> list[RecordDraft | RecordRun]:
        """The copies of records of one size. Where runs are short or none, they are looked for less and less."""
        copies: list[RecordDraft | RecordRun] = []
        at, in_view, passed_over = 0, len(waiting), _SHORTEST_RUN
        while at < len(waiting):
            run = self._run(waiting[at : at + in_view], now_ms)
            if run is None:
                copies += self._one_by_one(waiting[at : at + passed_over], now_ms)
                at += passed_over
                in_view, passed_over = _SHORTEST_RUN, 2 * passed_over
            else:
                copies.append(run)
                at += len(run)
                in_view, passed_over = 4 * len(run), _SHORTEST_RUN
        return copies

    def _one_by_one(self, waiting: Sequence[WaitingRecord], now_ms: int) -> list[RecordDraft]:
        drafts = [self._draft(item, now_ms) for item in waiting]
        return [draft for draft in drafts if draft is not None]

    def _run(self, waiting: Sequence[WaitingRecord], now_ms: int) -> RecordRun | None:
        """The copies of the first of these records, all of one size, as long as they have one shape; None for few.

        Whatever is wrong with one of them ends the run; `_draft` meets it then, and tells.
        """
        if len(waiting) < _SHORTEST_RUN:
            return None
        item = waiting[0]
        try:
            record = self._store.read(item.physical_offset, item.size)
            stamps = timer_stamps(record, item.enqueue_ms, now_ms) if item.enqueue_ms >= 0 else b""
            draft = released_draft(record, item.due_ms, stamps)
        except (CorruptRecordError, PoisonError):
            return None
        offsets = np.array([each.physical_offset for each in waiting], np.int64)
        rows = read_rows(self._store, offsets, item.size)
        if rows is None or record.topic != self._source_topic:
            return None
        shape = RecordShape(record, rows[0].tobytes())
        gap = _gap(record.properties_bytes, draft.properties, _stamps(record, item, now_ms))
        count = shape.count_matching(rows, offsets) if gap is not None else 0
        stamp_rows = _stamp_rows(record, waiting[:count], now_ms) if count >= _SHORTEST_RUN else None
        if gap is None or stamp_rows is None:
            return None
        columns = slice(shape.properties_at + gap.start, shape.properties_at + gap.stop)
        return RecordRun(draft, shape, rows[:count], columns, stamp_rows)

    def _draft(self, item: WaitingRecord, now_ms: int) -> RecordDraft | None:
        try:
            record = self._store.read(item.physical_offset, item.size)
        except CorruptRecordError as exc:
            self._report(item, None, exc.reason)
            return None
        if record.topic != self._source_topic:
            self._report(item, None, f"the record there is one of topic {record.topic}")
            return None
        try:
            if item.is_poison:
                raise PoisonError("its deliver time is missing or no number")
            if item.rolls:
                return rolled_draft(record, item.enqueue_ms, now_ms)
            stamps = timer_stamps(record, item.enqueue_ms, now_ms) if item.enqueue_ms >= 0 else b""
            return released_draft(record, item.due_ms, stamps)
        except PoisonError as exc:
            self._report(item, record, str(exc))
            return None if item.physical_offset in self.dead else dead_letter_draft(record)

    def append(self, copies: Sequence[RecordDraft | RecordRun]) -> int:
        """Append copies, all or none; gives the physical offset behind them, for `MessageStore.confirm`.

        Raises:
            StoreFullError: There is no room; nothing was handed over, try again.
        """
        drafts = [each for each in copies if isinstance(each, RecordDraft)]
        if len(drafts) < len(copies):
            return self._store.put_all(copies)[-1].end
        try:
            return self._store.put_all(drafts)[-1].end
        except MessageError as exc:
            if len(drafts) > 1:
                raise
            self._count_poison()
            _log.error(
                "delay.poison",
                topic=drafts[0].topic,
                source_offset=drafts[0].prepared_transaction_offset - 1,
                reason=str(exc),
            )
            return self._store.end_offset

    def confirm(self, end: int, topics: Collection[str], *, has_more: bool) -> None:
        """Wake the readers of *topics* when what lies before *end* is as safe as the flush mode says.

        Amid a spike nobody waits for the disk: what is due next is copied while the last copies are flushed.
        """
        if has_more:
            self._store.confirm_async(end, topics)
        else:
            self._store.confirm(end, topics)

    def _count_poison(self) -> None:
        self.poison_count += 1
        self._poison.add()

    def _report(self, item: WaitingRecord, record: StoredRecord | None, reason: str) -> None:
        self._count_poison()
        _log.error(
            "delay.poison",
            reason=reason,
            topic=self._source_topic,
            physical_offset=item.physical_offset,
            queue=None if record is None else record.queue_id,
            offset=None if record is None else record.queue_offset,
            due=item.due_ms,
            dead_letter_topic=None if record is None else DEAD_LETTER_TOPIC,
        )
