"""The message that a consumer receives, made from a stored record."""

from __future__ import annotations

from mqtemplate.errors import ConversionError, UnsupportedError
from mqtemplate.message import MessageExt, PackedBody
from mqtemplate.record.codec import StoredRecord, unpack_host
from mqtemplate.record.compression import MAX_BODY_BYTES, decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import decode_properties


def to_message_ext(record: StoredRecord, broker_name: str, max_body_bytes: int = MAX_BODY_BYTES) -> MessageExt:
    """Return the message of a record, with its body decompressed.

    A body that cannot be decompressed stays as it is, as a `PackedBody`, and its message keeps the flag
    `SysFlag.COMPRESSED`. One such message must not stop the consumption of its queue.

    Args:
        max_body_bytes: Largest body that is decompressed.
    """
    body, sys_flag = record.body, record.sys_flag
    if sys_flag & SysFlag.COMPRESSED:
        body, sys_flag = _decompress(record, max_body_bytes)
    return MessageExt(
        record.topic,
        body,
        decode_properties(record.properties_bytes),
        record.flag,
        broker_name=broker_name,
        queue_id=record.queue_id,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        store_size=record.total_size,
        sys_flag=sys_flag,
        body_crc=record.body_crc,
        born_timestamp=record.born_timestamp,
        born_host=unpack_host(record.born_host),
        store_timestamp=record.store_timestamp,
        store_host=unpack_host(record.store_host),
        reconsume_times=record.reconsume_times,
        prepared_transaction_offset=record.prepared_transaction_offset,
    )


def _decompress(record: StoredRecord, max_body_bytes: int) -> tuple[bytes, int]:
    """Return the body as the producer passed it, and the flags that describe it."""
    try:
        body = decompress_body(record.body, record.sys_flag, max_body_bytes)
        return body, record.sys_flag & ~SysFlag.COMPRESSED
    except (ConversionError, UnsupportedError) as exc:
        return PackedBody(record.body, str(exc)), record.sys_flag
