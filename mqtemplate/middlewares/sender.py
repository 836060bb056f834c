"""Sending methods of a broker with the middlewares of a template around each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from mqtemplate.clock import Clock
from mqtemplate.errors import MessageDroppedError, MessageError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.middlewares.declaration import arounds
from mqtemplate.middlewares.outgoing import Outgoing
from mqtemplate.middlewares.steps import Around, Steps, call_around, enter, leave
from mqtemplate.observation.interface import Sends
from mqtemplate.results import HalfMessage, SendResult

T = TypeVar("T")


def sends_with_middlewares(sends: Sends, middlewares: Iterable[object], clock: Clock) -> Sends:
    """Return the sending methods of a broker with middlewares; without any they are *sends* itself.

    Raises:
        ConfigurationError: Something is no middleware.
    """
    found = cast("Sequence[Around]", arounds(middlewares, "send"))
    return MiddlewareSender(sends, found, clock) if found else sends


class MiddlewareSender:
    """Sender whose middlewares get the messages as the broker gets them: converted, with all properties.

    The part of a middleware before its ``yield`` runs in the thread that sends, so the order of sends stays. The part
    after it runs in the thread that gets the result.
    """

    def __init__(self, sends: Sends, middlewares: Sequence[Around], clock: Clock) -> None:
        self._sends = sends
        self._clock = clock
        self._middlewares = middlewares

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """Send one message."""
        return self._around([message], "send", lambda each: self._sends.send(each.message, queue, timeout_ms))

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """Send messages together."""
        return self._around(messages, "send", lambda each: self._sends.send_batch(each.messages, queue, timeout_ms))

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """Send without waiting."""
        return self._later(messages, "send", lambda each: self._sends.send_async(each.messages, queue, timeout_ms))

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        """Send without an answer. A message that a middleware drops is not sent, and no error is raised."""
        outgoing = Outgoing([message], "one_way", self._clock)
        call_around(
            self._middlewares,
            outgoing,
            lambda each: self._sends.send_one_way(each.message, queue) if each.messages else None,
        )

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """Send the message of a transaction."""
        return self._around(
            [message], "transaction", lambda each: self._sends.send_half(each.message, group, queue, timeout_ms)
        )

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """Send a request. The middlewares get the reply as the result."""
        return self._later([message], "request", lambda each: self._sends.request(each.message, queue, timeout_ms))

    def reply(self, request: MessageExt, body: bytes, properties: Any = None, timeout_ms: int = 3_000) -> Any:
        """Reply to a request. A handler replies, not a template, so no middleware is called."""
        return self._sends.reply(request, body, properties, timeout_ms)

    def _around(self, messages: Sequence[Message], verb: str, send: Callable[[Outgoing], T]) -> T:
        outgoing = Outgoing(messages, verb, self._clock)
        result = call_around(self._middlewares, outgoing, lambda each: send(each) if each.messages else None)
        if result is None:
            raise _dropped(outgoing)
        return cast("T", result)

    def _later(
        self, messages: Sequence[Message], verb: str, send: Callable[[Outgoing], Future[T]]
    ) -> AwaitableFuture[T]:
        outgoing, opened = Outgoing(messages, verb, self._clock), list[Steps]()
        answer: AwaitableFuture[T] = AwaitableFuture()
        answer.set_running_or_notify_cancel()  # a message that is being sent cannot be cancelled
        result: Any = None
        error: BaseException | None = None
        try:
            is_passed, passed = enter(self._middlewares, outgoing, opened)
            if is_passed and passed.messages:
                send(passed).add_done_callback(lambda done: _settle(answer, opened, outgoing, done))
                return answer
            result = None if is_passed else passed
        except BaseException as raised:
            error = raised
        if isinstance(error, MessageError):
            leave(opened, None, error)  # an invalid call raises at once
        _finish(answer, opened, outgoing, result, error)
        return answer


def _settle(answer: Future[Any], opened: list[Steps], outgoing: Outgoing, done: Future[Any]) -> None:
    error = done.exception()
    _finish(answer, opened, outgoing, None if error is not None else done.result(), error)


def _finish(
    answer: Future[Any], opened: list[Steps], outgoing: Outgoing, result: Any, error: BaseException | None
) -> None:
    try:
        result = leave(opened, result, error)
        if result is None:
            raise _dropped(outgoing)
    except BaseException as raised:
        answer.set_exception(raised)
    else:
        answer.set_result(result)


def _dropped(outgoing: Outgoing) -> MessageDroppedError:
    return MessageDroppedError(
        f"a middleware dropped the message for {outgoing.message.topic!r}; nothing was sent. To let the call succeed, "
        "the middleware returns a SendResult"
    )
