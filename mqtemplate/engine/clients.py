"""Registry of the connected clients: producers and consumers by group, and the subscriptions of each consumer group.

A client may speak any protocol: its channel has what the registry needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.engine.checkers import TransactionCheck
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.services import wall_time
from mqtemplate.topics import RETRY_TOPIC_PREFIX

_log = get_logger("mqtemplate.server")

_BROADCASTING = "BROADCASTING"
_PUSH = "CONSUME_PASSIVELY"
_MAX_DIFFERENCES = 1_000
_CHARACTERS_OF_A_SUBSCRIPTION = 512


class Owner(NamedTuple):
    """The client that holds an object, for limits.

    Attributes:
        connection: ID of its connection.
        address: IP address of the connection.
        account: Its access key. None without access control.
    """

    connection: int
    address: str
    account: str | None = None


class HeldQuota(Protocol):
    """Limits how many objects of one kind clients hold. An error is raised if a limit would be exceeded."""

    def check(self, owner: Owner, count: int) -> None:
        """Raise the error that `take` would raise."""

    def take(self, owner: Owner, count: int = 1) -> None:
        """Count *count* more objects of a client: all of them or none."""

    def give(self, owner: Owner, count: int = 1) -> None:
        """Count *count* objects of a client less."""


class _NoQuota:
    """No limit. A `HeldQuota`."""

    def check(self, owner: Owner, count: int) -> None:
        """Count nothing."""

    def take(self, owner: Owner, count: int = 1) -> None:
        """Count nothing."""

    def give(self, owner: Owner, count: int = 1) -> None:
        """Count nothing."""


UNLIMITED: HeldQuota = _NoQuota()


class TopicSubscription(Protocol):
    """A subscription of a group to one topic. Its version is a time: the newer one is valid."""

    @property
    def topic(self) -> str: ...
    @property
    def sub_string(self) -> str: ...
    @property
    def expression_type(self) -> str: ...
    @property
    def sub_version(self) -> int: ...


class ConsumerMember(Protocol):
    """One member of a consumer group, as it describes itself. The values are RocketMQ's names."""

    @property
    def group_name(self) -> str: ...
    @property
    def consume_type(self) -> str: ...
    @property
    def message_model(self) -> str: ...
    @property
    def consume_from_where(self) -> str: ...
    @property
    def subscription_data_set(self) -> Sequence[TopicSubscription]: ...


class GroupChanged(NamedTuple):
    """Tells a member that its group has other members or topics: it assigns the queues again."""

    group: str


ClientNotice: TypeAlias = GroupChanged | TransactionCheck
"""Message of the broker to a client, which does not answer it."""


class ClientChannel(Protocol):
    """One client on one connection, in any protocol. A process may have several clients with different IDs.

    Attributes:
        client_id: Any text that the client chose.
        language: Name of the client's language, such as ``JAVA``.
        version: The client's version, as a number of its protocol.
        last_update_ms: Time of the last heartbeat, of `Clock.steady_ms`.
        access_key: The account of the client. None without access control.
    """

    client_id: str
    language: str
    version: int
    last_update_ms: int
    access_key: str | None

    @property
    def id(self) -> int:
        """ID of the connection."""

    @property
    def remote_address(self) -> HostAddress:
        """Address of the client."""

    @property
    def is_open(self) -> bool:
        """True while the connection is open."""

    @property
    def is_reachable(self) -> bool:
        """True while the client can get notices: in some protocols it may be open without that."""

    def tell(self, notice: ClientNotice) -> None:
        """Send a notice, without waiting."""

    def close(self, reason: str) -> None:
        """Close the connection."""


def owner_of(channel: ClientChannel) -> Owner:
    """Return a client as limits count it."""
    return Owner(channel.id, channel.remote_address.ip, channel.access_key)


