"""Checkpoint folder of a query: which batches are planned, which are committed. It is read without Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mqtemplate.errors import SparkError
from mqtemplate.spark.offsets import OffsetTable, from_spark, to_spark

_FIRST_OFFSETS = "mqtemplate-first-offsets.json"


class QueryCheckpoint:
    """Folder with the progress of a query. Spark writes it, except for one file of ours.

    Spark writes ``offsets/<batch id>`` before it runs a batch, with the end of the batch, and ``commits/<batch id>``
    after it. Our file holds the start of the first batch. Spark asks the source for it again if the first batch is
    repeated, and the group's offset may have changed by then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def query_id(self) -> str:
        """Return the permanent id of the query. Together with a batch id it identifies a batch for ever."""
        return str(json.loads((self.folder / "metadata").read_text())["id"])

    def planned(self) -> int:
        """Return the id of the newest planned batch; -1 if there is none."""
        return max(_batch_ids(self.folder / "offsets"), default=-1)

    def committed(self) -> int:
        """Return the id of the newest committed batch; -1 if there is none."""
        return max(_batch_ids(self.folder / "commits"), default=-1)

    def is_committed(self, batch_id: int) -> bool:
        """Return True if Spark has committed the batch."""
        return (self.folder / "commits" / str(batch_id)).is_file()

    def end_of(self, batch_id: int) -> OffsetTable | None:
        """Return the end of a batch; None if Spark has deleted it, or never planned the batch.

        Raises:
            SparkError: The file belongs to a query with other sources than one ``mqtemplate``.
        """
        path = self.folder / "offsets" / str(batch_id)
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return None
        try:
            (table,) = lines[2:]  # a version, metadata, then one line for each source
            return from_spark(json.loads(table))
        except (ValueError, AttributeError) as exc:
            raise SparkError(
                f"checkpoint {path} is not of a Spark listener's query ({exc}); give the listener a folder of its own"
            ) from exc

    def first_offsets(self) -> OffsetTable | None:
        """Return the start of the first batch; None before the first start of the query."""
        try:
            return from_spark(json.loads((self.folder / _FIRST_OFFSETS).read_text()))
        except FileNotFoundError:
            return None

    def write_first_offsets(self, offsets: OffsetTable) -> None:
        """Write the start of the first batch, durably and atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{_FIRST_OFFSETS}.new"
        with fresh.open("w") as file:
            json.dump(to_spark(offsets), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.folder / _FIRST_OFFSETS)


def _batch_ids(folder: Path) -> list[int]:
    """Return the batch ids in a folder of Spark. Its checksum and temporary files have other names."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
