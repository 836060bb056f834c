"""Sizes of the files of a store directory: set explicitly, or found in the directory, or the defaults of a new one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.layout import CQ_UNIT_SIZE
from mqtemplate.store.settings import StoreSettings

NEW_COMMIT_LOG_SIZE = 64 << 20
NEW_CONSUME_QUEUE_SIZE = 600_000
NEW_TIMER_LOG_SIZE = 4 << 20


class FileSizes(NamedTuple):
    """Bytes of each file of the commit log and of the consume queues."""

    commit_log: int
    consume_queue: int


def file_sizes(
    settings: StoreSettings, store_files: StoreFiles | None = None, noted: FileSizes | None = None
) -> FileSizes:
    """Return the sizes that *settings* set. One that is not set is that of the files; in a new directory the default.

    The result may contradict the files: then opening them fails, with the reason.

    Args:
        noted: The sizes that mqtemplate has noted in the directory. A single file that is shorter was cut.
    """
    commit_log, consume_queue = settings.mapped_file_size_commit_log, settings.mapped_file_size_consume_queue
    if commit_log is None and store_files is not None:
        commit_log = _not_cut(size_in_folder(store_files, "commitlog"), noted and noted.commit_log)
    if consume_queue is None and store_files is not None:
        consume_queue = _not_cut(_queue_file_size(store_files), noted and noted.consume_queue)
    # A consume queue has whole units.
    consume_queue = -(-(consume_queue or NEW_CONSUME_QUEUE_SIZE) // CQ_UNIT_SIZE) * CQ_UNIT_SIZE
    return FileSizes(commit_log or NEW_COMMIT_LOG_SIZE, consume_queue)


def size_in_folder(store_files: StoreFiles, folder: str) -> int | None:
    """Return the size of the mapped files in a folder; None without a file that has content.

    A file is named by the offset of its first byte, so the names of two adjacent files show the size as well.
    """
    lengths = store_files.file_sizes(folder)
    starts = sorted(int(name) for name in lengths if name.isdecimal())
    sizes = Counter(length for name, length in lengths.items() if length and name.isdecimal())
    if not sizes:
        return None
    distances = [later - earlier for earlier, later in pairwise(starts)]
    for size, _ in sizes.most_common():
        if all(distance % size == 0 for distance in distances):  # a multiple if a file is missing
            return size
    return min(distances)


def _queue_file_size(store_files: StoreFiles) -> int | None:
    """Return the size of most consume queue files."""
    found: Counter[int] = Counter()
    for topic in store_files.list_folders("consumequeue"):
        for queue_id in store_files.list_folders(f"consumequeue/{topic}"):
            size = size_in_folder(store_files, f"consumequeue/{topic}/{queue_id}")
            if size is not None and size % CQ_UNIT_SIZE == 0:
                found[size] += 1
    return found.most_common(1)[0][0] if found else None


def _not_cut(found: int | None, noted: int | None) -> int | None:
    return max(found, noted) if found and noted else found or noted