@dataclass(slots=True, eq=False)
class _ConnectionGroups:
    """The groups of one connection.

    Attributes:
        consumers: Group -> number of its subscriptions, as the quota counts them.
    """

    owner: Owner
    producers: set[str] = field(default_factory=set)
    consumers: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ConsumerGroupInfo:
    """The connected members of one consumer group, and what the group subscribes to.

    Attributes:
        consume_type, message_model, consume_from_where: RocketMQ's names, from the last heartbeat.
        channels: Members by connection ID.
        subscriptions: Subscriptions by topic. The latest one is valid for all members.
        expressions: By connection ID, what each member subscribes to: topic -> expression. Members with the same
            subscriptions share one of them.
    """

    group: str
    consume_type: str
    message_model: str
    consume_from_where: str
    channels: dict[int, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, TopicSubscription] = field(default_factory=dict)
    expressions: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        """True if each member receives all messages."""
        return self.message_model == _BROADCASTING

    def client_ids(self) -> list[str]:
        """Return the sorted IDs of the members, each once."""
        return sorted({channel.client_id for channel in self.channels.values()})

    def other_subscriptions(self, client_id: str, expressions: dict[str, str]) -> tuple[str, dict[str, str]] | None:
        """Return another member that subscribes to something else, and its expressions; None without one."""
        equal = {id(expressions)}
        for channel in self.channels.values():
            theirs = self.expressions.get(channel.id, expressions)
            if channel.client_id != client_id and id(theirs) not in equal:
                if theirs != expressions:
                    return channel.client_id, theirs
                equal.add(id(theirs))  # members share them: there may be a thousand members, and as many topics
        return None


