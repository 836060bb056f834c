"""The registry of clients is compared with a model while clients register, leave and expire in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.clients import ClientChannel, ClientRegistry, ConsumerGroupInfo
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol.bodies.group import ConsumerData
from mqtemplate.server.state.remote_clients import ConnectionChannel
from tests.server.serving import RecordingConnection, subscription
from tests.thirds import examples

GROUPS = st.sampled_from(["g1", "g2"])
CONNECTIONS = st.integers(0, 3)
TOPICS = st.frozensets(st.sampled_from(["t1", "t2", "t3"]))
EXPIRE_MS = 120_000
BROKER = ("broker-a", HostAddress("127.0.0.1", 10911))


class Watched(NamedTuple):
    """A subscription that calls *read* when its version is compared with that of another member."""

    topic: str
    read: Callable[[], object]
    sub_string: str = "*"
    expression_type: str = "TAG"

    @property
    def sub_version(self) -> int:
        self.read()
        return 1


def member(registry: ClientRegistry, read: Callable[[], object] = lambda: None) -> str:
    """Register one more member of a group with two subscriptions; return its client ID."""
    connection = RecordingConnection()
    subscriptions = [Watched(topic, read) for topic in ("orders", "returns")]
    client_id = f"client-{connection.id}"
    channel = ConnectionChannel(connection, client_id, "JAVA", 1, 0, None, BROKER)  # type: ignore[arg-type]
    registry.register_consumer(ConsumerData(group_name="g", subscription_data_set=subscriptions), channel)  # type: ignore[arg-type]
    return client_id


def test_the_subscriptions_of_members_are_compared_without_the_lock() -> None:
    """With 10,000 subscriptions that takes milliseconds, and the I/O threads need the lock."""
    registry = ClientRegistry(VirtualClock())
    was_locked: list[bool] = []
    member(registry)

    member(registry, lambda: was_locked.append(registry._lock.locked()))

    assert was_locked == [False, False]


def test_a_member_that_joins_while_another_one_does_is_not_lost() -> None:
    registry = ClientRegistry(VirtualClock())
    joined = [member(registry)]

    def join_once() -> None:
        if len(joined) == 1:
            joined.append("")
            joined[1] = member(registry)

    joined.append(member(registry, join_once))

    assert registry.consumers["g"].client_ids() == sorted(joined)


class Clients(RuleBasedStateMachine):
    """The model: (group, connection) -> time of the last heartbeat, and group -> topics of the last heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.registry = ClientRegistry(self.clock)
        self.connections = [RecordingConnection() for _ in range(4)]
        self.consumers: dict[tuple[str, int], int] = {}
        self.producers: dict[tuple[str, int], int] = {}
        self.topics: dict[str, frozenset[str]] = {}
        self.reported: list[ConsumerGroupInfo] = []
        self.registry.on_members_changed(self.reported.append)

    def channel(self, number: int) -> ClientChannel:
        now_ms = self.clock.now_ms()
        return ConnectionChannel(self.connections[number], f"client-{number}", "JAVA", 1, now_ms, None, BROKER)  # type: ignore[arg-type]

    @rule(group=GROUPS, number=CONNECTIONS, topics=TOPICS)
    def register_consumer(self, group: str, number: int, topics: frozenset[str]) -> None:
        is_change = (group, number) not in self.consumers or self.topics.get(group) != topics
        self.reported.clear()

        subscriptions = [subscription(topic) for topic in sorted(topics)]
        data = ConsumerData(group_name=group, subscription_data_set=subscriptions)
        changed = self.registry.register_consumer(data, self.channel(number))

        self.consumers[group, number] = self.clock.now_ms()
        self.topics[group] = topics
        assert changed == is_change
        assert [info.group for info in self.reported] == ([group] if is_change else [])

    @rule(group=GROUPS, number=CONNECTIONS)
    def register_producer(self, group: str, number: int) -> None:
        self.registry.register_producer(group, self.channel(number))
        self.producers[group, number] = self.clock.now_ms()

    @rule(group=GROUPS, number=CONNECTIONS)
    def unregister_consumer(self, group: str, number: int) -> None:
        self.reported.clear()
        was_member = self.consumers.pop((group, number), None) is not None

        self.registry.unregister_consumer(group, self.connections[number].id)

        assert [info.group for info in self.reported] == ([group] if was_member else [])
        self.forget_empty_groups()

    @rule(group=GROUPS, number=CONNECTIONS)
    def unregister_producer(self, group: str, number: int) -> None:
        self.registry.unregister_producer(group, self.connections[number].id)
        self.producers.pop((group, number), None)

    @rule(number=CONNECTIONS)
    def close_connection(self, number: int) -> None:
        self.registry.forget(self.connections[number].id)
        for table in (self.consumers, self.producers):
            for key in [key for key in table if key[1] == number]:
                del table[key]
        self.forget_empty_groups()

    @rule(seconds=st.integers(0, 100))
    def advance(self, seconds: int) -> None:
        self.clock.move_ms(1_000 * seconds)
        expired = self.registry.expire(EXPIRE_MS)

        limit = self.clock.now_ms() - EXPIRE_MS
        silent = {key[1] for table in (self.consumers, self.producers) for key, at in table.items() if at < limit}
        for table in (self.consumers, self.producers):
            for key in [key for key, at in table.items() if at < limit]:
                del table[key]
        left = {number for _, number in [*self.consumers, *self.producers]}
        assert {channel.client_id for channel in expired} == {f"client-{number}" for number in silent - left}
        self.forget_empty_groups()

    def forget_empty_groups(self) -> None:
        groups = {group for group, _ in self.consumers}
        self.topics = {group: topics for group, topics in self.topics.items() if group in groups}

    @invariant()
    def registry_equals_model(self) -> None:
        assert {group for group in ("g1", "g2") if self.registry.consumers.get(group)} == self.topics.keys()
        for group, topics in self.topics.items():
            info = self.registry.consumers.get(group)
            assert info is not None
            members = sorted({f"client-{number}" for name, number in self.consumers if name == group})
            assert info.client_ids() == members
            assert info.subscriptions.keys() == topics
        producers = {
            (group, channel.client_id)
            for group, channels in self.registry.producer_groups().items()
            for channel in channels
        }
        assert producers == {(group, f"client-{number}") for group, number in self.producers}


