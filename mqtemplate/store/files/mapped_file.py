"""One file of fixed size, seen as memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
from pathlib import Path

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.disk import Disk, disk_error, disk_errors
from mqtemplate.store.files.folders import make_folder, make_folders


class MappedFile:
    """A preallocated file, mapped whole; or, without a path, that much anonymous memory.

    - Its length never changes, and every byte of it has its block on the disk, so that writing into the map
      cannot fail: a full disk is met when the file is made.
    - Bytes never written are zero; in one that ``is_new``, all are.
    - A flush that fails is not forgiven: the system may then count bytes as written that are not on the disk, so
      they are given to it once more, and the next flush that succeeds has really written them.

    Args:
        path: The file; made if missing. None keeps it in memory.
        size: Its length in bytes.
        lasting: Its name lasts from the start. Else the owner sees to that (`folders.sync_folder`) when it flushes;
            it spares a new file one or two milliseconds.
        grows: A file that is too short is what a power failure left of a longer one; zeros take the missing place.

    Raises:
        StoreFullError: There is no room for it; nothing is left behind.
        StoreFormatError: It exists with another length.
        StoreError: The disk refused; nothing is left behind.
    """

    def __init__(
        self, path: Path | None, size: int, *, lasting: bool = True, grows: bool = False, disk: Disk | None = None
    ) -> None:
        self.path = path
        self.size = size
        self._disk = disk = disk or Disk()
        self._fd = -1
        self._fd_lock = threading.Lock()  # between a flush and who gives the descriptor back
        self._is_gone = path is None
        self.is_new = False
        if path is None:
            self.view = mmap.mmap(-1, size)
        else:
            self._fd, self.view, self.is_new = _open_allocated(disk, path, size, lasting=lasting, grows=grows)

    def write(self, at: int, data: bytes) -> None:
        """Put *data* at *at*, all of it or, if that fails, none.

        Through the file: the first write to a mapped page may wait for what the file system flushes at that moment,
        tens of milliseconds with the interpreter lock held. A system call lets go of that lock, though, and other
        threads rush in; where they would only find the writer's own lock, `write_mapped` is better.

        Raises:
            StoreError: The disk refused.
        """
        fd = self._fd
        if fd < 0:
            self.write_mapped(at, data)
            return
        begin, write_at = at, self._disk.write_at
        try:
            while (written := write_at(fd, data, at)) < len(data):
                at, data = at + written, data[written:]
        except OSError as exc:
            self.view[begin:at] = bytes(at - begin)  # or it would come alive behind a shorter record
            assert self.path is not None
            raise disk_error("write to", self.path, exc) from exc

    def write_mapped(self, at: int, data: bytes) -> None:
        """Put *data* at *at*, without letting another thread run in between."""
        self.view[at : at + len(data)] = data

    def flush(self, end: int | None = None) -> None:
        """Return when everything written so far is on the disk.

        Args:
            end: Nobody changes what lies before it any more; by default that is the whole file, or whoever does so
                writes through the map.

        Raises:
            StoreError: The disk refused.
        """
        with self._fd_lock:
            if self._is_gone:
                return
            assert self.path is not None
            with disk_errors("open", self.path):
                if self._fd < 0:
                    self._fd = self._disk.open(self.path, flags=0)
            try:
                self._disk.flush(self._fd)
            except OSError as exc:
                self._disk.write_again(self._fd, self.view, self.size if end is None else min(end, self.size))
                raise disk_error("flush", self.path, exc) from exc

    def rest(self) -> None:
        """Give the descriptor back until the next flush; a map has one of its own. For files that are full."""
        with self._fd_lock:
            self._close_fd()

    def close(self) -> None:
        self.view.close()
        with self._fd_lock:
            self._close_fd()
            self._is_gone = True

    def unlink(self) -> None:
        """Remove the file's name. Whoever reads it at this moment may go on; its memory goes with the last reader.

        Raises:
            StoreError: The disk refused.
        """
        with self._fd_lock:
            self._close_fd()
            self._is_gone = True
        if self.path is not None:
            with disk_errors("remove", self.path):
                self._disk.unlink(self.path)

    def delete(self) -> None:
        """Close it and remove the file."""
        self.close()
        self.unlink()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)


def _open_allocated(disk: Disk, path: Path, size: int, *, lasting: bool, grows: bool) -> tuple[int, mmap.mmap, bool]:
    """The descriptor, the map, and whether the file was made now."""
    (make_folder if lasting else make_folders)(path.parent, disk)
    fd = length = -1
    try:
        fd = disk.open(path)
        length = disk.length(fd)
        if length not in (0, size) and not (grows and length < size):
            raise StoreFormatError(
                f"{path} has {length} bytes, but the settings ask for {size}; "
                "open the folder with the sizes it was made with"
            )
        if length != size:
            disk.allocate(fd, size)
        if lasting:
            disk.sync_folder(path.parent)
        return fd, disk.map(fd, size), length == 0
    except BaseException as exc:
        if fd >= 0:
            disk.close(fd)
        if length == 0:
            with contextlib.suppress(OSError):
                disk.unlink(path)
        if isinstance(exc, OSError):
            raise disk_error("make" if length == 0 else "open", path, exc, size) from exc
        raise