class ClientRegistry:
    """Producers and consumers by group.

    - A returned object is a copy, or an object that is replaced instead of changed.
    - A group without members is removed.
    - The work at the end of a connection depends on the groups of that connection, not on all groups.
    - Thread-safe.

    Args:
        groups: Limits the groups of each client.
        subscriptions: Limits the subscriptions of each client.

    Attributes:
        peer_log: Log of warnings about clients.
        consumers: Consumer group -> its members. An entry is replaced instead of changed.
    """

    def __init__(
        self,
        clock: Clock,
        groups: HeldQuota = UNLIMITED,
        subscriptions: HeldQuota = UNLIMITED,
        peer_log: LimitedLog | None = None,
    ) -> None:
        self._clock = clock
        self.peer_log = peer_log or LimitedLog(_log, clock.steady_ms)
        self._group_quota = groups
        self._subscription_quota = subscriptions
        self._on_members_changed: Callable[[ConsumerGroupInfo], None] = lambda info: None
        self._lock = threading.Lock()
        self.consumers: dict[str, ConsumerGroupInfo] = {}
        self._producers: dict[str, dict[int, ClientChannel]] = {}
        self._memberships: dict[int, _ConnectionGroups] = {}  # by connection ID
        self._next_producer = 0
        self._differences: set[str] = set()

    def on_members_changed(self, callback: Callable[[ConsumerGroupInfo], None]) -> None:
        """Call *callback* with each group whose members or topics changed, in the thread that changed them."""
        self._on_members_changed = callback

    # --- queries -------------------------------------------------------------------------------

    def subscription(self, group: str, topic: str) -> TopicSubscription | None:
        """Return the subscription of *group* to *topic*, or None if it does not subscribe to it."""
        info = self.consumers.get(group)
        return None if info is None else info.subscriptions.get(topic)

    def groups_of_topic(self, topic: str) -> list[str]:
        """Return the sorted names of the groups that subscribe to *topic*."""
        return [info.group for info in self.subscribers({topic})]

    def subscribers(self, topics: Set[str]) -> list[ConsumerGroupInfo]:
        """Return the groups that subscribe to one of *topics* or more, sorted by name. Each group is looked at once."""
        found = [info for info in list(self.consumers.values()) if not info.subscriptions.keys().isdisjoint(topics)]
        return sorted(found, key=lambda info: info.group)

    def consumer(self, group: str, client_id: str) -> ClientChannel | None:
        """Return the latest channel of one member of a group, or None if it is not connected."""
        info = self.consumers.get(group)
        channels = () if info is None else info.channels.values()
        return _latest(channel for channel in channels if channel.client_id == client_id)

    def producer_groups(self) -> dict[str, list[ClientChannel]]:
        """Return the connected producers by group."""
        return {group: list(channels.values()) for group, channels in list(self._producers.items())}

    def producers(self, group: str) -> list[ClientChannel]:
        """Return the connected producers of *group*."""
        return list(self._producers.get(group, {}).values())

    def next_producer(
        self, group: str, is_permitted: Callable[[ClientChannel], bool] = lambda channel: True
    ) -> ClientChannel | None:
        """Return one producer of *group* that is permitted, in rotation. None if none is connected."""
        channels = [each for each in self.producers(group) if each.is_reachable and is_permitted(each)]
        if not channels:
            return None
        self._next_producer += 1
        return channels[self._next_producer % len(channels)]

    def producer_by_client_id(self, client_id: str) -> ClientChannel | None:
        """Return the latest channel of the producer with this ID, or None if it is not connected."""
        return _latest(
            channel
            for channels in list(self._producers.values())
            for channel in list(channels.values())
            if channel.client_id == client_id and channel.is_open
        )

    def difference(self, data: ConsumerMember, client_id: str) -> str | None:
        """Return a text if a member of the group subscribes to something else than *data*; log it once.

        Each member gets messages of a part of the queues only. So a message that another member would take is lost.
        """
        info = self.consumers.get(data.group_name)
        if info is None or info.is_broadcasting or data.consume_type != _PUSH:
            return None
        expressions = _expressions(data)
        found = info.other_subscriptions(client_id, expressions)
        if found is None:
            return None
        other_id, theirs = found
        text = (
            f"group {data.group_name!r} has members with different subscriptions: {client_id} subscribes to "
            f"{_describe(expressions)}, {other_id} to {_describe(theirs)}; messages are lost, since each member gets a "
            "part of the queues. Give one of them a group of its own"
        )
        if text not in self._differences:
            if len(self._differences) >= _MAX_DIFFERENCES:
                self._differences.clear()
            self._differences.add(text)
            self.peer_log.warning("server.subscriptions_differ", group=data.group_name, reason=text)
        return text

    # --- changes -------------------------------------------------------------------------------

    def check_subscriptions(self, owner: Owner, group: str, count: int) -> None:
        """Check that a client may have *count* subscriptions in *group*, before they are built to register it.

        Raises:
            Exception: A quota refuses it.
        """
        with self._lock:
            joined = self._memberships.get(owner.connection)
            before = 0 if joined is None else joined.consumers.get(group, 0)
        if count > before:
            self._subscription_quota.check(owner, count - before)

    def register_producer(self, group: str, channel: ClientChannel) -> bool:
        """Add or refresh a producer of *group*. Return True if the group had no other producer.

        Raises:
            Exception: A quota refuses it: the client has too many groups.
        """
        with self._lock:
            others = self._producers.get(group, {})
            joined = self._memberships_of(channel)
            if group not in joined.producers:
                self._group_quota.take(joined.owner)
                joined.producers.add(group)
            self._producers[group] = others | {channel.id: channel}
            return not others

    def register_consumer(self, data: ConsumerMember, channel: ClientChannel, *, without_sub: bool = False) -> bool:
        """Add or refresh a consumer. Return True if the members or the topics of its group changed.

        Args:
            without_sub: *data* has no subscriptions because they have not changed.

        Raises:
            Exception: A quota refuses it: the client has too many groups or subscriptions.
        """
        group, weight = data.group_name, None if without_sub else sum(map(_weight, data.subscription_data_set))
        before = self.consumers.get(group)
        while True:
            # The I/O threads need the lock, too, and a group may have thousands of subscriptions. So the entry is built
            # without it, and built again if another member has replaced the entry meanwhile.
            info, is_change = _joined(before, data, channel, without_sub=without_sub)
            with self._lock:
                current = self.consumers.get(group)
                if current is before:
                    self._count_consumer(group, channel, weight)
                    self.consumers[group] = info
                    break
            before = current
        self._report([info] if is_change else [])
        return is_change

    def unregister_producer(self, group: str, connection: int) -> None:
        """Remove a producer from *group*."""
        with self._lock:
            self._remove_producer(group, connection)

    def unregister_consumer(self, group: str, connection: int) -> None:
        """Remove a consumer from *group*."""
        with self._lock:
            changed = self._remove_consumer(group, connection)
        self._report(changed)

    def forget(self, connection: int, most: int = 1 << 62) -> bool:
        """Remove the clients of a closed connection from *most* groups of each kind. Return True if some are left."""
        changed: list[ConsumerGroupInfo] = []
        with self._lock:
            joined = self._memberships.get(connection)
            if joined is not None:
                for group in list(joined.producers)[:most]:
                    self._remove_producer(group, connection)
                for group in list(joined.consumers)[:most]:
                    changed += self._remove_consumer(group, connection)
                if not joined.producers and not joined.consumers:
                    self._memberships.pop(connection, None)
        self._report(changed)
        return connection in self._memberships

    def expire(self, silent_ms: int) -> list[ClientChannel]:
        """Remove clients that sent no heartbeat for a group in *silent_ms*. Return those that are in no group now."""
        limit = self._clock.steady_ms() - silent_ms
        expired: dict[int, ClientChannel] = {}
        changed: list[ConsumerGroupInfo] = []
        with self._lock:
            for group, channels in list(self._producers.items()):
                for channel in _silent(channels, limit):
                    self._remove_producer(group, channel.id)
                    expired[channel.id] = channel
            for group, info in list(self.consumers.items()):
                for channel in _silent(info.channels, limit):
                    changed += self._remove_consumer(group, channel.id)
                    expired[channel.id] = channel
            left = [channel for connection, channel in expired.items() if connection not in self._memberships]
        self._report(changed)
        return left

    # --- with the lock held --------------------------------------------------------------------

    def _memberships_of(self, channel: ClientChannel) -> _ConnectionGroups:
        joined = self._memberships.get(channel.id)
        if joined is None:
            joined = self._memberships[channel.id] = _ConnectionGroups(owner_of(channel))
        return joined

    def _count_consumer(self, group: str, channel: ClientChannel, count: int | None) -> None:
        """Count a consumer and its subscriptions, which count as *count*; None: they have not changed."""
        joined = self._memberships_of(channel)
        before = joined.consumers.get(group)
        if before is None:
            self._group_quota.take(joined.owner)
            joined.consumers[group] = before = 0
        if count is not None:
            if count > before:
                self._subscription_quota.take(joined.owner, count - before)
            elif count < before:
                self._subscription_quota.give(joined.owner, before - count)
            joined.consumers[group] = count

    def _leave(self, connection: int, subscriptions: int) -> None:
        """Count one group less."""
        joined = self._memberships[connection]
        self._group_quota.give(joined.owner)
        if subscriptions:
            self._subscription_quota.give(joined.owner, subscriptions)
        if not joined.producers and not joined.consumers:
            del self._memberships[connection]

    def _remove_producer(self, group: str, connection: int) -> None:
        joined = self._memberships.get(connection)
        if joined is None or group not in joined.producers:
            return
        joined.producers.remove(group)
        self._leave(connection, 0)
        channels = _without(self._producers.get(group, {}), connection)
        if channels:
            self._producers[group] = channels
        else:
            self._producers.pop(group, None)

    def _remove_consumer(self, group: str, connection: int) -> list[ConsumerGroupInfo]:
        """Return the changed group in a list, which is empty if the connection has no member of the group."""
        joined = self._memberships.get(connection)
        if joined is None or group not in joined.consumers:
            return []
        self._leave(connection, joined.consumers.pop(group))
        info = self.consumers.get(group)
        if info is None or connection not in info.channels:  # a heartbeat that was refused
            return []
        expressions = {key: value for key, value in info.expressions.items() if key != connection}
        changed = replace(info, channels=_without(info.channels, connection), expressions=expressions)
        if changed.channels:
            self.consumers[group] = changed
        else:
            del self.consumers[group]
        return [changed]

    # --- without the lock: a callback sends requests -------------------------------------------

    def _report(self, changed: Iterable[ConsumerGroupInfo]) -> None:
        for info in changed:
            self._on_members_changed(info)