Clients.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestClients = Clients.TestCase


def test_the_retry_topic_of_the_group_is_no_different_subscription() -> None:
    """Java's consumers list it in their heartbeats, and consumers of other clients do not."""
    registry, clock = ClientRegistry(VirtualClock()), VirtualClock()
    one, other = (
        ConnectionChannel(RecordingConnection(), name, "JAVA", 1, clock.now_ms(), None, BROKER)  # type: ignore[arg-type]
        for name in ("one", "other")
    )
    with_retry = ConsumerData(
        group_name="billing", subscription_data_set=[subscription("orders"), subscription("%RETRY%billing")]
    )
    without = ConsumerData(group_name="billing", subscription_data_set=[subscription("orders")])
    registry.register_consumer(with_retry, one)

    assert registry.difference(without, "other") is None
    registry.register_consumer(without, other)
    assert registry.difference(with_retry, "one") is None
    different = ConsumerData(group_name="billing", subscription_data_set=[subscription("invoices")])
    assert "one to orders:*" in (registry.difference(different, "third") or "")


def test_members_with_the_same_subscriptions_share_them_in_memory() -> None:
    """A group may have a thousand members with a thousand topics. A new member is compared with the newest one."""
    registry = ClientRegistry(VirtualClock())
    for name, expression in (("one", "a || b"), ("two", "b||a"), ("three", "a||b"), ("four", "b")):
        channel = ConnectionChannel(RecordingConnection(), name, "JAVA", 1, 0, None, BROKER)  # type: ignore[arg-type]
        data = ConsumerData(group_name="billing", subscription_data_set=[subscription("orders", expression)])
        registry.register_consumer(data, channel)

    one, two, three, four = registry.consumers["billing"].expressions.values()

    assert one is two is three
    assert (one, four) == ({"orders": "a || b"}, {"orders": "b"})
