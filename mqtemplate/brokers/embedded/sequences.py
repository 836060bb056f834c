"""Sequenced sends of an embedded broker: storing, and the table of the numbers that are stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mqtemplate.brokers.embedded.draft import DraftMaker
from mqtemplate.errors import SendError, SendTimeoutError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, MessageQueue, Property, SendSequence, copy_properties
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import EncodedMessage, RecordDraft, StoredRecord, pack_host
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import SEQUENCE, find_property, property_format
from mqtemplate.results import SequencedResult
from mqtemplate.store.files.json_files import VersionedTable, format_errors
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.broker")

_FILE = "config/sendSequences.json"
_MAX_PUT_BYTES = 1 << 20
_MAX_HEADER_BYTES = 400
"""More than a record has besides body and properties, with the longest topic."""
_SEQUENCE = property_format(SEQUENCE, b"%b %d")


@dataclass(slots=True)
class _Application:
    """Newest version of an application.

    Attributes:
        used_ms: Time of the last send, to remove the application that is unused for the longest time.
        next: Partition -> number of its next message.
    """

    version: int
    used_ms: int
    next: dict[int, int] = field(default_factory=dict)


class SequenceTable:
    """The next number of each partition, for the newest version of each application. Not thread-safe.

    Args:
        max_partitions: Most partitions in the table. Beyond it, the applications that are unused for the longest time
            are removed, but never the newest one: repeats of theirs would be stored again.
    """

    def __init__(self, max_partitions: int) -> None:
        self._max_partitions = max_partitions
        self._applications: dict[str, _Application] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of partitions."""
        return self._count

    def count_repeated(self, sequence: SendSequence, count: int) -> int:
        """Return how many of the next *count* messages are stored already.

        Raises:
            SendError: Numbers were left out.
        """
        known = self._applications.get(sequence.app_id)
        if known is None or known.version < sequence.version:
            return 0
        if known.version > sequence.version:
            return count
        expected = known.next.get(sequence.partition)
        if expected is not None and sequence.first > expected:
            raise SendError(
                f"partition {sequence.partition} of {sequence.app_id!r}, version {sequence.version}: the next number "
                f"is {expected}, got {sequence.first}; send the partition again from number 0"
            )
        return 0 if expected is None else min(expected - sequence.first, count)

    def advance(self, app_id: str, version: int, partition: int, following: int, now_ms: int) -> None:
        """Note that all messages of a partition before the number *following* are stored; it never goes back."""
        known = self._applications.get(app_id)
        if known is None or known.version < version:
            self._remove(app_id)
            known = self._applications[app_id] = _Application(version, now_ms)
        elif known.version > version:
            return
        known.used_ms = max(known.used_ms, now_ms)
        if partition not in known.next:
            self._count += 1
            known.next[partition] = 0
            if self._count > self._max_partitions:
                self._remove_unused(app_id)
        known.next[partition] = max(known.next[partition], following)

    def _remove(self, app_id: str) -> None:
        removed = self._applications.pop(app_id, None)
        self._count -= 0 if removed is None else len(removed.next)

    def _remove_unused(self, app_id: str) -> None:
        others = sorted((known.used_ms, name) for name, known in self._applications.items() if name != app_id)
        for used_ms, name in others:
            if self._count <= self._max_partitions:
                break
            self._remove(name)
            _log.warning("sequence.removed", app_id=name, unused_since_ms=used_ms, max_partitions=self._max_partitions)

    def to_json(self) -> dict[str, object]:
        """Return the table for its file."""
        return {
            app_id: {
                "version": known.version,
                "usedMs": known.used_ms,
                "next": {str(k): v for k, v in known.next.items()},
            }
            for app_id, known in self._applications.items()
        }


