"""Locks on queues, kept by brokers for members that handle messages in order.

Source: RocketMQ ``client: RebalanceImpl.lock``, ``broker: RebalanceLockManager``; section 12.4 of the specification.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

import structlog

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import LockBatchRequestBody, LockBatchResponseBody

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_TIMEOUT_MS = 1_000
_LOST_MS = 0


class QueueLocks:
    """The locks of one member. One that was not renewed for *live_ms* is lost here, before the broker gives it away.

    Args:
        live_ms: RocketMQ: 30 s here, 60 s at the broker.
    """

    def __init__(
        self,
        instance: ClientInstance,
        routes: RouteTable,
        namespace: Namespace,
        group: str,
        clock: Clock,
        live_ms: int,
    ) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._group = group
        self._clock = clock
        self._live_ms = live_ms
        self._lock = threading.Lock()
        self._renewed_ms: dict[MessageQueue, int] = {}

    def lock(self, queue: MessageQueue) -> bool:
        """Ask for one; False while another member has it.

        Raises:
            BrokerError: The broker does not say.
        """
        asked_ms = self._clock.now_ms()
        given = queue in self._ask(queue.broker_name, [queue])
        with self._lock:
            if given:
                self._renewed_ms[queue] = asked_ms
        return given

    def unlock(self, queue: MessageQueue) -> None:
        """Give one back; harmless if it is not held. A broker that does not hear of it lets it expire."""
        with self._lock:
            if self._renewed_ms.pop(queue, None) is None:
                return
        self._release(queue.broker_name, [queue])

    def holds(self, queue: MessageQueue) -> bool:
        """Whether it was asked for and given, and not given back; it may be lost meanwhile."""
        return queue in self._renewed_ms

    def lost(self) -> frozenset[MessageQueue]:
        """Those that were not renewed in time: their queues must not be read on."""
        if not self._renewed_ms:
            return frozenset()
        oldest_ms = self._clock.now_ms() - self._live_ms
        with self._lock:
            return frozenset([queue for queue, at_ms in self._renewed_ms.items() if at_ms <= oldest_ms])

    def renew(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Ask again for those of *queues* that are held; gives those that were lost and are held again."""
        held = self._by_broker(queue for queue in queues if queue in self._renewed_ms)
        regained: list[MessageQueue] = []
        for broker_name, mine in held.items():
            asked_ms, lost = self._clock.now_ms(), self.lost()
            try:
                given = self._ask(broker_name, mine)
            except BrokerError as exc:
                _log.warning("remote.lock_not_renewed", group=self._group, broker=broker_name, reason=str(exc))
                continue
            with self._lock:
                for queue in mine:
                    if queue in self._renewed_ms:
                        self._renewed_ms[queue] = asked_ms if queue in given else _LOST_MS
            regained += [queue for queue in mine if queue in given and queue in lost]
        return regained

    def close(self) -> None:
        """Give all back."""
        with self._lock:
            held = self._by_broker(self._renewed_ms)
            self._renewed_ms = {}
        for broker_name, queues in held.items():
            self._release(broker_name, queues)

    @staticmethod
    def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        by_broker: dict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker_name].append(queue)
        return by_broker

    def _ask(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        address = self._routes.address(broker_name)
        request = RemotingCommand.request(RequestCode.LOCK_BATCH_MQ, body=self._body(queues))
        answer = self._instance.invoke(address, request, _TIMEOUT_MS)
        asked = f"lock {len(queues)} queues of group {self._group!r}"
        locked = LockBatchResponseBody.decode(check_answer(answer, asked, address).body)
        return {self._namespace.unwrap_queue(queue) for queue in locked.lock_ok_mq_set}

    def _release(self, broker_name: str, queues: list[MessageQueue]) -> None:
        try:
            address = self._routes.address(broker_name)
            request = RemotingCommand.request(RequestCode.UNLOCK_BATCH_MQ, body=self._body(queues))
            answer = self._instance.invoke(address, request, _TIMEOUT_MS)
            reason = None if answer.code == ResponseCode.SUCCESS else str(answer)
        except BrokerError as exc:
            reason = str(exc)
        if reason is not None:
            _log.info("remote.unlock_failed", group=self._group, broker=broker_name, reason=reason)

    def _body(self, queues: list[MessageQueue]) -> bytes:
        return LockBatchRequestBody(
            consumer_group=self._namespace.wrap(self._group),
            client_id=self._instance.id,
            mq_set=[self._namespace.wrap_queue(queue) for queue in queues],
        ).encode()
