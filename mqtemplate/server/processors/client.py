"""Codes 34, 35, 38 and 46: clients register, list the members of their groups and check subscriptions.

Source: RocketMQ ``broker: ClientManageProcessor``, ``ConsumerManageProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.clients import ClientChannel
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    SubscriptionGroupConfig,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.delayed import HeartbeatRequestHeader, HeartbeatResponseHeader
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader, UnregisterClientRequestHeader
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.processors.delayed import announced_capabilities
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import mixed_group_error
from mqtemplate.server.state.quota import Owner
from mqtemplate.topics import RETRY_TOPIC_PREFIX


@dataclass(frozen=True, slots=True)
class ClientProcessor:
    """Registers clients by their heartbeats.

    The first heartbeat of a group creates its settings and its retry topic, before the broker responds.
    """

    server: ServerParts

    # --- registration --------------------------------------------------------------------------

    @handles(RequestCode.HEART_BEAT)
    def _heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        heartbeat = HeartbeatData.decode(request.body)
        self.server.access.bind_client(request, heartbeat.client_id, connection)
        work = partial(self._register, connection, request, heartbeat)
        if all(self._exists(data.group_name) for data in heartbeat.consumer_data_set):
            return work()
        return self.server.deferred_work.run(connection, request, work)

    def _exists(self, group: str) -> bool:
        """Return True if a group and its retry topic exist."""
        config = self.server.groups.find(group)
        if config is None:
            return False
        return config.retry_queue_nums <= 0 or self.server.topics.has(RETRY_TOPIC_PREFIX + group)

    def _register(self, connection: Connection, request: RemotingCommand, heartbeat: HeartbeatData) -> RemotingCommand:
        clients, now_ms = self.server.clients, self.server.engine.clock.steady_ms()
        owner = self.server.limits.owner(connection, request)
        channel = ClientChannel(
            connection, heartbeat.client_id, request.language, request.version, now_ms, owner.account
        )
        refusals = self._create_groups(heartbeat, owner)
        is_first = [clients.register_producer(data.group_name, channel) for data in heartbeat.producer_data_set]
        if any(is_first):
            self.server.engine.transactions.producer_connected()
        differences = []
        for consumer in heartbeat.consumer_data_set:
            if not connection.is_open:
                break
            try:
                differences.append(self._register_consumer(consumer, channel, without_sub=heartbeat.without_sub))
            except RefusedError as exc:  # The other groups of the client are registered nevertheless.
                refusals.append(exc)
        if not connection.is_open:  # It was closed before the client was registered: `forget` came too early.
            clients.forget(connection)
        if refusals:
            raise refusals[0]
        # A client of RocketMQ does not request the capabilities, and gets the response of RocketMQ's broker.
        if not request.header(HeartbeatRequestHeader).requests_capabilities:
            return request.response()
        header = HeartbeatResponseHeader(
            capabilities=announced_capabilities(self.server), warnings="\n".join(filter(None, differences)) or None
        )
        return request.response(header=header)

    def _create_groups(self, heartbeat: HeartbeatData, owner: Owner) -> list[RefusedError]:
        """Create the missing groups of a client, with one write of each table. Return why some were refused."""
        server, refusals = self.server, []
        names = dict.fromkeys(data.group_name for data in heartbeat.consumer_data_set)
        new = []
        for name in [name for name in names if server.groups.find(name) is None]:
            try:
                server.groups.check_new(name)
                new.append(SubscriptionGroupConfig(group_name=name))
            except RefusedError as exc:  # The other groups of the client are registered nevertheless.
                refusals.append(exc)
        if new:
            try:
                server.limits.new_groups.take(owner, len(new))
                server.groups.put(new)
            except RefusedError as exc:
                refusals.append(exc)
        found = [config for name in names if (config := server.groups.find(name)) is not None]
        server.topics.create_retry_topics(found)
        return refusals

    def _register_consumer(self, consumer: ConsumerData, channel: ClientChannel, *, without_sub: bool) -> str | None:
        """Register a consumer. Return a text if another member of its group has other subscriptions.

        Raises:
            RefusedError: The group has consumers in this process, or the client has too many groups or subscriptions;
                or another member has other subscriptions, and the server is strict.
        """
        group = consumer.group_name
        if self.server.groups.find(group) is None:
            return None  # it could not be created: the reason is known
        if self.server.engine.has_members(group):
            raise mixed_group_error(group)
        difference = None if without_sub else self.server.clients.difference(consumer, channel.client_id)
        if difference is not None and self.server.settings.strict_subscriptions:
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION, f"{difference}, or set strict-subscriptions to false on the server"
            )
        self.server.clients.register_consumer(consumer, channel, without_sub=without_sub)
        return difference

    @answers(RequestCode.UNREGISTER_CLIENT)
    def _unregister(self, header: UnregisterClientRequestHeader, connection: Connection) -> None:
        if header.producer_group is not None:
            self.server.clients.unregister_producer(header.producer_group, connection)
        if header.consumer_group is not None:
            self.server.clients.unregister_consumer(header.consumer_group, connection)

    # --- members and subscriptions -------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def _consumer_list(self, query: ConsumerGroupRequestHeader) -> GetConsumerListByGroupResponseBody:
        info = self.server.clients.consumer_group(query.consumer_group)
        if info is None:
            raise RefusedError(ResponseCode.SYSTEM_ERROR, f"group {query.consumer_group!r} has no connected consumer")
        return GetConsumerListByGroupResponseBody(consumer_id_list=info.client_ids())

    @answers(RequestCode.CHECK_CLIENT_CONFIG, slow=True)
    def _check_client(self, query: CheckClientRequestBody) -> None:
        """Check the expression of a subscription: a consumer requests this before it starts."""
        subscription = query.subscription_data
        self.server.subscriptions.compile(subscription.expression_type, subscription.sub_string)
