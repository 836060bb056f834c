"""Requests about pending messages: code 370, and codes 500,001 to 500,005, which RocketMQ does not have.

Source of code 370: RocketMQ ``broker: RecallMessageProcessor``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.broker import Capability
from mqtemplate.delay.pending import cursor_after
from mqtemplate.engine.delayed import LocalDelayedMessages
from mqtemplate.engine.engine import Engine
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChange
from mqtemplate.remoting.protocol.bodies.own_requests import (
    CancelDelayedMessageRequestHeader,
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    GetPendingPositionsRequestHeader,
    PendingCountsData,
    PendingMessageData,
    PendingMessagesData,
    PendingQueryRequestHeader,
    Refusal,
    RefusalHeader,
    RescheduleDelayedMessageRequestHeader,
    ScheduleChangeData,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import RecallMessageRequestHeader, RecallMessageResponseHeader
from mqtemplate.server.requests.registration import answers
from mqtemplate.server.requests.response import RefusedError, decode_handles, refusing_invalid
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs

_MAX_PAGE = 1_000
_MAX_PAGE_BYTES = 1 << 20
_MAX_POSITIONS = 400_000
"""Positions of a page: 24 bytes each, in a frame of at most 16 MiB."""
_MESSAGE_BYTES = 300
"""Bytes of one message of a page in JSON, without its texts."""
_MAX_BUCKETS = 100_000
"""Most time spans of a count. The longest delay, forty days, has 57,600 minutes."""


def announced_capabilities(engine: Engine, settings: BrokerServerSettings) -> str:
    """Return the names of the capabilities that remote clients of a server have, joined by commas."""
    missing = {Capability.LOCAL_FILES}
    if not settings.recall_message_enable:
        missing |= {Capability.SCHEDULE_CHANGE, Capability.TIMER_CHANGE}
    if not settings.enable_property_filter:
        missing.add(Capability.SQL92)
    # Only a server has blocks: an embedded broker has the files.
    capabilities = {*engine.capabilities, Capability.RECORD_BLOCK} - missing
    return ",".join(sorted(capability.name for capability in capabilities))


@dataclass(frozen=True, slots=True)
class DelayedMessageProcessor:
    """Control over the pending messages of this broker, for the remote broker of this library."""

    engine: Engine
    settings: BrokerServerSettings

    # --- changes -------------------------------------------------------------------------------

    @answers(RequestCode.CANCEL_DELAYED_MESSAGE, slow=True)
    def _cancel(self, header: CancelDelayedMessageRequestHeader) -> ScheduleChangeData:
        self._check_change(header)
        with refusing_invalid():
            change = self.engine.delayed.cancel(
                header.handle, key=header.key, topic=header.topic, namespace=header.namespace
            )
        return _change_data(change)

    @answers(RequestCode.RESCHEDULE_DELAYED_MESSAGE, slow=True)
    def _reschedule(self, header: RescheduleDelayedMessageRequestHeader) -> ScheduleChangeData:
        self._check_change(header)
        time_ms = header.deliver_time
        with refusing_invalid():
            change = self.engine.delayed.reschedule(
                header.handle, time_ms, key=header.key, topic=header.topic, namespace=header.namespace
            )
        return _change_data(change)

    def _check_change(self, header: CancelDelayedMessageRequestHeader) -> None:
        """Raise `RefusedError` if changes are disabled, or a handle is not one of this broker."""
        _check_enabled(self.settings)
        name = self.engine.name
        for handle in decode_handles(header.handle):
            if handle.broker_name != name:
                raise RefusedError(
                    ResponseCode.ILLEGAL_OPERATION,
                    f"the handle is for a message of broker {handle.broker_name!r}, not of {name!r}; send it there",
                )

    # --- queries -------------------------------------------------------------------------------

    @answers(RequestCode.GET_PENDING_MESSAGES, slow=True)
    def _page(self, header: GetPendingMessagesRequestHeader) -> PendingMessagesData:
        with refusing_invalid():
            page = self.engine.delayed.pending(_query(header), min(header.max_count, _MAX_PAGE), header.cursor)
        messages = _fitting(page.messages)
        return PendingMessagesData(
            messages=[_message_data(message) for message in messages],
            has_more=page.cursor is not None or len(messages) < len(page.messages),
        )

    @answers(RequestCode.COUNT_PENDING_MESSAGES, slow=True)
    def _count(self, header: CountPendingMessagesRequestHeader) -> PendingCountsData:
        with refusing_invalid():
            counts = self.engine.delayed.count_pending(_query(header), header.bucket_millis, max_buckets=_MAX_BUCKETS)
        return PendingCountsData(total=counts.total, buckets=counts.buckets)


@dataclass(frozen=True, slots=True)
class PendingPositionsProcessor:
    """Positions of pending messages in the files of this broker, for Spark's processes on the same machine."""

    delayed: LocalDelayedMessages

    @answers(RequestCode.GET_PENDING_POSITIONS, slow=True)
    def _positions(self, header: GetPendingPositionsRequestHeader) -> bytes:
        after, count = (header.after_due, header.after_offset), min(header.max_count, _MAX_POSITIONS)
        return self.delayed.pending_positions(_query(header), after, count)


def _change_data(change: ScheduleChange) -> ScheduleChangeData:
    return ScheduleChangeData(status=change.status.name, count=change.count, handles=list(change.handles))


def _query(header: PendingQueryRequestHeader) -> PendingQuery:
    return PendingQuery(
        topic=header.topic,
        key=header.key,
        tag=header.tag,
        before_ms=header.before_time,
        after_ms=header.after_time,
        namespace=header.namespace,
    )


def _fitting(messages: Iterable[PendingMessage]) -> list[PendingMessage]:
    """Return the first messages that fit into one response; at least one, if there is one."""
    fitting: list[PendingMessage] = []
    size = 0
    for message in messages:
        texts = (message.topic, message.msg_id, message.tags or "", message.keys or "", message.handle)
        size += _MESSAGE_BYTES + sum(map(len, texts))
        if fitting and size > _MAX_PAGE_BYTES:
            break
        fitting.append(message)
    return fitting


def _message_data(message: PendingMessage) -> PendingMessageData:
    return PendingMessageData(
        topic=message.topic,
        msg_id=message.msg_id,
        tags=message.tags,
        keys=message.keys,
        deliver_time=message.deliver_ms,
        delay_level=message.delay_level,
        roll_count=message.roll_count,
        born_timestamp=message.born_timestamp,
        store_timestamp=message.store_timestamp,
        body_size=message.body_size,
        handle=message.handle,
        cursor=cursor_after(message),
    )


@dataclass(frozen=True, slots=True)
class RecallProcessor:
    """Cancels delayed messages by handle. Unlike RocketMQ's broker, it refuses the recall of a delivered message."""

    engine: Engine
    topics: TopicConfigs
    settings: BrokerServerSettings

    @answers(RequestCode.RECALL_MESSAGE, slow=True)
    def _recall(self, header: RecallMessageRequestHeader) -> RecallMessageResponseHeader:
        _check_enabled(self.settings)
        self.topics.get(header.topic)
        msg_id = self.engine.delayed.recall(header.topic, header.recall_handle)
        return RecallMessageResponseHeader(msg_id=msg_id, msg_region=self.settings.region_id)


def _check_enabled(settings: BrokerServerSettings) -> None:
    if not settings.recall_message_enable:
        raise RefusedError(
            ResponseCode.NO_PERMISSION,
            "recall is disabled; set recall-message-enable to true",
            RefusalHeader(refusal=Refusal.RECALL_DISABLED),
        )
