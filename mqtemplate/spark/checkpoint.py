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

    Args:
        broker_name: Broker of the queues in offsets of version 1, which have no names of brokers.

    Raises:
        SparkError: From every method: a file is damaged, or the folder cannot be read. The text says what to do.
    """

    def __init__(self, folder: Path, broker_name: str = "broker-a") -> None:
        self.folder = folder
        self._broker_name = broker_name

    def query_id(self) -> str:
        """Return the permanent id of the query. Together with a batch id it identifies a batch for ever."""
        path = self.folder / "metadata"
        try:
            return str(json.loads(_text(path) or "")["id"])
        except (ValueError, TypeError, KeyError) as exc:
            raise _damaged(path, "it has the id of the query", exc) from exc

    def check(self) -> None:
        """Check the files that are read at the start of a query, so that it does not start with a damaged one."""
        if _text(self.folder / "metadata") is not None:
            self.query_id()
        for batch_id in {self.planned(), self.committed()} - {-1}:
            self.end_of(batch_id)

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
        text = _text(path)
        if text is None:
            return None
        try:
            (table,) = text.splitlines()[2:]  # a version, metadata, then one line for each source
            return from_spark(json.loads(table), self._broker_name)
        except (ValueError, AttributeError, TypeError, KeyError) as exc:
            raise SparkError(
                f"checkpoint {path} is damaged, or is not of a Spark listener's query ({exc}); restore the folder from "
                "a backup, or give the listener a folder of its own: a new one starts at the offsets of its group"
            ) from exc

    def first_offsets(self) -> OffsetTable | None:
        """Return the start of the first batch; None before the first start of the query."""
        path = self.folder / _FIRST_OFFSETS
        text = _text(path)
        if text is None:
            return None
        try:
            return from_spark(json.loads(text), self._broker_name)
        except (ValueError, AttributeError, TypeError, KeyError) as exc:
            raise _damaged(path, "it has the start of the first batch", exc) from exc

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
    try:
        return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _unreadable(folder, exc) from exc


def _text(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, exc: Exception) -> SparkError:
    return SparkError(f"checkpoint {path} cannot be read ({exc}); check the permissions and the owner of the folder")


def _damaged(path: Path, content: str, exc: Exception) -> SparkError:
    return SparkError(
        f"checkpoint {path} is damaged ({exc}); {content}. Restore the folder from a backup, or delete it: "
        "the query then starts at the offsets of its group"
    )