@dataclass(eq=False)
class ClientExpiry:
    """A `Service` that removes clients without heartbeats and closes their connections.

    Args:
        sweeps: Called at each check: they forget what clients have left behind.
        expire_ms: Maximum time between two heartbeats. RocketMQ: ``ConsumerManager``, 120 s.
        interval_ms: Time between two checks.
    """

    name = "server.client_expiry"

    _clients: ClientRegistry
    _clock: Clock
    _expire_ms: int
    _interval_ms: int
    _sweeps: Sequence[Callable[[], None]] = ()

    def __post_init__(self) -> None:
        self._due_ms = self._clock.steady_ms() + self._interval_ms

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Ignore *wake*: the checks are periodic."""

    def step(self) -> int | None:
        """Check the clients if a check is due, and return the time of the next check."""
        now_ms = self._clock.steady_ms()
        if self._due_ms <= now_ms:
            self._due_ms = now_ms + self._interval_ms
            for channel in self._clients.expire(self._expire_ms):
                address = str(channel.remote_address)
                self._clients.peer_log.warning("server.client_expired", client=channel.client_id, address=address)
                channel.close(f"no heartbeat for {format_ms(self._expire_ms)}")
            for sweep in self._sweeps:
                sweep()
        return wall_time(self._clock, self._due_ms)


def _latest(channels: Iterable[ClientChannel]) -> ClientChannel | None:
    return max(channels, key=lambda channel: channel.last_update_ms, default=None)


def _without(channels: dict[int, ClientChannel], connection: int) -> dict[int, ClientChannel]:
    return {key: channel for key, channel in channels.items() if key != connection}


def _silent(channels: dict[int, ClientChannel], limit_ms: int) -> list[ClientChannel]:
    return [channel for channel in channels.values() if channel.last_update_ms < limit_ms]


def _weight(subscription: TopicSubscription) -> int:
    """Return how often a subscription counts: its text takes the memory."""
    return 1 + (len(subscription.topic) + 2 * len(subscription.sub_string)) // _CHARACTERS_OF_A_SUBSCRIPTION


def _expressions(data: ConsumerMember) -> dict[str, str]:
    """Return what a member subscribes to: topic -> expression; tags are sorted, since their order has no meaning.

    Each member reads the retry topic of the group. Some clients list it and others do not, so it is left out.
    """
    listed = (each for each in data.subscription_data_set if not each.topic.startswith(RETRY_TOPIC_PREFIX))
    return {each.topic: _expression(each) for each in listed}


def _expression(subscription: TopicSubscription) -> str:
    text = subscription.sub_string
    if subscription.expression_type == "SQL92":
        return f"SQL92 {text}"
    return " || ".join(sorted({tag.strip() for tag in text.split("||")})) if "||" in text else text.strip()


def _joined(
    before: ConsumerGroupInfo | None, data: ConsumerMember, channel: ClientChannel, *, without_sub: bool
) -> tuple[ConsumerGroupInfo, bool]:
    """Return a group with one more or one refreshed member, and True if its members or topics changed."""
    names = (data.group_name, data.consume_type, data.message_model, data.consume_from_where)
    before = before or ConsumerGroupInfo(*names)
    known = before.channels.get(channel.id)
    is_change = known is None or known.client_id != channel.client_id
    channels = before.channels | {channel.id: channel}
    info = ConsumerGroupInfo(*names, channels, dict(before.subscriptions), dict(before.expressions))
    if not without_sub:
        is_change |= _update(info.subscriptions, {each.topic: each for each in data.subscription_data_set})
        info.expressions[channel.id] = _shared(info.expressions, _expressions(data))
    return info, is_change


def _shared(known: dict[int, dict[str, str]], expressions: dict[str, str]) -> dict[str, str]:
    """Return the same expressions of the newest member if it has them, so that most are in memory once.

    Not of any member: a look at all of them for each heartbeat would take long.
    """
    newest = next(reversed(known.values()), None)
    return newest if newest == expressions and newest is not None else expressions


def _describe(expressions: dict[str, str]) -> str:
    return ", ".join(f"{topic}:{expression}" for topic, expression in sorted(expressions.items())) or "no topic"


def _update(subscriptions: dict[str, TopicSubscription], latest: dict[str, TopicSubscription]) -> bool:
    """Take over newer subscriptions and remove missing ones. Return True if the set of topics changed.

    Another expression for the same topic does not count. Source: ``ConsumerGroupInfo.updateSubscription``.
    """
    topics_changed = latest.keys() != subscriptions.keys()
    for topic in subscriptions.keys() - latest.keys():
        del subscriptions[topic]
    for topic, subscription in latest.items():
        known = subscriptions.get(topic)
        if known is None or subscription.sub_version > known.sub_version:
            subscriptions[topic] = subscription
    return topics_changed
