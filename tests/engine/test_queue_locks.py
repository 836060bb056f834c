"""Locks of queues: each has one owner, which must renew it."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.clients import Owner
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Counter
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.limits import Quota, QuotaLimits
from tests.server.serving import RecordingConnection, Serving

QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(3)]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def locks(clock: VirtualClock) -> QueueLockTable:
    return QueueLockTable(clock, 60_000)


@pytest.mark.parametrize("step_ms", [0, 3_600_000, 10 * 365 * 86_400_000])
def test_a_lock_expires_a_minute_after_it_was_last_renewed_whatever_the_clock_does(
    locks: QueueLockTable, clock: VirtualClock, step_ms: int
) -> None:
    """A lock taken while the clock was ahead must not keep an ORDERLY queue from all others for years."""
    clock.move_ms(step_ms)
    for _ in range(2):
        locks.lock("billing", "a", QUEUES[:1])
        clock.move_ms(40_000)
    clock.move_ms(-step_ms)

    clock.move_ms(19_999)
    assert locks.lock("billing", "b", QUEUES[:1]) == []
    clock.move_ms(1)
    assert locks.lock("billing", "b", QUEUES[:1]) == QUEUES[:1]


def test_a_group_is_ordered_while_it_has_a_lock(locks: QueueLockTable, clock: VirtualClock) -> None:
    assert not locks.is_ordered("billing")
    locks.lock("billing", "a", QUEUES)
    assert locks.is_ordered("billing")

    clock.move_ms(60_000)

    assert not locks.is_ordered("billing")
    assert locks._groups == {}  # An expired group uses no memory.


def test_a_connection_that_closed_while_its_request_was_processed_keeps_no_lock() -> None:
    body = LockBatchRequestBody(consumer_group="billing", client_id="a", mq_set=QUEUES).encode()
    connection = RecordingConnection()
    connection.close("gone")
    with Serving() as serving:
        serving.request(RequestCode.LOCK_BATCH_MQ, None, body, over=connection)

        assert serving.server.locks.lock("billing", "b", QUEUES) == QUEUES
        assert connection.id not in serving.server.locks._of_connection


def test_a_client_that_reconnects_and_is_refused_counts_no_lock_that_it_does_not_have(clock: VirtualClock) -> None:
    """It renews a lock of its earlier connection, and requests new ones: together they are too many."""
    quota = Quota("locks", "max-queue-locks", QuotaLimits(total=9, per_connection=2, per_address=9), Counter())
    locks = QueueLockTable(clock, quota=quota)
    before, after = Owner(1, "10.0.0.1"), Owner(2, "10.0.0.1")
    locks.lock("billing", "a", QUEUES[:1], before)

    with pytest.raises(RefusedError, match="this connection may have 2 locks"):
        locks.lock("billing", "a", QUEUES, after)

    assert len(quota) == 1
    assert locks.lock("billing", "a", [*QUEUES[:2], QUEUES[0]], after) == [*QUEUES[:2], QUEUES[0]]
    assert len(quota) == 2
    for owner in (before, after):
        locks.forget(owner.connection)
    assert len(quota) == 0
