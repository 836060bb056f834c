"""Requests that the server sends to its clients: transaction checks (39), changed groups (40) and replies (326).

Source: RocketMQ ``broker: Broker2Client``.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.engine.clients import (
    ClientChannel,
    ClientNotice,
    ClientRegistry,
    ConsumerGroupInfo,
    GroupChanged,
    TopicSubscription,
)
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import BrokerError
from mqtemplate.event_log import LimitedLog
from mqtemplate.message import HostAddress, MessageExt, Property, offset_msg_id
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import UNIQ_KEY, find_property
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader
from mqtemplate.remoting.protocol.headers.message import (
    CheckTransactionStateRequestHeader,
    MessageRequestHeader,
    ReplyMessageRequestHeader,
    SendMessageRequestHeader,
)
from mqtemplate.remoting.protocol.messages import encode_properties_text
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Right
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.topics import HALF_TOPIC

_PUSH_TIMEOUT_MS = 10_000
_OWN_GROUP = "CLIENT_INNER_PRODUCER"


@dataclass(slots=True, eq=False)
class ConnectionChannel:
    """One client on one connection of RocketMQ's protocol. A `ClientChannel`.

    Attributes:
        broker: Name and address of the broker, for transaction checks.
    """

    connection: Connection
    client_id: str
    language: str
    version: int
    last_update_ms: int
    access_key: str | None
    broker: tuple[str, HostAddress]

    @property
    def id(self) -> int:
        return self.connection.id

    @property
    def remote_address(self) -> HostAddress:
        return self.connection.remote

    @property
    def is_open(self) -> bool:
        return self.connection.is_open

    @property
    def is_reachable(self) -> bool:
        return self.connection.is_open

    def tell(self, notice: ClientNotice) -> None:
        self.connection.send_one_way(_notice_request(notice, *self.broker))

    def close(self, reason: str) -> None:
        self.connection.close(reason)


@runtime_checkable
class DiagnosedClient(Protocol):
    """A client of another protocol that answers the requests of tools in its own way. A callback gets an error too."""

    def report_threads(self, on_answer: Callable[[str | BrokerError], None]) -> None:
        """Request the stacks of the threads of the client."""

    def handle_message(self, record: StoredRecord, topic: str, on_answer: Callable[[str | BrokerError], None]) -> None:
        """Let the client handle one message now. The answer is RocketMQ's name of the result: ``CR_SUCCESS``."""


def connection_of(channel: ClientChannel) -> Connection:
    """Return the connection of a client, for requests that only RocketMQ's protocol has.

    Raises:
        RefusedError: The client speaks another protocol.
    """
    if isinstance(channel, ConnectionChannel):
        return channel.connection
    raise RefusedError(ResponseCode.SYSTEM_ERROR, f"client {channel.client_id!r} does not answer such requests")


def subscription_data(found: TopicSubscription) -> SubscriptionData:
    """Return a subscription for a response: as the client sent it, if it speaks RocketMQ's protocol."""
    if isinstance(found, SubscriptionData):
        return found
    return SubscriptionData(
        topic=found.topic,
        sub_string=found.sub_string,
        expression_type=found.expression_type,
        sub_version=found.sub_version,
    )


