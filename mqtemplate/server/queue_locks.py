"""Which client of an ordered group has which queue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.message import MessageQueue


class _Lock(NamedTuple):
    client_id: str
    taken_ms: int


class QueueLocks:
    """Locks of queues by group. The owner takes its locks again and again; one that it does not take any more ends.

    - A lost connection ends no lock: its client may be back before another one may read the queue.
    - They are not kept over a restart; by then most would have ended.

    Args:
        max_live_ms: How long a lock lives after it was taken. Source: ``rocketmq.broker.rebalance.lockMaxLiveTime``.
    """

    def __init__(self, clock: Clock, max_live_ms: int = 60_000) -> None:
        self._clock = clock
        self._max_live_ms = max_live_ms
        self._mutex = threading.Lock()
        self._groups: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Take the locks of *queues* for a client; gives those that it has now, in the order asked."""
        now_ms = self._clock.now_ms()
        owned = []
        with self._mutex:
            locks = self._living(group, now_ms)
            for queue in queues:
                found = locks.get(queue)
                if found is None or found.client_id == client_id:
                    locks[queue] = _Lock(client_id, now_ms)
                    owned.append(queue)
            if locks:
                self._groups[group] = locks
        return owned

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give locks back; those of others stay as they are."""
        with self._mutex:
            locks = self._living(group, self._clock.now_ms())
            for queue in queues:
                found = locks.get(queue)
                if found is not None and found.client_id == client_id:
                    del locks[queue]
            if locks:
                self._groups[group] = locks

    def is_ordered(self, group: str) -> bool:
        """Whether somebody has a queue of *group*: then its members read in order."""
        with self._mutex:
            locks = self._living(group, self._clock.now_ms())
            if locks:
                self._groups[group] = locks
            return bool(locks)

    def _living(self, group: str, now_ms: int) -> dict[MessageQueue, _Lock]:
        """Take a group's locks out of the table, without those that ended."""
        limit = now_ms - self._max_live_ms
        return {queue: lock for queue, lock in self._groups.pop(group, {}).items() if lock.taken_ms > limit}
