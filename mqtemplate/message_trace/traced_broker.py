"""Trace of sent messages: a broker whose sends are noted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageExt, MessageQueue, Property, parse_offset_msg_id
from mqtemplate.message_trace.dispatcher import TraceDispatcher
from mqtemplate.message_trace.records import TraceMessageType, sent_record, transaction_record
from mqtemplate.results import HalfMessage, SendResult, SendStatus, TransactionState

DEFAULT_REGION = "DefaultRegion"
"""Region of a broker that reports none. Source: ``common: MixAll.DEFAULT_TRACE_REGION_ID``."""

_STATES = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",  # as RocketMQ spells it
}


class TracedBroker:
    """A broker for one template, which writes a trace record for each message that was sent.

    Everything else is that of the broker. One-way sends have no result and are not traced, as in RocketMQ.

    Args:
        group: Producer group in the records.
    """

    def __init__(self, broker: Broker, dispatcher: TraceDispatcher, group: str) -> None:
        self._broker = broker
        self._dispatcher = dispatcher
        self._group = group
        self._now_ms = broker.clock.now_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        """Do `Broker.send` and note the message."""
        started_ms = self._now_ms()
        result = self._broker.send(message, queue, timeout_ms)
        self._note((message,), result, started_ms)
        return result

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        """Do `Broker.send_batch` and note each message."""
        started_ms = self._now_ms()
        result = self._broker.send_batch(messages, queue, timeout_ms)
        self._note(messages, result, started_ms)
        return result

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        """Do `Broker.send_async` and note the messages when they are stored."""
        started_ms = self._now_ms()
        future = self._broker.send_async(messages, queue, timeout_ms)

        def note(done: Future[SendResult]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._note(messages, done.result(), started_ms)

        future.add_done_callback(note)
        return future

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        """Do `Broker.send_half` and note the half message."""
        started_ms = self._now_ms()
        half = self._broker.send_half(message, group, queue, timeout_ms)
        self._note((message,), half.send_result, started_ms, TraceMessageType.HALF)
        return half

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        """Do `Broker.end_transaction` and note the state."""
        self._broker.end_transaction(half, state, remark)
        message, result = half.message, half.send_result
        if not result.trace_on or not self._dispatcher.is_traced(message.topic):
            return
        record = transaction_record(
            time_ms=self._now_ms(),
            region=result.region_id or DEFAULT_REGION,
            group=self._group,
            topic=message.topic,
            msg_id=result.msg_id,
            tags=message.tags,
            keys=message.keys,
            store_host=str(parse_offset_msg_id(result.offset_msg_id)[0]),
            transaction_id=result.transaction_id,
            state=_STATES[state],
        )
        self._dispatcher.append(record)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        """Do `Broker.request`. A request is not traced: its result is the reply."""
        return self._broker.request(message, queue, timeout_ms)

    def _note(
        self,
        messages: Sequence[Message],
        result: SendResult,
        started_ms: int,
        kind: TraceMessageType | None = None,
    ) -> None:
        if not result.trace_on or not self._dispatcher.is_traced(messages[0].topic):
            return
        cost_ms = (self._now_ms() - started_ms) // len(messages)
        ids = zip(messages, result.msg_id.split(","), result.offset_msg_id.split(","), strict=False)
        for message, msg_id, offset_msg_id in ids:
            record = sent_record(
                time_ms=started_ms,
                region=result.region_id or DEFAULT_REGION,
                group=self._group,
                topic=message.topic,
                msg_id=msg_id,
                tags=message.tags,
                keys=message.keys,
                store_host=str(parse_offset_msg_id(offset_msg_id)[0]),
                body_bytes=len(message.body),
                cost_ms=cost_ms,
                kind=_kind_of(message) if kind is None else kind,
                offset_msg_id=offset_msg_id,
                success=result.send_status is SendStatus.SEND_OK,
            )
            self._dispatcher.append(record)


def _kind_of(message: Message) -> TraceMessageType:
    is_delayed = any(name in message.properties for name in DELAY_PROPERTIES)
    if is_delayed:
        return TraceMessageType.DELAY
    return TraceMessageType.ORDER if Property.SHARDING_KEY in message.properties else TraceMessageType.NORMAL
