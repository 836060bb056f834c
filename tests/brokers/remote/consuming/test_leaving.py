"""A member that leaves: its offsets are with the broker before another member can take its queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import Consumer
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from tests.brokers.remote.clients import client, join, one_queue, server, take
from tests.brokers.remote.scripted_cluster import Script, ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.waiting import eventually

COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
GROUP = "billing"
KEY = ("orders", GROUP)
ALL_COMMITTED = {0: 7, 1: 7, 2: 7, 3: 7}


@pytest.fixture
def cluster() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        broker.topic("orders")
        yield broker


@contextmanager
def member_of(cluster: ScriptedBroker, folder: Path, **settings: Any) -> Iterator[Consumer]:
    """Join a member that commits offset 7 of each queue."""
    with client(cluster.address, folder, **settings) as broker:
        member = join(broker, "orders", GROUP)
        assert {queue.queue_id for queue in member.assignment()} == {0, 1, 2, 3}
        for queue in member.assignment():
            member.commit(queue, 7)
        yield member


def queue_of(queue_id: int, broker_name: str = "broker-a") -> MessageQueue:
    return MessageQueue("orders", broker_name, queue_id)


def test_a_member_leaves_the_group_after_the_broker_has_applied_its_offsets(
    cluster: ScriptedBroker, tmp_path: Path
) -> None:
    """None of them is lost, although RocketMQ keeps one of several concurrent first commits of a topic and group."""
    groups = ScriptedGroups(cluster)

    with member_of(cluster, tmp_path) as member:
        member.close()

        assert (groups.unapplied_at, groups.members[GROUP]) == ({"unregistration": 0}, [])
        assert groups.tables[KEY] == ALL_COMMITTED


def test_a_member_that_leaves_waits_for_a_periodic_commit_under_way(cluster: ScriptedBroker, tmp_path: Path) -> None:
    """The member that takes the queues over would read the offsets before it; nor is it applied after a newer one."""
    groups = ScriptedGroups(cluster)

    with member_of(cluster, tmp_path, persist_consumer_offset_interval_ms=10) as member:
        eventually(lambda: cluster.count(COMMIT), "the periodic commit was sent")
        for queue_id in range(3):
            member.commit(queue_of(queue_id), 8)
        member.close()

        assert groups.unapplied_at["unregistration"] == 0
        assert groups.tables[KEY] == {0: 8, 1: 8, 2: 8, 3: 7}


def test_a_queue_is_unlocked_after_the_broker_has_applied_its_offset(cluster: ScriptedBroker, tmp_path: Path) -> None:
    groups = ScriptedGroups(cluster)

    with member_of(cluster, tmp_path) as member:
        assert member.lock(queue_of(1))
        member.unlock(queue_of(1))

        assert (groups.unapplied_at, groups.tables[KEY]) == ({"unlock": 0}, {1: 7})


def never_answer(request: RemotingCommand) -> None:
    """Leave a request without a response."""


def answer_full(request: RemotingCommand) -> RemotingCommand:
    return request.response(ResponseCode.SYSTEM_ERROR, remark="the disk is full")


@pytest.mark.parametrize(("script", "reason"), [(never_answer, "200ms"), (answer_full, "the disk is full")])
def test_a_broker_that_does_not_take_the_offsets_does_not_keep_a_member_from_leaving(
    cluster: ScriptedBroker, tmp_path: Path, script: Script, reason: str
) -> None:
    """If it is silent, the four queues cost one time limit, not four. Both cost one line in the log."""
    groups = ScriptedGroups(cluster)
    cluster.script(COMMIT, script)

    with member_of(cluster, tmp_path, request_timeout_ms=200) as member, capture_logs() as logs:
        member.close()

        assert groups.members[GROUP] == []
    [warning] = [log for log in logs if log["event"] == "remote.commit_failed"]
    assert (warning["log_level"], warning["group"], warning["broker"]) == ("warning", GROUP, "broker-a")
    assert reason in warning["reason"]
    assert script is not never_answer or cluster.count(COMMIT) == 1


def test_a_silent_broker_does_not_keep_offsets_from_another_one(tmp_path: Path) -> None:
    with ScriptedBroker("broker-a") as good, ScriptedBroker("broker-b") as silent:
        good.others = [silent]
        good.topic("orders", queues=2)
        groups, _ = ScriptedGroups(good), ScriptedGroups(silent)
        silent.script(COMMIT, lambda request: None)
        with client(good.address, tmp_path, request_timeout_ms=500) as broker:
            member = join(broker, "orders", GROUP)
            for queue in member.assignment():
                member.commit(queue, 7)
            member.close()

        assert groups.tables[KEY] == {0: 7, 1: 7}
        assert silent.count(COMMIT) == 1


def test_a_commit_that_failed_is_repeated(cluster: ScriptedBroker, tmp_path: Path) -> None:
    groups = ScriptedGroups(cluster, commit_delay_s=0.0)
    cluster.refuse(COMMIT, ResponseCode.SYSTEM_BUSY)

    with member_of(cluster, tmp_path, persist_consumer_offset_interval_ms=10):
        eventually(lambda: cluster.count(COMMIT) >= 4, "the broker has refused the commits")
        cluster.script(COMMIT, groups.commit)

        eventually(lambda: groups.tables.get(KEY) == ALL_COMMITTED, "the member has committed again")


def test_a_heartbeat_under_way_does_not_register_a_member_that_leaves_again(
    cluster: ScriptedBroker, tmp_path: Path
) -> None:
    """The broker would share queues out to this member until its connection ends."""
    groups = ScriptedGroups(cluster)

    with member_of(cluster, tmp_path, heartbeat_broker_interval_ms=10) as member:
        groups.heartbeat_delay_s = 0.1
        eventually(lambda: groups.unapplied_heartbeats, "a heartbeat is under way")
        member.close()

        eventually(lambda: not groups.unapplied_heartbeats, "the heartbeat is handled")
        assert groups.members[GROUP] == []


def test_a_pull_carries_the_last_commit(tmp_path: Path) -> None:
    """So the queue of a killed member is read from there, and not from the last periodic commit."""
    with (
        server() as cluster,
        client(cluster.address, tmp_path, persist_consumer_offset_interval_ms=3_600_000) as broker,
    ):
        queue = one_queue(broker)
        member = join(broker, "orders", GROUP)
        broker.sends.send(Message("orders", b"first"))
        take(member, 1)
        member.commit(queue, 1)
        broker.groups.committed_offset(GROUP, queue)  # sends the first commit, which no pull carries
        for number in range(2, 4):
            broker.sends.send(Message("orders", b"x"))
            take(member, 1)
            member.commit(queue, number)

        broker.sends.send(Message("orders", b"last"))
        take(member, 1)

        eventually(
            lambda: cluster.engine.groups.committed_offset(GROUP, queue) == 3, "the pull has committed the offset"
        )


def test_a_pull_of_a_member_that_locks_its_queues_carries_no_commit(tmp_path: Path) -> None:
    """It could arrive after the last commit of the queue, and the next member would handle messages again."""
    with (
        server() as cluster,
        client(cluster.address, tmp_path, persist_consumer_offset_interval_ms=3_600_000) as broker,
    ):
        queue = one_queue(broker)
        member = join(broker, "orders", GROUP)
        assert member.lock(queue)
        member.commit(queue, 1)
        broker.groups.committed_offset(GROUP, queue)

        member.commit(queue, 2)

        assert member.offsets.carried(queue) == 0  # type: ignore[attr-defined]
