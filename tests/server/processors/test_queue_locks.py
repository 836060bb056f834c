"""Locks of queues: each has one owner, which must renew it."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody, LockBatchResponseBody
from tests.server.serving import RecordingConnection, Serving

QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(3)]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def locks(clock: VirtualClock) -> QueueLockTable:
    return QueueLockTable(clock, 60_000)


def test_a_queue_has_one_owner_in_a_group(locks: QueueLockTable) -> None:
    assert locks.lock("billing", "a", QUEUES[:2]) == QUEUES[:2]

    assert locks.lock("billing", "b", QUEUES) == QUEUES[2:]
    assert locks.lock("other", "b", QUEUES) == QUEUES


def test_a_lock_expires_a_minute_after_it_was_last_renewed(locks: QueueLockTable, clock: VirtualClock) -> None:
    locks.lock("billing", "a", QUEUES[:1])
    clock.move_ms(40_000)
    locks.lock("billing", "a", QUEUES[:1])

    clock.move_ms(59_999)
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    clock.move_ms(1)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


@pytest.mark.parametrize("step_ms", [3_600_000, 10 * 365 * 86_400_000])
def test_a_lock_expires_in_time_whatever_the_clock_does(
    locks: QueueLockTable, clock: VirtualClock, step_ms: int
) -> None:
    """A lock taken while the clock was ahead must not keep an ORDERLY queue from all others for years."""
    clock.move_ms(step_ms)
    locks.lock("billing", "a", QUEUES[:1])
    clock.move_ms(-step_ms)

    clock.move_ms(59_999)
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    clock.move_ms(1)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


def test_only_the_owner_releases_a_lock(locks: QueueLockTable) -> None:
    locks.lock("billing", "a", QUEUES[:1])

    locks.unlock("billing", "b", QUEUES[:1])
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    locks.unlock("billing", "a", QUEUES)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


def test_a_group_is_ordered_while_it_has_a_lock(locks: QueueLockTable, clock: VirtualClock) -> None:
    assert not locks.is_ordered("billing")
    locks.lock("billing", "a", QUEUES)
    assert locks.is_ordered("billing")

    clock.move_ms(60_000)

    assert not locks.is_ordered("billing")
    assert locks._groups == {}  # An expired group uses no memory.


def test_clients_lock_and_unlock_queues_by_requests() -> None:
    """The response has the queues exactly as the request: clients compare them."""
    foreign = MessageQueue("orders", "name-that-the-client-uses", 0)
    with Serving() as serving:
        body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=[foreign, QUEUES[1]]).encode()
        other = LockBatchRequestBody(consumer_group="billing", client_id="b", mq_set=[foreign]).encode()

        locked = serving.request(RequestCode.LOCK_BATCH_MQ, None, body)
        refused = serving.request(RequestCode.LOCK_BATCH_MQ, None, other)
        unlocked = serving.request(RequestCode.UNLOCK_BATCH_MQ, None, body)
        taken = serving.request(RequestCode.LOCK_BATCH_MQ, None, other)

    assert LockBatchResponseBody.decode(locked.body).lock_ok_mq_set == [foreign, QUEUES[1]]
    assert LockBatchResponseBody.decode(refused.body).lock_ok_mq_set == []
    assert (unlocked.code, unlocked.body) == (ResponseCode.SUCCESS, b"")
    assert LockBatchResponseBody.decode(taken.body).lock_ok_mq_set == [foreign]


def test_the_locks_of_a_client_end_with_its_connection() -> None:
    """So the queues of a killed member are handled by the others at once."""
    body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=QUEUES).encode()
    connection = RecordingConnection()
    with Serving() as serving:
        locks = serving.server.locks
        serving.request(RequestCode.LOCK_BATCH_MQ, None, body, over=connection)
        before = locks.lock("billing", "b", QUEUES)

        locks.forget(connection.id)

        assert (before, locks.lock("billing", "b", QUEUES)) == ([], QUEUES)


def test_a_client_that_has_locked_its_queues_over_another_connection_keeps_them() -> None:
    """The server may notice the end of the older connection late."""
    body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=QUEUES).encode()
    older, newer = RecordingConnection(), RecordingConnection()
    with Serving() as serving:
        locks = serving.server.locks
        for connection in (older, newer):
            serving.request(RequestCode.LOCK_BATCH_MQ, None, body, over=connection)

        locks.forget(older.id)

        assert locks.lock("billing", "b", QUEUES) == []


def test_a_connection_that_closed_while_its_request_was_processed_keeps_no_lock() -> None:
    body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=QUEUES).encode()
    connection = RecordingConnection()
    connection.close("gone")
    with Serving() as serving:
        serving.request(RequestCode.LOCK_BATCH_MQ, None, body, over=connection)

        assert serving.server.locks.lock("billing", "b", QUEUES) == QUEUES
        assert serving.server.locks._of_connection == {}
