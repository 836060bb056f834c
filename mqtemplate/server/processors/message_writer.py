"""Storing for the server: nothing here waits for the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from mqtemplate.errors import StoreError
from mqtemplate.record.codec import RecordDraft
from mqtemplate.store import MessageStore, PutResult

_log = structlog.stdlib.get_logger("mqtemplate.server")

_Done = Callable[[StoreError | None], None]


class MessageWriter:
    """Appends records. Whether they are safe is told to a callback, later and maybe in another thread.

    Raises:
        MessageError: A record is too large, or its properties are.
        StoreError: It cannot be stored now.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def put(self, draft: RecordDraft, topic: str, queue_id: int) -> PutResult:
        """Append one record; *topic* and *queue_id* are those it is for, which may differ while it waits."""
        if draft.topic != topic:
            self._store.prepare(topic, queue_id)  # when it is due, there should be no file to make
        return self._store.put(draft)

    def put_all(self, drafts: Sequence[RecordDraft], topic: str, queue_id: int) -> list[PutResult]:
        """`put` for several: all of them or none."""
        if drafts[0].topic != topic or drafts[-1].topic != topic:
            self._store.prepare(topic, queue_id)
        return self._store.put_all(drafts)

    def confirm(self, end: int, topics: Sequence[str], done: _Done) -> None:
        """Call *done* when everything before *end* is as safe as the flush mode promises, or with the disk's error.

        What it raises is logged: it runs in the thread that flushes, between the answers to other senders.
        """

        def tell(error: StoreError | None) -> None:
            try:
                done(error)
            except Exception as exc:
                _log.error("server.answer_failed", exc_info=exc)

        self._store.confirm_async(end, topics, tell)

    def confirm_one_way(self, end: int, topics: Sequence[str]) -> None:
        """The same for a sender who asks for no answer."""
        self._store.confirm_async(end, topics)
