"""Requests of connected clients beside sends and pulls, and requests that the broker relays to them.

Codes 34, 35, 38, 41, 42 and 46: clients register, list the members of their groups, and lock queues. Code 37 ends a
transaction, codes 324 and 325 reply to a request. Codes 307 and 309: a tool asks one consumer through the broker. Code
370, and codes 500,001 to 500,004 and 500,011, which RocketMQ does not have: control over pending messages.

Source: RocketMQ ``broker: ClientManageProcessor``, ``ConsumerManageProcessor``, ``AdminBrokerProcessor``,
``EndTransactionProcessor``, ``ReplyMessageProcessor``, ``RecallMessageProcessor``. Unlike there, replies are not
stored: only the requesting producer could use them, and only before its timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from mqtemplate.broker import Capability
from mqtemplate.delay.pending import ScanLimit, cursor_after
from mqtemplate.engine.clients import ClientChannel, ClientRegistry
from mqtemplate.engine.delayed import LocalDelayedMessages
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import BrokerError, ConversionError, MessageError, RemoteTimeoutError
from mqtemplate.message import Message, Property, parse_offset_msg_id
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChange
from mqtemplate.record.codec import parse_record
from mqtemplate.record.compression import decompress_body
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import client_properties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE
from mqtemplate.remoting.protocol.bodies import own_requests as own
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerRunningInfo,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers import group as headers
from mqtemplate.remoting.protocol.headers.message import (
    ConsumeMessageDirectlyResultRequestHeader,
    EndTransactionRequestHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.results import TransactionState
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.core.clients import ClientLocks, ClientRegistration
from mqtemplate.server.core.producers import ClientRecalls, ClientTransactionEnd, ClientTransactionEnds
from mqtemplate.server.pulls.pull_checks import Subscriptions
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError, refusing_invalid
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import reply_when_durable
from mqtemplate.server.state.remote_clients import (
    ConnectionChannel,
    DiagnosedClient,
    RemoteClients,
    connection_of,
    subscription_data,
)
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.message_store import MessageStore


def announced_capabilities(engine: Engine, settings: BrokerServerSettings) -> str:
    """Return the names of the capabilities that remote clients of a server have, joined by commas."""
    missing = {Capability.LOCAL_FILES}
    if not settings.recall_message_enable:
        missing |= {Capability.SCHEDULE_CHANGE, Capability.TIMER_CHANGE, Capability.PENDING_KEYS}
    if not settings.enable_property_filter:
        missing.add(Capability.SQL92)
    # Only a server has blocks: an embedded broker has the files.
    capabilities = {*engine.capabilities, Capability.RECORD_BLOCK} - missing
    return ",".join(sorted(capability.name for capability in capabilities))


@dataclass(frozen=True, slots=True)
class ClientProcessor:
    """Registers clients by their heartbeats.

    The first heartbeat of a group creates its settings and its retry topic, before the broker responds.

    Attributes:
        capabilities: Names of the capabilities that clients of this library have here, joined by commas.
    """

    registration: ClientRegistration
    access: AccessControl
    callers: Callers
    deferred_work: DeferredWork
    subscriptions: Subscriptions
    capabilities: str

    # --- registration --------------------------------------------------------------------------

    @handles(RequestCode.HEART_BEAT)
    def _heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        heartbeat = HeartbeatData.decode(request.body)
        caller = self.callers.of(connection, request)
        self.access.bind_client(caller, heartbeat.client_id)
        work = partial(self._register, connection, request, caller.account, heartbeat)
        if all(self.registration.creations.has_group(data.group_name) for data in heartbeat.consumer_data_set):
            return work()
        return self.deferred_work.run(connection, request, work)

    def _register(
        self, connection: Connection, request: RemotingCommand, account: str | None, heartbeat: HeartbeatData
    ) -> RemotingCommand:
        engine = self.registration.engine
        channel = ConnectionChannel(
            connection,
            heartbeat.client_id,
            request.language.name,
            request.version,
            engine.clock.steady_ms(),
            account,
            (engine.name, engine.settings.listen_host),
        )
        registered = self.registration.register(
            channel,
            [data.group_name for data in heartbeat.producer_data_set],
            heartbeat.consumer_data_set,
            without_sub=heartbeat.without_sub,
        )
        if registered.refusals:
            raise registered.refusals.pop(0)
        # A client of RocketMQ does not request the capabilities, and gets the response of RocketMQ's broker.
        if not request.header(own.HeartbeatRequestHeader).requests_capabilities:
            return request.response()
        warnings = "\n".join(registered.differences) or None
        return request.response(header=own.HeartbeatResponseHeader(capabilities=self.capabilities, warnings=warnings))

    @answers(RequestCode.UNREGISTER_CLIENT)
    def _unregister(self, header: headers.UnregisterClientRequestHeader, connection: Connection) -> None:
        if header.producer_group is not None:
            self.registration.clients.unregister_producer(header.producer_group, connection.id)
        if header.consumer_group is not None:
            self.registration.clients.unregister_consumer(header.consumer_group, connection.id)

    # --- members and subscriptions -------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def _consumer_list(self, query: headers.ConsumerGroupRequestHeader) -> GetConsumerListByGroupResponseBody:
        info = self.registration.clients.consumers.get(query.consumer_group)
        if info is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {query.consumer_group!r} has no connected consumer")
        return GetConsumerListByGroupResponseBody(consumer_id_list=info.client_ids())

    @answers(RequestCode.CHECK_CLIENT_CONFIG, slow=True)
    def _check_client(self, query: CheckClientRequestBody) -> None:
        """Check the expression of a subscription: a consumer requests this before it starts."""
        subscription = query.subscription_data
        self.subscriptions.compile(subscription.expression_type, subscription.sub_string)


@dataclass(frozen=True, slots=True)
class LockProcessor:
    """Locks queues for consumers that consume in order."""

    callers: Callers
    locks: ClientLocks

    @answers(RequestCode.LOCK_BATCH_MQ)
    def _lock(
        self, body: LockBatchRequestBody, connection: Connection, request: RemotingCommand
    ) -> LockBatchResponseBody:
        caller = self.callers.of(connection, request)
        locked = self.locks.lock(caller, body.consumer_group, body.client_id, body.mq_set)
        return LockBatchResponseBody(lock_ok_mq_set=locked)

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def _unlock(self, body: LockBatchRequestBody) -> None:
        self.locks.table.unlock(body.consumer_group, body.client_id, body.mq_set)


_STATES = {
    0: TransactionState.UNKNOWN,
    SysFlag.TRANSACTION_COMMIT: TransactionState.COMMIT,
    SysFlag.TRANSACTION_ROLLBACK: TransactionState.ROLLBACK,
}


@dataclass(frozen=True, slots=True)
class TransactionProcessor:
    """Ends transactions for remote producers, and replies when the end is durable."""

    store: MessageStore
    callers: Callers
    ends: ClientTransactionEnds

    @handles(RequestCode.END_TRANSACTION)
    def _end(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(EndTransactionRequestHeader)
        state = _STATES.get(header.commit_or_rollback)
        if state is None:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"commitOrRollback must be 0 (unknown), 8 (commit) or 12 (rollback), got {header.commit_or_rollback}",
            )
        end = self.ends.end(
            ClientTransactionEnd(
                self.callers.of(connection, request),
                header.producer_group,
                header.tran_state_table_offset,
                header.commit_log_offset,
                state,
                header.msg_id,
                request.remark,
            )
        )
        if end is None:
            return request.response()
        reply_when_durable(self.store, connection, request, end.physical_end, end.topics)
        return None


_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"


@dataclass(frozen=True, slots=True)
class ReplyProcessor:
    """Forwards replies to the producer of the request, which is a remote client or in this process."""

    engine: Engine
    remote_clients: RemoteClients

    @handles(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2, max_body_bytes=None)
    def _reply(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        is_v1 = request.code == RequestCode.SEND_REPLY_MESSAGE
        sent = request.header(SendMessageRequestHeader if is_v1 else SendMessageRequestHeaderV2)
        sent = replace(sent, sys_flag=sent.sys_flag & SysFlag.OF_CLIENTS)
        properties = dict(client_properties(decode_properties_text(sent.properties), sent.topic))
        client_id = properties.get(Property.REPLY_TO_CLIENT)
        if not client_id:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                f"the reply has no property {Property.REPLY_TO_CLIENT}, the client ID of the requesting producer",
            )
        success = SendMessageResponseHeader(msg_id="0", queue_id=max(sent.queue_id, 0), queue_offset=0)
        if client_id == self.engine.requests.client_id:
            self._deliver_here(sent, request.body, properties)
            return request.response(ResponseCode.SUCCESS, success)

        def done(failure: str | None) -> None:
            if failure is None:
                connection.reply(request.response(ResponseCode.SUCCESS, success))
            else:
                remark = f"the reply could not be delivered to {client_id!r}: {failure}"
                connection.reply(request.response(ResponseCode.SYSTEM_ERROR, remark=remark))

        properties[_PUSH_REPLY_TIME] = str(self.engine.clock.now_ms())
        self.remote_clients.push_reply(client_id, sent, properties, request.body, str(connection.remote), done)
        return None

    def _deliver_here(self, sent: SendMessageRequestHeader, body: bytes, properties: dict[str, str]) -> None:
        """Deliver a reply to a request of this process. If the request has timed out, the reply is dropped."""
        try:
            body = decompress_body(body, sent.sys_flag, self.engine.settings.max_body_bytes())
        except (ConversionError, BrokerError) as exc:
            raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
        self.engine.requests.receive(Message(sent.topic, body, properties, sent.flag))


_Header = headers.GetConsumerRunningInfoRequestHeader | ConsumeMessageDirectlyResultRequestHeader

_TIMEOUT_MS = 10_000
_ACL_FIELDS = (ACCESS_KEY, SECURITY_TOKEN, SIGNATURE)


class ConsumeDirectlyResult(JsonBody):
    """Result of the handling of one message by a consumer. Source: ``remoting: ConsumeMessageDirectlyResult``."""

    consume_result: str
    order: bool = False
    auto_commit: bool = True
    remark: str | None = None
    spent_time_mills: int = 0


@dataclass(frozen=True, slots=True)
class RelayProcessor:
    """Relays requests between a tool and a consumer, which both know the broker's address only.

    The signature of the tool is not relayed: it is valid for the broker only.
    """

    raw: RawReader
    topics: TopicConfigs
    clients: ClientRegistry

    @handles(RequestCode.GET_CONSUMER_RUNNING_INFO)
    def _running_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(headers.GetConsumerRunningInfoRequestHeader)
        client = self._consumer(header)
        if not isinstance(client, DiagnosedClient):
            self._relay(connection, request, client, request.body)
            return None
        info = self._known_of(client, header.consumer_group)
        if not header.jstack_enable:
            return request.response(body=info.encode())

        def on_threads(answer: str | BrokerError) -> None:
            if isinstance(answer, str):
                connection.reply(request.response(body=replace(info, jstack=answer).encode()))
            else:
                connection.reply(_relayed_response(request, client.client_id, answer))

        client.report_threads(on_threads)
        return None

    def _known_of(self, client: ClientChannel, group: str) -> ConsumerRunningInfo:
        """Return what the server itself knows of a client that cannot tell it."""
        found = self.clients.consumers.get(group)
        subscriptions = () if found is None else found.subscriptions.values()
        return ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": "CONSUME_POP" if found is None else found.consume_type,
                "PROP_CLIENT_VERSION": str(client.version),
                "PROP_CONSUMER_START_TIMESTAMP": "0",
            },
            subscription_set=[subscription_data(each) for each in subscriptions],
        )

    @handles(RequestCode.CONSUME_MESSAGE_DIRECTLY, slow=True)
    def _consume_directly(self, connection: Connection, request: RemotingCommand) -> None:
        header = request.header(ConsumeMessageDirectlyResultRequestHeader)
        client = self._consumer(header)
        record = self.raw.record_at(_physical_offset(header.msg_id or ""))
        if record is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"message {header.msg_id} does not exist")
        if isinstance(client, DiagnosedClient):
            self._handle_directly(connection, request, client, record, header)
            return
        added_fields = {"brokerName": self.topics.broker_name}
        config = self.topics.find(header.topic) if header.topic else None
        if config is not None:
            added_fields["topicSysFlag"] = str(config.topic_sys_flag)
        self._relay(connection, request, client, record, **added_fields)

    def _handle_directly(
        self,
        connection: Connection,
        request: RemotingCommand,
        client: DiagnosedClient,
        data: bytes,
        header: ConsumeMessageDirectlyResultRequestHeader,
    ) -> None:
        record, client_id = parse_record(data), header.client_id or ""

        def on_result(answer: str | BrokerError) -> None:
            if isinstance(answer, str):
                body = ConsumeDirectlyResult(consume_result=answer).encode()
                connection.reply(request.response(body=body))
            else:
                connection.reply(_relayed_response(request, client_id, answer))

        client.handle_message(record, header.topic or record.topic, on_result)

    def _consumer(self, header: _Header) -> ClientChannel:
        """Return the consumer that a tool names."""
        group, client_id = header.consumer_group, header.client_id or ""
        consumer = self.clients.consumer(group, client_id)
        if consumer is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {group!r} has no connected consumer {client_id!r}")
        if consumer.version < Version.V3_1_8_SNAPSHOT:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"client {client_id!r} is older than 3.1.8")
        return consumer

    def _relay(
        self, connection: Connection, request: RemotingCommand, consumer: ClientChannel, body: bytes, **added: str
    ) -> None:
        relayed = RemotingCommand.request(request.code, body=body)
        fields = {name: value for name, value in request.ext_fields.items() if name not in _ACL_FIELDS}
        relayed.ext_fields = fields | added

        def on_response(response: RemotingCommand | BrokerError) -> None:
            connection.reply(_relayed_response(request, consumer.client_id, response))

        connection_of(consumer).request(relayed, _TIMEOUT_MS, on_response)


def _relayed_response(
    request: RemotingCommand, client_id: str, response: RemotingCommand | BrokerError
) -> RemotingCommand:
    """Return the consumer's response as the response to *request*, or an error response if it did not respond."""
    if isinstance(response, RemotingCommand):
        relayed = request.response(response.code, body=response.body, remark=response.remark)
        relayed.ext_fields = response.ext_fields
        return relayed
    code = ResponseCode.CONSUME_MSG_TIMEOUT if isinstance(response, RemoteTimeoutError) else ResponseCode.SYSTEM_ERROR
    return request.response(code, remark=f"client {client_id!r} did not respond: {response}")


