"""Codes 34, 35, 38, 41, 42 and 46: clients register, list the members of their groups, and lock queues.

Source: RocketMQ ``broker: ClientManageProcessor``, ``ConsumerManageProcessor``, ``AdminBrokerProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import (
    CheckClientRequestBody,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from mqtemplate.remoting.protocol.bodies.own_requests import (
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader, UnregisterClientRequestHeader
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.creations import ClientRegistration
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.remote_clients import ConnectionChannel
from mqtemplate.server.state.subscriptions import Subscriptions


@dataclass(frozen=True, slots=True)
class ClientProcessor:
    """Registers clients by their heartbeats.

    The first heartbeat of a group creates its settings and its retry topic, before the broker responds.

    Attributes:
        capabilities: Names of the capabilities that clients of this library have here, joined by commas.
    """

    registration: ClientRegistration
    access: AccessControl
    deferred_work: DeferredWork
    subscriptions: Subscriptions
    capabilities: str

    @property
    def clients(self) -> ClientRegistry:
        """The connected clients."""
        return self.registration.clients

    # --- registration --------------------------------------------------------------------------

    @handles(RequestCode.HEART_BEAT)
    def _heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        heartbeat = HeartbeatData.decode(request.body)
        self.access.bind_client(request, heartbeat.client_id, connection)
        work = partial(self._register, connection, request, heartbeat)
        if all(self.registration.creations.has_group(data.group_name) for data in heartbeat.consumer_data_set):
            return work()
        return self.deferred_work.run(connection, request, work)

    def _register(self, connection: Connection, request: RemotingCommand, heartbeat: HeartbeatData) -> RemotingCommand:
        engine = self.registration.engine
        owner = self.registration.creations.limits.owner(connection, request)
        channel = ConnectionChannel(
            connection,
            heartbeat.client_id,
            request.language.name,
            request.version,
            engine.clock.steady_ms(),
            owner.account,
            (engine.name, engine.settings.listen_host),
        )
        registered = self.registration.register(
            channel,
            owner,
            [data.group_name for data in heartbeat.producer_data_set],
            heartbeat.consumer_data_set,
            without_sub=heartbeat.without_sub,
        )
        if registered.refusals:
            raise registered.refusals[0]
        # A client of RocketMQ does not request the capabilities, and gets the response of RocketMQ's broker.
        if not request.header(HeartbeatRequestHeader).requests_capabilities:
            return request.response()
        warnings = "\n".join(registered.differences) or None
        return request.response(header=HeartbeatResponseHeader(capabilities=self.capabilities, warnings=warnings))

    @answers(RequestCode.UNREGISTER_CLIENT)
    def _unregister(self, header: UnregisterClientRequestHeader, connection: Connection) -> None:
        if header.producer_group is not None:
            self.clients.unregister_producer(header.producer_group, connection.id)
        if header.consumer_group is not None:
            self.clients.unregister_consumer(header.consumer_group, connection.id)

    # --- members and subscriptions -------------------------------------------------------------

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def _consumer_list(self, query: ConsumerGroupRequestHeader) -> GetConsumerListByGroupResponseBody:
        info = self.clients.consumer_group(query.consumer_group)
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

    locks: QueueLockTable
    limits: ClientLimits

    @answers(RequestCode.LOCK_BATCH_MQ)
    def _lock(
        self, body: LockBatchRequestBody, connection: Connection, request: RemotingCommand
    ) -> LockBatchResponseBody:
        holder = self.limits.owner(connection, request)
        locked = self.locks.lock(body.consumer_group, body.client_id, body.mq_set, holder)
        if not connection.is_open:  # it was closed before the queues were locked: `forget` came too early
            self.locks.forget(connection.id)
        return LockBatchResponseBody(lock_ok_mq_set=locked)

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def _unlock(self, body: LockBatchRequestBody) -> None:
        self.locks.unlock(body.consumer_group, body.client_id, body.mq_set)
