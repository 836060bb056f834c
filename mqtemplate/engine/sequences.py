"""Sequenced sends: storing, and the table of the numbers that are stored."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mqtemplate.engine.drafts import DraftMaker
from mqtemplate.errors import MessageError, SendError, StoreError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import Message, MessageExt, Property, SendSequence, copy_properties
from mqtemplate.numbers import parse_number
from mqtemplate.record.codec import Drafts, EncodedMessage, RecordDraft, StoredRecord, pack_host
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import SEQUENCE, find_property, property_format
from mqtemplate.results import SequencedResult
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import VersionedTable, format_errors

_log = get_logger("mqtemplate.broker")

_FILE = "config/sendSequences.json"
_MAX_PUT_BYTES = 1 << 20
_MAX_HEADER_BYTES = 400
"""More than a record has besides body and properties, with the longest topic."""
_SEQUENCE = property_format(SEQUENCE, b"%b %d")
_SEQUENCE_TEXT = re.compile(r"([^ ]+) (\d{1,19}) (\d{1,10}) (\d{1,19})", re.ASCII)
_MAX_LONG, _MAX_INT = 2**63 - 1, 2**31 - 1
_ACCOUNT_SEPARATOR = "\x1f"  # not printable, so no application id has it


def application_key(app_id: str, account: str) -> str:
    """Return the key of an application in the table: each account has its own applications.

    Without accounts it is the application id. The records have the key too, and consumers read them, so it has a digest
    of the account's access key.
    """
    return f"{app_id}{_ACCOUNT_SEPARATOR}{hashlib.sha256(account.encode()).hexdigest()[:16]}" if account else app_id


def read_sequence(text: str) -> tuple[str, int, int, int] | None:
    """Return application key, version, partition and number in the property of a record; None if it is not valid."""
    found = _SEQUENCE_TEXT.fullmatch(text)
    if found is None:
        return None
    version, partition, number = int(found[2]), int(found[3]), int(found[4])
    is_valid = version <= _MAX_LONG and partition <= _MAX_INT and number <= _MAX_LONG
    return (found[1], version, partition, number) if is_valid else None


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

    Applications have the key that `application_key` returns.

    Args:
        max_partitions: Most partitions in the table. Beyond it, the account with the most partitions loses the
            applications that it has not used for the longest time, but never the newest one: repeats of theirs would be
            stored again.
    """

    def __init__(self, max_partitions: int) -> None:
        self._max_partitions = max_partitions
        self._applications: dict[str, _Application] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of partitions."""
        return self._count

    def count_repeated(self, sequence: SendSequence, count: int, key: str | None = None) -> int:
        """Return how many of the next *count* messages are stored already.

        Args:
            key: Key of the application; None without an account.

        Raises:
            SendError: Numbers were left out.
        """
        known = self._applications.get(sequence.app_id if key is None else key)
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

    def advance(self, key: str, version: int, partition: int, following: int, now_ms: int) -> None:
        """Note that all messages of a partition before the number *following* are stored; it never goes back."""
        known = self._applications.get(key)
        if known is None or known.version < version:
            self._remove(key)
            known = self._applications[key] = _Application(version, now_ms)
        elif known.version > version:
            return
        known.used_ms = max(known.used_ms, now_ms)
        if partition not in known.next:
            self._count += 1
            known.next[partition] = 0
            if self._count > self._max_partitions:
                self._remove_unused(key)
        known.next[partition] = max(known.next[partition], following)

    def _remove(self, key: str) -> None:
        removed = self._applications.pop(key, None)
        self._count -= 0 if removed is None else len(removed.next)

    def _remove_unused(self, newest: str) -> None:
        """Remove applications of the account that has the most partitions: one account must not displace others."""
        while self._count > self._max_partitions:
            counts = Counter[str]()
            for key, known in self._applications.items():
                counts[_account_of(key)] += len(known.next)
            for account, _ in counts.most_common():
                others = [key for key in self._applications if key != newest and _account_of(key) == account]
                if others:
                    break
            else:
                return
            key = min(others, key=lambda other: (self._applications[other].used_ms, other))
            unused_since_ms = self._applications[key].used_ms
            self._remove(key)
            _log.warning(
                "sequence.removed",
                app_id=key.partition(_ACCOUNT_SEPARATOR)[0],
                unused_since_ms=unused_since_ms,
                max_partitions=self._max_partitions,
            )

    def to_json(self) -> dict[str, object]:
        """Return the table for its file."""
        return {
            key: {
                "version": known.version,
                "usedMs": known.used_ms,
                "next": {str(k): v for k, v in known.next.items()},
            }
            for key, known in self._applications.items()
        }


def _account_of(key: str) -> str:
    return key.partition(_ACCOUNT_SEPARATOR)[2]


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
        self._replay_log = LimitedLog(_log, store.clock.now_ms)

    # --- LogFollower ---------------------------------------------------------------------------

    def replay_from(self) -> int | None:
        """Read the file. The records after the checkpoint follow."""
        table = self._file.load()
        with format_errors(self._file.name):
            for key, known in table.get("applications", {}).items():
                for partition, following in known["next"].items():
                    self._table.advance(key, known["version"], int(partition), following, known["usedMs"])
        return None

    def replay(self, record: StoredRecord) -> None:
        """Note the number of a record."""
        if record.sys_flag & SysFlag.SEQUENCED == 0:
            return
        value = find_property(record.properties_bytes, SEQUENCE)
        if value is None:
            return
        sequence = read_sequence(value)
        if sequence is None:  # an earlier version of this library stored what a client had sent
            at = record.physical_offset
            self._replay_log.warning("sequence.unreadable", physical_offset=at, topic=record.topic, value=value[:80])
            return
        key, version, partition, number = sequence
        self._table.advance(key, version, partition, number + 1, record.store_timestamp)
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
        account: str = "",
    ) -> tuple[SequencedResult, int, frozenset[str]]:
        """Store those messages, each with its queue id, that are not stored yet.

        Args:
            complete: Sets further fields of a record.
            account: Account of a client. Equal application ids of two accounts name two applications.

        Returns:
            The result, the physical offset that must be durable, and the topics whose readers must be woken then.

        Raises:
            MessageError: A message cannot be stored; none is.
            SendError: Numbers were left out, or the store cannot store a record now.
        """
        key = application_key(sequence.app_id, account)
        with self._lock:
            repeated = self._table.count_repeated(sequence, len(messages), key)
            drafts = self._make(messages[repeated:], key, sequence.after(repeated), complete)
            number = sequence.first + repeated
            try:
                for part in self._parts(drafts):
                    self._store.put(Drafts(part))
                    number += len(part)
                    self._is_dirty = True
                    now_ms = self._store.clock.now_ms()
                    self._table.advance(key, sequence.version, sequence.partition, number, now_ms)
            except StoreError as exc:
                raise SendError(f"not stored: {exc}") from exc
        self._repeated.add(repeated)
        result = SequencedResult(len(drafts), repeated)
        # The first sender of a repeated message may not have waited for the disk: so this one waits for all of it.
        return result, self._store.end_offset, frozenset(draft.topic for draft in drafts)

    def _make(
        self,
        messages: Sequence[tuple[Message | EncodedMessage, int]],
        key: str,
        sequence: SendSequence,
        complete: Callable[[RecordDraft], None],
    ) -> list[RecordDraft]:
        now_ms, drafts = self._store.clock.now_ms(), []
        prefix = f"{key} {sequence.version} {sequence.partition}".encode()
        for number, (message, queue_id) in enumerate(messages, sequence.first):
            added = _SEQUENCE % (prefix, number)
            if isinstance(message, EncodedMessage):
                draft = self._drafts.make_encoded(message, queue_id, now_ms, added)
            else:
                draft = self._make_one(message, queue_id, now_ms, added)
            draft.sys_flag |= SysFlag.SEQUENCED
            if draft.pending is not None:
                raise MessageError(
                    f"message {number} of a sequenced send has the pending key {draft.pending.key!r}: the broker could "
                    "not tell a repeat from a new decision; send it without a sequence, or without pending_key"
                )
            complete(draft)
            drafts.append(draft)
        return drafts

    def _make_one(self, message: Message, queue_id: int, now_ms: int, added: bytes) -> RecordDraft:
        original, times = message, parse_number(message.properties.get(Property.RECONSUME_TIME))
        if times is not None:
            properties = copy_properties(message.properties, Property.RECONSUME_TIME)
            message = Message(message.topic, message.body, properties, message.flag)
        draft, _ = self._drafts.make(message, queue_id, now_ms)
        draft.properties += added
        draft.reconsume_times = min(max(times or 0, 0), _MAX_INT)
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
