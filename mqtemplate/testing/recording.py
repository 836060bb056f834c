"""Recordings for tests: sent messages, received messages, and the content of a topic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Unpack

from mqtemplate.broker import Broker
from mqtemplate.listener.decorator import ListenerAttributes, message_listener
from mqtemplate.message import MessageExt
from mqtemplate.results import PullStatus, SendResult, TransactionSendResult
from mqtemplate.template.destination import parse_destination
from mqtemplate.template.rocketmq_template import RocketMQTemplate


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One successful call of a sending method.

    Attributes:
        verb: ``sync_send``, ``async_send``, ``send_one_way``, ``send_in_transaction``, ``async_send_and_receive``;
            the other methods and Spring's names call one of these.
        payload: The passed object, before its conversion to bytes.
        options: Other arguments by name.
        result: Result of the call.
    """

    verb: str
    destination: str
    payload: Any
    options: dict[str, Any]
    result: SendResult | Future[Any] | None

    @property
    def topic(self) -> str:
        """Topic of the destination."""
        return parse_destination(self.destination).topic

    @property
    def tag(self) -> str | None:
        """Tag of the destination; None if it has none."""
        return parse_destination(self.destination).tag


class RecordingTemplate(RocketMQTemplate):
    """Template that sends messages and records the calls.

    Attributes:
        sent: Recorded calls, oldest first. A test may clear it.
    """

    def __init__(self, broker: Broker, **settings: Any) -> None:
        super().__init__(broker, **settings)
        self.sent: list[SentMessage] = []

    def sync_send(self, *args: Any, **options: Any) -> SendResult:
        result = super().sync_send(*args, **options)
        self._record(RocketMQTemplate.sync_send, args, options, result)
        return result

    def async_send(self, *args: Any, **options: Any) -> Future[SendResult]:
        result = super().async_send(*args, **options)
        self._record(RocketMQTemplate.async_send, args, options, result)
        return result

    def send_one_way(self, *args: Any, **options: Any) -> None:
        super().send_one_way(*args, **options)
        self._record(RocketMQTemplate.send_one_way, args, options, None)

    def send_in_transaction(self, *args: Any, **options: Any) -> TransactionSendResult:
        result = super().send_in_transaction(*args, **options)
        self._record(RocketMQTemplate.send_in_transaction, args, options, result)
        return result

    def async_send_and_receive(self, *args: Any, **options: Any) -> Future[Any]:
        result = super().async_send_and_receive(*args, **options)
        self._record(RocketMQTemplate.async_send_and_receive, args, options, result)
        return result

    def _record(self, verb: Callable[..., object], args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        named = inspect.signature(verb).bind(self, *args, **options).arguments
        rest = {name: value for name, value in named.items() if name not in ("self", "destination", "payload")}
        self.sent.append(SentMessage(verb.__name__, named["destination"], named["payload"], rest, result))


class Inbox:
    """Listener that collects its messages.

    ::

        inbox = Inbox()
        mqtemplate_app(inbox.listener("orders", "audit", selector_expression="paid"))

    Attributes:
        received: Messages, oldest first.
    """

    def __init__(self) -> None:
        self.received: list[MessageExt] = []

    def listener(
        self, topic: str, consumer_group: str, **attributes: Unpack[ListenerAttributes]
    ) -> Callable[[MessageExt], None]:
        """Return a decorated function that collects messages here; arguments as `message_listener`."""

        @message_listener(topic, consumer_group, **attributes)
        def collect(message: MessageExt) -> None:
            self.received.append(message)

        return collect

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the received messages."""
        return [message.body for message in self.received]


def messages_in(broker: Broker, topic: str) -> list[MessageExt]:
    """Return all messages of *topic* that a consumer could get now, queue by queue; no pending ones."""
    found: list[MessageExt] = []
    for queue in broker.queues(topic):
        queue_offset = broker.min_offset(queue)
        while (page := broker.pull(queue, queue_offset)).pull_status is not PullStatus.NO_NEW_MSG:
            found += page.messages
            queue_offset = page.next_begin_offset
    return found
