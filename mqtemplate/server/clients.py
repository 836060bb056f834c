"""Who is connected, and for which groups: producers, consumers, and what consumers subscribe to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mqtemplate.clock import Clock
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import LanguageCode
from mqtemplate.remoting.protocol.bodies.group import ConsumerData
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData

_BROADCASTING = "BROADCASTING"


@dataclass(slots=True, eq=False)
class ClientChannel:
    """One client over one connection. A process may have several, each with an id of its own.

    Attributes:
        client_id: As the client calls itself; any text.
        version: The client's `Version`, as a number.
        last_update_ms: When it was last heard of.
    """

    connection: Connection
    client_id: str
    language: LanguageCode
    version: int
    last_update_ms: int


@dataclass(slots=True, eq=False)
class ConsumerGroupInfo:
    """The members of one group that are connected, and what the group reads.

    Attributes:
        consume_type, message_model, consume_from_where: RocketMQ's words, as the last heartbeat had them.
        channels: By the connection's id.
        subscriptions: By topic. The newest one holds for all members.
    """

    group: str
    consume_type: str
    message_model: str
    consume_from_where: str
    channels: dict[int, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model == _BROADCASTING

    def client_ids(self) -> list[str]:
        """Each member once, sorted."""
        return sorted({channel.client_id for channel in self.channels.values()})

    def channel_of(self, client_id: str) -> ClientChannel | None:
        """The member's connection; its newest where it has several."""
        mine = [channel for channel in self.channels.values() if channel.client_id == client_id]
        return max(mine, key=lambda channel: channel.last_update_ms, default=None)