def _physical_offset(msg_id: str) -> int:
    try:
        return parse_offset_msg_id(msg_id)[1]
    except MessageError as exc:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER,
            f"{msg_id!r} is not an offset message ID ({len(msg_id)} characters): it must have 32 hex digits, or 56 for "
            "an IPv6 address",
        ) from exc


# --- pending messages -------------------------------------------------------------------------------

_MAX_PAGE = 1_000
_MAX_COMPARED = 2_000
"""Most records that one request reads, of a client that goes on from a cursor: some hundredths of a second."""
_MAX_PAGE_BYTES = 1 << 20
_MAX_POSITIONS = 400_000
"""Positions of a page: 24 bytes each, in a frame of at most 16 MiB."""
_MESSAGE_BYTES = 300
"""Bytes of one message of a page in JSON, without its texts."""
_MAX_BUCKETS = 100_000
"""Most time spans of a count. The longest delay, forty days, has 57,600 minutes."""


@dataclass(frozen=True, slots=True)
class DelayedMessageProcessor:
    """Control over the pending messages of this broker, for the remote broker of this library."""

    engine: Engine
    recalls: ClientRecalls

    # --- changes -------------------------------------------------------------------------------

    @answers(RequestCode.CANCEL_DELAYED_MESSAGE, slow=True)
    def _cancel(self, header: own.CancelDelayedMessageRequestHeader) -> own.ScheduleChangeData:
        self.recalls.check_change(header.handle)
        with refusing_invalid():
            change = self.engine.delayed.cancel(
                header.handle, key=header.key, topic=header.topic, namespace=header.namespace
            )
        return _change_data(change)

    @answers(RequestCode.RESCHEDULE_DELAYED_MESSAGE, slow=True)
    def _reschedule(self, header: own.RescheduleDelayedMessageRequestHeader) -> own.ScheduleChangeData:
        self.recalls.check_change(header.handle)
        time_ms = header.deliver_time
        with refusing_invalid():
            change = self.engine.delayed.reschedule(
                header.handle, time_ms, key=header.key, topic=header.topic, namespace=header.namespace
            )
        return _change_data(change)

    # --- queries -------------------------------------------------------------------------------

    @answers(RequestCode.GET_PENDING_MESSAGES, slow=True)
    def _page(self, connection: Connection, header: own.GetPendingMessagesRequestHeader) -> own.PendingMessagesData:
        count, limit = min(header.max_count, _MAX_PAGE), _limit(connection, header.max_records)
        with refusing_invalid():
            page = self.engine.delayed.pending_step(_query(header), count, header.cursor, limit)
        messages = _fitting(page.messages)
        is_whole = len(messages) == len(page.messages)
        return own.PendingMessagesData(
            messages=[_message_data(message) for message in messages],
            has_more=page.cursor is not None or not is_whole,
            cursor=page.cursor if is_whole and header.max_records is not None else None,
            compared_property=header.compared_property,
        )

    @answers(RequestCode.COUNT_PENDING_MESSAGES, slow=True)
    def _count(self, connection: Connection, header: own.CountPendingMessagesRequestHeader) -> own.PendingCountsData:
        limit = _limit(connection, header.max_records)
        with refusing_invalid():
            counts, cursor = self.engine.delayed.count_pending_step(
                _query(header), header.bucket_millis, header.cursor, limit, _MAX_BUCKETS
            )
        return own.PendingCountsData(
            total=counts.total, buckets=counts.buckets, cursor=cursor, compared_property=header.compared_property
        )


