"""Results of handlers: which ones are allowed, and which messages of a batch failed."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from mqtemplate.callables import unfinished
from mqtemplate.errors import ListenerError
from mqtemplate.listener.calling.send import Send, is_sends
from mqtemplate.listener.consume_status import ConsumeStatus
from mqtemplate.user_code import Picklable

_INDEX_COLLECTIONS = (
    list,
    set,
    frozenset,
    tuple,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Set,
)


class BatchFailure(Picklable):  # a result of the handler, not an error of the library
    """Exception of a batch handler: some messages failed, the others are done.

    Args:
        failed: Indices of the failed messages in the list that the handler got, counted from 0.
        reason: Cause for the log.
    """

    def __init__(self, failed: Iterable[int], reason: str = "") -> None:
        self.failed = tuple(failed)
        super().__init__(reason or f"{len(self.failed)} message(s) of the batch failed")


def check_result(result: object) -> None:
    """Refuse a result that is work that is never done, such as a generator: the message is not handled yet.

    Raises:
        ListenerError: It says what was returned.
    """
    if (found := unfinished(result)) is not None:
        raise ListenerError(
            f"the handler returned {found}, so its work is not done; await it in an 'async def' handler, run it to its "
            "end, or return a list"
        )


def failed_indices(result: object, count: int) -> frozenset[int]:
    """Return the indices of the messages that failed, from the result of a batch handler.

    Args:
        result: None, ``CONSUME_SUCCESS`` or messages to send: none failed. ``RECONSUME_LATER``: all failed. Numbers:
            these failed.
        count: Number of messages that the handler got.

    Raises:
        ListenerError: The result is none of these, or an index is not in the batch.
    """
    if result is None or result is ConsumeStatus.CONSUME_SUCCESS or is_sends(result):
        return frozenset()
    if result is ConsumeStatus.RECONSUME_LATER:
        return frozenset(range(count))
    check_result(result)
    if not isinstance(result, list | tuple | set | frozenset):
        raise ListenerError(
            f"a batch handler returned {result!r}; return nothing, a ConsumeStatus, the indices of those that failed, "
            "or messages to send: Send(...)"
        )
    for index in result:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ListenerError(f"a batch handler named message {index!r} as failed, the batch has 0..{count - 1}")
    return frozenset(result)


def is_done(result: object) -> bool:
    """Return True unless the result of a handler of single messages requests its message again."""
    return result is not ConsumeStatus.RECONSUME_LATER


def is_batch_done(result: object) -> bool:
    """Return True unless the result of a batch handler says that some of its messages failed."""
    if isinstance(result, list | tuple | set | frozenset):
        return not result or is_sends(result)
    return is_done(result)


def is_allowed_result(annotation: Any, is_batch: bool) -> bool:
    """Return True if a return type is a status, a reply to a request, or indices of a batch.

    ``bool`` is not allowed: a handler that returns False means that the message is not done.
    """
    if annotation in (None, NoneType, Any, NoReturn, object, ConsumeStatus):
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return all(is_allowed_result(argument, is_batch) for argument in arguments)
    if origin in (collections.abc.Awaitable, collections.abc.Coroutine):
        return is_allowed_result(arguments[-1], is_batch)
    if not is_batch:
        return annotation is not bool
    return annotation is Send or (origin in _INDEX_COLLECTIONS and (int in arguments or Send in arguments))
