"""The consume queues of a store, by topic and queue id."""

from __future__ import annotations

import threading

from mqtemplate.errors import StoreError
from mqtemplate.numbers import parse_number
from mqtemplate.store.files.mapped_queues import MappedQueues
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.store.queues.consume_queue import ConsumeQueue
from mqtemplate.topics import is_file_name


class QueueTable:
    """The consume queues of a store. The caller holds the lock of the store, except for `create`.

    Args:
        max_mapped: Largest number of queues with mapped files.
        lock: The lock of the store.

    Attributes:
        queues: All queues that exist.
    """

    def __init__(self, store_files: StoreFiles, max_mapped: int, lock: threading.Lock) -> None:
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._store_files = store_files
        self._mapped = MappedQueues(max_mapped)
        self._lock = lock
        self._creation_ended = threading.Condition(lock)
        self._in_creation: set[tuple[str, int]] = set()  # queues whose file is created now
        self._file_size = 0
        self._setting = ""

    def load(self, file_size: int, setting: str) -> None:
        """Open all queues in the folder.

        Args:
            setting: Configuration key of the size, for the error message; empty if the size is that of the files.

        Raises:
            StoreFormatError: The files have another size.
        """
        self._file_size, self._setting = file_size, setting
        for topic in self._store_files.list_folders("consumequeue"):
            for queue_id in self._store_files.list_folders(f"consumequeue/{topic}"):
                if (number := parse_number(queue_id)) is not None and 0 <= number < 1 << 31:
                    self.open(topic, number)

    def open(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue. If it is missing, add it without a file; if its file is created now, wait for that."""
        key = topic, queue_id
        found = self.queues.get(key)
        if found is not None:
            return found
        while key in self._in_creation:
            self._creation_ended.wait()
        if key not in self.queues:
            self.queues[key] = self._new(topic, queue_id)
        return self.queues[key]

    def create(self, topic: str, queue_id: int) -> None:
        """Add a queue with its file, unless it exists. The lock is free while a busy disk takes its time for the file.

        Raises:
            StoreFullError: There is no space for the file.
        """
        key = topic, queue_id
        with self._lock:
            if key in self.queues or key in self._in_creation:
                return
            self._in_creation.add(key)
        created = None
        try:
            queue = self._new(topic, queue_id)
            queue.create_first_file()
            created = queue
        finally:
            with self._lock:
                self._in_creation.remove(key)
                self._creation_ended.notify_all()
                if created is not None:
                    self.queues[key] = created
                    self._mapped.note(created)

    def _new(self, topic: str, queue_id: int) -> ConsumeQueue:
        if not is_file_name(topic):
            raise StoreError(f"topic {topic[:40]!r} has no queues: it cannot be the name of a folder; use another name")
        files = self._store_files.mapped_queue(
            f"consumequeue/{topic}/{queue_id}", self._file_size, setting=self._setting, rebuildable=True
        )
        return ConsumeQueue(files, self._mapped)
