"""Members of a group while brokers restart, or only their replicas are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.consuming import group_requests
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.listener import ConsumeMode
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from tests.brokers.remote.clients import assign_again, client, group_spec
from tests.brokers.remote.consuming.test_orderly_listeners import listening
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.waiting import eventually

GROUP = "billing"
KEY = ("orders", GROUP)


def join(broker: RemoteBroker) -> RemoteConsumer:
    member = broker.groups.subscribe(group_spec(GROUP, "orders"))
    assert isinstance(member, RemoteConsumer)
    return member


def orders(member: RemoteConsumer) -> list[MessageQueue]:
    return sorted(queue for queue in member.assignment() if queue.topic == "orders")


@contextmanager
def master_and(second: str, queues: int = 2) -> Iterator[tuple[ScriptedBroker, ScriptedBroker]]:
    """Start a master "broker-a", which is the name server, too, and a second broker; both have the topic."""
    with ScriptedBroker("broker-a") as one, ScriptedBroker(second) as other:
        one.others = [other]
        one.topic("orders", queues)
        yield one, other


# --- lists of members -------------------------------------------------------------------------------


def test_a_member_that_a_restarted_master_lacks_keeps_its_queues(tmp_path: Path) -> None:
    """Members ask all masters: one that has just restarted has only those members whose heartbeats have arrived."""
    with master_and("broker-b") as (settled, restarted):
        ScriptedGroups(settled).members[GROUP] = ["0 other"]
        ScriptedGroups(restarted)
        with client(settled.address, tmp_path) as broker:
            member = join(broker)
            shares = []
            for _ in range(20):
                member.rebalance()
                shares.append(len(orders(member)))

    assert shares == [2] * 20, "of four queues"


def test_a_member_that_is_alone_at_a_restarted_broker_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_requests, "_SETTLE_MS", 3_600_000)
    with ScriptedBroker() as only, client_with_other(only, tmp_path) as (member, groups):
        groups.members.clear()
        only.lose_connections()
        eventually(lambda: groups.members.get(GROUP), "the member has registered again")
        member.rebalance()

        assert (len(orders(member)), member.is_incomplete) == (2, True)


def test_a_member_takes_the_queues_of_one_that_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_requests, "_SETTLE_MS", 100)
    with ScriptedBroker() as only, client_with_other(only, tmp_path) as (member, groups):
        groups.members.clear()
        only.lose_connections()

        eventually(lambda: len(orders(member)) == 4, "the member takes all queues")


@contextmanager
def client_with_other(broker: ScriptedBroker, folder: Path) -> Iterator[tuple[RemoteConsumer, ScriptedGroups]]:
    """Join a group that has another member."""
    broker.topic("orders", 4)
    groups = ScriptedGroups(broker)
    groups.members[GROUP] = ["0 other"]
    with client(broker.address, folder) as remote:
        member = join(remote)
        assert len(orders(member)) == 2
        yield member, groups


def test_a_restarted_broker_gets_the_members_within_seconds(tmp_path: Path) -> None:
    """Not only with the next heartbeat, which is sent each 30 s."""
    with ScriptedBroker("broker-a") as names:
        first = ScriptedBroker("broker-b")
        with first:
            names.others = [first]
            names.topic("orders", 1)
            ScriptedGroups(names)
            ScriptedGroups(first)
            stack = ExitStack()
            broker = stack.enter_context(client(names.address, tmp_path))
            join(broker)
            port = first.port
        eventually(lambda: not broker._client._lost.is_empty, "the loss is noticed")
        restarted = ScriptedBroker("broker-b", port=port)
        groups = ScriptedGroups(restarted)  # before it answers the first heartbeat
        with restarted:
            names.others = [restarted]
            eventually(lambda: groups.members.get(GROUP), "the member is registered", timeout_s=20)
            eventually(lambda: broker._client._lost.is_empty, "the broker is not looked for any more")
            stack.close()


def test_a_broker_that_lost_commits_gets_them_again(tmp_path: Path) -> None:
    """RocketMQ stores them each five seconds: a killed broker forgets the last ones."""
    with ScriptedBroker() as only:
        only.topic("orders", 1)
        groups = ScriptedGroups(only)
        with client(only.address, tmp_path, persist_consumer_offset_interval_ms=50) as broker:
            member = join(broker)
            member.commit(MessageQueue("orders", "broker-a", 0), 7)
            eventually(lambda: groups.tables.get(KEY) == {0: 7}, "the offset is committed")

            groups.tables.clear()
            only.lose_connections()

            eventually(lambda: groups.tables.get(KEY) == {0: 7}, "the offset is committed again")


def test_a_queue_whose_lock_was_lost_with_its_broker_is_taken_again(tmp_path: Path) -> None:
    with ScriptedBroker() as only:
        only.topic("orders", 1)
        ScriptedGroups(only)
        queue = MessageQueue("orders", "broker-a", 0)
        with client(only.address, tmp_path) as broker:
            member = join(broker)
            assert member.lock(queue)
            member.locks.lose("broker-a")

            assign_again(member, {queue})
            member.lock_soon(queue)
            eventually(lambda: member.lock_soon(queue), "the queue is locked again")

            assert orders(member) == [queue]


def test_a_queue_whose_broker_was_killed_continues_after_the_last_commit_of_its_member(tmp_path: Path) -> None:
    """The broker comes back with the commits that it had stored before."""
    queue = MessageQueue("orders", "broker-b", 0)
    with master_and("broker-b", queues=1) as (one, other):
        ScriptedGroups(one)
        groups = ScriptedGroups(other)
        with client(one.address, tmp_path) as broker:
            member = join(broker)
            member.commit(queue, 9)
            one.others, of_both = [], one.routes["orders"]
            one.topic("orders", 1)
            broker._client._routes.follow()
            eventually(lambda: queue not in member.assignment(), "the queue is given up")
            groups.tables[KEY] = {0: 5}

            one.others, one.routes["orders"] = [other], of_both
            broker._client._routes.follow()
            eventually(lambda: queue in member.assignment(), "the queue is taken again")

            assert (member.position(queue), member.committed(queue)) == (9, 9)


# --- log --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [ConsumeMode.CONCURRENTLY, ConsumeMode.ORDERLY])
def test_the_log_of_an_outage_does_not_grow_with_the_queues(mode: ConsumeMode, tmp_path: Path) -> None:
    """Twelve queues whose broker is away: a line at the start, one at the end, and the lines of the changed routes."""
    with ScriptedBroker("broker-a") as names, capture_logs() as logs:
        first = ScriptedBroker("broker-b")
        with first:
            names.others = [first]
            names.topic("orders", 12)
            ScriptedGroups(names)
            ScriptedGroups(first)
            stack = ExitStack()
            broker = stack.enter_context(client(names.address, tmp_path, retry_after_error_ms=20))
            stack.enter_context(listening(broker, [], mode))
            eventually(lambda: first.count(RequestCode.PULL_MESSAGE) > 11, "all queues are read")
            port = first.port
        lost = broker._client._lost
        eventually(lambda: not lost.is_empty, "the loss is noticed")
        names.others = []
        names.topic("orders", 12)
        eventually(lambda: len(broker.queues("orders")) == 12, "the route drops the broker")
        restarted = ScriptedBroker("broker-b", port=port)
        ScriptedGroups(restarted)
        with restarted:
            names.others = [restarted]
            names.topic("orders", 12)
            eventually(lambda: restarted.count(RequestCode.PULL_MESSAGE) > 11, "all queues are read again")
            stack.close()

    shown = [log["event"] for log in logs if log["log_level"] != "debug" and not log["event"].startswith("broker.")]
    assert shown.count("remote.outage_started") == shown.count("remote.reconnected") == 1
    assert [event for event in shown if event.startswith("listener.poll")] == []
    assert len(shown) <= 6, shown


# --- replicas ---------------------------------------------------------------------------------------


def test_a_new_member_reads_from_replicas_while_all_masters_are_down(tmp_path: Path) -> None:
    with ScriptedBroker("names") as names, ScriptedBroker("broker-a") as replica, capture_logs() as logs:
        names.others = [replica]
        names.topic("orders", 2)
        names.routes["orders"] = names.routes["orders"][1:]
        names.addresses = {"broker-a": {1: replica.address}, "names": {}}
        ScriptedGroups(replica)
        with client(names.address, tmp_path) as broker:
            member = join(broker)
            eventually(lambda: replica.count(RequestCode.PULL_MESSAGE), "the replica is read")
            member.rebalance()
            assert len(orders(member)) == 2

    [warning] = [log for log in logs if log["event"] == "remote.masters_missing" and log["topic"] == "orders"]
    assert (warning["log_level"], warning["group"]) == ("warning", GROUP)


def test_a_replica_without_the_offset_of_a_group_with_progress_is_not_read_from_the_start(tmp_path: Path) -> None:
    """A replica copies the offsets each ten seconds; the queue waits for its master."""
    with master_and("broker-b", queues=1) as (one, other), capture_logs() as logs:
        of_one, of_other = ScriptedGroups(one), ScriptedGroups(other)
        of_one.tables[KEY] = {0: 7}
        one.addresses["broker-b"] = {1: other.address}
        with client(one.address, tmp_path, poll_name_server_interval_ms=50) as broker:
            member = join(broker)
            for _ in range(3):
                member.rebalance()
            without_master = orders(member)

            of_other.tables[KEY] = {0: 5}
            del one.addresses["broker-b"]
            eventually(lambda: len(orders(member)) == 2, "the queue is read when its master is back")

    assert without_master == [MessageQueue("orders", "broker-a", 0)]
    assert {pull.header(PullMessageRequestHeader).queue_offset for pull in pulls(other, "orders")} == {5}
    assert [log["queue"] for log in logs if log["event"] == "remote.offset_unknown"] == [0]


def test_a_member_continues_at_a_replica_where_it_has_stopped(tmp_path: Path) -> None:
    queue = MessageQueue("orders", "broker-b", 0)
    with master_and("broker-b", queues=1) as (one, other):
        ScriptedGroups(one)
        groups = ScriptedGroups(other)
        with client(one.address, tmp_path) as broker:
            member = join(broker)
            member.commit(queue, 9)
            with member._assigning:  # a rebalance in another thread waits meanwhile
                member._assign(set())
                groups.tables.clear()
                one.addresses["broker-b"] = {1: other.address}
                broker._client._routes.refresh()

                member._assign({queue})

            assert member.position(queue) == 9


def test_a_new_group_starts_at_a_replica_by_its_settings(tmp_path: Path) -> None:
    with master_and("broker-b", queues=1) as (one, other):
        ScriptedGroups(one)
        ScriptedGroups(other)
        one.addresses["broker-b"] = {1: other.address}
        with client(one.address, tmp_path) as broker:
            member = join(broker)

            assert [member.position(queue) for queue in orders(member)] == [0, 0]


def pulls(broker: ScriptedBroker, topic: str) -> list[object]:
    """Return the pulls that a broker has received."""
    return [
        request
        for request in broker.seen
        if request.code == RequestCode.PULL_MESSAGE and request.header(PullMessageRequestHeader).topic == topic
    ]
