"""Topics and groups that clients create by using them, and the registration of clients by their heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mqtemplate.engine.clients import ClientChannel, ClientRegistry, Owner
from mqtemplate.engine.engine import Engine
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, SubscriptionGroupConfig
from mqtemplate.remoting.protocol.bodies.own_requests import Refusal, RefusalHeader
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable, mixed_group_error
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.topics import RETRY_TOPIC_PREFIX


@dataclass(frozen=True, slots=True)
class ClientCreations:
    """Creates what a client uses first, within its limits.

    Raises:
        RefusedError: It may not be created, or the client has created too much.
        StoreError: A table could not be written.
    """

    topics: TopicConfigs
    groups: SubscriptionGroupTable
    limits: ClientLimits

    def group(self, connection: Connection, request: RemotingCommand, group: str) -> SubscriptionGroupConfig:
        """Return the settings of the group in a request. Create it if it is missing."""
        found = self.groups.find(group)
        if found is not None:
            return found
        self.groups.check_new(group)
        self.limits.new_groups.take(self.limits.owner(connection, request))
        return self.groups.ensure(group)

    def topic(
        self, connection: Connection, request: RemotingCommand, topic: str, default_topic: str, queue_nums: int
    ) -> None:
        """Create the topic of a message if it is missing; see `TopicConfigs.create_by_first_message`."""
        if not self.topics.has(topic):
            self.topics.check_first_message(topic, default_topic)
            self.limits.topics.take(self.limits.owner(connection, request))
            self.topics.create_by_first_message(topic, default_topic, queue_nums)

    def has_group(self, group: str) -> bool:
        """Return True if a group and its retry topic exist."""
        config = self.groups.find(group)
        if config is None:
            return False
        return config.retry_queue_nums <= 0 or self.topics.has(RETRY_TOPIC_PREFIX + group)

    def groups_of(self, owner: Owner, names: Iterable[str]) -> list[RefusedError]:
        """Create the missing groups of a client, with one write of each table. Return why some were refused."""
        groups, refusals = self.groups, []
        wanted = dict.fromkeys(names)
        new = []
        for name in [name for name in wanted if groups.find(name) is None]:
            try:
                groups.check_new(name)
                new.append(SubscriptionGroupConfig(group_name=name))
            except RefusedError as exc:  # The other groups of the client are registered nevertheless.
                refusals.append(exc)
        if new:
            try:
                self.limits.new_groups.take(owner, len(new))
                groups.put(new)
            except RefusedError as exc:
                refusals.append(exc)
        found = [config for name in wanted if (config := groups.find(name)) is not None]
        self.topics.create_retry_topics(found)
        return refusals


@dataclass(slots=True)
class Registered:
    """Result of the registration of a client.

    Attributes:
        differences: Texts: members of a group have other subscriptions.
        refusals: Why some groups were refused. The other groups are registered nevertheless.
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
        owner: Owner,
        producer_groups: Iterable[str],
        consumers: Sequence[ConsumerData],
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
        result = Registered(refusals=self.creations.groups_of(owner, (each.group_name for each in consumers)))
        is_first = [self.clients.register_producer(group, channel) for group in producer_groups]
        if any(is_first):
            self.engine.transactions.producer_connected()
        for consumer in consumers:
            if not channel.is_open:
                break
            try:
                difference = self._register_consumer(consumer, channel, without_sub=without_sub)
            except RefusedError as exc:
                result.refusals.append(exc)
            else:
                result.differences += filter(None, [difference])
        if not channel.is_open:  # It was closed before the client was registered: `forget` came too early.
            self.clients.forget(channel.id)
        return result

    def _register_consumer(self, consumer: ConsumerData, channel: ClientChannel, *, without_sub: bool) -> str | None:
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
        difference = None if without_sub else self.clients.difference(consumer, channel.client_id)
        if difference is not None and self.strict_subscriptions:
            raise RefusedError(
                ResponseCode.ILLEGAL_OPERATION,
                f"{difference}, or set strict-subscriptions to false on the server",
                RefusalHeader(refusal=Refusal.DIFFERENT_SUBSCRIPTIONS, group=group),
            )
        self.clients.register_consumer(consumer, channel, without_sub=without_sub)
        return difference
