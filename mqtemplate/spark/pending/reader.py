"""Reader of the pending view: positions from the broker, records from its folder; or pages of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.delay.pending_rows import PENDING_DTYPE
from mqtemplate.message import MessageQueue
from mqtemplate.pending import PendingMessage
from mqtemplate.spark.broker_access.connection import open_broker
from mqtemplate.spark.pending.columns import pending_batch
from mqtemplate.spark.pending.options import PENDING_SCHEMA, PendingOptions
from mqtemplate.spark.reader.record_block import MAX_ROWS, RecordBlock, pieces
from mqtemplate.spark.store_folder import StoreFolder

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
        with open_broker(self._options.location) as broker:
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
    assert isinstance(broker, EmbeddedBroker | RemoteBroker)
    pages: list[np.ndarray] = []
    after = (-1, -1)
    while True:
        page = np.frombuffer(broker.pending_positions(options.query, after, _PAGE), PENDING_DTYPE)
        if not len(page):
            return np.concatenate(pages) if pages else page
        pages.append(page)
        after = int(page[-1]["due_ms"]), int(page[-1]["physical_offset"])


def _pages(options: PendingOptions) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a cluster, as far as its brokers list them."""
    cursor = None
    with open_broker(options.location) as broker:
        while True:
            page = broker.pending(options.query, _CLUSTER_PAGE, cursor)
            if page.messages:
                yield _batch([_listed(message) for message in page.messages])
            cursor = page.cursor
            if cursor is None:
                return


def _listed(message: PendingMessage) -> tuple[Any, ...]:
    return (
        message.topic,
        message.deliver_ms * 1_000,
        message.delay_level,
        message.tags,
        message.keys,
        message.msg_id,
        message.body_size,
        message.roll_count,
        message.born_timestamp * 1_000,
        message.store_timestamp * 1_000,
        message.handle,
    )


def _batch(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [
        pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), PENDING_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PENDING_SCHEMA)
