"""Requests of a template: a message that somebody replies to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.template.callbacks import report_to

T = TypeVar("T")


class RequestVerbs:
    """The verbs of `mqtemplate.template.RocketMQTemplate` for requests."""

    broker: Broker
    converter: MessageConverter
    _single_message: Callable[..., tuple[Message, MessageQueue | None, int]]

    def send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[T],
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
    ) -> T:
        """Send, and wait for the reply: what a listener of the topic returned.

        Args:
            reply_type: What the reply shall be; `MessageExt` for the whole of it.
            timeout: Milliseconds until the reply must be here, a delay included.

        Other arguments as ``sync_send``.

        Raises:
            RequestTimeoutError: No reply came in time.
            ConversionError: One came, and is no *reply_type*.
            MessageError, SendError: As ``sync_send``.
        """
        future = self.async_send_and_receive(
            destination,
            payload,
            reply_type,
            timeout,
            delay_level,
            delay=delay,
            deliver_at=deliver_at,
            hash_key=hash_key,
            keys=keys,
            headers=headers,
            queue=queue,
        )
        if isinstance(self.broker.clock, VirtualClock) and not self.broker.clock.wait_for(future.done):
            raise UnsupportedError(
                "send_and_receive waits, and on a virtual clock nothing moves by itself; make a Harness, which lets "
                "time pass for it, or use async_send_and_receive and move the clock"
            )
        return future.result()

    def async_send_and_receive(
        self,
        destination: str,
        payload: object,
        reply_type: type[T],
        timeout: int | None = None,
        delay_level: int = 0,
        *,
        delay: timedelta | float | None = None,
        deliver_at: datetime | int | None = None,
        hash_key: str | None = None,
        keys: str | Sequence[str] = (),
        headers: Mapping[str, object] | None = None,
        queue: MessageQueue | None = None,
        on_success: Callable[[T], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> Future[T]:
        """`send_and_receive` without waiting: the future has the reply.

        Args:
            on_success: Called with the reply, in whichever thread brings it. What it raises is logged.
            on_error: Called with what went wrong instead. Without it a failure beside *on_success* is logged.

        Raises:
            MessageError: At once, for what is wrong with the call.
        """
        if isinstance(payload, list):
            raise MessageError("a request is one message, got a list; pass a tuple to send one JSON array")
        message, queue, timeout_ms = self._single_message(
            destination, payload, timeout, delay_level, delay, deliver_at, hash_key, keys, headers, queue
        )
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # what was sent cannot be taken back

        def arrived(reply: Future[MessageExt]) -> None:
            try:
                answer.set_result(self._convert(reply.result(), reply_type))
            except Exception as exc:
                answer.set_exception(exc)

        self.broker.request(message, queue, timeout_ms).add_done_callback(arrived)
        if on_success is not None or on_error is not None:
            answer.add_done_callback(report_to(on_success, on_error, destination, "request"))
        return answer

    def _convert(self, reply: MessageExt, reply_type: type[T]) -> T:
        wanted: Any = reply_type
        if wanted in (MessageExt, Message):
            return cast("T", reply)
        return cast("T", self.converter.from_body(reply.body, wanted, reply.properties))
