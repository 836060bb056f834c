"""Topics, groups and offsets, the same for every kind of broker."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.delay.settings import TopicShape
from mqtemplate.errors import MessageError, StoreLockedError, UnknownNameError, UnsupportedError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.operations import (
    BrokerAccess,
    OffsetChange,
    OffsetPosition,
    OffsetTarget,
    StoreAccess,
    TopicKind,
    apply_reset,
    forget_group,
    plan_reset,
)
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.operations.brokers import access_of, create_dead_letters, fill, free_address, server

# --- topics -------------------------------------------------------------------------------------


def test_topics_have_their_messages_and_their_kind(access: BrokerAccess) -> None:
    topics = {topic.name: topic for topic in access.admin.topics()}

    orders = topics["orders"]
    assert (orders.message_count, len(orders.queues), orders.kind) == (10, 2, TopicKind.NORMAL)
    assert orders.last_stored_ms is not None
    assert topics["%DLQ%billing"].kind is TopicKind.DEAD_LETTER
    assert topics["%RETRY%billing"].kind is TopicKind.RETRY
    assert topics["SCHEDULE_TOPIC_XXXX"].kind is TopicKind.SYSTEM


def test_a_list_of_topics_opens_no_queues_without_messages() -> None:
    """A dashboard lists thousands of topics with many queues, of which few have a message."""
    with EmbeddedBroker(None) as broker:
        broker.create_topic("orders", 8)
        used = broker.queues("orders")[3]
        broker.sends.send(Message("orders", b"x"), used)
        admin = BrokerAccess(broker).admin

        [orders] = [each for each in admin.topics() if each.name == "orders"]

        assert [(each.min_offset, each.max_offset) for each in orders.queues] == [
            (0, 1 if n == 3 else 0) for n in range(8)
        ]
        assert broker.store.queue_ids("orders") == [3]


def test_topics_have_the_shapes_of_their_releases_in_the_names_of_the_settings() -> None:
    """A client of the server reads them from its configuration; other topics have none."""
    shapes = {
        "mails": TopicShape(fair_by="tenant", max_rate=500, max_rate_per_key=2.5, message_priority=True),
        "polls": TopicShape(jitter=timedelta(seconds=30), spread=timedelta(minutes=10), priority=9),
    }
    address = free_address()
    engine = EmbeddedBroker(None, EmbeddedSettings(listen_host=address, topic_shapes=shapes))
    with (
        LocalCluster(engine, BrokerServerSettings(listen=address)),
        RemoteBroker(RemoteSettings(name_servers=(str(address),))) as client,
    ):
        for name in ("mails", "polls", "orders"):
            engine.create_topic(name, 1)
        found = [
            {each.name: each.shape for each in admin.topics() if each.kind is TopicKind.NORMAL}
            for admin in (engine.admin(), client.admin())
        ]
        one = client.admin().topic("mails").shape

    assert found[0] == found[1]
    assert found[0] == {
        "mails": "max-rate 500/s, fair-by tenant, max-rate-per-key 2.5/s, message-priority on",
        "polls": "jitter 30s, spread 10m, priority 9",
        "orders": None,
    }
    assert one == found[0]["mails"]


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "server"])
def test_connected_members_and_their_subscriptions_are_listed(kind: str, tmp_path: Path) -> None:
    with access_of(kind, tmp_path) as access:
        tags, sql = TagSelector("paid"), Sql92Selector("number > 3")
        spec = ConsumerSpec(group="mailing", subscriptions={"orders": tags, "reminders": sql})
        member = access.broker.groups.subscribe(spec)
        group = access.admin.group("mailing")
        member.close()

    assert len(group.members) == 1
    assert group.members[0].language == "PYTHON"
    assert group.message_model == "CLUSTERING"
    assert [(each.topic, each.expression, each.expression_type) for each in group.subscriptions][-2:] == [
        ("orders", "paid", "TAG"),
        ("reminders", "number > 3", "SQL92"),
    ]


def test_a_server_lists_the_groups_of_an_embedded_broker_that_had_its_folder(tmp_path: Path) -> None:
    """An embedded broker stores their offsets only; no member has connected to the server yet."""
    with EmbeddedBroker(tmp_path / "store") as owner:
        fill(owner)
        create_dead_letters(owner)

    with server(tmp_path) as settings, RemoteBroker(settings) as client:
        admin = client.admin()
        group = admin.group("billing")
        names = admin.group_names()
        forget_group(BrokerAccess(client), "billing")

        assert names == ["billing"]
        assert (group.members, group.lag) == ((), 4)
        assert admin.group_names() == []


# --- offsets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (OffsetTarget(position=OffsetPosition.EARLIEST), [(3, 0), (3, 0)]),
        (OffsetTarget(position=OffsetPosition.LATEST), [(3, 5), (3, 5)]),
        (OffsetTarget(time_ms=1), [(3, 0), (3, 0)]),
        (OffsetTarget(queue_offset=4), [(3, 4), (3, 4)]),
        (OffsetTarget(shift=-2), [(3, 1), (3, 1)]),
        (OffsetTarget(shift=1_000), [(3, 5), (3, 5)]),
        (OffsetTarget(shift=0), []),
    ],
)
def test_a_reset_is_planned_and_applied(
    tmp_path: Path, target: OffsetTarget, expected: list[tuple[int | None, int]]
) -> None:
    with access_of("memory", tmp_path) as access:
        changes = plan_reset(access, "billing", "orders", target)

        assert [(change.before, change.after) for change in changes] == expected
        assert [each.committed for each in access.admin.progress("billing", "orders")] == [
            3,
            3,
        ]  # not changed yet
        apply_reset(access, "billing", changes)
        assert plan_reset(access, "billing", "orders", target) == [] or target.shift


def test_connected_members_of_a_server_continue_at_the_new_offset(tmp_path: Path) -> None:
    with access_of("server", tmp_path) as access:
        member = access.broker.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
        first: list[int] = []
        while len(first) < 4:
            first += [message.queue_offset for message in member.poll(32, 500)]
        apply_reset(
            access,
            "billing",
            plan_reset(access, "billing", "orders", OffsetTarget(position=OffsetPosition.EARLIEST)),
        )
        again: list[int] = []
        while len(again) < 10:
            again += [message.queue_offset for message in member.poll(32, 500)]
        member.close()

    assert sorted(first) == [3, 3, 4, 4]
    assert sorted(again) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_group_with_listeners_in_this_process_is_refused() -> None:
    with EmbeddedBroker() as broker:
        fill(broker)
        member = broker.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
        with pytest.raises(UnsupportedError, match="has listeners in this process, with read positions of their own"):
            broker.admin().set_offsets("billing", {MessageQueue("orders", broker.name, 0): 1})
        member.close()


def test_a_group_that_is_gone_is_forgotten(access: BrokerAccess) -> None:
    """Retention keeps no messages for a group without offsets. A group that returns starts as a new one."""
    before = forget_group(access, "billing")

    assert before.lag == 4
    assert [each.committed for each in before.progress if each.queue.topic == "orders"] == [3, 3]
    queues = access.broker.queues("orders")
    assert [access.broker.groups.committed_offset("billing", queue) for queue in queues] == [None, None]


def test_a_group_that_does_not_exist_cannot_be_forgotten(access: BrokerAccess) -> None:
    with pytest.raises(UnknownNameError, match="group 'bill' does not exist; did you mean 'billing'"):
        forget_group(access, "bill")


@pytest.mark.parametrize("kind", ["memory", "server"])
def test_a_group_with_members_is_not_forgotten(kind: str, tmp_path: Path) -> None:
    with access_of(kind, tmp_path) as access:
        member = access.broker.groups.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
        member.poll(1, 500)
        with pytest.raises(
            UnsupportedError,
            match=r"group 'billing' has members now.*, so it is not gone; stop them first, or move its offsets instead "
            "with: mqtemplate offsets reset billing TOPIC --to latest",
        ):
            forget_group(access, "billing")
        member.close()


def test_a_target_needs_one_value() -> None:
    with pytest.raises(MessageError, match="a reset needs one target: earliest, latest, a time"):
        OffsetTarget(time_ms=1, shift=2)


# --- a store directory in use -------------------------------------------------------------------


def test_a_directory_in_use_is_read_and_not_changed(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as owner, StoreAccess(tmp_path) as access:
        fill(owner)
        assert access.admin.topic("orders").message_count == 10
        with pytest.raises(StoreLockedError, match="is in use by process"):
            apply_reset(access, "billing", [OffsetChange(MessageQueue("orders", owner.name, 0), None, 1)])
        owner.sends.send(Message("orders", b"new"))
        before = access.admin.topic("orders").message_count
        access.refresh()

        assert (before, access.admin.topic("orders").message_count) == (10, 11)


def test_reading_a_directory_delivers_and_changes_nothing(tmp_path: Path) -> None:
    with access_of("folder", tmp_path) as access:
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
        access.admin.topics()
        access.admin.groups()

        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == files


# --- messages in flight by POP --------------------------------------------------------------------


def pop_orders(broker: EmbeddedBroker) -> str:
    """Let the group shipping receive an order by POP, before another one of the same key. Return its message id."""
    broker.pop.join(ConsumerSpec(group="shipping", subscriptions={"orders": TagSelector()}))
    for _ in range(2):
        broker.sends.send(Message("orders", b"x", {"KEYS": "4466", "__SHARDINGKEY": "a"}), broker.queues("orders")[0])
    [received] = broker.pop.receive("shipping", "orders", 1, 600_000, 10_000, None, is_ordered=True)
    broker.pop.receive("shipping", "orders", 1, 600_000, 0, None, is_ordered=True)
    return received.message.msg_id


@pytest.mark.parametrize("kind", ["memory", "folder", "server"])
def test_messages_in_flight_are_listed_with_their_member_and_their_times(kind: str, tmp_path: Path) -> None:
    """A broker that was opened later does not know the member."""
    with ExitStack() as stack:
        path = None if kind == "memory" else tmp_path / "store"
        address = free_address()
        owner = EmbeddedBroker(path, EmbeddedSettings(listen_host=address))
        if kind == "server":
            stack.enter_context(LocalCluster(owner, BrokerServerSettings(listen=address)))
            admin = stack.enter_context(RemoteBroker(RemoteSettings(name_servers=(str(address),)))).admin()
        else:
            stack.enter_context(owner)
            admin = owner.admin()
        owner.create_topic("orders", 1)
        msg_id = pop_orders(owner)
        if kind == "folder":
            owner.close()
            admin = stack.enter_context(StoreAccess(tmp_path / "store")).admin

        found, none = admin.deliveries("shipping"), admin.deliveries("billing")

    assert found is not None
    [message] = found.messages
    assert (found.in_flight, found.waiting, found.expired, found.held) == (1, 1, 0, 0)
    assert (message.msg_id, message.keys, message.topic, message.queue.topic) == (msg_id, "4466", "orders", "orders")
    assert message.client == ("" if kind == "folder" else "this process")
    assert message.until_ms - message.since_ms == 600_000
    assert (message.message_group, message.blocked, message.attempt) == ("a", 1, 1)
    assert none is None
