"""One file of fixed size, seen as memory."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from mqtemplate.errors import StoreFormatError, StoreFullError
from mqtemplate.store.folders import make_folder, sync_folder

__all__ = ["MappedFile"]


class MappedFile:
    """A preallocated file, mapped whole; or, without a path, that much anonymous memory.

    - Its length never changes, and every byte of it has its block on the disk, so that writing into the map
      cannot fail: a full disk is met when the file is made.
    - Bytes never written are zero; in one that ``is_new``, all are.

    Args:
        path: The file; made if missing. None keeps it in memory.
        size: Its length in bytes.
        lasting: Its name lasts from the start. Else the owner sees to that (`folders.sync_folder`) when it flushes;
            it spares a new file one or two milliseconds.

    Raises:
        StoreFullError: There is no room for it; nothing is left behind.
        StoreFormatError: It exists with another length.
    """

    def __init__(self, path: Path | None, size: int, *, lasting: bool = True) -> None:
        self.path = path
        self.size = size
        self._fd, self.is_new = (-1, False) if path is None else _open_allocated(path, size, lasting=lasting)
        self.view = mmap.mmap(self._fd, size)

    def write(self, at: int, data: bytes) -> None:
        """Put *data* at *at*.

        Through the file: the first write to a mapped page may wait for what the file system flushes at that moment,
        tens of milliseconds with the interpreter lock held. A system call lets go of that lock, though, and other
        threads rush in; where they would only find the writer's own lock, `write_mapped` is better.
        """
        if self._fd < 0:
            self.write_mapped(at, data)
            return
        while (written := os.pwrite(self._fd, data, at)) < len(data):
            at, data = at + written, data[written:]

    def write_mapped(self, at: int, data: bytes) -> None:
        """Put *data* at *at*, without letting another thread run in between."""
        self.view[at : at + len(data)] = data

    def flush(self) -> None:
        """Return when everything written so far is on the disk."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        self.view.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def unlink(self) -> None:
        """Remove the file's name. Whoever reads it at this moment may go on; its memory goes with the last reader."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        """Close it and remove the file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _open_allocated(path: Path, size: int, *, lasting: bool) -> tuple[int, bool]:
    """The descriptor, and whether the file was made now."""
    if lasting:
        make_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    length = os.fstat(fd).st_size
    try:
        if length not in (0, size):
            raise StoreFormatError(
                f"{path} has {length} bytes, but the settings ask for {size}; "
                "open the folder with the sizes it was made with"
            )
        if length == 0:
            os.posix_fallocate(fd, 0, size)
            if lasting:
                sync_folder(path.parent)
    except BaseException as exc:
        os.close(fd)
        if length == 0:
            path.unlink(missing_ok=True)
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(
                f"no room on the disk for {path.name} ({size} bytes) in {path.parent}; free space there, then "
                "send again: what was acknowledged is safe"
            ) from exc
        raise
    return fd, length == 0
