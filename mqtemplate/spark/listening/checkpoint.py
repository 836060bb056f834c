"""Checkpoint folder of a query: which batches are planned, which are committed. It is read without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mqtemplate.errors import SparkError
from mqtemplate.hashes import crc32
from mqtemplate.processes import write_private
from mqtemplate.spark.records.offsets import OffsetTable, from_spark, to_spark

_FIRST_OFFSETS = "mqtemplate-first-offsets.json"
_MALFORMED = (ValueError, AttributeError, TypeError, KeyError)
_ParsedT = TypeVar("_ParsedT")
_CRC_SUFFIX, _CRC_MAGIC, _CRC_FRONT = ".crc", b"crc\0", 8


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
        found = _parsed(path, lambda text: str(json.loads(text)["id"]), "it has the id of the query")
        if found is None:
            raise _missing(path, "the id of the query")
        return found

    def check(self) -> None:
        """Check the files that Spark and the listener read at the start of a query.

        So a damaged one is an error with advice, and not one of Spark in the middle of a stack. A query also must not
        start if a missing file would give a batch other messages than before under the same id: what a function has
        written by that id would be replaced, or dropped as a repeat.
        """
        planned, committed = self.planned(), self.committed()
        has_batches = max(planned, committed) >= 0
        if has_batches or _text(self.folder / "metadata") is not None:
            self.query_id()
        newest = max(committed, *_checksum_ids(self.folder / "offsets"), planned)
        if newest > planned:
            raise _missing(self.folder / "offsets" / str(newest), f"the end of batch {newest}")
        for batch_id in {planned, planned - 1, committed}:
            # Spark reads the newest two. It deletes older ones, also the one of the committed batch.
            if batch_id >= 0 and self.end_of(batch_id) is None and batch_id >= planned - 1:
                raise _missing(self.folder / "offsets" / str(batch_id), f"the end of batch {batch_id}")
        if committed >= 0:
            self._check_commit(committed)
        if (planned, committed) == (0, -1) and self.first_offsets() is None:
            raise _missing(self.folder / _FIRST_OFFSETS, "the start of the first batch, which is repeated")

    def _check_commit(self, batch_id: int) -> None:
        path = self.folder / "commits" / str(batch_id)
        try:
            version, *metadata = (_text(path) or "").splitlines()
            if not version.startswith("v") or not all(isinstance(json.loads(line), dict) for line in metadata):
                raise ValueError("it is not a version and a JSON object")
        except ValueError as exc:
            advice = f"batch {batch_id} was committed. Delete the file to repeat this batch, with the same messages"
            raise SparkError(f"checkpoint {path} is damaged ({exc}); {advice}") from exc

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
        except _MALFORMED as exc:
            raise SparkError(
                f"checkpoint {path} is damaged, or is not of a Spark listener's query ({exc}); restore the folder from "
                "a backup, or give the listener a folder of its own: a new one starts at the offsets of its group"
            ) from exc

    def first_offsets(self) -> OffsetTable | None:
        """Return the start of the first batch; None before the first start of the query."""
        return _parsed(
            self.folder / _FIRST_OFFSETS,
            lambda text: from_spark(json.loads(text), self._broker_name),
            "it has the start of the first batch",
        )

    def write_first_offsets(self, offsets: OffsetTable) -> None:
        """Write the start of the first batch, durably and atomically."""
        write_private(self.folder / _FIRST_OFFSETS, json.dumps(to_spark(offsets)).encode())


def _batch_ids(folder: Path) -> list[int]:
    """Return the batch ids in a folder of Spark. Its checksum and temporary files have other names."""
    try:
        return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _unreadable(folder, exc) from exc


def _checksum_ids(folder: Path) -> list[int]:
    """Return the batch ids whose checksums are in a folder of Spark, which writes them after the file itself.

    Without the file, Spark ends the query with "Multiple streaming queries are concurrently using" this checkpoint.
    """
    names = (path.name[1 : -len(_CRC_SUFFIX)] for path in folder.glob(f".*{_CRC_SUFFIX}"))
    return [int(name) for name in names if name.isdecimal()]


def _text(path: Path) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        data = path.read_bytes()
        _compare(path, data)
        return data.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise _unreadable(path, exc) from exc


def _compare(path: Path, data: bytes) -> None:
    """Compare a file with its checksums, as Spark does. They may be missing, as in a copy without hidden files.

    ``.name.crc`` has ``crc`` and 0, the bytes of each part as i4, and the CRC-32 of each part. Spark ignores a file
    that begins otherwise. Source: Hadoop ``ChecksumFileSystem``.
    """
    try:
        stored = path.with_name(f".{path.name}{_CRC_SUFFIX}").read_bytes()
    except FileNotFoundError:
        return
    size = int.from_bytes(stored[4:8], "big")
    if not stored.startswith(_CRC_MAGIC) or len(stored) < _CRC_FRONT or not size:
        return
    computed = b"".join(crc32(data[at : at + size]).to_bytes(4, "big") for at in range(0, len(data), size))
    if stored[_CRC_FRONT:] != computed:
        raise SparkError(
            f"checkpoint {path} is damaged: it does not match its checksum. Restore the folder from a backup; if you "
            f"have changed the file on purpose, delete .{path.name}.crc beside it"
        )


def _unreadable(path: Path, exc: Exception) -> SparkError:
    return SparkError(f"checkpoint {path} cannot be read ({exc}); check the permissions and the owner of the folder")


def _missing(path: Path, content: str) -> SparkError:
    return SparkError(
        f"checkpoint {path} is missing; it has {content}. Restore the folder from a backup, or delete it: "
        "the query then starts at the offsets of its group"
    )


def _parsed(path: Path, parse: Callable[[str], _ParsedT], content: str) -> _ParsedT | None:
    """Return what a file contains; None if it is missing."""
    text = _text(path)
    try:
        return None if text is None else parse(text)
    except _MALFORMED as exc:
        raise SparkError(
            f"checkpoint {path} is damaged ({exc}); {content}. Restore the folder from a backup, or delete it: "
            "the query then starts at the offsets of its group"
        ) from exc
