"""Queue locks of a group member, which handles the messages of a locked queue in order.

Source: RocketMQ ``client: RebalanceImpl.lock``, ``broker: RebalanceLockManager``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from mqtemplate.brokers.remote.consuming.group_requests import GroupRequests
from mqtemplate.brokers.remote.outages import log_failure
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue

_log = get_logger("mqtemplate.remote")

_NEVER_MS = 0


@dataclass(slots=True, eq=False)
class QueueLocks:
    """The locks of one member. A lock that was not renewed for *live_ms* counts as lost.

    Args:
        live_ms: 30 s in RocketMQ. A broker gives the lock to another member after 60 s.
    """

    requests: GroupRequests
    clock: Clock
    live_ms: int
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _renewed_ms: dict[MessageQueue, int] = field(default_factory=dict, init=False)

    def lock(self, queue: MessageQueue) -> bool:
        """Lock a queue; return False while another member has the lock.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """
        requested_ms = self.clock.now_ms()
        is_locked = queue in self.requests.lock(queue.broker_name, [queue])
        if is_locked:
            with self._lock:
                self._renewed_ms[queue] = requested_ms
        return is_locked

    def unlock(self, queue: MessageQueue) -> None:
        """Unlock a queue, if it is locked. At a broker that cannot be reached the lock expires."""
        with self._lock:
            if self._renewed_ms.pop(queue, None) is None:
                return
        self.requests.unlock(queue.broker_name, [queue])

    def holds(self, queue: MessageQueue) -> bool:
        """Return True if this member has locked the queue and not unlocked it; the lock may be lost."""
        return queue in self._renewed_ms

    def lost(self) -> frozenset[MessageQueue]:
        """Return the queues whose locks were not renewed in time: they must not be read."""
        if not self._renewed_ms:
            return frozenset()
        oldest_ms = self.clock.now_ms() - self.live_ms
        with self._lock:
            return frozenset([queue for queue, at_ms in self._renewed_ms.items() if at_ms <= oldest_ms])

    def renew(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Renew the locks of *queues*, where they are locked; return the queues whose lost locks were regained."""
        held = _by_broker(queue for queue in queues if queue in self._renewed_ms)
        regained: list[MessageQueue] = []
        for broker_name, mine in held.items():
            requested_ms, lost = self.clock.now_ms(), self.lost()
            try:
                locked = self.requests.lock(broker_name, mine)
            except BrokerError as exc:
                log_failure(_log, "remote.lock_renewal_failed", exc, group=self.requests.group, broker=broker_name)
                continue
            with self._lock:
                for queue in mine:
                    if queue in self._renewed_ms:
                        self._renewed_ms[queue] = requested_ms if queue in locked else _NEVER_MS
            regained += [queue for queue in mine if queue in locked and queue in lost]
        return regained

    def close(self) -> None:
        """Unlock all queues."""
        with self._lock:
            held = _by_broker(self._renewed_ms)
            self._renewed_ms = {}
        for broker_name, queues in held.items():
            self.requests.unlock(broker_name, queues)


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    by_broker: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        by_broker[queue.broker_name].append(queue)
    return by_broker
