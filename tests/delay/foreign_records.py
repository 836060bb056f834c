"""Records as RocketMQ writes them: without our check, and copies without a link to the delayed record."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mqtemplate.delay.timers.files import TIMER_LOG_FOLDER
from mqtemplate.delay.timers.timer_log import TIMER_UNIT_DTYPE
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.layout import CHECK_SIZE
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.topics import SCHEDULE_TOPIC

__all__ = ["ForeignDraft", "clear_tails", "foreign_copy", "foreign_level_message"]

_I4 = struct.Struct(">i")


class ForeignDraft(RecordDraft):
    """A draft without the parts that only we write."""

    def encode(self, queue_offset: int, physical_offset: int, store_timestamp: int, store_host: bytes) -> bytes:
        properties, self.properties = self.properties, b""  # RocketMQ's may be longer than ours
        try:
            data = bytearray(super().encode(queue_offset, physical_offset, store_timestamp, store_host))
        finally:
            self.properties = properties
        del data[-CHECK_SIZE:]
        data[-2:] = len(properties).to_bytes(2, "big")
        data += properties
        _I4.pack_into(data, 0, len(data))
        return bytes(data)


def foreign_level_message(body: bytes, level: int, delay_ms: int, **properties: str) -> ForeignDraft:
    """Return a message with a delay level for queue 0 of ``orders``."""
    kept = {"DELAY": str(level), "REAL_QID": "0", "REAL_TOPIC": "orders"} | properties
    return ForeignDraft(SCHEDULE_TOPIC, level - 1, body, encode_properties(kept), delay_ms=delay_ms)


def foreign_copy(record: StoredRecord) -> ForeignDraft:
    """Return the record that RocketMQ appends when *record* is due."""
    properties = decode_properties(record.properties_bytes)
    return ForeignDraft(
        properties["REAL_TOPIC"],
        int(properties["REAL_QID"]),
        record.body,
        encode_properties(dict(sorted(properties.items()))),
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times,
    )


def clear_tails(folder: Path) -> None:
    """Turn the units of a store directory's timer log into units of RocketMQ, which have no due time."""
    for path in (folder / TIMER_LOG_FOLDER).iterdir():
        data = bytearray(path.read_bytes())
        units = np.frombuffer(data, TIMER_UNIT_DTYPE, len(data) // 52)
        units["tail"][units["size"] == 52] = 0
        path.write_bytes(data)
