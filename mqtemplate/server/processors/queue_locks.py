"""Codes 41 and 42: an ordered consumer locks and unlocks queues.

Source: RocketMQ ``broker: RebalanceLockManager``, ``AdminBrokerProcessor``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mqtemplate.clock import Clock
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody, LockBatchResponseBody
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.server.registration import answers

_Locks = dict[MessageQueue, tuple[str, int]]
"""Queue -> client ID of the owner, and when (ms) the owner locked the queue or renewed the lock."""


class QueueLocks:
    """Locks by group and queue, and the processors of lock requests.

    - A client renews its locks regularly. A lock that is not renewed expires.
    - The end of a client's connection releases its locks, so that the queues of a killed member stand for no minute as
      with RocketMQ. A client that reconnects has to lock its queues again before it goes on.
    - Locks are not stored. After a restart of the broker most of them would have expired.

    Args:
        max_live_ms: Time to live of a lock. RocketMQ: ``rocketmq.broker.rebalance.lockMaxLiveTime``.
    """

    def __init__(self, clock: Clock, max_live_ms: int = 60_000) -> None:
        self._clock = clock
        self._max_live_ms = max_live_ms
        self._mutex = threading.Lock()
        self._groups: dict[str, _Locks] = {}
        self._connections: dict[tuple[str, str], int] = {}  # (group, client ID) -> ID of the connection used last

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock *queues* for a client, and return those that it holds now, in the given order."""
        with self._live_locks(group) as locks:
            owned = [queue for queue in queues if queue not in locks or locks[queue][0] == client_id]
            locks.update(dict.fromkeys(owned, (client_id, self._clock.now_ms())))
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the locks of *queues* that the client holds."""
        with self._live_locks(group) as locks:
            for queue in queues:
                if queue in locks and locks[queue][0] == client_id:
                    del locks[queue]

    def forget(self, connection: Connection) -> None:
        """Release the locks of the clients that used a closed connection, unless they use another one now."""
        with self._mutex:
            ended = [client for client, used in self._connections.items() if used == connection.id]
            for client in ended:
                del self._connections[client]
        for group, client_id in ended:
            with self._live_locks(group) as locks:
                for queue in [queue for queue, (owner, _) in locks.items() if owner == client_id]:
                    del locks[queue]

    def is_ordered(self, group: str) -> bool:
        """Return True if a client holds a queue of *group*: its members consume in order."""
        with self._live_locks(group) as locks:
            return bool(locks)

    @contextmanager
    def _live_locks(self, group: str) -> Iterator[_Locks]:
        """Yield the locks of a group that have not expired. The caller may change them."""
        with self._mutex:
            limit = self._clock.now_ms() - self._max_live_ms
            locks = {queue: lock for queue, lock in self._groups.pop(group, {}).items() if lock[1] > limit}
            yield locks
            if locks:
                self._groups[group] = locks

    # --- requests ------------------------------------------------------------------------------

    @answers(RequestCode.LOCK_BATCH_MQ)
    def _process_lock(self, body: LockBatchRequestBody, connection: Connection) -> LockBatchResponseBody:
        locked = self.lock(body.consumer_group, body.client_id, body.mq_set)
        if locked:
            with self._mutex:
                self._connections[body.consumer_group, body.client_id] = connection.id
            if not connection.is_open:  # it was closed before it was noted: `forget` came too early
                self.forget(connection)
        return LockBatchResponseBody(lock_ok_mq_set=locked)

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def _process_unlock(self, body: LockBatchRequestBody) -> None:
        self.unlock(body.consumer_group, body.client_id, body.mq_set)
