"""ORDERLY listeners on a cluster: hand-over of queues between members, and brokers that do not answer."""

from __future__ import annotations

import queue as queues
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import Consumer
from mqtemplate.brokers import RemoteBroker
from mqtemplate.brokers.remote.cluster.failures import LostBrokers
from mqtemplate.brokers.remote.consuming import group_requests
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.brokers.remote.consuming.group_requests import GroupRequests, HeldQueueLocks
from mqtemplate.brokers.remote.consuming.pulls import PullLoop
from mqtemplate.converter import JsonMessageConverter
from mqtemplate.errors import BrokerError, RemoteTimeoutError
from mqtemplate.listener import ConsumeMode, ListenerContainer, ListenerRegistry, message_listener
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.server import LocalCluster
from tests.brokers.remote.clients import (
    assign_again,
    bodies,
    client,
    give_up_all,
    join,
    message_ext,
    one_queue,
    send_numbers,
    server,
)
from tests.brokers.remote.consuming.test_consumer import pulled
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.brokers.remote.scripted_group import ScriptedGroups
from tests.waiting import PATIENCE_S, eventually


@contextmanager
def listening(
    broker: RemoteBroker, received: list[str], mode: ConsumeMode = ConsumeMode.ORDERLY, gate: Event | None = None
) -> Iterator[ListenerContainer]:
    """Run a listener of group "billing"; it waits for *gate* at the message "1"."""

    @message_listener(
        topic="orders",
        consumer_group="billing",
        consume_mode=mode,
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        consume_thread_number=1,
    )
    def bill(body: str) -> None:
        received.append(body)
        if body == "1" and gate is not None:
            gate.wait()

    registry = ListenerRegistry(broker, JsonMessageConverter())
    [container] = registry.register(bill)
    registry.start()
    try:
        yield container
    finally:
        if gate is not None:
            gate.set()
        registry.stop()


def wait_for_fetch(container: ListenerContainer) -> None:
    """Return when the listener has fetched once more."""
    for _ in range(2):
        container.member.run_when_polling(lambda: None)  # runs between two fetches


def messages_queue(member: Consumer) -> list[MessageQueue]:
    return sorted(queue for queue in member.assignment() if queue.topic == "orders")


def test_a_new_member_starts_after_what_the_previous_one_has_committed(tmp_path: Path) -> None:
    """It takes a queue over: it must not commit the position that it had before it got the lock."""
    received: list[str] = []
    with server() as cluster, client(cluster.address, tmp_path) as one, client(cluster.address, tmp_path) as other:
        one.create_topic("orders", 2)
        before = join(one, "orders")
        both = one.queues("orders")
        for queue in both:
            assert before.lock(queue)
            for number in range(4):
                one.sends.send(Message("orders", b"%d of %d" % (number, queue.queue_id)), queue)
        with listening(other, received) as container:
            [kept] = eventually(lambda: len(messages_queue(before)) == 1 and messages_queue(before), "it gave one up")
            [given_up] = [queue for queue in both if queue != kept]
            wait_for_fetch(container)

            before.commit(given_up, 3)
            before.unlock(given_up)
            eventually(lambda: received, "the new member handles the queue")

    assert received == [f"3 of {given_up.queue_id}"]


