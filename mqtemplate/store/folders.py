"""Making names durable: a file that is flushed is not found after a power failure if its folder was not."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["make_folder", "sync_folder"]


def make_folder(folder: Path) -> None:
    """Make *folder* and those above it that are missing, so that they last."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in *folder* are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
