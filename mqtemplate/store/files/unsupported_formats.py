"""Store formats of RocketMQ that mqtemplate cannot read."""

from __future__ import annotations

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import StoreFiles


def refuse_unsupported_formats(store_files: StoreFiles) -> None:
    """Raise an error if the store has consume queues in another format.

    The commit log has the same format everywhere, so no message is lost. But the state of RocketMQ is in the other
    queues, not in the files that mqtemplate would read.

    Raises:
        StoreFormatError: The consume queues are in RocksDB or in batches, or have extension files.
    """
    for folder in ("consumequeue", "consumequeue_rocksdb"):
        if store_files.exists(f"{folder}/CURRENT"):
            raise StoreFormatError(
                f"the consume queues of this folder are in RocksDB ({folder}/CURRENT; RocketMQ's storeType "
                "defaultRocksDB), which cannot be read here. The messages can. The progress of the consumer groups and "
                "the queue counts of the topics are in RocksDB too, below config/, and would start from zero; "
                f"{_way_out(folder)}"
            )
    extended = _first_file(store_files, "consumequeue_ext")
    if extended is not None:
        raise StoreFormatError(
            f"the consume queues of this folder have an extension ({extended}; RocketMQ's enableConsumeQueueExt), "
            f"which cannot be read here. The messages can; {_way_out('consumequeue', 'consumequeue_ext')}"
        )
    batched = _first_file(store_files, "batchconsumequeue")
    if batched is not None:
        raise StoreFormatError(
            f"this folder has a topic whose queues are in batches ({batched}; RocketMQ's queue.type BatchCQ), which "
            "cannot be read here; open it with RocketMQ, and send its messages to a topic without that attribute"
        )


def _way_out(*folders: str) -> str:
    return (
        f"stop RocketMQ, move {' and '.join(folders)} and the file checkpoint away, and open the folder again: the "
        "queues are then rebuilt from the commit log"
    )


def _first_file(store_files: StoreFiles, folder: str) -> str | None:
    """Return a file at the position of a queue file: ``folder/topic/queue/file``."""
    for topic in store_files.list_folders(folder):
        for queue_id in store_files.list_folders(f"{folder}/{topic}"):
            for name in store_files.file_sizes(f"{folder}/{topic}/{queue_id}"):
                return f"{folder}/{topic}/{queue_id}/{name}"
    return None