def test_a_member_does_not_commit_a_queue_that_another_one_has_locked(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as one, client(cluster.address, tmp_path) as other:
        one.create_topic("orders", 1)
        [queue] = one.queues("orders")
        owner = join(one, "orders")
        assert owner.lock(queue)
        owner.close()
        cluster.broker.locks.lock("billing", "another member", [queue])
        member = join(other, "orders")
        assert not member.lock_soon(queue)

        member.commit(queue, 5)
        member.close()

        assert cluster.engine.groups.committed_offset("billing", queue) is None


def test_a_locked_queue_that_was_given_up_before_it_was_read_is_unlocked(tmp_path: Path) -> None:
    """Nobody would unlock it later, and its renewals would keep the next member away for ever."""
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        queue = one_queue(broker)
        member = join(broker, "orders")
        assert isinstance(member, RemoteConsumer)
        assert not member.lock_soon(queue)
        eventually(lambda: member.locks.is_ready(queue), "the queue is locked")

        give_up_all(member)

        eventually(lambda: is_locked_by_other(cluster, queue), "another member locks the queue")


def test_a_queue_that_is_given_up_while_it_is_being_locked_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        queue = one_queue(broker)
        member = join(broker, "orders")
        assert isinstance(member, RemoteConsumer)
        lock, is_given_up = GroupRequests.lock, Event()

        def lock_late(requests: GroupRequests, queues: Any) -> dict[str, set[MessageQueue] | BrokerError]:
            results = lock(requests, queues)
            give_up_all(member)
            is_given_up.set()
            return results

        monkeypatch.setattr(RemoteConsumer, "rebalance", lambda member: None)  # the next one gives the queue back
        monkeypatch.setattr(GroupRequests, "lock", lock_late)
        assert not member.lock_soon(queue)
        eventually(is_given_up.is_set, "the queue is locked, and the member does not know it yet")

        eventually(lambda: is_locked_by_other(cluster, queue), "another member locks the queue")


def test_a_queue_that_is_given_up_before_a_late_answer_to_its_lock_request_is_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker had locked it after the time limit of the request. The next member waited for a minute."""
    unlocked: queues.Queue[MessageQueue] = queues.Queue()
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        queue = one_queue(broker)
        member = join(broker, "orders")
        assert isinstance(member, RemoteConsumer)
        lock, unlock = GroupRequests.lock, GroupRequests.unlock

        def lock_late(requests: GroupRequests, by_broker: Any) -> dict[str, set[MessageQueue] | BrokerError]:
            lock(requests, by_broker)
            give_up_all(member)
            return dict.fromkeys(by_broker, RemoteTimeoutError("no answer within 1s"))

        def unlock_and_note(requests: GroupRequests, by_broker: Any) -> None:
            unlock(requests, by_broker)
            for each in by_broker.values():
                for one in each:
                    unlocked.put(one)

        monkeypatch.setattr(RemoteConsumer, "rebalance", lambda member: None)  # the next one gives the queue back
        monkeypatch.setattr(GroupRequests, "lock", lock_late)
        monkeypatch.setattr(GroupRequests, "unlock", unlock_and_note)
        assert not member.lock_soon(queue)

        assert unlocked.get(timeout=PATIENCE_S) == queue
        assert is_locked_by_other(cluster, queue)


def test_a_queue_that_is_given_up_while_a_handler_runs_after_its_lock_was_regained_is_unlocked(
    our_server: LocalCluster, our_client: RemoteBroker
) -> None:
    """The listener does not count it as locked any more. Without an unlock the next member waits for a minute."""
    gate = Event()
    received: list[str] = []
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    with listening(our_client, received, gate=gate) as container:
        eventually(lambda: "1" in received, "the handler has the second message")
        member = container.member.consumer
        assert isinstance(member, RemoteConsumer)
        member.locks.lose(queue.broker_name)
        member.renew_locks()
        wait_for_fetch(container)

        give_up_all(member)
        member.renew_locks()
        during = is_locked_by_other(our_server, queue)
        gate.set()
        eventually(lambda: is_locked_by_other(our_server, queue), "another member locks the queue")

    assert not during


def test_a_lock_that_is_requested_while_the_member_closes_is_unlocked(
    our_server: LocalCluster, our_client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = one_queue(our_client)
    member = join(our_client, "orders")
    locking, closing = Event(), Event()
    lock, close = our_server.broker.locks.lock, HeldQueueLocks.close

    def lock_late(*arguments: Any) -> list[MessageQueue]:
        locked = lock(*arguments)
        locking.set()
        closing.wait()
        return locked

    def close_meanwhile(locks: HeldQueueLocks) -> None:
        closing.set()
        close(locks)

    with monkeypatch.context() as patched:
        patched.setattr(group_requests, "_LOCK_TIMEOUT_MS", PATIENCE_S * 1_000)
        patched.setattr(our_server.broker.locks, "lock", lock_late)
        patched.setattr(HeldQueueLocks, "close", close_meanwhile)
        assert not member.lock_soon(queue)
        locking.wait()
        member.close()

    assert is_locked_by_other(our_server, queue)


def test_a_lock_is_lost_with_its_connection_also_while_the_broker_counts_as_away(
    our_client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue may have been locked again before the broker was found to be back."""
    monkeypatch.setattr(LostBrokers, "update", lambda *_: None)  # it is not found to be back yet
    queue = one_queue(our_client)
    member = join(our_client, "orders")
    address = our_client.client_context.routes.master(queue.broker_name)
    our_client._client._on_lost(address)
    eventually(lambda: member.lock_soon(queue), "the queue is locked")

    our_client._client._on_lost(address)

    assert queue in member.lost_locks()


def test_a_lock_that_was_lost_is_not_used_before_the_commits_of_others_are_read(
    our_server: LocalCluster, our_client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member may have had it meanwhile: the next message is not the one that was next before."""
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    member = join(our_client, "orders")
    assert isinstance(member, RemoteConsumer)
    eventually(lambda: member.lock_soon(queue), "the queue is locked")
    read_stored, seen = member.offsets.read_stored, list[object]()

    def read_late(queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | BrokerError | None]:
        if locked := list(queues):
            seen.append(member.lock_soon(queue))
            member.flush_offsets()
            seen.append(our_server.engine.groups.committed_offset("billing", queue))
        return read_stored(locked)

    monkeypatch.setattr(member.offsets, "read_stored", read_late)
    member.locks.lose(queue.broker_name)
    member.commit(queue, 1)
    our_server.engine.groups.commit_offset("billing", queue, 3)  # by another member, which had the lock
    assert not member.lock_soon(queue)
    eventually(lambda: member.lock_soon(queue), "the queue is locked again")

    assert seen[:2] == [False, 3]
    assert member.position(queue) == 3


def test_a_queue_that_is_locked_while_it_is_being_assigned_continues_after_the_last_commit(
    our_client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start offset was read before, and the previous member has committed since."""
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    member = join(our_client, "orders")
    assert isinstance(member, RemoteConsumer)
    add = member.pulls.add

    def add_late(queue: MessageQueue, queue_offset: int) -> None:
        our_client.groups.commit_offset("billing", queue, 3)
        member.lock_soon(queue)
        member.change_locks()
        add(queue, queue_offset)

    with monkeypatch.context() as patched:
        patched.setattr(PullLoop, "add", lambda _, *arguments: add_late(*arguments))
        assign_again(member, {queue})
    eventually(lambda: member.lock_soon(queue), "the queue is locked")

    assert member.position(queue) == 3


@pytest.mark.parametrize("target", [0, 2])
def test_a_seek_holds_for_a_queue_that_is_locked_later(
    our_server: LocalCluster, our_client: RemoteBroker, target: int
) -> None:
    """A listener that was just started waits for its locks, perhaps until the previous member has finished."""
    received: list[str] = []
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    our_client.groups.commit_offset("billing", queue, 3)
    our_server.broker.locks.lock("billing", "another member", [queue])
    with listening(our_client, received) as container:
        container.seek(queue, target)
        wait_for_fetch(container)
        during = our_client.groups.committed_offset("billing", queue)

        our_server.broker.locks.unlock("billing", "another member", [queue])
        eventually(lambda: "3" in received, "the queue is handled")

    assert during == 3
    assert received == ["0", "1", "2", "3"][target:]


def is_locked_by_other(cluster: LocalCluster, queue: MessageQueue) -> bool:
    return bool(cluster.broker.locks.lock("billing", "another member", [queue]))


def test_a_broker_that_does_not_answer_locks_delays_no_other_broker(tmp_path: Path) -> None:
    received: list[str] = []
    with ScriptedBroker("broker-a") as answering, ScriptedBroker("broker-b") as silent:
        answering.others = [silent]
        answering.topic("orders", queues=1)
        answering.topic("%RETRY%billing", queues=1)
        ScriptedGroups(answering)
        ScriptedGroups(silent)
        silent.script(RequestCode.LOCK_BATCH_MQ, lambda request: None)
        answering.script(RequestCode.PULL_MESSAGE, one_message)

        with (
            client(answering.address, tmp_path) as broker,
            capture_logs() as logs,
            listening(broker, received) as container,
        ):
            eventually(lambda: received, "the message of the broker that answers is handled")
            eventually(lambda: silent.count(RequestCode.LOCK_BATCH_MQ) > 1, "the other broker is asked again")
            wait_for_fetch(container)

    assert received == ["a"]
    assert [log["event"] for log in logs if log["event"].startswith("listener.poll")] == []


def one_message(request: RemotingCommand) -> RemotingCommand | None:
    """Respond to a pull of a queue with one message."""
    header = request.header(PullMessageRequestHeader)
    if header.topic == "orders" and header.queue_offset == 0:
        return pulled(request, message_ext(body=b"a"))
    return None if header.suspend_timeout_millis else pulled(request)


def test_a_queue_that_returns_while_its_messages_are_handled_repeats_none(our_client: RemoteBroker) -> None:
    """The assignment may change twice within a moment, while members join. The handler finishes the queue meanwhile."""
    received: list[str] = []
    gate = Event()
    our_client.create_topic("orders", 1)
    send_numbers(our_client, 4)
    with listening(our_client, received, gate=gate) as container:
        eventually(lambda: "1" in received, "the handler has the second message")
        member = container.member.consumer
        assign_again(member, set(member.assignment()))
        our_client._client.members.rebalance_topic("orders")
        gate.set()
        eventually(lambda: "3" in received, "all messages are handled")
        wait_for_fetch(container)

    assert received == ["0", "1", "2", "3"]


def test_a_lost_lock_stops_the_handling_of_fetched_messages_until_it_is_regained(tmp_path: Path) -> None:
    received: list[str] = []
    gate = Event()
    with (
        server() as cluster,
        client(cluster.address, tmp_path, lock_live_ms=300, lock_interval_ms=50) as broker,
    ):
        queue = one_queue(broker)
        send_numbers(broker, 4)
        locks = cluster.broker.locks
        with listening(broker, received, gate=gate) as container:
            eventually(lambda: "1" in received, "the handler has the second message")
            member = container.member.consumer
            locks.unlock("billing", member.context.instance.id, [queue])  # type: ignore[attr-defined]
            locks.lock("billing", "another member", [queue])
            eventually(lambda: queue in member.lost_locks(), "the lock is lost")
            wait_for_fetch(container)
            gate.set()
            for _ in range(2):
                wait_for_fetch(container)
            after_loss = list(received)
            cluster.engine.groups.commit_offset("billing", queue, 3)  # the other member has handled one message more
            locks.unlock("billing", "another member", [queue])
            eventually(lambda: "3" in received, "the last message is handled")

    assert after_loss == ["0", "1"]
    assert received == ["0", "1", "3"]


def test_fetched_messages_are_not_handled_after_a_lock_was_lost_and_regained(our_client: RemoteBroker) -> None:
    """A process that stood still for longer than its lock may have it back before its other threads look."""
    received: list[str] = []
    gate = Event()
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    with listening(our_client, received, gate=gate) as container:
        eventually(lambda: "1" in received, "the handler has the second message")
        member = container.member.consumer
        member.locks.lose(queue.broker_name)  # type: ignore[attr-defined]
        our_client.groups.commit_offset("billing", queue, 3)  # by another member, which had the lock meanwhile

        member.renew_locks()  # type: ignore[attr-defined]
        gate.set()
        eventually(lambda: "3" in received, "the last message is handled")

    assert received == ["0", "1", "3"]


def test_no_handler_begins_after_the_lock_is_lost_even_before_the_polling_thread_looks(
    our_client: RemoteBroker,
) -> None:
    received: list[str] = []
    gate, polling = Event(), Event()
    queue = one_queue(our_client)
    send_numbers(our_client, 4)
    with listening(our_client, received, gate=gate) as container:
        eventually(lambda: "1" in received, "the handler has the second message")
        member, service = container.member.consumer, container.member.service
        blocking = Thread(target=lambda: container.member.run_when_polling(polling.wait))
        blocking.start()
        member.locks.lose(queue.broker_name)  # type: ignore[attr-defined]

        gate.set()
        eventually(lambda: service.next_due() is not None, "the queue is suspended")
        before = list(received)
        polling.set()
        blocking.join()
        eventually(lambda: "3" in received, "the lock is regained")

    assert before == ["0", "1"]
    assert received[:2] + sorted(set(received[2:])) == ["0", "1", "2", "3"]


def test_the_lock_of_a_caller_excludes_other_processes_until_it_is_released(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as one, client(cluster.address, tmp_path) as other:
        queue = one_queue(one)
        lock = one.groups.lock_queue("billing", queue)
        assert lock is not None

        during = other.groups.lock_queue("billing", queue)
        lock.release()
        after = other.groups.lock_queue("billing", queue)

        assert during is None
        assert after is not None
        after.release()


def test_the_lock_of_a_caller_is_renewed_and_a_loss_is_not_forgotten(tmp_path: Path) -> None:
    """After a loss another process may have had the lock, and may have done what the caller is about to do."""
    with server() as cluster, client(cluster.address, tmp_path) as broker:
        queue, members = one_queue(broker), broker._client.members
        lock = broker.groups.lock_queue("billing", queue)
        assert lock is not None
        members.lock_renewals.step()
        assert lock.is_held

        members.lose_locks(queue.broker_name)
        members.lock_renewals.step()

        assert not lock.is_held
        lock.release()
        again = broker.groups.lock_queue("billing", queue)
        assert again is not None
        assert again.is_held
        again.release()


def test_the_locks_of_a_process_that_ends_are_free_at_once(tmp_path: Path) -> None:
    with server() as cluster, client(cluster.address, tmp_path) as other:
        with client(cluster.address, tmp_path) as ended:
            queue = one_queue(ended)
            assert ended.groups.lock_queue("billing", queue) is not None

        lock = eventually(lambda: other.groups.lock_queue("billing", queue), "the lock is free")

        lock.release()


def test_a_reset_by_an_administrator_discards_the_messages_that_were_fetched(our_client: RemoteBroker) -> None:
    """Otherwise the commit of one of them would be past messages that are to be handled again."""
    received: list[str] = []
    gate = Event()
    queue = one_queue(our_client)
    send_numbers(our_client, 3)
    with listening(our_client, received, ConsumeMode.CONCURRENTLY, gate) as container:
        eventually(lambda: "1" in received, "the handler has the second message")

        container.member.consumer.reset({queue: 0})  # type: ignore[attr-defined]
        wait_for_fetch(container)
        gate.set()
        eventually(lambda: len(received) >= 5, "all messages are handled again")
        wait_for_fetch(container)

    assert received == ["0", "1", "0", "1", "2"]


def test_messages_polled_after_a_reset_start_at_its_offset(our_client: RemoteBroker) -> None:
    queue = one_queue(our_client)
    send_numbers(our_client, 3)
    member = join(our_client, "orders")
    assert member.take_resets() == {}

    member.reset({queue: 2})  # type: ignore[attr-defined]
    unread, resets = member.poll(8), member.take_resets()
    member.seek(queue, resets[queue])

    assert (unread, resets) == ([], {queue: 2})
    assert bodies(member.poll(8)) == [b"2"]
