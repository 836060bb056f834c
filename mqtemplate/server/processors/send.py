"""Codes 10, 310 and 320: producers send messages. Code 500,010: sequenced sends, whose repeats are dropped.
Code 500,006: messages that are stored together with a change of pending messages.
Code 36: consumers send messages back that they could not handle.

Source: RocketMQ ``broker: SendMessageProcessor``, ``AbstractSendMessageProcessor.consumerSendMsgBack``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from mqtemplate.broker import QueuedMessage
from mqtemplate.engine.delayed import LocalDelayedMessages
from mqtemplate.engine.sends import StoredSend
from mqtemplate.errors import MessageError, SendError
from mqtemplate.message import Property, SendSequence
from mqtemplate.pending import PendingState
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.own_requests import (
    ChangeAction,
    ChangeAndSendData,
    ChangeAndSendRequestHeader,
    SendSequencedRequestHeader,
    SendSequencedResponseHeader,
    StoredMessageData,
    encode_outcome,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import (
    ConsumerSendMsgBackRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.remoting.protocol.sequenced import read_queue_batches
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.core.producers import ClientRecalls
from mqtemplate.server.core.sends import (
    CheckedSendBack,
    ClientChangeSends,
    ClientSend,
    ClientSendBack,
    ClientSendBacks,
    ClientSends,
    ClientSequencedSends,
)
from mqtemplate.server.fast_path.pipelines import INLINE_MESSAGES
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError, refusing_invalid
from mqtemplate.server.requests.registration import handles
from mqtemplate.server.requests.response import SendResponses, reply_when_durable
from mqtemplate.store.message_store import MessageStore

_MAX_SEQUENCED_BYTES = 16 << 20
"""As many as a frame: one message may have megabytes. Clients send many small ones in requests of 1 MiB."""


def _client_send(callers: Callers, connection: Connection, request: RemotingCommand) -> ClientSend:
    code = request.code
    header = request.header(
        SendMessageRequestHeader if code == RequestCode.SEND_MESSAGE else SendMessageRequestHeaderV2
    )
    # By position: names would take twice the time (measured).
    return ClientSend(
        callers.of(connection, request),
        header.topic,
        request.body,
        header.properties,
        header.queue_id,
        header.flag,
        header.sys_flag,
        header.born_timestamp,
        header.reconsume_times or 0,
        header.producer_group,
        header.default_topic,
        header.default_topic_queue_nums,
        header.max_reconsume_times,
        header.batch or code == RequestCode.SEND_BATCH_MESSAGE,
    )


@dataclass(frozen=True, slots=True)
class SendProcessor:
    """Stores the messages of producers, and replies when they are as durable as the flush mode requires.

    A send that creates its topic, and a long batch, are stored in another thread.
    """

    store: MessageStore
    callers: Callers
    sends: ClientSends
    responses: SendResponses
    deferred_work: DeferredWork

    @handles(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, max_body_bytes=None)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        send = _client_send(self.callers, connection, request)
        topic = self.sends.existing_topic(send)
        if topic is None or (send.is_batch and self.sends.checked_count(send, topic) > INLINE_MESSAGES):
            work = partial(self._store, connection, request, send, topic)
            return self.deferred_work.run(connection, request, work)
        self._store(connection, request, send, topic)
        return None

    def _store(self, connection: Connection, request: RemotingCommand, send: ClientSend, topic: str | None) -> None:
        """Store the message or the batch, and reply with the positions when it is durable."""
        stored, queue_id = self.sends.store(send, topic)
        if request.is_one_way:
            self.store.confirm_async(stored.end, stored.topics)
            return
        pending = None if stored.pending is None else encode_outcome(stored.pending, stored.msg_id)
        header = self.responses.header(
            stored.offset_msg_id,
            queue_id if stored.queue_id is None else stored.queue_id,
            stored.queue_offset,
            _unique_id(send, stored),
            stored.handle,
            pending,
        )
        failure = ResponseCode.FLUSH_DISK_TIMEOUT
        reply_when_durable(self.store, connection, request, stored.end, stored.topics, header, failure)


def _unique_id(send: ClientSend, stored: StoredSend) -> str | None:
    """Return the id for the response: of a batch the one in the header of the request, if it has one."""
    return decode_properties_text(send.properties).get(Property.UNIQ_KEY) if send.is_batch else stored.msg_id


@dataclass(frozen=True, slots=True)
class SequencedSendProcessor:
    """Stores the messages of a sequenced send that are not stored yet, and replies when all of them are durable.

    RocketMQ has no such request: see `mqtemplate.message.SendSequence`.
    """

    store: MessageStore
    callers: Callers
    sends: ClientSequencedSends

    @handles(RequestCode.SEND_SEQUENCED_MESSAGES, slow=True, max_body_bytes=_MAX_SEQUENCED_BYTES)
    def _send(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(SendSequencedRequestHeader)
        batches = list(read_queue_batches(request.body))
        sequence = SendSequence(header.app_id, header.version, header.partition, header.first)
        caller = self.callers.of(connection, request)
        result, end, topics = self.sends.store(caller, sequence, header.born_timestamp, batches)
        answer = SendSequencedResponseHeader(stored=result.stored, repeated=result.repeated)
        if self.store.confirm(end, topics):
            return request.response(ResponseCode.SUCCESS, answer)
        return request.response(ResponseCode.FLUSH_DISK_TIMEOUT, remark="stored, but not flushed in time; send again")


@dataclass(frozen=True, slots=True)
class ChangeSendProcessor:
    """Changes pending messages and stores others, all of it or nothing; or stores messages under a condition.

    RocketMQ has no such request: see `mqtemplate.broker.DelayedMessages.cancel` and ``send_if``.
    """

    delayed: LocalDelayedMessages
    recalls: ClientRecalls
    callers: Callers
    sends: ClientChangeSends

    @handles(RequestCode.CHANGE_AND_SEND, slow=True, max_body_bytes=_MAX_SEQUENCED_BYTES)
    def _change(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(ChangeAndSendRequestHeader)
        if header.action not in ChangeAction.__members__:
            raise RefusedError(ResponseCode.INVALID_PARAMETER, f"unknown action {header.action[:40]!r}")
        self.recalls.check_change(header.handle)
        with refusing_invalid():
            messages = self.sends.queued(self.callers.of(connection, request), list(read_queue_batches(request.body)))
            try:
                data = self._carry_out(header, messages)
            except SendError as exc:
                raise RefusedError(ResponseCode.SERVICE_NOT_AVAILABLE, str(exc)) from exc
        return request.response(ResponseCode.SUCCESS, body=data.encode())

    def _carry_out(self, header: ChangeAndSendRequestHeader, messages: list[QueuedMessage]) -> ChangeAndSendData:
        handle, key, topic, namespace = header.handle, header.key, header.topic, header.namespace
        if header.action == ChangeAction.SEND_IF:
            state = PendingState.__members__.get(header.state or "")
            if state is None:
                raise MessageError(f"send_if needs a state as its condition, got {header.state!r}")
            found = self.delayed.send_if(messages, state, handle, key=key, topic=topic, namespace=namespace)
            return ChangeAndSendData(status=found.state.name, **_stored_messages(found.sent))
        if header.action == ChangeAction.CANCEL:
            change = self.delayed.cancel(handle, key=key, topic=topic, then=messages, namespace=namespace)
        else:
            deliver_ms = header.deliver_time or 0
            change = self.delayed.reschedule(
                handle, deliver_ms, key=key, topic=topic, then=messages, namespace=namespace
            )
        return ChangeAndSendData(
            status=change.status.name,
            count=change.count,
            handles=list(change.handles),
            **_stored_messages(change.sent),
        )


class _Stored(TypedDict):
    sent: list[StoredMessageData]
    is_flushed: bool


def _stored_messages(sent: Sequence[SendResult]) -> _Stored:
    stored = [
        StoredMessageData(
            msg_id=each.msg_id,
            offset_msg_id=each.offset_msg_id,
            topic=each.message_queue.topic,
            queue_id=each.message_queue.queue_id,
            queue_offset=each.queue_offset,
            handle=each.handle,
        )
        for each in sent
    ]
    return {"sent": stored, "is_flushed": all(each.send_status is SendStatus.SEND_OK for each in sent)}


@dataclass(frozen=True, slots=True)
class SendBackProcessor:
    """Stores messages again that consumers send back, and replies when they are durable.

    If the group or its topic has to be created, this is done in another thread.
    """

    store: MessageStore
    callers: Callers
    send_backs: ClientSendBacks
    deferred_work: DeferredWork

    @handles(RequestCode.CONSUMER_SEND_MSG_BACK)
    def _send_back(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ConsumerSendMsgBackRequestHeader)
        back = ClientSendBack(
            self.callers.of(connection, request),
            header.group,
            header.offset,
            decode_properties_text(header.properties),
            header.delay_level,
            header.delay_ms,
            header.max_reconsume_times,
        )
        work = partial(self._check, connection, request, back)
        if self.send_backs.creations.groups.find(back.group) is not None:
            return work()
        return self.deferred_work.run(connection, request, work)

    def _check(self, connection: Connection, request: RemotingCommand, back: ClientSendBack) -> RemotingCommand | None:
        checked = self.send_backs.check(back)
        if checked is None:
            return request.response()  # The group has no retries.
        if not self.send_backs.topics.has_queue(checked.topic, -1):
            return self.deferred_work.run(connection, request, partial(self._store, connection, request, checked))
        self._store(connection, request, checked)
        return None

    def _store(self, connection: Connection, request: RemotingCommand, checked: CheckedSendBack) -> None:
        stored = self.send_backs.store(checked)
        reply_when_durable(self.store, connection, request, stored.end, stored.topics)
