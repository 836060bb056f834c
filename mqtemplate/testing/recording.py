"""What a test wants to look at afterwards: what was sent, and what arrived."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.listener import message_listener
from mqtemplate.message import MessageExt
from mqtemplate.results import PullStatus, SendResult, TransactionSendResult
from mqtemplate.template import RocketMQTemplate
from mqtemplate.template.destination import parse_destination


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One call of a sending verb that the broker did not refuse.

    Attributes:
        verb: ``sync_send``, ``async_send``, ``send_one_way``, ``send_in_transaction``, ``async_send_and_receive``;
            the other verbs and the names of Spring end in one of them.
        payload: The object as it was passed, not its bytes.
        options: What else was passed, by name.
        result: What the call returned.
    """

    verb: str
    destination: str
    payload: Any
    options: dict[str, Any]
    result: SendResult | Future[Any] | None

    @property
    def topic(self) -> str:
        return parse_destination(self.destination).topic

    @property
    def tag(self) -> str | None:
        return parse_destination(self.destination).tag


class RecordingTemplate(RocketMQTemplate):
    """A template that sends as ever and remembers it.

    Attributes:
        sent: The calls, oldest first. Clear it as you like.
    """

    def __init__(self, broker: Broker, **settings: Any) -> None:
        super().__init__(broker, **settings)
        self.sent: list[SentMessage] = []

    def sync_send(self, *args: Any, **options: Any) -> SendResult:
        result = super().sync_send(*args, **options)
        self._note(RocketMQTemplate.sync_send, args, options, result)
        return result

    def async_send(self, *args: Any, **options: Any) -> Future[SendResult]:
        result = super().async_send(*args, **options)
        self._note(RocketMQTemplate.async_send, args, options, result)
        return result

    def send_one_way(self, *args: Any, **options: Any) -> None:
        super().send_one_way(*args, **options)
        self._note(RocketMQTemplate.send_one_way, args, options, None)

    def send_in_transaction(self, *args: Any, **options: Any) -> TransactionSendResult:
        result = super().send_in_transaction(*args, **options)
        self._note(RocketMQTemplate.send_in_transaction, args, options, result)
        return result

    def async_send_and_receive(self, *args: Any, **options: Any) -> Future[Any]:
        result = super().async_send_and_receive(*args, **options)
        self._note(RocketMQTemplate.async_send_and_receive, args, options, result)
        return result

    def _note(
        self,
        verb: Callable[..., object],
        args: tuple[Any, ...],
        options: dict[str, Any],
        result: SendResult | Future[Any] | None,
    ) -> None:
        named = inspect.signature(verb).bind(self, *args, **options).arguments
        rest = {
            name: value for name, value in named.items() if name not in ("self", "destination", "payload", "options")
        }
        rest |= named.get("options", {})
        self.sent.append(SentMessage(verb.__name__, named["destination"], named["payload"], rest, result))


class Inbox:
    """A listener that keeps what it hears.

    ::

        inbox = Inbox()
        mqtemplate_app(inbox.listener("orders", "audit", selector_expression="paid"))

    Attributes:
        received: Oldest first.
    """

    def __init__(self) -> None:
        self.received: list[MessageExt] = []

    def listener(self, topic: str, consumer_group: str, **attributes: Any) -> Callable[[MessageExt], None]:
        """A decorated function that puts each message in here; attributes as `message_listener`."""

        @message_listener(topic=topic, consumer_group=consumer_group, **attributes)
        def keep(message: MessageExt) -> None:
            self.received.append(message)

        return keep

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.received]


def messages_in(broker: Broker, topic: str) -> list[MessageExt]:
    """Everything a consumer of *topic* could see now, queue by queue; a delayed message is there once it is due."""
    found: list[MessageExt] = []
    for queue in broker.queues(topic):
        queue_offset = broker.min_offset(queue)
        while (page := broker.pull(queue, queue_offset)).pull_status is not PullStatus.NO_NEW_MSG:
            found += page.messages
            queue_offset = page.next_begin_offset
    return found
