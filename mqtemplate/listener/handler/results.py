"""Results of handlers: which ones are allowed, which messages of a batch failed, and what is sent to other topics."""

from __future__ import annotations

import collections.abc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, NoReturn, Protocol, Union, get_args, get_origin

from mqtemplate.callables import unfinished
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.results import ConsumeStatus, PublishSpec, ResultSender, is_sends
from mqtemplate.template.options import Send

_INDEX_COLLECTIONS = (
    list,
    set,
    frozenset,
    tuple,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Set,
)


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
        ListenerError: The result is something else, or an index is not in the batch.
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


class SendingTemplate(Protocol):
    """The sending verbs of a template that a publisher uses."""

    def sync_send(self, *args: Any, **options: Any) -> object:
        """Send, and wait until the broker has stored the message."""

    def async_send(self, *args: Any, **options: Any) -> Awaitable[object]:
        """Send without waiting."""


class ResultPublisher:
    """Sender of the results of one handler.

    Args:
        listener: Name of the listener, for errors.
        specs: Specs of ``@publishes``, resolved.
        template: Function that returns the template; None without an application.
    """

    def __init__(
        self,
        listener: str = "",
        specs: Sequence[PublishSpec] = (),
        template: Callable[[], SendingTemplate] | None = None,
    ) -> None:
        self.specs = specs
        self._listener = listener
        self._template = template

    def publish(self, result: object) -> None:
        """Send what a result requests, and wait until the broker has it."""
        for send in self._sends(result):
            self._found().sync_send(send.destination, send.payload, None, send.delay_level, **send.options)

    async def publish_async(self, result: object) -> None:
        """Do `publish` without blocking the event loop."""
        sent = [
            self._found().async_send(send.destination, send.payload, None, send.delay_level, **send.options)
            for send in self._sends(result)
        ]
        for future in sent:
            await future

    def through(self, sender: ResultSender, result: object) -> Iterator[object]:
        """Send what a result requests by another sender, and yield what it returns."""
        for send in self._sends(result):
            yield sender.send(send.destination, send.payload, send.delay_level, **send.options)

    def around(self, call: Callable[[Any], Any], *, is_async: bool) -> Callable[[Any], Any]:
        """Return a handler, as a function of one argument, that sends its results before it returns."""
        publish, publish_async = self.publish, self.publish_async

        def call_and_send(source: Any) -> object:
            result = call(source)
            if result is not None:
                publish(result)
            return result

        async def await_and_send(source: Any) -> object:
            result = await call(source)
            if result is not None:
                await publish_async(result)
            return result

        return await_and_send if is_async else call_and_send

    def _sends(self, result: object) -> Sequence[Send]:
        if result is None or isinstance(result, ConsumeStatus):
            return ()
        if is_sends(result):
            return [result] if isinstance(result, Send) else result  # type: ignore[return-value]  # of `Send`
        if self.specs:
            check_result(result)
        return [Send(spec.destination, result, spec.delay_level, **spec.options) for spec in self.specs]

    def _found(self) -> SendingTemplate:
        if self._template is None:
            raise ListenerError(
                f"{self._listener}: its result goes to another topic, and the registry has no template; give the "
                "ListenerRegistry template=..., or let an MQApplication run the listener"
            )
        return self._template()
