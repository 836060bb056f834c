"""Broker interface over a RocketMQ cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

from mqtemplate.broker import Broker, Capability, CheckTransaction, Consumer, ConsumerSpec, Registration
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.outages import log_failure
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID, RouteTable
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.brokers.remote.cluster_client import ClusterClient
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.engine.retries import FIRST_RETRY_LEVEL, SentBack
from mqtemplate.errors import BrokerClosedError, BrokerError, ConfigurationError, MessageError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue, SendSequence
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.processes import OwnerProcess
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.admin import CreateTopicRequestHeader
from mqtemplate.remoting.protocol.messages import EncodedBatch
from mqtemplate.results import HalfMessage, PullResult, SendResult, SequencedResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service, ServiceThread
from mqtemplate.topics import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, check_send_topic, is_application_topic, is_reply_topic

_log = get_logger("mqtemplate.remote")

_LEVELS_MS: Sequence[int] = DelayLevels.parse().delays_ms


class RemoteBroker(Broker):
    """A client of a RocketMQ cluster.

    - Each object has its own client id and connections, so several of them in one process share nothing.
    - Its reads return all messages that it has sent.
    - It works in the process that starts it. After a fork, the child needs an object of its own; `close` does nothing
      there.
    - `capabilities` depends on the versions of the cluster's brokers. It is set by `start`.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.name = "cluster"
        self.capabilities = frozenset[Capability]()
        self._lifecycle = threading.Lock()
        self._owner = OwnerProcess("this client of a cluster")
        self._started: ClusterClient | None = None
        self._threads: list[ServiceThread] = []

    # --- start and close -----------------------------------------------------------------------

    def start(self) -> None:
        """Find the brokers and register at them.

        Raises:
            RemoteConnectError: No name server answers.
        """
        with self._lifecycle:
            if self._started is not None:
                return
            client = ClusterClient(self.settings, self.clock)
            try:
                client.open()
                name, capabilities = client.name, client.capabilities()
            except BaseException:
                client.close()
                raise
            self._owner = OwnerProcess("this client of a cluster")
            self.name, self.capabilities, self._started = name, capabilities, client
            if not self.clock.is_virtual:
                self._threads = [
                    ServiceThread(f"mqtemplate-{name}", services, self.clock, _report)
                    for name, services in client.service_groups().items()
                ]
                for thread in self._threads:
                    thread.start()
        _log.debug("broker.started", broker=self.name, name_servers=list(self.settings.name_servers))

    def close(self) -> None:
        if not self._owner.is_current:
            return  # connections and threads belong to the parent process
        with self._lifecycle:
            client, self._started = self._started, None
            threads, self._threads = self._threads, []
            if client is None:
                return
            client.leave()
            for thread in threads:
                thread.stop()
            client.close()
        _log.debug("broker.stopped", broker=self.name)

    def services(self) -> Sequence[Service]:
        client = self._started
        return [] if client is None else [service for group in client.service_groups().values() for service in group]

    @property
    def _client(self) -> ClusterClient:
        if self._started is None:
            raise BrokerClosedError(
                f"broker {self.name!r} is not running; call start() first, or use it in a with block"
            )
        return self._started

    @property
    def client_context(self) -> ClientContext:
        """Routes, namespace and connections of this client, for the requests of administrators."""
        return self._client.context

    def outage(self) -> str | None:
        return "the client is not running" if self._started is None else self._started.outages.describe()

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return _LEVELS_MS

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return _LEVELS_MS[FIRST_RETRY_LEVEL - 1 :]

    # --- sending -------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        return topic_queues(self._client.context, topic)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        """Create a topic with *queue_count* queues on each broker, or give it more queues."""
        create_topic(self._client.context, topic, queue_count)

    def topic_names(self) -> Sequence[str]:
        names = self._client.context.routes.name_servers.topics()
        return [topic for topic in names if is_application_topic(topic) and not is_reply_topic(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        self._client.context.routes.unknown.expect(topics)

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        return self._client.producer.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        return self._client.producer.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        return self._client.producer.send_async(messages, queue, timeout_ms)

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self._client.producer.send_one_way(message, queue)

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        return self._client.sequenced.send(messages, sequence, timeout_ms)

    def send_encoded(
        self, batch: EncodedBatch, queue: MessageQueue, sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        """Do as `send_sequenced` with encoded messages for one queue. See `SequencedSends.send_encoded`."""
        return self._client.sequenced.send_encoded(batch, queue, sequence, timeout_ms)

    # --- transactions and requests -------------------------------------------------------------

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        return self._client.transactions.send_half(message, group, queue, timeout_ms)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        self._client.transactions.end(half, state, remark)

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        return self._client.transactions.check(group, check, threads, max_waiting)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        return self._client.requests.request(message, queue, timeout_ms)

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        self._client.requests.reply(request, body, properties, timeout_ms)

    # --- reading -------------------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        return self._client.queries.pull(queue, queue_offset, max_count, wait_ms, selector)

    def unreachable(self) -> Mapping[str, str | None]:
        found: dict[str, str | None] = {}
        for name in sorted(self._client.context.routes.brokers()):
            try:
                self.min_offset(MessageQueue(SCHEDULE_TOPIC, name, 0))
                found[name] = None
            except BrokerError as exc:
                found[name] = str(exc)
        return found

    def min_offset(self, queue: MessageQueue) -> int:
        return self._client.queries.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        return self._client.queries.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        return self._client.queries.search_offset(queue, timestamp)

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        self.expect_topics(spec.subscriptions)
        return self._client.members.join(spec)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        return self._client.members.committed_offset(group, queue)

    def send_back(self, sent_back: SentBack) -> None:
        """Send a message back for a group without a member here; see `Consumer.send_back`."""
        self._client.members.send_back(sent_back)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self._client.members.commit_offset(group, queue, queue_offset)

    # --- delayed messages ----------------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        return self._client.delayed.cancel(handle, key=key, topic=topic)

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        return self._client.delayed.reschedule(handle, deliver_ms, key=key, topic=topic)

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        return self._client.delayed.pending(query, max_count, cursor)

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        return self._client.delayed.count_pending(query, bucket_ms)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return positions in the files of a server of this machine; see `EmbeddedBroker.pending_positions`."""
        return self._client.our_server.positions(query, after, max_count)

    def change_delay_levels(self, text: str) -> None:
        """Use another level table on each server, such as ``"1s 10s 2h"``, until its next start.

        Pending messages keep their deliver time. With access control this needs an administrator.

        Raises:
            ConfigurationError: *text* is not a level table.
            UnsupportedError: A broker of the cluster is one of RocketMQ, which reads its table at start only.
        """
        change_delay_levels(self._client.context, text)

    # --- finding -------------------------------------------------------------------------------

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        return self._client.queries.by_id(offset_msg_id)

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
        return self._client.queries.by_key(topic, key, max_count, begin_ms, end_ms, unique=unique)


def _report(service: Service, error: Exception) -> None:
    """Log a failed step; the service repeats it."""
    if isinstance(error, BrokerError):
        log_failure(_log, "remote.service_failed", error, service=service.name)
    else:
        _log.error("remote.service_failed", service=service.name, exc_info=error)


# --- changes of the cluster -----------------------------------------------------------------------


# --- topics ---------------------------------------------------------------------------------------


_WAIT_S = 5.0
_REPEAT_S = 0.01


def topic_queues(context: ClientContext, topic: str) -> Sequence[MessageQueue]:
    """See `Broker.queues`; of a missing topic, return the queues that its first message creates."""
    return context.routes.publish_route(check_send_topic(topic)).write_queues


def create_topic(context: ClientContext, topic: str, queue_count: int) -> None:
    """Give *topic* at least *queue_count* queues on each broker, and wait until the name servers have them.

    Raises:
        BrokerError: A broker refused, or the name servers do not have the topic in time.
    """
    check_send_topic(topic)
    if queue_count < 1:
        raise MessageError(f"a topic has 1 queue or more, got queue_count {queue_count}")
    counts = _queue_counts(context.routes, topic)
    masters = {name: by_id[MASTER_ID] for name, by_id in context.routes.brokers().items() if MASTER_ID in by_id}
    changed = [name for name in masters if counts[name] < queue_count]
    header = CreateTopicRequestHeader(
        topic=context.namespace.wrap(topic),
        default_topic=AUTO_CREATE_TOPIC,
        read_queue_nums=queue_count,
        write_queue_nums=queue_count,
        perm=Perm.READ | Perm.WRITE,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
        order=False,
    )
    for name in changed:
        request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        context.call(masters[name], request, f"create topic {topic!r}")
    _wait_for_route(context.routes, topic, queue_count, changed)


def _wait_for_route(routes: RouteTable, topic: str, queue_count: int, broker_names: list[str]) -> None:
    """Wait until the brokers have registered the topic at the name servers."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        counts = _queue_counts(routes, topic)
        if all(counts[name] >= queue_count for name in broker_names):
            return
        if time.monotonic() > deadline:
            raise BrokerError(
                f"topic {topic!r} was created on {', '.join(broker_names)}, but no name server has it after "
                f"{_WAIT_S:g} s; see that the brokers reach the name servers (namesrvAddr), and try again"
            )
        threading.Event().wait(_REPEAT_S)


def _queue_counts(routes: RouteTable, topic: str) -> Counter[str]:
    """Look up the number of queues of each broker."""
    routes.forget(topic)
    route = routes.existing(topic)
    return Counter(queue.broker_name for queue in (route.write_queues if route is not None else ()))


# --- delay levels ---------------------------------------------------------------------------------


_LEVEL_RESPONSES = (ResponseCode.SUCCESS, ResponseCode.INVALID_PARAMETER)


def change_delay_levels(context: ClientContext, text: str) -> None:
    """See `RemoteBroker.change_delay_levels`."""
    masters = context.routes.masters()
    context.instance.register_at(masters)
    others = [address for address in masters if not context.instance.announced.get(address)]
    if others or not masters:
        raise UnsupportedError(
            f"the delay levels of {', '.join(others) or 'this cluster'} cannot be changed from here: a RocketMQ broker "
            "reads them at start; set messageDelayLevel in its settings and restart it"
        )
    for address in masters:
        request = RemotingCommand.request(
            RequestCode.UPDATE_BROKER_CONFIG, body=f"messageDelayLevel={' '.join(text.split())}\n".encode()
        )
        response = context.call(address, request, "change the delay levels", accept=_LEVEL_RESPONSES)
        if response.code == ResponseCode.INVALID_PARAMETER:
            raise ConfigurationError(response.remark or f"{text!r} is not a level table")
