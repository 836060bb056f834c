"""Search for messages by id and by key in an embedded broker."""

from __future__ import annotations

from collections.abc import Iterator

from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress, MessageExt, parse_offset_msg_id
from mqtemplate.record.codec import StoredRecord, pack_host
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.broker")


class MessageFinder:
    """Finds messages by id or key. It finds only messages that are as durable as the flush mode guarantees.

    A delayed message is found under the system topic that it is stored in. It is found under its real topic once it is
    delivered.

    Args:
        host: The address in the message ids of this broker.
        max_body_bytes: Largest body that is decompressed.
    """

    def __init__(self, store: MessageStore, broker_name: str, host: HostAddress, max_body_bytes: int) -> None:
        self._store = store
        self._broker_name = broker_name
        self._host = host
        self._max_body_bytes = max_body_bytes
        self._limited_log = LimitedLog(_log, store.clock.now_ms)  # a client may repeat a query

    def by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `Broker.message_by_id`. Ids from before a change of the broker's address are found too."""
        host, physical_offset = parse_offset_msg_id(offset_msg_id)
        record = self._store.read_at(physical_offset)
        if pack_host(host) != (pack_host(self._host) if record is None else record.store_host):
            raise MessageError(
                f"message id {offset_msg_id} was created by the broker at {host}; this broker is at {self._host}, so "
                "ask the other one"
            )
        record = self._durable(record)
        return None if record is None else to_message_ext(record, self._broker_name, self._max_body_bytes)

    def by_key(self, query: KeyQuery) -> list[MessageExt]:
        """See `Broker.messages_by_key`. A corrupt message is logged with file and offset, and skipped."""
        return [to_message_ext(record, self._broker_name, self._max_body_bytes) for record in self.records(query)]

    def records(self, query: KeyQuery) -> Iterator[StoredRecord]:
        """Return the records of the same messages, each read when it is requested. No body is decompressed."""
        found: set[int] = set()
        for physical_offset in self._store.index.candidates(query.topic, query.key, query.begin_ms, query.last_ms):
            record = None if physical_offset in found else self._read(physical_offset)
            if record is not None and query.matches_record(record):
                found.add(physical_offset)
                yield record
                if len(found) == query.max_count:
                    return

    def _read(self, physical_offset: int) -> StoredRecord | None:
        try:
            record = self._store.read_at(physical_offset)
        except DeletedRecordError:
            return None
        except CorruptRecordError as exc:
            self._limited_log.warning(
                "broker.record_skipped", file=exc.path.name, physical_offset=physical_offset, reason=exc.reason
            )
            return None
        return self._durable(record)

    def _durable(self, record: StoredRecord | None) -> StoredRecord | None:
        """Return *record*; None if a crash could still lose it."""
        if record is None or record.physical_offset + record.total_size > self._store.confirm_offset:
            return None
        return record
