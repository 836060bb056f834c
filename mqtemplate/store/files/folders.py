"""Making names durable: a file that is flushed is not found after a power failure if its folder was not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mqtemplate.store.files.disk import Disk, disk_error, disk_errors


def make_folder(folder: Path, disk: Disk) -> None:
    """Make *folder* and those above it that are missing, so that they last.

    Raises:
        StoreError: The disk refused; what could not be made to last is not there.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, disk)
    try:
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)
    except OSError as exc:
        with contextlib.suppress(OSError):  # else the next who comes would think that it lasts
            folder.rmdir()
        raise disk_error("make the folder", folder, exc) from exc


def make_folders(folder: Path, disk: Disk) -> None:
    """The same in haste: somebody syncs those above it later."""
    if folder.is_dir():
        return
    make_folders(folder.parent, disk)
    with disk_errors("make the folder", folder):
        disk.make_folder(folder)


def sync_folder(folder: Path, disk: Disk) -> None:
    """Return when the names in *folder* are on the disk.

    Raises:
        StoreError: The disk refused.
    """
    with disk_errors("flush the folder", folder):
        disk.sync_folder(folder)