class ClientRegistry:
    """Producers and consumers by group.

    - What it gives is a copy, or is replaced and never changed while others may read it.
    - A group of which nobody is left is forgotten.
    - Any thread may ask and tell.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed: Callable[[ConsumerGroupInfo], None] = lambda info: None
        self._lock = threading.Lock()
        self._consumers: dict[str, ConsumerGroupInfo] = {}
        self._producers: dict[str, dict[int, ClientChannel]] = {}
        self._turn = 0

    def on_members_changed(self, changed: Callable[[ConsumerGroupInfo], None]) -> None:
        """Call *changed* with each group whose members or topics changed, and who is in it now; in any thread."""
        self._changed = changed

    # --- asking --------------------------------------------------------------------------------

    def consumer_groups(self) -> list[str]:
        """The groups that somebody consumes for, sorted."""
        return sorted(self._consumers)

    def consumer_group(self, group: str) -> ConsumerGroupInfo | None:
        """The group; None if nobody consumes for it."""
        return self._consumers.get(group)

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """What *group* wants of *topic*; None if nobody consumes for it, or it does not subscribe to that."""
        info = self._consumers.get(group)
        return None if info is None else info.subscriptions.get(topic)

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that subscribe to *topic*, sorted."""
        return sorted(group for group, info in list(self._consumers.items()) if topic in info.subscriptions)

    def consumer(self, group: str, client_id: str) -> ClientChannel | None:
        """One member of a group; None if it is not connected."""
        info = self._consumers.get(group)
        return None if info is None else info.channel_of(client_id)

    def producer_groups(self) -> dict[str, list[ClientChannel]]:
        """Who sends for each group."""
        return {group: list(channels.values()) for group, channels in list(self._producers.items())}

    def producers(self, group: str) -> list[ClientChannel]:
        """Who sends for *group*; empty if nobody does."""
        return list(self._producers.get(group, {}).values())

    def next_producer(self, group: str) -> ClientChannel | None:
        """One who sends for *group*, each in turn; None if nobody does."""
        channels = [channel for channel in self.producers(group) if channel.connection.is_open]
        if not channels:
            return None
        self._turn += 1
        return channels[self._turn % len(channels)]

    def producer_by_client_id(self, client_id: str) -> ClientChannel | None:
        """The producer that calls itself so, by its newest connection; None if it is not connected."""
        mine = [
            channel
            for channels in list(self._producers.values())
            for channel in list(channels.values())
            if channel.client_id == client_id and channel.connection.is_open
        ]
        return max(mine, key=lambda channel: channel.last_update_ms, default=None)

    # --- telling -------------------------------------------------------------------------------

    def register_producer(self, group: str, channel: ClientChannel) -> bool:
        """A client sends for *group*, or still does; gives whether it is the first of its group."""
        with self._lock:
            others = self._producers.get(group, {})
            self._producers[group] = others | {channel.connection.id: channel}
            return not others

    def register_consumer(self, data: ConsumerData, channel: ClientChannel, *, without_sub: bool = False) -> bool:
        """A client consumes for a group, or still does; gives whether that was news.

        Args:
            without_sub: *data* leaves the subscriptions out, since they are as they were.
        """
        with self._lock:
            before = self._consumers.get(data.group_name)
            subscriptions = dict(before.subscriptions) if before is not None else {}
            has_changed = False if without_sub else _update(subscriptions, data.subscription_data_set)
            channels = dict(before.channels) if before is not None else {}
            known = channels.get(channel.connection.id)
            is_news = has_changed or known is None or known.client_id != channel.client_id
            channels[channel.connection.id] = channel
            info = ConsumerGroupInfo(
                data.group_name,
                data.consume_type,
                data.message_model,
                data.consume_from_where,
                channels,
                subscriptions,
            )
            self._consumers[data.group_name] = info
        if is_news:
            self._changed(info)
        return is_news

    def unregister_producer(self, group: str, connection: Connection) -> None:
        """A client sends for *group* no more."""
        with self._lock:
            self._drop_producer(group, connection)

    def unregister_consumer(self, group: str, connection: Connection) -> None:
        """A client consumes for *group* no more."""
        with self._lock:
            info = self._drop_consumer(group, connection)
        self._tell(() if info is None else (info,))

    def forget(self, connection: Connection) -> None:
        """The connection is gone, and with it whoever came over it."""
        with self._lock:
            for group in list(self._producers):
                self._drop_producer(group, connection)
            left = [info for group in list(self._consumers) if (info := self._drop_consumer(group, connection))]
        self._tell(left)

    def expire(self, silent_ms: int) -> list[ClientChannel]:
        """Take out of each group who was not heard of for it in *silent_ms*; gives those who are in no group now."""
        limit = self._clock.now_ms() - silent_ms
        gone: dict[int, ClientChannel] = {}
        changed = []
        with self._lock:
            for group, channels in list(self._producers.items()):
                for channel in _silent(channels, limit):
                    self._drop_producer(group, channel.connection)
                    gone[channel.connection.id] = channel
            for group, info in list(self._consumers.items()):
                for channel in _silent(info.channels, limit):
                    dropped = self._drop_consumer(group, channel.connection)
                    changed += [] if dropped is None else [dropped]
                    gone[channel.connection.id] = channel
            members = set().union(*self._producers.values(), *(info.channels for info in self._consumers.values()))
        self._tell(changed)
        return [channel for connection_id, channel in gone.items() if connection_id not in members]

    # --- inside --------------------------------------------------------------------------------

    def _drop_producer(self, group: str, connection: Connection) -> None:
        channels = self._producers.get(group, {})
        if connection.id in channels:
            left = {key: channel for key, channel in channels.items() if key != connection.id}
            if left:
                self._producers[group] = left
            else:
                del self._producers[group]

    def _drop_consumer(self, group: str, connection: Connection) -> ConsumerGroupInfo | None:
        """The group as it is now; None if nothing changed."""
        info = self._consumers.get(group)
        if info is None or connection.id not in info.channels:
            return None
        channels = {key: channel for key, channel in info.channels.items() if key != connection.id}
        changed = ConsumerGroupInfo(
            group, info.consume_type, info.message_model, info.consume_from_where, channels, info.subscriptions
        )
        if channels:
            self._consumers[group] = changed
        else:
            del self._consumers[group]
        return changed

    def _tell(self, changed: Iterable[ConsumerGroupInfo]) -> None:
        for info in changed:
            self._changed(info)


def _silent(channels: dict[int, ClientChannel], limit_ms: int) -> list[ClientChannel]:
    return [channel for channel in channels.values() if channel.last_update_ms < limit_ms]


def _update(subscriptions: dict[str, SubscriptionData], told: Iterable[SubscriptionData]) -> bool:
    """Take over what is newer, and drop what is not told any more; whether a topic came or went.

    Source: ``ConsumerGroupInfo.updateSubscription``: another expression for a topic they have is no news to the others.
    """
    fresh = {subscription.topic: subscription for subscription in told}
    topics_changed = fresh.keys() != subscriptions.keys()
    for topic in subscriptions.keys() - fresh.keys():
        del subscriptions[topic]
    for topic, subscription in fresh.items():
        known = subscriptions.get(topic)
        if known is None or subscription.sub_version > known.sub_version:
            subscriptions[topic] = subscription
    return topics_changed
