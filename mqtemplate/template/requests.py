"""Requests of a template: messages that a consumer replies to."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar, cast

from mqtemplate.broker import Broker
from mqtemplate.clock import VirtualClock
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import UnsupportedError
from mqtemplate.message import Message, MessageExt
from mqtemplate.template.send_options import SendPlan

T = TypeVar("T")


class Requests:
    """Requests of one template: sends them and converts the replies."""

    def __init__(self, broker: Broker, converter: MessageConverter) -> None:
        self._broker = broker
        self._converter = converter

    def send(self, plan: SendPlan, reply_type: type[T]) -> Future[T]:
        """Send the message of *plan* and return the future of its reply, as *reply_type*."""
        [message] = plan.messages
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a message that is sent cannot be cancelled

        def arrived(reply: Future[MessageExt]) -> None:
            try:
                answer.set_result(self._convert(reply.result(), reply_type))
            except Exception as exc:
                answer.set_exception(exc)

        self._broker.request(message, plan.queue, plan.timeout_ms).add_done_callback(arrived)
        return answer

    def result(self, answer: Future[T]) -> T:
        """Wait for a reply and return it.

        Raises:
            UnsupportedError: The clock is virtual, and no harness advances it while the caller waits.
        """
        clock = self._broker.clock
        if isinstance(clock, VirtualClock) and not clock.wait_for(answer.done):
            raise UnsupportedError(
                "send_and_receive waits for the reply, and nothing advances the virtual clock; make a Harness, which "
                "does, or use async_send_and_receive and advance the clock"
            )
        return answer.result()

    def _convert(self, reply: MessageExt, reply_type: type[T]) -> T:
        wanted: Any = reply_type
        if wanted in (MessageExt, Message):
            return cast("T", reply)
        return cast("T", self._converter.from_body(reply.body, wanted, reply.properties))
