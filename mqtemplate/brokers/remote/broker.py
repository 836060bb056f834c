"""A RocketMQ cluster as a broker of the port: the same application, on other machines' brokers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import structlog

from mqtemplate.broker import Broker, Capability, CheckTransaction, Consumer, ConsumerSpec, Registration
from mqtemplate.brokers.remote.cluster_client import ClusterClient
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.errors import BrokerClosedError, BrokerError, UnsupportedError
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.results import HalfMessage, PullResult, SendResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service, ServiceThread

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_LOOK_ELSEWHERE = "look at the broker with its own tools (mqadmin), or use the embedded broker or our server"


class RemoteBroker(Broker):
    """A client of a cluster, with the port in front.

    - It has an identity and connections of its own; several of them in one process share nothing.
    - What this object has sent, its own reads see.
    - Made and started in a process, it works in that process only: after a fork, make another one.
    - `capabilities` is what the cluster's brokers can do, as their versions tell; it is known after `start`.

    Args:
        settings: Where the cluster is.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.name = "cluster"
        self.capabilities = frozenset[Capability]()
        self._life = threading.Lock()
        self._link: ClusterClient | None = None
        self._threads: list[ServiceThread] = []

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Find the brokers.

        Raises:
            RemoteConnectError: No name server answers.
        """
        with self._life:
            if self._link is not None:
                return
            link = ClusterClient(self.settings, self.clock)
            try:
                link.open()
            except BaseException:
                link.close()
                raise
            self.name, self.capabilities, self._link = link.name, link.capabilities(), link
            if not self.clock.is_virtual:
                self._threads = [
                    ServiceThread(f"mqtemplate-{name}", services, self.clock, _report)
                    for name, services in link.service_groups().items()
                ]
                for thread in self._threads:
                    thread.start()
        _log.info("broker.started", broker=self.name, name_servers=list(self.settings.name_servers))

    def close(self) -> None:
        with self._life:
            link, self._link = self._link, None
            threads, self._threads = self._threads, []
            if link is None:
                return
            link.leave()
            for thread in threads:
                thread.stop()
            link.close()
        _log.info("broker.stopped", broker=self.name)

    def services(self) -> Sequence[Service]:
        link = self._link
        return [] if link is None else [service for group in link.service_groups().values() for service in group]

    def _open_link(self) -> ClusterClient:
        if self._link is None:
            raise BrokerClosedError(
                f"broker {self.name!r} is not running; call start() first, or use it in a with block"
            )
        return self._link

    # --- sending -------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return self._open_link().topics.queues(topic)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        """Make a topic with so many queues on each broker, or give it more."""
        self._open_link().topics.create(topic, queue_count)

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        return self._open_link().sender.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        return self._open_link().sender.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[SendResult]:
        return self._open_link().sender.send_async(messages, queue, timeout_ms)

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self._open_link().sender.send_one_way(message, queue)

    # --- transactions and requests -------------------------------------------------------------

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        return self._open_link().transactions.send_half(message, group, queue, timeout_ms)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        self._open_link().transactions.end(half, state, remark)

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        return self._open_link().transactions.check(group, check, threads, max_waiting)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        return self._open_link().requests.request(message, queue, timeout_ms)

    def reply(
        self,
        request: MessageExt,
        body: bytes,
        properties: Mapping[str, str] | None = None,
        timeout_ms: int = 3_000,
    ) -> None:
        self._open_link().requests.reply(request, body, properties, timeout_ms)

    # --- reading -------------------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        return self._open_link().queries.pull(queue, queue_offset, max_count, wait_ms, selector)

    def min_offset(self, queue: MessageQueue) -> int:
        return self._open_link().queries.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        return self._open_link().queries.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        return self._open_link().queries.search_offset(queue, timestamp)

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        return self._open_link().join(spec)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        return self._open_link().committed_offset(group, queue)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self._open_link().commit_offset(group, queue, queue_offset)

    # --- what waits ----------------------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        """Call a message with a timer back, by its handle.

        A RocketMQ broker takes the wish without looking: ``CANCELLED`` says that the message will not be delivered if
        it still waits, not that it does.
        """
        return self._open_link().recall.cancel(handle, key)

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        raise UnsupportedError(
            "a RocketMQ cluster cannot move a message that waits; cancel it by its handle and send it again, or use "
            "the embedded broker or our server"
        )

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        raise UnsupportedError(f"a RocketMQ cluster does not show what waits; {_LOOK_ELSEWHERE}")

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        raise UnsupportedError(f"a RocketMQ cluster does not count what waits; {_LOOK_ELSEWHERE}")

    # --- finding -------------------------------------------------------------------------------

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        return self._open_link().queries.by_id(offset_msg_id)

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        return self._open_link().queries.by_key(topic, key, max_count, begin_ms, end_ms, unique=unique)


def _report(service: Service, error: Exception) -> None:
    """A step failed; it is tried again soon."""
    if isinstance(error, BrokerError):
        _log.warning("remote.service_failed", service=service.name, reason=str(error))
    else:
        _log.error("remote.service_failed", service=service.name, exc_info=error)
