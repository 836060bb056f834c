"""Messages on request: what stands behind ``template.receive``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import structlog

from mqtemplate.broker import Broker, ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import BrokerClosedError, ConversionError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.selectors.tags import SelectorType, make_selector
from mqtemplate.topics import check_topic

_log = structlog.stdlib.get_logger("mqtemplate.template")

_STRAIGHT_TO_DEAD_LETTERS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """What a template receives, and as whom. One group reads one topic; see ``rocketmq.pull-consumer.*``.

    Attributes:
        consume_from_where: Where the group starts the first time. The first offset is the default, since a program
            that asks for messages now and then would else miss what came before its first question.
    """

    group: str
    topic: str
    selector_type: SelectorType = SelectorType.TAG
    selector_expression: str = "*"
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    consume_timestamp: int | None = None
    max_reconsume_times: int = 16
    instance_name: str = "DEFAULT"

    def spec(self) -> ConsumerSpec:
        return ConsumerSpec(
            group=self.group,
            subscriptions={check_topic(self.topic): make_selector(self.selector_type, self.selector_expression)},
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
            consume_timestamp=self.consume_timestamp,
            max_reconsume_times=self.max_reconsume_times,
            instance_name=self.instance_name,
        )


class LitePullConsumer:
    """A member of a group that reads when it is asked.

    What one ``receive`` returned counts as done when the next one begins, or at ``close``. A process that dies in
    between gets it again: at least once. Several threads may take turns, but the next one's question confirms what
    the one before was given; a program that works on messages in several threads is better served by a listener.

    It joins the group with the first ``receive``, and belongs to one template.
    """

    def __init__(self, broker: Broker, settings: PullSettings, converter: MessageConverter) -> None:
        self._broker = broker
        self._settings = settings
        self._converter = converter
        self._consumer: Consumer | None = None
        self._unconfirmed: dict[MessageQueue, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, target_type: Any, max_count: int, timeout_ms: int) -> list[Any]:
        """Up to *max_count* messages, each as *target_type*; an empty list if none came within *timeout_ms*.

        A message that is no *target_type* goes to ``%DLQ%group`` and into the log: asking again could not help it,
        and it must not stand in the way of the others. (A broadcasting group has no dead letters, only the log.)
        """
        with self._lock:
            consumer = self._open()
            self._confirm(consumer)
            messages = consumer.poll(max_count, timeout_ms)
            self._unconfirmed = {queue: consumer.position(queue) for queue in consumer.assignment()}
            return [payload for message in messages for payload in self._convert(consumer, message, target_type)]

    def close(self) -> None:
        """Confirm what was received, and leave the group. A ``receive`` that waits in another thread ends."""
        self._closed = True
        waiting = self._consumer
        if waiting is not None:
            waiting.wake()
        with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                self._confirm(consumer)
                consumer.close()

    def _open(self) -> Consumer:
        if self._closed:
            raise BrokerClosedError("the template was closed; it receives no more")
        if self._consumer is None:
            self._consumer = self._broker.subscribe(self._settings.spec())
        return self._consumer

    def _confirm(self, consumer: Consumer) -> None:
        """Commit what was returned. A queue that another member has now is read there again from its last commit."""
        mine = consumer.assignment()
        for queue, queue_offset in self._unconfirmed.items():
            if queue in mine:
                consumer.commit(queue, queue_offset)
        self._unconfirmed = {}

    def _convert(self, consumer: Consumer, message: MessageExt, target_type: Any) -> list[Any]:
        if target_type is MessageExt or target_type is Message:
            return [message]
        try:
            return [self._converter.from_body(message.body, target_type, message.properties)]
        except ConversionError as exc:
            if self._settings.message_model is MessageModel.CLUSTERING:
                consumer.send_back(message, _STRAIGHT_TO_DEAD_LETTERS)
            _log.error(
                "receive.conversion_failed",
                topic=message.topic,
                tag=message.tags,
                group=self._settings.group,
                msg_id=message.msg_id,
                queue=message.queue_id,
                offset=message.queue_offset,
                reason=str(exc),
            )
            return []
