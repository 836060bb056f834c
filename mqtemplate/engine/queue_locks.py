"""Locks of queues, for consumers that are remote clients and consume in order.

Source: RocketMQ ``broker: RebalanceLockManager``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from mqtemplate.clock import Clock
from mqtemplate.engine.clients import UNLIMITED, HeldQuota, Owner
from mqtemplate.message import MessageQueue


@dataclass(slots=True)
class _QueueLock:
    """The lock of one queue.

    Attributes:
        locked_ms: When the owner locked the queue or renewed the lock.
        holder: The client for the quota.
    """

    client_id: str
    locked_ms: int
    holder: Owner


_UNCOUNTED = Owner(-1, "")

_Locks = dict[MessageQueue, _QueueLock]


class QueueLockTable:
    """Locks by group and queue.

    - A client renews its locks regularly. A lock that is not renewed expires.
    - The end of a client's connection releases its locks. A client that reconnects has to lock its queues again.
    - Locks are not stored. After a restart of the broker most of them would have expired.

    Args:
        max_live_ms: Time to live of a lock. RocketMQ: ``rocketmq.broker.rebalance.lockMaxLiveTime``.
        quota: Limits the locks of each client.
    """

    def __init__(self, clock: Clock, max_live_ms: int = 60_000, quota: HeldQuota = UNLIMITED) -> None:
        self._clock = clock
        self._max_live_ms = max_live_ms
        self._quota = quota
        self._mutex = threading.Lock()
        self._groups: dict[str, _Locks] = {}
        self._of_connection: dict[int, set[tuple[str, MessageQueue]]] = {}

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], holder: Owner = _UNCOUNTED
    ) -> list[MessageQueue]:
        """Lock *queues* for a client, and return those that it holds now, in the given order.

        Raises:
            Exception: The quota refuses it: the client would have too many locks.
        """
        with self._mutex:
            now_ms = self._clock.steady_ms()
            locks = self._live_locks(group, now_ms)
            owned = [queue for queue in queues if queue not in locks or locks[queue].client_id == client_id]
            # All at once: if the quota refuses, nothing has changed, and nothing is counted.
            counted = {queue for queue in owned if queue not in locks or locks[queue].holder != holder}
            if counted:
                self._quota.take(holder, len(counted))
            for queue in dict.fromkeys(owned):
                if queue in locks and queue in counted:
                    self._drop(group, queue)  # the client had another connection, for which it was counted
                self._set(group, queue, _QueueLock(client_id, now_ms, holder))
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the locks of *queues* that the client holds."""
        with self._mutex:
            locks = self._live_locks(group, self._clock.steady_ms())
            for queue in queues:
                if queue in locks and locks[queue].client_id == client_id:
                    self._drop(group, queue)

    def is_ordered(self, group: str) -> bool:
        """Return True if a client holds a queue of *group*: its members consume in order."""
        with self._mutex:
            return bool(self._live_locks(group, self._clock.steady_ms()))

    def forget(self, connection: int, most: int = 1 << 62) -> bool:
        """Release *most* locks of a closed connection. Return True if it has more."""
        with self._mutex:
            for group, queue in list(self._of_connection.get(connection, ()))[:most]:
                self._drop(group, queue)
            return connection in self._of_connection

    def sweep(self) -> None:
        """Forget the expired locks of all groups. Called from time to time."""
        now_ms = self._clock.steady_ms()
        for group in list(self._groups):
            with self._mutex:
                self._live_locks(group, now_ms)

    # --- with the mutex held -------------------------------------------------------------------

    def _live_locks(self, group: str, now_ms: int) -> _Locks:
        """Return the locks of a group, after the expired ones were dropped."""
        limit = now_ms - self._max_live_ms
        locks = self._groups.get(group, {})
        for queue in [queue for queue, lock in locks.items() if lock.locked_ms <= limit]:
            self._drop(group, queue)
        return locks

    def _set(self, group: str, queue: MessageQueue, lock: _QueueLock) -> None:
        self._groups.setdefault(group, {})[queue] = lock
        self._of_connection.setdefault(lock.holder.connection, set()).add((group, queue))

    def _drop(self, group: str, queue: MessageQueue) -> None:
        locks = self._groups[group]
        holder = locks.pop(queue).holder
        if not locks:
            del self._groups[group]
        held = self._of_connection[holder.connection]
        held.discard((group, queue))
        if not held:
            del self._of_connection[holder.connection]
        self._quota.give(holder)
