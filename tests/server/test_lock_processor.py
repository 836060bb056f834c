"""Locks of queues: one owner each, who has to come again."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody, LockBatchResponseBody
from mqtemplate.server.queue_locks import QueueLocks
from tests.server.serving import Serving

QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(3)]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def locks(clock: VirtualClock) -> QueueLocks:
    return QueueLocks(clock, 60_000)


def test_a_queue_has_one_owner_in_a_group(locks: QueueLocks) -> None:
    assert locks.lock("billing", "a", QUEUES[:2]) == QUEUES[:2]

    assert locks.lock("billing", "b", QUEUES) == QUEUES[2:]
    assert locks.lock("other", "b", QUEUES) == QUEUES


def test_a_lock_ends_a_minute_after_it_was_last_taken(locks: QueueLocks, clock: VirtualClock) -> None:
    locks.lock("billing", "a", QUEUES[:1])
    clock.move_ms(40_000)
    locks.lock("billing", "a", QUEUES[:1])

    clock.move_ms(59_999)
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    clock.move_ms(1)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


def test_only_the_owner_gives_a_lock_back(locks: QueueLocks) -> None:
    locks.lock("billing", "a", QUEUES[:1])

    locks.unlock("billing", "b", QUEUES[:1])
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    locks.unlock("billing", "a", QUEUES)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


def test_a_group_reads_in_order_while_it_has_a_lock(locks: QueueLocks, clock: VirtualClock) -> None:
    assert not locks.is_ordered("billing")
    locks.lock("billing", "a", QUEUES)
    assert locks.is_ordered("billing")

    clock.move_ms(60_000)

    assert not locks.is_ordered("billing")
    assert locks._groups == {}  # and costs nothing any more


def test_clients_lock_and_unlock_over_the_wire() -> None:
    """The queues come back word for word: clients compare them (trap 32)."""
    foreign = MessageQueue("orders", "as-the-client-calls-it", 0)
    with Serving() as serving:
        body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=[foreign, QUEUES[1]]).encode()
        theirs = LockBatchRequestBody(consumer_group="billing", client_id="b", mq_set=[foreign]).encode()

        locked = serving.ask(RequestCode.LOCK_BATCH_MQ, None, body)
        refused = serving.ask(RequestCode.LOCK_BATCH_MQ, None, theirs)
        unlocked = serving.ask(RequestCode.UNLOCK_BATCH_MQ, None, body)
        taken = serving.ask(RequestCode.LOCK_BATCH_MQ, None, theirs)

    assert LockBatchResponseBody.decode(locked.body).lock_ok_mq_set == [foreign, QUEUES[1]]
    assert LockBatchResponseBody.decode(refused.body).lock_ok_mq_set == []
    assert (unlocked.code, unlocked.body) == (ResponseCode.SUCCESS, b"")
    assert LockBatchResponseBody.decode(taken.body).lock_ok_mq_set == [foreign]
