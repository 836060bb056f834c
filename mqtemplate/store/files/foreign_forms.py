"""Forms that RocketMQ can give a store and that cannot be read here: said at the start, with what to do about it."""

from __future__ import annotations

from mqtemplate.errors import StoreFormatError
from mqtemplate.store.files.store_files import StoreFiles


def refuse_foreign_forms(store_files: StoreFiles) -> None:
    """Do nothing where the store can be read.

    The commit log is the same in every form. Queues in another form are no loss, but what RocketMQ wrote last is in
    them and not in the files that would be read here.

    Raises:
        StoreFormatError: The consume queues are in RocksDB or in batches, or have extension files.
    """
    for folder in ("consumequeue", "consumequeue_rocksdb"):
        if store_files.exists(f"{folder}/CURRENT"):
            raise StoreFormatError(
                f"the consume queues of this folder are in RocksDB ({folder}/CURRENT; RocketMQ's storeType "
                f"defaultRocksDB), which cannot be read here. {_anew(folder)} How far the consumer groups were, and "
                "how many queues a topic has, is in RocksDB too, below config/, and begins anew"
            )
    extended = _first_file(store_files, "consumequeue_ext")
    if extended is not None:
        raise StoreFormatError(
            f"the consume queues of this folder have an extension ({extended}; RocketMQ's enableConsumeQueueExt), "
            f"which cannot be read here. {_anew('consumequeue', 'consumequeue_ext')}"
        )
    batched = _first_file(store_files, "batchconsumequeue")
    if batched is not None:
        raise StoreFormatError(
            f"this folder has a topic whose queues are in batches ({batched}; RocketMQ's queue.type BatchCQ), which "
            "cannot be read here; open it with RocketMQ, and send what the topic holds to one without that attribute"
        )


def _anew(*folders: str) -> str:
    return (
        f"The messages can: stop RocketMQ, move {' and '.join(folders)} and the file checkpoint away, and open the "
        "folder again; the queues are then made anew from the commit log."
    )


def _first_file(store_files: StoreFiles, folder: str) -> str | None:
    """A file where those of a queue lie: ``folder/topic/queue/file``."""
    for topic in store_files.list_folders(folder):
        for queue_id in store_files.list_folders(f"{folder}/{topic}"):
            for name in store_files.file_sizes(f"{folder}/{topic}/{queue_id}"):
                return f"{folder}/{topic}/{queue_id}/{name}"
    return None
