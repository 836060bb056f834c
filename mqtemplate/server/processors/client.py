"""Codes 34, 35, 38 and 46: clients say who they are and ask who else is there; 40 tells them that this changed.

Source: RocketMQ ``broker: ClientManageProcessor``, ``ConsumerManageProcessor``; sections 7, 12 and 17 of the
specification.
"""

from __future__ import annotations

from functools import partial

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
)
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader, UnregisterClientRequestHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientChannel, ClientRegistry, ConsumerGroupInfo
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_creation import ensure_group
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.response import RefusedError
from mqtemplate.server.subscriptions import Subscriptions, selector_of
from mqtemplate.server.topic_creation import TopicMaker
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = structlog.stdlib.get_logger("mqtemplate.server")


class ClientProcessor:
    """Keeps the registry of clients.

    A group that is new gets its settings and its retry topic with the first heartbeat, before that is answered.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        clients: ClientRegistry,
        subscriptions: Subscriptions,
        groups: SubscriptionGroupTable,
        topics: TopicMaker,
        later: DeferredWork,
    ) -> None:
        self._engine = engine
        self._clients = clients
        self._subscriptions = subscriptions
        self._groups = groups
        self._topics = topics
        self._deferred_work = later

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self._check_client,
        }

    # --- who is there --------------------------------------------------------------------------

    def _heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        beat = HeartbeatData.decode(request.body)
        if all(self._is_known(data.group_name) for data in beat.consumer_data_set):
            return self._register(connection, request, beat)
        return self._deferred_work.answer(connection, request, partial(self._register, connection, request, beat))

    def _is_known(self, group: str) -> bool:
        settings = self._groups.find(group)
        if settings is None:
            return False
        return settings.retry_queue_nums <= 0 or self._topics.has(RETRY_TOPIC_PREFIX + group)

    def _register(self, connection: Connection, request: RemotingCommand, beat: HeartbeatData) -> RemotingCommand:
        channel = ClientChannel(
            connection, beat.client_id, request.language, request.version, self._engine.clock.now_ms()
        )
        came = [self._clients.register_producer(producer.group_name, channel) for producer in beat.producer_data_set]
        if any(came):
            self._engine.transactions.producer_connected()
        refusals = []
        for consumer in beat.consumer_data_set:
            try:
                self._register_consumer(consumer, channel, without_sub=beat.without_sub)
            except RefusedError as exc:  # the client's other groups are taken all the same
                refusals.append(exc)
        if not connection.is_open:  # it ended while its group was made
            self._clients.forget(connection)
        if refusals:
            raise refusals[0]
        return request.response()

    def _register_consumer(self, consumer: ConsumerData, channel: ClientChannel, *, without_sub: bool) -> None:
        """Take a consumer in.

        Raises:
            RefusedError: Its group is not there and may not be made, or is one of this process.
        """
        group = consumer.group_name
        settings = ensure_group(self._groups, group)
        if settings.retry_queue_nums > 0:
            self._topics.make(RETRY_TOPIC_PREFIX + group, settings.retry_queue_nums)
        if self._engine.has_members(group):
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"group {group!r} is read by listeners in the broker's own process, which share no queues with remote "
                "members; give the remote consumer a group of its own",
            )
        self._clients.register_consumer(consumer, channel, without_sub=without_sub)

    def _unregister(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        asked = request.header(UnregisterClientRequestHeader)
        if asked.producer_group is not None:
            self._clients.unregister_producer(asked.producer_group, connection)
        if asked.consumer_group is not None:
            self._clients.unregister_consumer(asked.consumer_group, connection)
        return request.response()

    def _consumer_list(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group = request.header(ConsumerGroupRequestHeader).consumer_group
        info = self._clients.consumer_group(group)
        if info is None:
            return request.response(ResponseCode.SYSTEM_ERROR, remark=f"nobody consumes for group {group!r}")
        return request.response(body=GetConsumerListByGroupResponseBody(consumer_id_list=info.client_ids()).encode())

    def tell_members(self, info: ConsumerGroupInfo) -> None:
        """Let the members of a group share its queues out anew, at once."""
        settings = self._groups.find(info.group)
        if info.is_broadcasting or (settings is not None and not settings.notify_consumer_ids_changed_enable):
            return
        header = ConsumerGroupRequestHeader(consumer_group=info.group)
        for channel in info.channels.values():
            channel.connection.send_one_way(
                RemotingCommand.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, one_way=True)
            )

    # --- what they want ------------------------------------------------------------------------

    def _check_client(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """Whether a consumer's expression will do; it asks before it starts."""
        asked = CheckClientRequestBody.decode(request.body).subscription_data
        self._subscriptions.check_kind(asked.expression_type)
        selector_of(asked.expression_type, asked.sub_string)
        return request.response()
