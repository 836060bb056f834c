"""The pending view: its options, its columns, and its reader.

The reader gets positions from the broker and records from its folder; or pages from a cluster.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from mqtemplate.broker import Broker
from mqtemplate.delay.pending_rows import PENDING_DTYPE
from mqtemplate.message import MessageQueue, Property
from mqtemplate.numbers import parse_number
from mqtemplate.pending import PendingMessage, PendingQuery
from mqtemplate.record.layout import QUEUE_ID_AT
from mqtemplate.spark.location.connection import open_broker
from mqtemplate.spark.location.folder import StoreFolder
from mqtemplate.spark.location.location import CLIENT_OPTIONS, PATH, BrokerLocation
from mqtemplate.spark.location.option_values import known_options, milliseconds
from mqtemplate.spark.records.arrow_arrays import number_column, timestamp_column
from mqtemplate.spark.records.blocks import MAX_ROWS, RecordBlock, pieces
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA, Records
from mqtemplate.topics import SCHEDULE_TOPIC

_ATTRIBUTES = {
    "topic": "topic",
    "deliverTime": "deliver_ms",
    "delayLevel": "delay_level",
    "tags": "tags",
    "keys": "keys",
    "msgId": "msg_id",
    "bodySize": "body_size",
    "rollCount": "roll_count",
    "bornTimestamp": "born_timestamp",
    "storeTimestamp": "store_timestamp",
    "handle": "handle",
    "pendingKey": "pending_key",
}
"""Column of the view -> attribute of `mqtemplate.pending.PendingMessage`."""

_TYPES = dict.fromkeys(("delayLevel", "bodySize", "rollCount"), pa.int32())
_TIMES = ("deliverTime", "bornTimestamp", "storeTimestamp")
_TYPES |= dict.fromkeys(_TIMES, pa.timestamp("us", "UTC"))
PENDING_SCHEMA = pa.schema([(name, _TYPES.get(name, pa.string())) for name in _ATTRIBUTES])
"""Columns of the view."""

PENDING_OPTIONS = ("view", "store", "nameServer", *CLIENT_OPTIONS, "topic", "dueAfter", "dueBefore")
"""Names for ``.option(...)``; case does not matter."""


def pending_schema() -> StructType:
    """Return the columns as Spark's types."""
    return from_arrow_schema(PENDING_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOptions:
    """Checked options of the view."""

    location: BrokerLocation
    query: PendingQuery

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> PendingOptions:
        """Return the checked options.

        Raises:
            ConfigurationError: An option is unknown, malformed or missing.
        """
        given = known_options(options, PENDING_OPTIONS, aliases=PATH, ignored={"provider"}, where=" for view='pending'")
        return cls(
            location=BrokerLocation.of_options(given),
            query=PendingQuery(
                topic=given.get("topic"),
                after_ms=milliseconds(given, "dueAfter"),
                before_ms=milliseconds(given, "dueBefore"),
            ),
        )


# --- records as rows ---------------------------------------------------------------------------

_COPIED = pa.schema([ARROW_SCHEMA.field(name) for name in ("tags", "keys", "bornTimestamp", "storeTimestamp")])


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
        "deliverTime": timestamp_column(pa.array(due_ms)),
        "delayLevel": _levels(records, block),
        "msgId": properties.value(Property.UNIQ_KEY),
        "bodySize": pc.binary_length(records.cells(Records.BODY)),
        "rollCount": _numbers(properties.value(Property.TIMER_ROLL_TIMES)),
        "handle": _handles(records, block, due_ms, topics),
        "pendingKey": properties.value(Property.PENDING_KEY),
        **{name: copied.column(name) for name in _COPIED.names},
    }
    batch = pa.RecordBatch.from_arrays([columns[name] for name in PENDING_SCHEMA.names], schema=PENDING_SCHEMA)
    is_wanted = pc.is_null(properties.value(Property.TIMER_DEL_UNIQKEY))
    return batch.filter(is_wanted if topic is None else pc.and_(is_wanted, pc.equal(topics, topic)))


