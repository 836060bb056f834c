"""Requests of a template: messages that a consumer replies to."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar, cast

from mqtemplate.calls.send import SendCall, SendPipeline
from mqtemplate.clock import Clock, VirtualClock
from mqtemplate.converter import MessageConverter, TypeChecks, payload_of
from mqtemplate.futures import AwaitableFuture, HandlerFuture
from mqtemplate.message import Message, MessageExt

T = TypeVar("T")


class Requests:
    """Requests of one template: sends them and converts the replies."""

    def __init__(self, sends: SendPipeline, clock: Clock, converter: MessageConverter) -> None:
        self._sends = sends
        self._converter = converter
        self._types = TypeChecks(converter)
        self._virtual_clock = clock if isinstance(clock, VirtualClock) else None

    def send(self, call: SendCall, reply_type: type[T]) -> AwaitableFuture[T]:
        """Send the message of *call* and return the future of its reply, as *reply_type*.

        Raises:
            ConversionError: No reply can become *reply_type*; nothing was sent.
        """
        self._types.check(reply_type)
        answer: HandlerFuture[T] = HandlerFuture("async_send_and_receive", self._virtual_clock)
        answer.set_running_or_notify_cancel()  # a message that is sent cannot be cancelled

        def arrived(reply: Future[MessageExt]) -> None:
            try:
                answer.set_result(self._convert(reply.result(), reply_type))
            except BaseException as exc:  # also of the converter: the caller waits for the answer
                answer.set_exception(exc)

        self._sends.call(call).add_done_callback(arrived)
        return answer

    def _convert(self, reply: MessageExt, reply_type: type[T]) -> T:
        wanted: Any = reply_type
        if wanted in (MessageExt, Message):
            return cast("T", reply)
        return cast("T", payload_of(reply, wanted, self._converter))