@dataclass(frozen=True, eq=False, slots=True)
class RemoteClients:
    """The clients of this server, as its processors and the engine see them; see `Engine.attach`."""

    engine: Engine
    clients: ClientRegistry
    groups: SubscriptionGroupTable
    access: AccessControl
    peer_log: LimitedLog

    # --- consumer groups -----------------------------------------------------------------------

    def has_members(self, group: str) -> bool:
        return self.clients.consumers.get(group) is not None

    def consumer_groups(self) -> list[ConsumerGroupInfo]:
        return list(self.clients.consumers.values())

    def notify_members(self, info: ConsumerGroupInfo) -> None:
        """Notify the members of a group that it changed. They rebalance the queues at once."""
        if not info.is_broadcasting:
            self._notify(info)

    def notify_topics_created(self, topics: Set[str]) -> None:
        """Notify the members of the groups that subscribe to new topics. RocketMQ's members look for them periodically.

        A member of this library looks them up at once. One of RocketMQ rebalances, which has no effect.
        """
        for info in self.clients.subscribers(topics):
            self._notify(info)

    def _notify(self, info: ConsumerGroupInfo) -> None:
        config = self.groups.find(info.group)
        if config is not None and not config.notify_consumer_ids_changed_enable:
            return
        for channel in info.channels.values():
            channel.tell(GroupChanged(info.group))

    # --- transaction checks --------------------------------------------------------------------

    def can_check(self, group: str, topic: str) -> bool:
        return self._checker(group, topic) is not None

    def _checker(self, group: str, topic: str) -> ClientChannel | None:
        """Return a producer of *group* whose account may send to *topic*: a check contains the half message.

        Any account may join a producer group, since its name gives no rights.
        """
        return self.clients.next_producer(group, lambda channel: self.access.may(channel.access_key, topic, Right.PUB))

    def send_check(self, check: TransactionCheck) -> None:
        channel = self._checker(check.group, check.topic)
        if channel is not None:  # None: the last producer has just disconnected. The check is repeated later.
            channel.tell(check)

    # --- replies -------------------------------------------------------------------------------

    def deliver_reply(self, reply: MessageExt) -> bool:
        """Push the reply of a listener in this process to a remote client. Return False if it is not connected."""
        sent = SendMessageRequestHeader(
            producer_group=_OWN_GROUP,
            topic=reply.topic,
            default_topic=reply.topic,
            default_topic_queue_nums=1,
            queue_id=0,
            sys_flag=0,
            born_timestamp=reply.born_timestamp,
            flag=reply.flag,
        )
        client_id = reply.properties.get(Property.REPLY_TO_CLIENT, "")
        try:
            self.push_reply(client_id, sent, reply.properties, reply.body, str(reply.born_host), lambda failure: None)
        except RefusedError:
            return False
        return True

    def push_reply(
        self,
        client_id: str,
        sent: SendMessageRequestHeader,
        properties: dict[str, str],
        body: bytes,
        born_host: str,
        done: Callable[[str | None], None],
    ) -> None:
        """Push a reply to a remote client, and call *done* with None, or with the reason of a failure."""
        channel = self.clients.producer_by_client_id(client_id)
        if channel is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"client {client_id!r} is not connected as a producer")
        shared = {each.name: getattr(sent, each.name) for each in fields(MessageRequestHeader)}
        header = ReplyMessageRequestHeader(
            **shared | {"properties": encode_properties_text(properties)},
            unit_mode=bool(sent.unit_mode),
            born_host=born_host,
            store_host=str(self.engine.settings.listen_host),
            store_timestamp=self.engine.clock.now_ms(),
        )

        def on_response(response: RemotingCommand | BrokerError) -> None:
            failure: str | None = None
            if not isinstance(response, RemotingCommand):
                failure = str(response)
            elif response.code != ResponseCode.SUCCESS:
                failure = response.remark or str(response)
            if failure is not None:
                self.peer_log.warning("server.reply_refused", client_id=client_id, reason=failure)
            done(failure)

        push = RemotingCommand.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body)
        connection_of(channel).request(push, _PUSH_TIMEOUT_MS, on_response)


def _notice_request(notice: ClientNotice, broker_name: str, host: HostAddress) -> RemotingCommand:
    if isinstance(notice, GroupChanged):
        group_header = ConsumerGroupRequestHeader(consumer_group=notice.group)
        return RemotingCommand.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, group_header, one_way=True)
    half = notice.half
    unique_id = find_property(half.properties_bytes, UNIQ_KEY)
    header = CheckTransactionStateRequestHeader(
        topic=HALF_TOPIC,
        tran_state_table_offset=half.queue_offset,
        commit_log_offset=half.physical_offset,
        msg_id=unique_id,
        transaction_id=unique_id,
        offset_msg_id=offset_msg_id(host, half.physical_offset),
        broker_name=broker_name,
    )
    return RemotingCommand.request(RequestCode.CHECK_TRANSACTION_STATE, header, _record_of(notice), one_way=True)


def _record_of(check: TransactionCheck) -> bytes:
    """Return the half message with the real topic, as its producer sent it. Its properties identify the transaction."""
    half = check.half
    draft = RecordDraft(
        check.topic,
        check.queue_id,
        half.body,
        half.properties_bytes,
        flag=half.flag,
        sys_flag=half.sys_flag,
        born_timestamp=half.born_timestamp,
        born_host=half.born_host,
        reconsume_times=half.reconsume_times,
        prepared_transaction_offset=half.prepared_transaction_offset,
        body_crc=half.body_crc,
    )
    return draft.encode(half.queue_offset, half.physical_offset, half.store_timestamp, half.store_host)
