"""Work of one task: the record batches of its ranges. It runs on the executors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.errors import OffsetOutOfRangeError, SparkError
from mqtemplate.hashes.java_hash import java_string_hash
from mqtemplate.selectors.sql92.selector import Sql92Selector
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
        tags: Further condition for the tags, from the filters of the query; None: any.
    """

    options: SourceOptions
    schema: pa.Schema
    tags: frozenset[str] | None = None

    def batches(self, share: Share) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a task.

        Raises:
            SparkError: This machine has another store or none, or messages were deleted during the read.
            CorruptRecordError: A record is damaged.
        """
        if not share.ranges:
            return
        options = self.options
        codes = self._tag_codes()
        blocks: Blocks = LocalStore(options.store, options.broker_name) if options.store else open_blocks(options)
        if share.identity:
            blocks.check_identity(share.ranges[0], share.identity)
        for found in share.ranges:
            try:
                found_blocks = blocks.blocks(found, codes)
                yield from self._selected(record_batches(found_blocks, self._needed(), options.max_body_bytes))
            except OffsetOutOfRangeError as exc:
                raise SparkError(f"messages were deleted during the read: {exc}; run it again") from exc

    def _tag_codes(self) -> npt.NDArray[np.int64] | None:
        """Return the hash codes of the tags to read; None for all."""
        tags, codes = self._tags(), self.options.selector.codes
        if tags is not None:
            codes = frozenset(map(java_string_hash, tags))
        elif self.options.selector.selects_all:
            codes = None
        return None if codes is None else np.fromiter(codes, np.int64)

    def _tags(self) -> frozenset[str] | None:
        """Return the tags to read; None for all."""
        selector = self.options.selector
        own = selector.tags if isinstance(selector, TagSelector) and not selector.selects_all else None
        if own is None or self.tags is None:
            return self.tags if own is None else own
        return own & self.tags

    def _needed(self) -> pa.Schema:
        """Return the columns to build: those of the result, and those that the conditions need."""
        needed = [] if self._tags() is None else ["tags"]
        if isinstance(self.options.selector, Sql92Selector):
            needed.append("properties")
        added = [ARROW_SCHEMA.field(name) for name in needed if name not in self.schema.names]
        return pa.schema([*self.schema, *added])

    def _selected(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        selector, tags = self.options.selector, self._tags()
        if tags is None and selector.selects_all:
            yield from batches
            return
        allowed = None if tags is None else pa.array(sorted(tags), pa.string())
        for batch in batches:
            if allowed is not None:
                batch = batch.filter(pc.is_in(batch["tags"], allowed))
            if isinstance(selector, Sql92Selector):
                properties = batch["properties"].to_pylist()
                batch = batch.filter(pa.array([selector.matches(dict(pairs)) for pairs in properties], pa.bool_()))
            batch = batch.select(self.schema.names)
            if batch.num_rows:
                yield batch