def _limit(connection: Connection, max_records: int | None) -> ScanLimit:
    """Return the work of one request. It ends early when its client is gone.

    A client that gives no number knows no steps: it gets the whole answer.
    """

    def check(_: int) -> None:
        if not connection.is_open:
            raise RefusedError(ResponseCode.SYSTEM_BUSY, "the client has closed its connection")

    return ScanLimit(None if max_records is None else min(max(max_records, 1), _MAX_COMPARED), check)


@dataclass(frozen=True, slots=True)
class PendingPositionsProcessor:
    """Positions of pending messages in the files of this broker, for Spark's processes on the same machine."""

    delayed: LocalDelayedMessages

    @answers(RequestCode.GET_PENDING_POSITIONS, slow=True)
    def _positions(self, header: own.GetPendingPositionsRequestHeader) -> bytes:
        after, count = (header.after_due, header.after_offset), min(header.max_count, _MAX_POSITIONS)
        return self.delayed.pending_positions(_query(header), after, count)


def _change_data(change: ScheduleChange) -> own.ScheduleChangeData:
    return own.ScheduleChangeData(status=change.status.name, count=change.count, handles=list(change.handles))


def _query(header: own.PendingQueryRequestHeader) -> PendingQuery:
    text = header.compared_property
    return PendingQuery(
        topic=header.topic,
        key=header.key,
        tag=header.tag,
        with_property=None if text is None else (text.partition("=")[0], text.partition("=")[2]),
        before_ms=header.before_time,
        after_ms=header.after_time,
        newest=header.newest,
        namespace=header.namespace,
    )


def _fitting(messages: Iterable[PendingMessage]) -> list[PendingMessage]:
    """Return the first messages that fit into one response; at least one, if there is one."""
    fitting: list[PendingMessage] = []
    size = 0
    for message in messages:
        texts = (
            *(message.topic, message.msg_id, message.tags or "", message.keys or ""),
            *(message.pending_key or "", message.handle),
        )
        size += _MESSAGE_BYTES + sum(map(len, texts))
        if fitting and size > _MAX_PAGE_BYTES:
            break
        fitting.append(message)
    return fitting


def _message_data(message: PendingMessage) -> own.PendingMessageData:
    return own.PendingMessageData(
        topic=message.topic,
        msg_id=message.msg_id,
        tags=message.tags,
        keys=message.keys,
        pending_key=message.pending_key,
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
    """Cancels delayed messages by handle, for their producers."""

    recalls: ClientRecalls
    region_id: str

    @answers(RequestCode.RECALL_MESSAGE, slow=True)
    def _recall(self, header: RecallMessageRequestHeader) -> RecallMessageResponseHeader:
        msg_id = self.recalls.recall(header.topic, header.recall_handle)
        return RecallMessageResponseHeader(msg_id=msg_id, msg_region=self.region_id)
