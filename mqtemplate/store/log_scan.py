"""Reading the commit log from an offset to its end, as the recovery does."""

from __future__ import annotations

from collections.abc import Iterator

from mqtemplate.event_log import get_logger
from mqtemplate.record import layout
from mqtemplate.record.codec import BadRecordError
from mqtemplate.record.columns import RecordBatch
from mqtemplate.store.files.mapped_file import MappedFile
from mqtemplate.store.log_reader import LogReader, parse_at

_log = get_logger("mqtemplate.store")

_BYTES_AT_ONCE = 1 << 20


class LogScan:
    """Reads records in order, from file to file, until no record starts.

    Attributes:
        end: Physical offset where the last `batches` stopped.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self.end = log.start

    def batches(self, start: int) -> Iterator[RecordBatch]:
        """Yield the records from *start* on, until no record starts.

        Raises:
            BadRecordError: The bytes there are not zero. The recovery decides whether they are a torn tail.
        """
        self.end = start
        while (found := self._log.find(self.end)) is not None:
            file, file_start = found
            at = self.end - file_start
            batch = RecordBatch(_next_bytes(file, at), self.end)
            if len(batch):
                yield batch
                self.end += batch.byte_count
            elif _ends_file(file, at):
                self.end = file_start + file.size
            elif layout.read_size_and_magic(file.view, at) == (0, 0):
                return
            else:
                parse_at(file, at, file_start)  # raises the reason
                raise BadRecordError("it is not a record")


def _next_bytes(file: MappedFile, at: int) -> bytes:
    """Return the bytes from *at* on: a megabyte, or as many as a larger record there has."""
    size, magic = layout.read_size_and_magic(file.view, at) if at + layout.BLANK_SIZE <= file.size else (0, 0)
    is_large = size > _BYTES_AT_ONCE and magic in (layout.MAGIC_V1, layout.MAGIC_V2)
    return file.read(at, size if is_large else _BYTES_AT_ONCE)


def _ends_file(file: MappedFile, at: int) -> bool:
    """Return True if a blank starts at *at*. One valid number of the two is enough: no record has either there."""
    if at + layout.BLANK_SIZE > file.size:
        return True  # a blank of fewer bytes than its own header
    size, magic = layout.read_size_and_magic(file.view, at)
    matches = (magic == layout.MAGIC_BLANK, size == file.size - at)
    if any(matches) and not all(matches):
        _log.warning("store.blank_damaged", file=str(file.path), offset_in_file=at)
    return any(matches)
