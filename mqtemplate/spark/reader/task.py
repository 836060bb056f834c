"""Work of one task: the record batches of its ranges. It runs on the executors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.spark.options import SourceOptions
from mqtemplate.spark.reader.blocks import Blocks
from mqtemplate.spark.reader.local_store import LocalStore
from mqtemplate.spark.reader.partitions import Share
from mqtemplate.spark.record_batches import ARROW_SCHEMA, record_batches


def open_blocks(options: SourceOptions) -> Blocks:
    """Return the place that the options name.

    Raises:
        SparkError: The folder is not a store.
    """
    if options.store:
        from mqtemplate.spark.store_folder import StoreFolder

        StoreFolder(options.store)
        return LocalStore(options.store, options.broker_name)
    from mqtemplate.spark.reader.remote_cluster import RemoteCluster

    return RemoteCluster(options.name_servers, options.client_file, options.group)


@dataclass(frozen=True, slots=True)
class TaskReader:
    """Reader of the messages that the options select. It is picklable.

    Args:
        schema: Columns to build.
    """

    options: SourceOptions
    schema: pa.Schema

    def batches(self, share: Share) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task.

        Raises:
            SparkError: This machine has another store or none, or messages were deleted during the read.
            CorruptRecordError: A record is damaged.
        """
        if not share.ranges:
            return
        options = self.options
        codes = None if options.selector.codes is None or options.selector.selects_all else _codes(options)
        blocks: Blocks = LocalStore(options.store, options.broker_name) if options.store else open_blocks(options)
        if share.identity:
            blocks.check_identity(share.ranges[0], share.identity)
        for found in share.ranges:
            try:
                found_blocks = blocks.blocks(found, codes)
                yield from self._selected(record_batches(found_blocks, self._needed(), options.max_body_bytes))
            except OffsetOutOfRangeError as exc:
                raise SparkError(f"messages were deleted during the read: {exc}; run it again") from exc

    def _needed(self) -> pa.Schema:
        """Return the columns to build: those of the result, and those that the selector needs."""
        selector, schema = self.options.selector, self.schema
        if selector.selects_all:
            return schema
        name = "tags" if isinstance(selector, TagSelector) else "properties"
        return schema if name in schema.names else schema.append(ARROW_SCHEMA.field(name))

    def _selected(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        selector = self.options.selector
        if selector.selects_all:
            yield from batches
            return
        tags: Any = pa.array(sorted(selector.tags)) if isinstance(selector, TagSelector) else None
        for batch in batches:
            if tags is not None:
                mask = pc.is_in(batch["tags"], tags)
            else:
                mask = pa.array([selector.matches(dict(pairs)) for pairs in batch["properties"].to_pylist()])
            batch = batch.filter(mask).select(self.schema.names)
            if batch.num_rows:
                yield batch


def _codes(options: SourceOptions) -> Any:
    return np.fromiter(options.selector.codes or (), np.int64)