class SequencedSender:
    """Stores the messages of sequenced sends once. It follows the log: see `LogFollower`.

    - Each message has its number as a property, and the flag `SysFlag.SEQUENCED`. So the log has the whole state.
    - ``config/sendSequences.json`` has the table as of the last checkpoint. A start reads the records after it.
    - Messages of a send are stored in their order. A process that is killed in between has stored the first of them.
    """

    def __init__(self, store: MessageStore, drafts: DraftMaker, max_partitions: int) -> None:
        self._store = store
        self._drafts = drafts
        self._file = VersionedTable(store.store_files, store.clock, _FILE, "applications")
        self._lock = threading.Lock()
        self._table = SequenceTable(max_partitions)
        self._is_dirty = False
        store.metrics.gauge("sequence.partitions", lambda: len(self._table))
        self._repeated = store.metrics.counter("sequence.repeated")

    # --- LogFollower ---------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Read the file. The records after the checkpoint follow."""
        table = self._file.load()
        with format_errors(self._file.name):
            for app_id, known in table.get("applications", {}).items():
                for partition, following in known["next"].items():
                    self._table.advance(app_id, known["version"], int(partition), following, known["usedMs"])
        return None

    def replay(self, record: StoredRecord) -> None:
        """Note the number of a record."""
        if record.sys_flag & SysFlag.SEQUENCED == 0:
            return
        value = find_property(record.properties_bytes, SEQUENCE)
        if value is not None:
            app_id, version, partition, number = value.split(" ")
            self._table.advance(app_id, int(version), int(partition), int(number) + 1, record.store_timestamp)
            self._is_dirty = True

    def persist(self) -> int | None:
        """Write the table, once the messages in it are durable: a number must not outlive its message."""
        # With the lock: between a record and its number in the table there must be no checkpoint after the record.
        with self._lock:
            if not self._is_dirty:
                return None
            self._is_dirty = False
            applications = self._table.to_json()
        try:
            self._store.flush()
            self._file.save(applications=applications)
        except BaseException:
            self._is_dirty = True
            raise
        return None

    # --- sending -------------------------------------------------------------------------------

    def put(
        self,
        messages: Sequence[tuple[Message | EncodedMessage, int]],
        sequence: SendSequence,
        complete: Callable[[RecordDraft], None] = lambda draft: None,
    ) -> tuple[SequencedResult, int, frozenset[str]]:
        """Store those messages, each with its queue id, that are not stored yet.

        Args:
            complete: Sets further fields of a record.

        Returns:
            The result, the physical offset that must be durable, and the topics whose readers must be woken then.

        Raises:
            MessageError: A message cannot be stored; none is.
            SendError: Numbers were left out, or the store cannot store a record now.
        """
        with self._lock:
            repeated = self._table.count_repeated(sequence, len(messages))
            drafts = self._make(messages[repeated:], sequence.after(repeated), complete)
            number = sequence.first + repeated
            try:
                for part in self._parts(drafts):
                    self._store.put_all(part)
                    number += len(part)
                    self._is_dirty = True
                    self._table.advance(
                        sequence.app_id, sequence.version, sequence.partition, number, self._store.clock.now_ms()
                    )
            except StoreError as exc:
                raise SendError(f"not stored: {exc}") from exc
        self._repeated.add(repeated)
        result = SequencedResult(len(drafts), repeated)
        # The first sender of a repeated message may not have waited for the disk: so this one waits for all of it.
        return result, self._store.end_offset, frozenset(draft.topic for draft in drafts)

    def _make(
        self,
        messages: Sequence[tuple[Message | EncodedMessage, int]],
        sequence: SendSequence,
        complete: Callable[[RecordDraft], None],
    ) -> list[RecordDraft]:
        now_ms, drafts = self._store.clock.now_ms(), []
        prefix = f"{sequence.app_id} {sequence.version} {sequence.partition}".encode()
        for number, (message, queue_id) in enumerate(messages, sequence.first):
            added = _SEQUENCE % (prefix, number)
            if isinstance(message, EncodedMessage):
                draft = self._drafts.make_encoded(message, queue_id, now_ms, added)
            else:
                draft = self._make_one(message, queue_id, now_ms, added)
            draft.sys_flag |= SysFlag.SEQUENCED
            complete(draft)
            drafts.append(draft)
        return drafts

    def _make_one(self, message: Message, queue_id: int, now_ms: int, added: bytes) -> RecordDraft:
        original, times = message, parse_number(message.properties.get(Property.RECONSUME_TIME)) or 0
        if Property.SEQUENCE in message.properties or Property.RECONSUME_TIME in message.properties:
            properties = copy_properties(message.properties, Property.SEQUENCE, Property.RECONSUME_TIME)
            message = Message(message.topic, message.body, properties, message.flag)
        draft, _ = self._drafts.make(message, queue_id, now_ms)
        draft.properties += added
        draft.reconsume_times = times if 0 <= times < 1 << 31 else 0  # a field of 32 bits
        if isinstance(original, MessageExt):  # a copy of a stored message, such as a retry
            draft.reconsume_times, draft.born_timestamp = original.reconsume_times, original.born_timestamp
            draft.born_host = pack_host(original.born_host)
        return draft

    def _parts(self, drafts: Sequence[RecordDraft]) -> list[list[RecordDraft]]:
        """Divide records into parts that fit into a file of the log."""
        most = min(_MAX_PUT_BYTES, self._store.sizes.commit_log // 2)
        parts: list[list[RecordDraft]] = []
        left = 0
        for draft in drafts:
            size = len(draft.body) + len(draft.properties) + _MAX_HEADER_BYTES
            if size > left:
                parts.append([])
                left = most
            parts[-1].append(draft)
            left -= size
        return parts


@dataclass(frozen=True, slots=True)
class LocalSequencedSends:
    """`Broker.send_sequenced` of an embedded broker.

    Attributes:
        select: Checks a queue, or raises `DestinationError`.
    """

    sender: SequencedSender
    store: MessageStore
    select: Callable[[str, MessageQueue], MessageQueue]

    def send(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int
    ) -> SequencedResult:
        """Store the messages and wait until they are durable.

        Raises:
            SendTimeoutError: They are stored, but were not flushed in time; a repeat is harmless.
        """
        for topic, queue in {(message.topic, queue) for message, queue in messages}:
            self.select(topic, queue)
        result, end, topics = self.sender.put([(message, queue.queue_id) for message, queue in messages], sequence)
        if not self.store.confirm(end, topics, timeout_ms):
            raise SendTimeoutError("the messages are stored, but were not flushed in time; send them again")
        return result
