"""Queue locks of a group member, which handles the messages of a locked queue in order.

Source: RocketMQ ``client: RebalanceImpl.lock``, ``broker: RebalanceLockManager``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable
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

    A queue is *ready* when it is locked and its read position was set after that: the previous member may have
    committed until it unlocked the queue.

    Args:
        live_ms: 30 s in RocketMQ. A broker gives the lock to another member after 60 s.
    """

    requests: GroupRequests
    clock: Clock
    live_ms: int
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _renewed_ms: dict[MessageQueue, int] = field(default_factory=dict, init=False)
    _ready: set[MessageQueue] = field(default_factory=set, init=False)
    _requested: set[MessageQueue] = field(default_factory=set, init=False)
    _released: set[MessageQueue] = field(default_factory=set, init=False)

    # --- state ---------------------------------------------------------------------------------

    def holds(self, queue: MessageQueue) -> bool:
        """Return True if this member has locked the queue and not unlocked it; the lock may be lost."""
        return queue in self._renewed_ms

    def is_ready(self, queue: MessageQueue) -> bool:
        """Return True if the queue may be read."""
        return queue in self._ready and queue not in self.lost()

    def lost(self) -> frozenset[MessageQueue]:
        """Return the queues whose locks were not renewed in time: they must not be read."""
        if not self._renewed_ms:
            return frozenset()
        oldest_ms = self.clock.steady_ms() - self.live_ms
        with self._lock:
            return frozenset([queue for queue, at_ms in self._renewed_ms.items() if at_ms <= oldest_ms])

    def valid(self) -> frozenset[MessageQueue]:
        """Return the queues that are locked now."""
        with self._lock:
            held = frozenset(self._renewed_ms)
        return held - self.lost()

    def lose(self, broker_name: str) -> bool:
        """Count the locks at a broker as lost; return True if there are some."""
        with self._lock:
            lost = [queue for queue in self._renewed_ms if queue.broker_name == broker_name]
            self._renewed_ms |= dict.fromkeys(lost, _NEVER_MS)
            return bool(lost)

    # --- requests that are carried out in another thread ---------------------------------------

    def request(self, queue: MessageQueue) -> bool:
        """Have a queue locked by the next `take_requested`; return False if that was requested before."""
        with self._lock:
            is_new = queue not in self._requested
            self._requested.add(queue)
            return is_new

    def release(self, queue: MessageQueue) -> None:
        """Have a queue unlocked by the next `take_released`."""
        with self._lock:
            self._ready.discard(queue)
            self._released.add(queue)

    def take_requested(self, assignment: Collection[MessageQueue]) -> list[MessageQueue]:
        """Return the queues that are requested; forget those that are not assigned."""
        with self._lock:
            self._requested.intersection_update(assignment)
            return sorted(self._requested)

    def take_released(self) -> list[MessageQueue]:
        """Return the queues to be unlocked, and forget them."""
        with self._lock:
            released, self._released = sorted(self._released), set()
            return released

    # --- requests ------------------------------------------------------------------------------

    def lock(self, queue: MessageQueue) -> bool:
        """Lock a queue; return False while another member has the lock.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """
        [(_, locked)] = self._lock_all([queue]).items()
        if isinstance(locked, BrokerError):
            raise locked
        return queue in locked

    def acquire(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues; return those that are locked now. A broker that fails delays no other one, and is logged."""
        acquired: set[MessageQueue] = set()
        for broker_name, locked in self._lock_all(queues).items():
            if isinstance(locked, BrokerError):
                log_failure(_log, "remote.lock_failed", locked, group=self.requests.group, broker=broker_name)
            else:
                acquired |= locked
        return acquired

    def _lock_all(self, queues: Iterable[MessageQueue]) -> dict[str, set[MessageQueue] | BrokerError]:
        """Send lock requests to all brokers at once; return the locked queues, or the error, of each."""
        by_broker, requested_ms = _by_broker(queues), self.clock.steady_ms()
        results = self.requests.lock(by_broker)
        with self._lock:
            for broker_name, locked in results.items():
                if isinstance(locked, BrokerError):
                    continue
                for queue in by_broker[broker_name]:
                    if queue in locked:
                        self._renewed_ms[queue] = requested_ms
                    elif queue in self._renewed_ms:
                        self._renewed_ms[queue] = _NEVER_MS
        return results

    def set_ready(self, queue: MessageQueue) -> None:
        """Declare that the read position of a locked queue was set."""
        with self._lock:
            self._requested.discard(queue)
            if queue in self._renewed_ms:
                self._ready.add(queue)

    def renew(self, assignment: Collection[MessageQueue]) -> tuple[set[MessageQueue], bool]:
        """Renew the locks. A lost lock is renewed for an assigned queue, and else forgotten.

        Returns:
            The queues whose lost locks were regained, and True if each broker has answered.
        """
        lost = self.lost()
        with self._lock:
            for queue in lost.difference(assignment):
                self._renewed_ms.pop(queue, None)
                self._ready.discard(queue)
            held = frozenset(self._renewed_ms)
        locked = self.acquire(held)
        regained = locked & lost
        with self._lock:
            self._ready -= regained
        return regained, held <= locked

    def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock those of *queues* that are locked. At a broker that cannot be reached the locks expire."""
        with self._lock:
            held = [queue for queue in queues if self._renewed_ms.pop(queue, None) is not None]
            self._ready.difference_update(held)
        if held:
            self.requests.unlock(_by_broker(held))

    def close(self) -> None:
        """Unlock all queues."""
        self.unlock(list(self._renewed_ms))


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    by_broker: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in queues:
        by_broker[queue.broker_name].append(queue)
    return by_broker
