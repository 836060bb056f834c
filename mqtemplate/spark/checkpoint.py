"""What a query's checkpoint folder tells: which batches were planned and which are done. Without Spark."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mqtemplate.errors import SparkError
from mqtemplate.spark.offsets import OffsetTable, from_spark, to_spark

_FIRST = "mqtemplate-first-offsets.json"


class QueryCheckpoint:
    """The folder that Spark keeps a query's progress in, and one file of ours in it.

    Spark writes ``offsets/<batch id>`` before it runs a batch, with the end of the batch, and ``commits/<batch id>``
    after it. Our file keeps where the first batch began: Spark asks the source for that again if the first batch has to
    be repeated, and by then the group's offset may have moved on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def query_id(self) -> str:
        """The id that the query keeps for life; with a batch id it names a batch for ever."""
        return str(json.loads((self.folder / "metadata").read_text())["id"])

    def planned(self) -> int:
        """The newest batch that was planned; -1 for none."""
        return max(_numbers(self.folder / "offsets"), default=-1)

    def committed(self) -> int:
        """The newest batch that is done; -1 for none."""
        return max(_numbers(self.folder / "commits"), default=-1)

    def is_committed(self, batch_id: int) -> bool:
        return (self.folder / "commits" / str(batch_id)).is_file()

    def end_of(self, batch_id: int) -> OffsetTable | None:
        """Where a batch ends; None if Spark keeps it no longer, or never planned it.

        Raises:
            SparkError: The file is not of a query over the source ``mqtemplate`` alone.
        """
        path = self.folder / "offsets" / str(batch_id)
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return None
        try:
            (table,) = lines[2:]  # a version, metadata, then one line a source
            return from_spark(json.loads(table))
        except (ValueError, AttributeError) as exc:
            raise SparkError(
                f"checkpoint {path} is not of a Spark listener's query ({exc}); give the listener a folder of its own"
            ) from exc

    def first_offsets(self) -> OffsetTable | None:
        """Where the first batch began; None before the query was started."""
        try:
            table: dict[str, Any] = json.loads((self.folder / _FIRST).read_text())
        except FileNotFoundError:
            return None
        return from_spark(table)

    def keep_first_offsets(self, offsets: OffsetTable) -> None:
        """Note where the first batch begins, durably and whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f".{_FIRST}.new"
        with fresh.open("w") as file:
            json.dump(to_spark(offsets), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.folder / _FIRST)


def _numbers(folder: Path) -> list[int]:
    """The batch ids in a folder of Spark's; its checksum and temporary files have other names."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
