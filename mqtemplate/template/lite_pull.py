"""The consumer behind ``template.receive``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from mqtemplate.broker import Broker, ConsumeFromWhere, Consumer, ConsumerSpec, MessageModel
from mqtemplate.converter import MessageConverter
from mqtemplate.errors import BrokerClosedError, ConversionError
from mqtemplate.event_log import get_logger
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.selectors.tags import SelectorType, make_selector
from mqtemplate.topics import check_topic

_log = get_logger("mqtemplate.template")

_STRAIGHT_TO_DEAD_LETTERS = -1  # see `Consumer.send_back`


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Consumer group and subscription of ``template.receive``: one topic. See ``rocketmq.pull-consumer.*``.

    Attributes:
        consume_from_where: Start of a new group. The default is the first offset: a program that receives from time to
            time would otherwise miss the messages before its first call.
    """

    group: str
    topic: str
    selector_type: SelectorType = SelectorType.TAG
    selector_expression: str = "*"
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

    def spec(self) -> ConsumerSpec:
        """Return the subscription as the broker takes it."""
        return ConsumerSpec(
            group=self.group,
            subscriptions={check_topic(self.topic): make_selector(self.selector_type, self.selector_expression)},
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
        )


class LitePullConsumer:
    """A member of a consumer group that polls when the application calls ``receive``.

    - Delivery is at least once: the messages of one ``receive`` are committed by the next one, or by `close`. If the
      process dies before that, the group receives them again.
    - Threads may share it, but a call commits what another thread received before. To process messages in several
      threads use a listener.
    - It joins the group with the first ``receive``.
    """

    def __init__(self, broker: Broker, settings: PullSettings, converter: MessageConverter) -> None:
        self._broker = broker
        self._settings = settings
        self._converter = converter
        self._consumer: Consumer | None = None
        self._uncommitted: dict[MessageQueue, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, target_type: Any, max_count: int, timeout_ms: int) -> list[Any]:
        """Return up to *max_count* messages, each as *target_type*; empty if none arrives within *timeout_ms*.

        A message that cannot be converted goes to ``%DLQ%group`` and into the log: a retry would fail too, and it must
        not block the other messages. (A broadcasting group has no dead-letter topic, only the log.)
        """
        with self._lock:
            consumer = self._open()
            self._commit(consumer)
            messages = consumer.poll(max_count, timeout_ms)
            self._uncommitted = {queue: consumer.position(queue) for queue in consumer.assignment()}
            return [payload for message in messages for payload in self._convert(consumer, message, target_type)]

    def close(self) -> None:
        """Commit what was received, and leave the group. A ``receive`` that waits in another thread ends."""
        self._closed = True
        polling = self._consumer
        if polling is not None:
            polling.wake()  # before the lock: a waiting `receive` holds it
        with self._lock:
            consumer, self._consumer = self._consumer, None
            if consumer is not None:
                self._commit(consumer)
                consumer.close()

    def _open(self) -> Consumer:
        if self._closed:
            raise BrokerClosedError("the template was closed; it receives no more")
        if self._consumer is None:
            self._consumer = self._broker.subscribe(self._settings.spec())
        return self._consumer

    def _commit(self, consumer: Consumer) -> None:
        """Commit what the last call returned. The new owner of a reassigned queue reads on from the last commit."""
        assigned = consumer.assignment()
        for queue, queue_offset in self._uncommitted.items():
            if queue in assigned:
                consumer.commit(queue, queue_offset)
        self._uncommitted = {}

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
