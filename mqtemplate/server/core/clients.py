"""Groups that connected clients join and queues that they lock, in any protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mqtemplate.engine.clients import ClientChannel, ClientRegistry, ConsumerMember, owner_of
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.own_requests import Refusal, RefusalHeader
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.groups import ClientCreations, mixed_group_error


@dataclass(slots=True)
class Registered:
    """Result of the registration of a client.

    Attributes:
        differences: Texts: members of a group have other subscriptions.
        refusals: Why some groups were refused. The other groups are registered nevertheless. Remove the one to raise:
            otherwise it and the frame that raises it keep each other, and all that the client sent.
    """

    differences: list[str] = field(default_factory=list)
    refusals: list[RefusedError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ClientRegistration:
    """Registers clients of any protocol in their groups, and creates the groups that are missing.

    Attributes:
        strict_subscriptions: A member with other subscriptions than its group is refused.
    """

    engine: Engine
    clients: ClientRegistry
    creations: ClientCreations
    strict_subscriptions: bool

    def register(
        self,
        channel: ClientChannel,
        producer_groups: Iterable[str],
        consumers: Sequence[ConsumerMember],
        *,
        without_sub: bool,
    ) -> Registered:
        """Register a client.

        Args:
            without_sub: The consumers have no subscriptions because they have not changed.

        Raises:
            RefusedError: It is a producer of too many groups.
            StoreError: A table could not be written.
        """
        result = Registered(
            refusals=self.creations.groups_of(owner_of(channel), (each.group_name for each in consumers))
        )
        has_first = False
        for group in producer_groups:
            self.creations.pause()
            has_first |= self.clients.register_producer(group, channel)
        if has_first:
            self.engine.transactions.producer_connected()
        for consumer in consumers:
            self.creations.pause()
            if not channel.is_open:
                break
            try:
                difference = self._register_consumer(consumer, channel, without_sub=without_sub)
            except RefusedError as exc:
                result.refusals.append(exc.with_traceback(None))  # its frames refer to *result*, and to the consumer
            else:
                result.differences += filter(None, [difference])
        if not channel.is_open:  # It was closed before the client was registered: `forget` came too early.
            self.clients.forget(channel.id)
        return result

    def _register_consumer(self, consumer: ConsumerMember, channel: ClientChannel, *, without_sub: bool) -> str | None:
        """Register a consumer. Return a text if another member of its group has other subscriptions.

        Raises:
            RefusedError: The group has consumers in this process, or the client has too many groups or subscriptions;
                or another member has other subscriptions, and the server is strict.
        """
        group = consumer.group_name
        if self.creations.groups.find(group) is None:
            return None  # it could not be created: the reason is known
        if self.engine.groups.local.has_members(group):
            raise mixed_group_error(group)
        if not without_sub:
            self.clients.check_subscriptions(owner_of(channel), group, len(consumer.subscription_data_set))
        difference = None if without_sub else self.clients.difference(consumer, channel.client_id)
        if difference is not None and self.strict_subscriptions:
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION,
                f"{difference}, or set strict-subscriptions to false on the server",
                RefusalHeader(refusal=Refusal.DIFFERENT_SUBSCRIPTIONS, group=group),
            )
        self.clients.register_consumer(consumer, channel, without_sub=without_sub)
        return difference


@dataclass(frozen=True, slots=True)
class ClientLocks:
    """Locks of queues for consumers that consume in order.

    Attributes:
        table: The locks of all clients, for their release.
    """

    table: QueueLockTable

    def lock(self, caller: Caller, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock *queues* for a client, and return those that it holds now, in the given order.

        Raises:
            RefusedError: The client would have too many locks.
        """
        locked = self.table.lock(group, client_id, queues, caller.owner)
        if not caller.connection.is_open:  # it was closed before the queues were locked: `forget` came too early
            self.table.forget(caller.connection.id)
        return locked
