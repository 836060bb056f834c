"""Finding messages by their id or by a key: the asking half of an embedded broker."""

from __future__ import annotations

import structlog

from mqtemplate.errors import CorruptRecordError, DeletedRecordError, MessageError
from mqtemplate.message import HostAddress, MessageExt
from mqtemplate.record.codec import StoredRecord, pack_host, unpack_host
from mqtemplate.record.message_ext import to_message_ext
from mqtemplate.record.properties import KEYS, UNIQ_KEY, find_property
from mqtemplate.store import MessageStore

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_ID_LENGTHS = (32, 56)
_OFFSET_DIGITS = 16
_END_OF_TIME_MS = (1 << 63) - 1


class MessageFinder:
    """Reads messages by what names them; nothing is seen before it is as safe as the flush mode promises.

    A message that waits is stored, and found, under the system topic it waits in; under its real topic it is found
    once it was handed over.

    Args:
        host: The address that this broker's ids carry.
    """

    def __init__(self, store: MessageStore, broker_name: str, host: HostAddress) -> None:
        self._store = store
        self._broker_name = broker_name
        self._host = host

    def by_id(self, offset_msg_id: str) -> MessageExt | None:
        """See `Broker.message_by_id`. Ids from a time when this folder's broker had another address work too."""
        host, physical_offset = _parse_id(offset_msg_id)
        record = self._store.read_at(physical_offset)
        if record is not None and record.store_host != host:
            raise self._foreign(offset_msg_id, host)
        if record is None and host != pack_host(self._host):
            raise self._foreign(offset_msg_id, host)
        if record is None or not self._is_safe(record):
            return None
        return to_message_ext(record, self._broker_name)

    def _foreign(self, offset_msg_id: str, host: bytes) -> MessageError:
        return MessageError(
            f"message id {offset_msg_id} was given by the broker at {unpack_host(host)}; this one is at {self._host}, "
            "so ask that one"
        )

    def by_key(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int | None, *, unique: bool
    ) -> list[MessageExt]:
        """See `Broker.messages_by_key`. A damaged message is logged with file and offset, and left out.

        Raises:
            MessageError: *key* is no key, or *max_count* no number of messages.
        """
        if not key or " " in key:
            raise MessageError(f"a key is one word, got {key!r}; ask for each of several keys by itself")
        if max_count < 1:
            raise MessageError(f"max_count must be 1 or more, got {max_count}")
        last_ms = _END_OF_TIME_MS if end_ms is None else end_ms
        found: dict[int, MessageExt] = {}
        for physical_offset in self._store.index.candidates(topic, key, begin_ms, last_ms):
            record = None if physical_offset in found else self._read(physical_offset)
            if record is None or record.topic != topic or not begin_ms <= record.store_timestamp <= last_ms:
                continue
            if _has_key(record, key, unique=unique) and self._is_safe(record):
                found[physical_offset] = to_message_ext(record, self._broker_name)
                if len(found) == max_count:
                    break
        return list(found.values())

    def _read(self, physical_offset: int) -> StoredRecord | None:
        try:
            return self._store.read_at(physical_offset)
        except DeletedRecordError:
            return None
        except CorruptRecordError as exc:
            _log.warning(
                "broker.query_skips_damage", file=exc.path.name, physical_offset=physical_offset, reason=exc.reason
            )
            return None

    def _is_safe(self, record: StoredRecord) -> bool:
        return record.physical_offset + record.total_size <= self._store.confirm_offset


def physical_offset_in(offset_msg_id: str) -> int:
    """The place in the log that an id names.

    Raises:
        MessageError: It is no such id.
    """
    return _parse_id(offset_msg_id)[1]


def _parse_id(offset_msg_id: str) -> tuple[bytes, int]:
    """The packed host and the physical offset in an id; see `message.offset_msg_id`."""
    if len(offset_msg_id) not in _ID_LENGTHS or not _is_hex(offset_msg_id):
        raise MessageError(
            f"{offset_msg_id!r} is no offset message id: those are 32 hex digits, or 56 with an IPv6 address, as in "
            "SendResult.offset_msg_id; ask for one of several by itself, and for a sender's id with "
            "messages_by_key(topic, id, unique=True)"
        )
    return bytes.fromhex(offset_msg_id[:-_OFFSET_DIGITS]), int(offset_msg_id[-_OFFSET_DIGITS:], 16)


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)


def _has_key(record: StoredRecord, key: str, *, unique: bool) -> bool:
    properties = record.properties_bytes
    if unique:
        return find_property(properties, UNIQ_KEY) == key
    return key in (find_property(properties, KEYS) or "").split(" ")