def _levels(records: Records, block: RecordBlock) -> pa.Array:
    """Return the delay level of each message: the queue of the schedule topic says it; 0 for a timer."""
    name = SCHEDULE_TOPIC.encode()
    cell = bytes((len(name),)) + name  # the topic after its length, as the cells have it
    is_level = pc.starts_with(records.cells(Records.TOPIC), cell).to_numpy(zero_copy_only=False)
    queues = records.numbers(">i4", block.at + QUEUE_ID_AT)
    return pa.array(np.where(is_level, queues + 1, 0), pa.int32())


def _numbers(texts: pa.Array) -> pa.Array:
    """Return texts as numbers; 0 for null, and for a text that is not a number of 31 bits."""
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


_PAGE = 400_000
_MAX_PER_TASK = 100_000
_CLUSTER_PAGE = 1_000


class _Positions(NamedTuple):
    """Records to read in one task: bytes of `PENDING_DTYPE`."""

    data: bytes
    broker_name: str


class PendingReader(DataSourceReader):
    """Reader of ``view=pending``.

    With ``store``, the broker says where the pending records are when Spark plans the read, and each task reads some of
    them from the files. A message that is delivered or cancelled meanwhile is still listed. With ``nameServer``, one
    task requests page after page.
    """

    def __init__(self, options: PendingOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Return the positions of each task."""
        if self._options.location.store is None:
            return [InputPartition(None)]
        # A read changes nothing: without an owner, no message is delivered.
        with open_broker(self._options.location, delivers=False) as broker:
            positions, name = _positions(broker, self._options), broker.name
        if not len(positions):
            return [InputPartition(_Positions(b"", name))]
        tasks = max(2, -(-len(positions) // _MAX_PER_TASK)) if len(positions) > MAX_ROWS else 1
        return [InputPartition(_Positions(part.tobytes(), name)) for part in np.array_split(positions, tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the pending messages of one task."""
        value: _Positions | None = partition.value
        if value is None:
            yield from _pages(self._options)
        else:
            yield from self._records(np.frombuffer(value.data, PENDING_DTYPE), value.broker_name)

    def _records(self, positions: np.ndarray, broker_name: str) -> Iterator[pa.RecordBatch]:
        folder, topic = StoreFolder(str(self._options.location.store)), self._options.query.topic
        # By physical offset, so that each file of the log is mapped once.
        positions = positions[np.argsort(positions["physical_offset"])]
        for window, where in folder.windows(positions["physical_offset"].astype(np.int64)):
            found = positions[where]
            for part in (found[piece] for piece in pieces(found["size"].astype(np.int64))):
                offsets = part["physical_offset"].astype(np.int64)
                block = RecordBlock(
                    queue=MessageQueue("", broker_name, 0),
                    data=window.data,
                    at=offsets - window.start,
                    sizes=part["size"].astype(np.int64),
                    queue_offsets=np.zeros(len(part), np.int64),
                    physical_offsets=offsets,
                    source=window.path,
                )
                batch = pending_batch(block, part["due_ms"].astype(np.int64), topic)
                if batch.num_rows:
                    yield batch


def create_reader(options: Mapping[str, str]) -> PendingReader:
    """Return the reader of a read with these options; errors as in `PendingOptions.parse`."""
    return PendingReader(PendingOptions.parse(options))


def _positions(broker: Broker, options: PendingOptions) -> np.ndarray:
    pages: list[np.ndarray] = []
    after = (-1, -1)
    while True:
        page = np.frombuffer(broker.delayed.pending_positions(options.query, after, _PAGE), PENDING_DTYPE)
        if not len(page):
            return np.concatenate(pages) if pages else page
        pages.append(page)
        after = int(page[-1]["due_ms"]), int(page[-1]["physical_offset"])


def _pages(options: PendingOptions) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a cluster, as far as its brokers list them."""
    cursor = None
    with open_broker(options.location) as broker:
        while True:
            page = broker.delayed.pending(options.query, _CLUSTER_PAGE, cursor)
            if page.messages:
                yield _batch(page.messages)
            cursor = page.cursor
            if cursor is None:
                return


def _batch(messages: Sequence[PendingMessage]) -> pa.RecordBatch:
    columns = []
    for field in PENDING_SCHEMA:
        values = [getattr(message, _ATTRIBUTES[field.name]) for message in messages]
        columns.append(timestamp_column(pa.array(values)) if field.name in _TIMES else pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=PENDING_SCHEMA)
