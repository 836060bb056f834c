"""Source for Spark in Python that reads nothing: the share of a figure that is Spark's own.

It yields the columns of ours from arrays that were built once for each process, by the same classes of Spark. What is
left is Spark's: planning, the protocol between the JVM and Python, the copies of the columns, and the JVM's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mqtemplate.spark.records.record_batches import ARROW_SCHEMA
from mqtemplate.spark.records.schema import source_schema

_ROWS = 8_192
_NAME = "reference"


class ReferenceSource(DataSource):
    """``format("reference")``: options ``rows``, ``bodySize``, ``tasks``, and for a stream ``rowsPerTrigger``."""

    @classmethod
    def name(cls) -> str:
        return _NAME

    def schema(self) -> StructType:
        return source_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return _BatchReader(self.options, schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        return _StreamReader(self.options, schema.names)


class _Rows:
    def __init__(self, options: dict[str, str], names: list[str]) -> None:
        self._count, self._tasks = int(options["rows"]), int(options.get("tasks", "2"))
        self._body_size, self._names = int(options.get("bodySize", "200")), tuple(names)
        self._a_trigger = int(options.get("rowsPerTrigger", "100000"))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        whole = _rows(self._names, self._body_size)
        for first in range(0, partition.value, _ROWS):
            yield whole.slice(0, min(_ROWS, partition.value - first))

    def _share(self, count: int) -> Sequence[InputPartition]:
        return [InputPartition(count // self._tasks)] * self._tasks


class _BatchReader(_Rows, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        return self._share(self._count)


class _StreamReader(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._a_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"at": self._count}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        return {"at": min(self._count, start["at"] + self._a_trigger)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._share(end["at"] - start["at"])

    def commit(self, end: dict[str, Any]) -> None:
        pass


@lru_cache
def _rows(names: tuple[str, ...], body_size: int) -> pa.RecordBatch:
    numbers = np.arange(_ROWS)
    stamp = pa.array(np.full(_ROWS, 1_700_000_000_000_000)).view(pa.timestamp("us", "UTC"))
    keys = [f"k{n}" for n in numbers]
    ids = [f"0A0000010ABC1234567890ABCDEF{n:04X}" for n in numbers]
    maps = [[("TAGS", "pay"), ("KEYS", key), ("UNIQ_KEY", each)] for key, each in zip(keys, ids, strict=True)]
    columns = {
        "topic": pa.array(["orders"] * _ROWS),
        "brokerName": pa.array(["broker-a"] * _ROWS),
        "queueId": pa.array(np.zeros(_ROWS, np.int32)),
        "queueOffset": pa.array(numbers),
        "msgId": pa.array(ids),
        "tags": pa.array(["pay", "ship"] * (_ROWS // 2)),
        "keys": pa.array(keys),
        "body": pa.array([bytes(body_size)] * _ROWS, pa.binary()),
        "flag": pa.array(np.zeros(_ROWS, np.int32)),
        "properties": pa.array(maps, pa.map_(pa.string(), pa.string())),
        "bornTimestamp": stamp,
        "storeTimestamp": stamp,
        "deliverTimestamp": pa.nulls(_ROWS, stamp.type),
        "reconsumeTimes": pa.array(np.zeros(_ROWS, np.int32)),
    }
    schema = pa.schema([ARROW_SCHEMA.field(name) for name in names])
    return pa.RecordBatch.from_arrays([columns[name] for name in names], schema=schema)
