"""Pending records as rows of the view, built column by column."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.message import Property
from mqtemplate.numbers import parse_number
from mqtemplate.record.layout import QUEUE_ID_AT
from mqtemplate.spark.pending.options import PENDING_SCHEMA
from mqtemplate.spark.reader.record_block import RecordBlock
from mqtemplate.spark.record_batches import ARROW_SCHEMA, Records, number_column, timestamp_column
from mqtemplate.topics import SCHEDULE_TOPIC

_COPIED = pa.schema([ARROW_SCHEMA.field(name) for name in ("tags", "keys", "bornTimestamp", "storeTimestamp")])
_TIME = PENDING_SCHEMA.field("deliverTime").type


def pending_batch(block: RecordBlock, due_ms: npt.NDArray[np.int64], topic: str | None) -> pa.RecordBatch:
    """Return the pending messages of a block, without delete markers.

    Args:
        due_ms: Due time of each record.
        topic: Return only messages to this topic.

    Raises:
        CorruptRecordError: A record is damaged.
    """
    records = Records(block)
    properties, copied = records.properties, records.batch(_COPIED)
    topics = pc.fill_null(properties.value(Property.REAL_TOPIC), "")
    columns = {
        "topic": topics,
        "deliverTime": timestamp_column(pa.array(due_ms)).view(_TIME),
        "delayLevel": _levels(records, block),
        "msgId": properties.value(Property.UNIQ_KEY),
        "bodySize": pc.binary_length(records.cells(1)),
        "rollCount": _numbers(properties.value(Property.TIMER_ROLL_TIMES)),
        "handle": _handles(records, block, due_ms, topics),
        **{name: copied.column(name) for name in _COPIED.names},
    }
    batch = pa.RecordBatch.from_arrays([columns[name] for name in PENDING_SCHEMA.names], schema=PENDING_SCHEMA)
    is_wanted = pc.is_null(properties.value(Property.TIMER_DEL_UNIQKEY))
    return batch.filter(is_wanted if topic is None else pc.and_(is_wanted, pc.equal(topics, topic)))


def _levels(records: Records, block: RecordBlock) -> pa.Array:
    """Return the delay level of each message: the queue of the schedule topic says it; 0 for a timer."""
    name = SCHEDULE_TOPIC.encode()
    cell = bytes((len(name),)) + name  # the topic after its length, as the cells have it
    is_level = pc.starts_with(records.cells(2), cell).to_numpy(zero_copy_only=False)
    queues = records.numbers(">i4", block.at + QUEUE_ID_AT)
    return pa.array(np.where(is_level, queues + 1, 0), pa.int32())


def _numbers(texts: pa.Array) -> pa.Array:
    """Return texts as numbers; 0 for null, and for a text that is no number of 31 bits."""
    if texts.null_count == len(texts):
        return pa.array(np.zeros(len(texts), np.int32))
    numbers = (parse_number(text) or 0 for text in texts.to_pylist())
    return pa.array([number if 0 <= number < 1 << 31 else 0 for number in numbers], pa.int32())


def _handles(records: Records, block: RecordBlock, due_ms: npt.NDArray[np.int64], topics: pa.Array) -> pa.Array:
    """Return what `mqtemplate.delay.recall_handle.handle_of` returns for each record."""
    slots = number_column(records.properties.value(Property.TIMER_OUT_MS))
    times = pc.coalesce(pc.add(slots, 1), pa.array(due_ms)).cast(pa.string())
    ids = pc.fill_null(records.properties.value(Property.UNIQ_KEY), "")
    offsets = pa.array(block.physical_offsets).cast(pa.string())
    words: list[Any] = [pa.scalar("v1"), topics, pa.scalar(block.queue.broker_name), times, ids, offsets]
    texts = pc.binary_join_element_wise(*words, " ").cast(pa.binary()).to_pylist()
    encoded = pa.array([b2a_base64(text, newline=False) for text in texts], pa.binary()).cast(pa.string())
    return pc.replace_substring(pc.replace_substring(encoded, "+", "-"), "/", "_")
