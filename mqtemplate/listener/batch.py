"""Which messages of a batch failed, and how a handler says so."""

from __future__ import annotations

from collections.abc import Iterable

from mqtemplate.errors import ListenerError
from mqtemplate.listener.modes import ConsumeStatus


class BatchFailure(Exception):  # noqa: N818 (it is an answer of the handler's, not a fault of the library's)
    """Raised by a batch handler: these messages failed, the others are done.

    Args:
        failed: Their places in the list that the handler got, counted from 0.
        reason: What went wrong, for the log.
    """

    def __init__(self, failed: Iterable[int], reason: str = "") -> None:
        self.failed = tuple(failed)
        super().__init__(reason or f"{len(self.failed)} message(s) of the batch failed")


def failed_indices(result: object, count: int) -> frozenset[int]:
    """Read what a batch handler returned.

    Args:
        result: None or ``CONSUME_SUCCESS``: all done. ``RECONSUME_LATER``: none done. Numbers: these failed.
        count: How many messages the handler got.

    Raises:
        ListenerError: It is none of these, or names a message that is not in the batch.
    """
    if result is None or result is ConsumeStatus.CONSUME_SUCCESS:
        return frozenset()
    if result is ConsumeStatus.RECONSUME_LATER:
        return frozenset(range(count))
    if not isinstance(result, list | tuple | set | frozenset):
        raise ListenerError(
            f"a batch handler returned {result!r}; return nothing, a ConsumeStatus, or the indices of those that failed"
        )
    for index in result:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ListenerError(f"a batch handler named message {index!r} as failed, the batch has 0..{count - 1}")
    return frozenset(result)
