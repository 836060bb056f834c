"""The embedded broker: it stores messages in this process, in a store directory or in memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from os import getpid
from pathlib import Path
from typing import Protocol

from mqtemplate.broker import Broker, Capability, CheckTransaction, Consumer, ConsumerSpec, Registration
from mqtemplate.brokers.embedded.consumer_group import ConsumerGroups, EmbeddedConsumer
from mqtemplate.brokers.embedded.message_finder import MessageFinder
from mqtemplate.brokers.embedded.offsets import CommittedOffsets
from mqtemplate.brokers.embedded.queue_reader import QueueReader
from mqtemplate.brokers.embedded.routing import TopicRoutes
from mqtemplate.brokers.embedded.settings import EmbeddedSettings
from mqtemplate.brokers.embedded.transactions.checkers import LocalCheckers, TransactionChecker
from mqtemplate.brokers.embedded.transactions.service import TransactionService
from mqtemplate.brokers.key_query import KeyQuery
from mqtemplate.brokers.requests import PendingRequests, create_reply, create_request, received_reply
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.delay.causes import LatenessCauses
from mqtemplate.delay.control import DelayController
from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.levels import DelayLevels, tags_code_of
from mqtemplate.delay.pending import PendingView
from mqtemplate.delay.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.settings import TimerSettings
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.engine.drafts import DraftMaker
from mqtemplate.engine.retries import SentBack
from mqtemplate.engine.sends import LocalSends, MessageWriter
from mqtemplate.engine.sequences import SequencedSender
from mqtemplate.errors import BrokerClosedError, ListenerError, MessageError, SendError, SendTimeoutError, StoreError
from mqtemplate.event_log import get_logger
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import (
    Message,
    MessageExt,
    MessageQueue,
    Property,
    SendSequence,
    create_unique_id,
    parse_offset_msg_id,
)
from mqtemplate.metrics import Metrics
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.processes import OwnerProcess, absolute_path
from mqtemplate.record.compression import max_body_bytes
from mqtemplate.results import HalfMessage, PullResult, PullStatus, SendResult, SequencedResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import Service, ServiceThread, WakeEvent
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import TopicTable
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, check_topic, is_application_topic

_log = get_logger("mqtemplate.broker")

_SCHEDULE_QUEUES = 18  # as RocketMQ, independent of the number of levels
_DEFAULT_CLUSTER = "DefaultCluster"
_FLUSH_THREAD = "mqtemplate-flush"


class RemoteClients(TransactionChecker, Protocol):
    """The remote clients of an embedded broker. A server passes them to `EmbeddedBroker.attach`."""

    def has_members(self, group: str) -> bool:
        """Return True if a remote client is a member of the consumer group."""

    def deliver_reply(self, reply: MessageExt) -> bool:
        """Send a reply to the remote client that it names; return False if that client is not connected."""


class EmbeddedBroker(Broker):
    """A broker in this process.

    - With a store directory, acknowledged messages survive the process. One process owns the directory.
    - In memory the same code uses anonymous memory, for tests and for messages that may be lost.
    - On a virtual clock it starts no thread: a harness steps ``services()``.
    - It is started once. To start again, create another broker.
    - It works in the process that starts it. In a process that was forked later, each use raises `ForkedError`, and
      `close` does nothing.

    Args:
        path: The store directory, created if missing; None for memory. A relative path is resolved here, once.
        store_files: Store files to use instead of a directory, for tests with a simulated disk.

    Attributes:
        store: Commit log and consume queues.
        topics: The table of topics.
        routes: The queues of the topics.
        max_body_bytes: Largest body that is decompressed for consumers in this process.
        reader: Reads messages by queue offset.
        finder: Finds messages by id and by key.
        drafts: Creates the records of messages.
        writer: Stores the records of messages.
        offsets: Committed offsets of the clustering groups.
        sequences: Stores the messages of sequenced sends.
        release_causes: Explains why messages were released late.
        transactions: Half messages and transaction checks.
        requests: The requests of this process that have no reply yet.
        client_id: The client id in these requests.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        settings: EmbeddedSettings | None = None,
        clock: Clock | None = None,
        *,
        store_files: StoreFiles | None = None,
    ) -> None:
        self.settings = settings = settings or EmbeddedSettings()
        self.clock = clock = clock or SystemClock()
        self.name = settings.broker_name
        self.path = None if path is None else absolute_path(path)
        self.capabilities = self._capabilities()
        self._store_files: StoreFiles = store_files or (
            MemoryStoreFiles() if self.path is None else FolderStoreFiles(self.path)
        )
        self._is_open = False
        self._owner = self._this_process()
        self._threads: dict[str, ServiceThread] = {}
        self._remote_clients: RemoteClients | None = None
        self.levels = DelayLevels.parse(settings.message_delay_level)
        self.store = MessageStore(
            self._store_files,
            settings,
            clock,
            tags_code_of=lambda topic, properties, stored_ms: tags_code_of(topic, properties, stored_ms, self.levels),
        )
        self.topics = TopicTable(self._store_files, clock)
        self._groups = ConsumerGroups()
        self.routes = TopicRoutes(
            self.topics,
            self.name,
            settings.default_topic_queue_nums,
            self._groups.rebalance,
            auto_create=settings.auto_create_topic_enable,
        )
        self.max_body_bytes = max_body_bytes(settings.max_decompressed_size, settings.max_message_size)
        self.reader = QueueReader(self.store, self.name, self.max_body_bytes)
        self.finder = MessageFinder(self.store, self.name, settings.listen_host, self.max_body_bytes)
        self._offsets = CommittedOffsets(self.store, settings.flush_consumer_offset_interval_ms)
        self.offsets = self._offsets.clustering
        self.client_id = f"{self.name}@{create_unique_id()}"
        self.requests = PendingRequests("broker.requests", clock, self.store.metrics)
        self._create_delay_services()
        self._create_send_path()

    def _create_delay_services(self) -> None:
        settings = self.settings
        limits = settings.timer_limits()
        self.release_causes = causes = LatenessCauses(self.store.metrics)
        self._schedule = ScheduleMessageService(self.store, limits.precision_ms, causes)
        self._timer = TimerMessageStore(
            self.store,
            TimerSettings(
                precision_ms=limits.precision_ms,
                roll_window_slots=settings.timer_roll_window_slot,
                log_file_size=settings.mapped_file_size_timer_log,
            ),
            causes,
            settings.topic_shapes,
        )
        delay_stores: list[DelayStore] = [self._schedule, self._timer]
        self._delay_control = DelayController(self.store, delay_stores, limits, self.name)
        self._pending = PendingView(self.store, delay_stores, self.topics.names, self.name)
        self.store.cleaning.on_cleaned(self._timer.delete_before)

    def _create_send_path(self) -> None:
        settings = self.settings
        self.drafts = DraftMaker(self.levels, settings.timer_limits(), settings.max_message_size, settings.listen_host)
        self.transactions = TransactionService(self.store, self.topics, self.offsets, self.drafts, settings)
        self._checkers = LocalCheckers(
            *(self.name, self._end_transaction, self.transactions.producer_connected),
            has_threads=not self.clock.is_virtual,
            max_body_bytes=self.max_body_bytes,
        )
        self.transactions.add_checker(self._checkers)
        self.writer = MessageWriter(self.store, self.drafts, self.transactions.prepare, self.name, settings.listen_host)
        self.sequences = SequencedSender(self.store, self.drafts, settings.max_send_sequences)
        self._sends = LocalSends(
            self.store, self.routes, self.drafts, self.writer, self.sequences, settings.listen_host
        )

    def _capabilities(self) -> frozenset[Capability]:
        timers = {Capability.TIMER, Capability.TIMER_CHANGE, Capability.RETRY_DELAY}
        missing = set() if self.settings.timer_wheel_enable else timers
        if self.path is None:
            missing.add(Capability.LOCAL_FILES)
        return frozenset(Capability) - missing

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self.levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self.drafts.retry_delays_ms

    @property
    def metrics(self) -> Metrics:
        """Metrics of this broker; docs/metrics.md has their names."""
        return self.store.metrics

    @property
    def timer_log_file_size(self) -> int:
        """Bytes of each file of the timer log; ``store.sizes`` has the other sizes."""
        return self._timer.log_file_size

    # --- start and close -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the files and recover.

        Raises:
            StoreLockedError: Another process owns the store directory.
            StoreFormatError: The store directory was created with other file sizes.
            ForkedError: The parent process has started it.
        """
        if self._is_open:
            self._owner.check()
            return
        self._owner = self._this_process()
        was_clean = not self._store_files.was_left_open()
        self.store.load([self._schedule, self._timer, self.sequences], self._delay_control)
        try:
            self._load_tables()
            self._schedule.start()
            self._timer.start()
            self.transactions.load(was_clean=was_clean)
        except BaseException:
            self._timer.close()
            self.store.release()
            raise
        self._is_open = True
        if not self.clock.is_virtual:
            self._start_threads()
        where = str(self.path or "memory")
        _log.debug("broker.started", broker=self.name, store_files=where, end_offset=self.store.end_offset)

    def _load_tables(self) -> None:
        self.topics.load()
        self.topics.create(SCHEDULE_TOPIC, _SCHEDULE_QUEUES)
        self.topics.create(TIMER_TOPIC, 1)
        self.routes.expect(self.settings.topics)
        for topic in self.settings.topics:
            self.routes.queues(topic)
        self.offsets.load()

    def _services_of_threads(self) -> dict[str, list[Service]]:
        # A checkpoint flushes each queue that has changed; producers wait for the other thread only.
        return {
            "mqtemplate-delay": [self._schedule, self._timer, self._delay_control.clock_correction],
            _FLUSH_THREAD: [self.store.flush_service],
            "mqtemplate-store": [*self.store.services(), self._offsets.service],
            "mqtemplate-cleaning": [self.store.cleaning],
            "mqtemplate-transactions": [self.transactions, self.requests],
        }

    def _start_threads(self) -> None:
        self.store.start()
        for name, services in self._services_of_threads().items():
            self._threads[name] = thread = ServiceThread(name, services, self.clock, self.store.report)
            thread.start()

    def _this_process(self) -> OwnerProcess:
        place = "in memory" if self.path is None else f"store directory {self.path}"
        return OwnerProcess(f"broker {self.name!r} ({place}), with the templates and consumers that use it,")

    def services(self) -> Sequence[Service]:
        if self._is_open:
            self._owner.check()
        return [service for services in self._services_of_threads().values() for service in services]

    def close(self) -> None:
        if not self._is_open or not self._owner.is_current:
            return
        self._groups.close()
        self._checkers.close()
        for name in sorted(self._threads, key=_FLUSH_THREAD.__eq__):  # last, since the others may wait for a flush
            self._threads[name].stop()
        self._is_open = False
        self.requests.close()
        self.transactions.save_progress()
        with ExitStack() as stack:  # close all of them even if one raises: the lock of the store directory is released
            stack.callback(self._timer.close)
            stack.callback(self.store.close)
            self._offsets.persist()
        _log.debug("broker.stopped", broker=self.name)

    def attach(self, remote_clients: RemoteClients) -> None:
        """Serve remote clients too: a server calls it when it starts.

        Producers among them answer transaction checks and get replies. A consumer group has either remote members or
        members in this process.
        """
        self._remote_clients = remote_clients
        self.transactions.add_checker(remote_clients)

    def detach(self) -> None:
        """Serve no remote clients any more. Without a server this has no effect."""
        if self._remote_clients is not None:
            self.transactions.remove_checker(self._remote_clients)
            self._remote_clients = None

    def _check_open(self) -> None:
        if not self._is_open:
            raise BrokerClosedError(
                f"broker {self.name!r} is not running; call start() first, or use it in a with block"
            )
        if getpid() != self._owner.pid:  # not `check`: each send comes here
            raise self._owner.error()

    # --- sending -------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._check_open()
        return self.routes.queues(topic)

    def topic_names(self) -> Sequence[str]:
        return [topic for topic in self.topics.names() if is_application_topic(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        self.routes.expect(topics)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        self._check_open()
        self.routes.create(topic, queue_count)

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        self._check_open()
        return self._sends.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        self._check_open()
        return self._sends.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        self._check_open()
        return self._sends.send_async(messages, queue)

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self._check_open()
        self._sends.send_one_way(message, queue)

    def send_back(self, sent_back: SentBack) -> None:
        """Store a message that a member of a group sends back; see `Consumer.send_back`."""
        self._check_open()
        self._sends.send_back(sent_back)

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        self._check_open()
        return self._sends.send_sequenced(messages, sequence, timeout_ms)

    # --- transactions and requests -------------------------------------------------------------

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        self._check_open()
        result = self._sends.send_half(message, check_topic(group), queue, timeout_ms)
        return HalfMessage(message, group, result)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        sent = half.send_result
        _, physical_offset = parse_offset_msg_id(sent.offset_msg_id)
        self._end_transaction(sent.queue_offset, physical_offset, half.group, state, remark)

    def _end_transaction(
        self, half_offset: int, physical_offset: int, group: str, state: TransactionState, remark: str | None
    ) -> None:
        self._check_open()
        try:
            end = self.transactions.end(half_offset, physical_offset, group, state, remark=remark)
            is_safe = end is None or self.store.confirm(end.physical_end, end.topics)
        except StoreError as exc:
            raise SendError(f"the end of the transaction was not stored, or is not durable yet: {exc}") from exc
        if not is_safe:
            raise SendTimeoutError("the end of the transaction is stored, but was not flushed in time")

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        self._check_open()
        return self._checkers.register(check_topic(group), check, threads, max_waiting)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        self._check_open()
        request = create_request(message, self.client_id, timeout_ms)
        future = self.requests.add(request, timeout_ms)

        def sent(sending: Future[SendResult]) -> None:
            if (error := sending.exception()) is not None:
                self.requests.fail(request.properties[Property.CORRELATION_ID], error)

        self._sends.send_async([request], queue).add_done_callback(sent)
        if future.done() and isinstance(error := future.exception(), MessageError):
            raise error
        return future

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        self._check_open()
        reply = create_reply(request, body, properties, _DEFAULT_CLUSTER)
        client_id = reply.properties[Property.REPLY_TO_CLIENT]
        received = received_reply(reply, self.name, self.clock.now_ms(), self.settings.listen_host)
        if client_id == self.client_id:
            is_delivered = self.requests.complete(received)
        else:
            is_delivered = self._remote_clients is not None and self._remote_clients.deliver_reply(received)
        if not is_delivered:
            raise SendError(
                f"the reply to message {request.msg_id} of {request.topic!r} could not be delivered: client "
                f"{client_id!r}, which sent the request, is not connected or no longer waits"
            )

    # --- reading -------------------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        self._check_open()
        if selector is not None and selector.selects_all:
            selector = None
        result = self.reader.pull(queue, queue_offset, max_count, selector)
        if result.messages or wait_ms <= 0 or self.clock.is_virtual:
            return result
        return self._wait_and_pull(queue, result, max_count, wait_ms, selector)

    def _wait_and_pull(
        self, queue: MessageQueue, result: PullResult, max_count: int, wait_ms: int, selector: Selector | None
    ) -> PullResult:
        wake_event = WakeEvent()
        deadline = time.monotonic() + wait_ms / 1_000
        self.store.watch(queue.topic, wake_event.set)
        try:
            while True:
                result = self.reader.pull(queue, result.next_begin_offset, max_count, selector)
                left = deadline - time.monotonic()
                if result.messages or left <= 0 or not self._is_open:
                    return result
                if result.pull_status is PullStatus.NO_NEW_MSG:  # otherwise more messages may follow the skipped ones
                    wake_event.wait(left)
        finally:
            self.store.unwatch(queue.topic, wake_event.set)

    def min_offset(self, queue: MessageQueue) -> int:
        self._check_open()
        return self.reader.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        self._check_open()
        return self.reader.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        self._check_open()
        return self.reader.search_offset(queue, timestamp)

    # --- groups --------------------------------------------------------------------------------

    def has_members(self, group: str) -> bool:
        """Return True if *group* has members in this process."""
        return self._groups.has_members(group)

    def has_remote_members(self, group: str) -> bool:
        """Return True if *group* has members that are clients of a server of this broker."""
        return self._remote_clients is not None and self._remote_clients.has_members(group)

    def member_groups(self) -> list[str]:
        """Return the groups that have members in this process."""
        return self._groups.names()

    def members(self, group: str) -> list[tuple[str, ConsumerSpec]]:
        """Return id and settings of each member of *group* in this process."""
        return self._groups.members(group)

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        self._check_open()
        if self.has_remote_members(spec.group):
            raise ListenerError(
                f"group {spec.group!r} is read by remote clients of this broker, which share no queues with listeners "
                "in its own process; give the listener a group of its own"
            )
        self.routes.expect(spec.subscriptions)
        return EmbeddedConsumer(self, self._groups.group(spec.group), spec, self._offsets.table(spec))

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        self._check_open()
        return self.offsets.offset(group, queue.topic, queue.queue_id)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self._check_open()
        self.offsets.commit(group, queue.topic, queue.queue_id, queue_offset)

    # --- pending messages and search -----------------------------------------------------------

    def cancel(
        self,
        handle: str | None = None,
        *,
        key: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
    ) -> ScheduleChange:
        """See `Broker.cancel`.

        Args:
            namespace: With *key*: only messages for topics of this namespace of remote clients.
        """
        self._check_open()
        return self._delay_control.cancel(handle, key, topic, namespace)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
    ) -> ScheduleChange:
        """See `Broker.reschedule`; *namespace* as in `cancel`."""
        self._check_open()
        return self._delay_control.reschedule(handle, deliver_ms, key, topic, namespace)

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        self._check_open()
        return self._pending.page(query, max_count, cursor)

    def count_pending(
        self, query: PendingQuery, bucket_ms: int = 60_000, *, max_buckets: int | None = None
    ) -> PendingCounts:
        """See `Broker.count_pending`.

        Args:
            max_buckets: Most time spans in the result.

        Raises:
            MessageError: There are more spans, or *bucket_ms* is below 1.
        """
        self._check_open()
        return self._pending.count(query, bucket_ms, max_buckets)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return where the records of pending messages are, for readers of the files; see `PendingView.positions`."""
        self._check_open()
        return self._pending.positions(query, after, max_count).tobytes()

    def change_delay_levels(self, text: str) -> None:
        """Use another level table, such as ``"1s 10s 2h"``, until the next start.

        Pending messages keep their deliver time.

        Raises:
            ConfigurationError: *text* is not a level table.
        """
        if self._is_open:
            self._owner.check()
        self.levels = levels = DelayLevels.parse(text)
        self.drafts.change_levels(levels)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        self._check_open()
        return self.finder.by_id(offset_msg_id)

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
        self._check_open()
        return self.finder.by_key(KeyQuery(topic, key, max_count, begin_ms, end_ms, unique))
