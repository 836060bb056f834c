"""A whole broker in this process: durable in a folder, or in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import structlog

from mqtemplate.broker import (
    Broker,
    Capability,
    CheckTransaction,
    Consumer,
    ConsumerSpec,
    MessageModel,
    Registration,
)
from mqtemplate.brokers.embedded.consumer_group import ConsumerGroup, EmbeddedConsumer
from mqtemplate.brokers.embedded.draft import DraftMaker
from mqtemplate.brokers.embedded.message_finder import MessageFinder, physical_offset_in
from mqtemplate.brokers.embedded.queue_reader import QueueReader
from mqtemplate.brokers.embedded.replies import Replies, make_reply, received_reply
from mqtemplate.brokers.embedded.routing import TopicRoutes
from mqtemplate.brokers.embedded.sender import Sender
from mqtemplate.brokers.embedded.settings import EmbeddedSettings
from mqtemplate.brokers.embedded.transaction_checkers import TransactionCheckers
from mqtemplate.brokers.embedded.transactions.service import TransactionCheck, TransactionService
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.delay import (
    DelayController,
    DelayLevels,
    DelayStore,
    PendingView,
    ScheduleMessageService,
    TimerMessageStore,
    tags_code_of,
)
from mqtemplate.errors import BrokerClosedError, ListenerError, MessageError, SendError, SendTimeoutError, StoreError
from mqtemplate.message import Message, MessageExt, MessageQueue, Property, create_unique_id
from mqtemplate.metrics import Metrics
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.results import HalfMessage, PullResult, PullStatus, SendResult, TransactionState
from mqtemplate.selectors.tags import Selector
from mqtemplate.services import AfterChangeService, Service, ServiceThread, WakeEvent
from mqtemplate.store import ConsumerOffsets, FolderStoreFiles, MemoryStoreFiles, MessageStore, StoreFiles, TopicTable
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC, check_topic

_log = structlog.stdlib.get_logger("mqtemplate.broker")

_SCHEDULE_QUEUES = 18  # upstream's number, however many levels there are


class EmbeddedBroker(Broker):
    """The engine with the port in front.

    - On a folder, what was acknowledged survives the process; one process owns the folder.
    - In memory the same code runs over memory of its own, for tests and for work that may be lost.
    - On a virtual clock it starts no thread: whoever owns the clock steps ``services()``.
    - It is opened once; for a second start make another one.

    Args:
        path: The folder, made if missing; None keeps everything in memory.
        store_files: One that is ready, instead of a folder: for tests of what a disk may do.

    Attributes:
        transactions: Keeps half messages; more who can ask producers may join its checkers.
        replies: The requests of this process that wait for a reply.
        forward_reply: Brings a reply to a client that is not this process; False if it cannot.
        remote_members: Tells whether clients outside this process read for a group.
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
        self.path = None if path is None else Path(path)
        self.capabilities = self._capabilities()
        self._store_files: StoreFiles = store_files or (
            MemoryStoreFiles() if self.path is None else FolderStoreFiles(self.path)
        )
        self.levels = DelayLevels.parse(settings.message_delay_level)
        self.store = MessageStore(
            self._store_files,
            settings.store_settings(),
            clock,
            tags_code_of=lambda record: tags_code_of(record, self.levels),
        )
        self.reader = QueueReader(self.store, self.name)
        self._finder = MessageFinder(self.store, self.name, settings.listen_host)
        limits = settings.timer_limits()
        self._schedule = ScheduleMessageService(self.store, limits.precision_ms)
        self._timer = TimerMessageStore(self.store, settings.timer_settings())
        self.topics = TopicTable(self._store_files, clock)
        self.routes = TopicRoutes(self.topics, self.name, settings.default_topic_queue_nums, self._rebalance)
        self.drafts = DraftMaker(self.levels, limits, settings.max_message_size, settings.listen_host)
        self.sender = Sender(self.store, self.routes, self.drafts, settings.listen_host)
        delay_stores: list[DelayStore] = [self._schedule, self._timer]
        self._delay_control = DelayController(self.store, delay_stores, limits, self.name)
        self._pending = PendingView(self.store, delay_stores, self.topics.names, self.name)
        self._keep_what_waits()
        self.offsets = ConsumerOffsets(self._store_files, clock, flush=self.store.flush)
        self._broadcast_offsets: dict[tuple[str, str], ConsumerOffsets] = {}
        self._offsets_service = AfterChangeService(
            "broker.offsets", self._persist_offsets, clock, settings.flush_consumer_offset_interval_ms
        )
        self.offsets.on_change(self._offsets_service.changed)
        self.transactions = TransactionService(
            self.store, self.topics, self.offsets, self.drafts, settings.transaction_limits()
        )
        self._checkers = TransactionCheckers(
            self.name, self._answer_check, self.transactions.producer_connected, has_threads=not clock.is_virtual
        )
        self.transactions.checkers.append(self._checkers)
        self.replies = Replies(f"{self.name}@{create_unique_id()}", clock, self.store.metrics)
        self.forward_reply: Callable[[MessageExt], bool] = lambda reply: False
        self.remote_members: Callable[[str], bool] = lambda group: False
        self._groups: dict[str, ConsumerGroup] = {}
        self._threads: list[ServiceThread] = []
        self._is_open = False

    def _keep_what_waits(self) -> None:
        """Before a file of the log goes, what waits in it is copied forward; then what pointed into it goes too."""
        cleaning = self.store.cleaning
        cleaning.make_free = self._delay_control.copy_forward
        cleaning.waiting_bytes = self._delay_control.pending_bytes
        cleaning.on_cleaned(self._timer.delete_before)

    def _capabilities(self) -> frozenset[Capability]:
        capabilities = {
            Capability.DELAY_LEVEL,
            Capability.BATCH_DELAY,
            Capability.QUERY,
            Capability.SCHEDULE_CHANGE,
            Capability.PENDING,
            Capability.TRANSACTION,
            Capability.TRANSACTION_DELAY,
            Capability.REQUEST_REPLY,
            Capability.SQL92,
        }
        if self.settings.timer_wheel_enable:
            capabilities.add(Capability.TIMER)
        if self.path is not None:
            capabilities.add(Capability.LOCAL_FILES)
        return frozenset(capabilities)

    @property
    def metrics(self) -> Metrics:
        """Counts and times of this broker; docs/metrics.md has the names."""
        return self.store.metrics

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the files and recover.

        Raises:
            StoreLockedError: Another process owns the folder.
            StoreFormatError: The folder was made with other file sizes.
        """
        if self._is_open:
            return
        was_clean = not self._store_files.was_left_open()
        self.store.load([self._schedule, self._timer])
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
        _log.info(
            "broker.started", broker=self.name, store_files=str(self.path or "memory"), end_offset=self.store.end_offset
        )

    def _load_tables(self) -> None:
        self.topics.load()
        self.topics.create(SCHEDULE_TOPIC, _SCHEDULE_QUEUES)
        self.topics.create(TIMER_TOPIC, 1)
        self.offsets.load()

    def _start_threads(self) -> None:
        self.store.start()
        delay_stores: list[Service] = [*self.store.services(), self._offsets_service]
        self._threads = [
            ServiceThread("mqtemplate-store", delay_stores, self.clock, self.store.report),
            ServiceThread("mqtemplate-delay", [self._schedule, self._timer], self.clock, self.store.report),
            ServiceThread("mqtemplate-asking", [self.transactions, self.replies], self.clock, self.store.report),
            ServiceThread("mqtemplate-cleaning", [self.store.cleaning], self.clock, self.store.report),
        ]
        for thread in self._threads:
            thread.start()

    def services(self) -> Sequence[Service]:
        return [
            self._schedule,
            self._timer,
            *self.store.services(),
            self._offsets_service,
            self.store.cleaning,
            self.transactions,
            self.replies,
        ]

    def close(self) -> None:
        if not self._is_open:
            return
        for group in list(self._groups.values()):
            group.close()
        self._checkers.close()
        for thread in reversed(self._threads):
            thread.stop()
        self._is_open = False
        self.replies.close()
        self.transactions.note_progress()
        with ExitStack() as last:  # each, whatever the disk says to the one before; the folder is free then
            last.callback(self._timer.close)
            last.callback(self.store.close)
            self._persist_offsets()
        _log.info("broker.stopped", broker=self.name)

    def _check_open(self) -> None:
        if not self._is_open:
            raise BrokerClosedError(
                f"broker {self.name!r} is not running; call start() first, or use it in a with block"
            )

    # --- sending -------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._check_open()
        return self.routes.queues(topic)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        self._check_open()
        self.routes.create(topic, queue_count)

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        self._check_open()
        return self.sender.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        self._check_open()
        return self.sender.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[SendResult]:
        self._check_open()
        return self.sender.send_async(messages, queue)

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self._check_open()
        self.sender.send_one_way(message, queue)

    def send_back(self, message: MessageExt, group: str, delay_level: int, max_reconsume_times: int) -> None:
        """Take a message that a member of *group* could not handle; see `Consumer.send_back`."""
        self._check_open()
        self.sender.send_back(message, group, delay_level, max_reconsume_times)

    # --- transactions and requests -------------------------------------------------------------

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        self._check_open()
        result = self.sender.send_half(message, check_topic(group), queue, timeout_ms, self.transactions)
        return HalfMessage(message, group, result)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        sent = half.send_result
        self._end_transaction(sent.queue_offset, physical_offset_in(sent.offset_msg_id), half.group, state, remark)

    def _end_transaction(
        self, half_offset: int, physical_offset: int, group: str, state: TransactionState, remark: str | None
    ) -> None:
        self._check_open()
        try:
            end = self.transactions.end(half_offset, physical_offset, group, state, remark=remark)
            is_safe = end is None or self.store.confirm(end.physical_end, end.topics)
        except StoreError as exc:
            raise SendError(f"the end of the transaction was not stored, or is not safe yet: {exc}") from exc
        if not is_safe:
            raise SendTimeoutError("the end of the transaction is stored, and was not flushed in time")

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        self._check_open()
        return self._checkers.register(check_topic(group), check, threads, max_waiting)

    def _answer_check(self, check: TransactionCheck, state: TransactionState, remark: str | None) -> None:
        half = check.half
        self._end_transaction(half.queue_offset, half.physical_offset, check.group, state, remark)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        self._check_open()
        request, future = self.replies.expect(message, timeout_ms)

        def sent(sending: Future[SendResult]) -> None:
            if (error := sending.exception()) is not None:
                self.replies.fail(request, error)

        self.sender.send_async([request], queue).add_done_callback(sent)
        if future.done() and isinstance(error := future.exception(), MessageError):
            raise error
        return future

    def reply(
        self,
        request: MessageExt,
        body: bytes,
        properties: Mapping[str, str] | None = None,
        timeout_ms: int = 3_000,
    ) -> None:
        self._check_open()
        reply = make_reply(request, body, properties)
        client_id = reply.properties[Property.REPLY_TO_CLIENT]
        arrived = received_reply(reply, self.name, self.clock.now_ms(), self.settings.listen_host)
        deliver = self.replies.arrived if client_id == self.replies.client_id else self.forward_reply
        if not deliver(arrived):
            raise SendError(
                f"the reply to message {request.msg_id} of {request.topic!r} could not be brought: {client_id!r}, who "
                "asked, is not here or waits no longer"
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
        wanted = None if selector is None or selector.selects_all else selector
        result = self.reader.pull(queue, queue_offset, max_count, wanted)
        if result.messages or wait_ms <= 0 or self.clock.is_virtual:
            return result
        return self._pull_waiting(queue, result, max_count, wait_ms, wanted)

    def _pull_waiting(
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
                if result.pull_status is PullStatus.NO_NEW_MSG:  # else a selector left out what there was so far
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
        """Whether consumers of this process read for *group*."""
        found = self._groups.get(group)
        return found is not None and found.has_members

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        self._check_open()
        if self.remote_members(spec.group):
            raise ListenerError(
                f"group {spec.group!r} is read by remote clients of this broker, which share no queues with listeners "
                "in its own process; give the listener a group of its own"
            )
        group = self._groups.setdefault(spec.group, ConsumerGroup(spec.group))
        return EmbeddedConsumer(self, group, spec, self._offsets_of(spec))

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        return self.offsets.offset(group, queue.topic, queue.queue_id)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self._check_open()
        self.offsets.commit(group, queue.topic, queue.queue_id, queue_offset)

    # --- what waits, and finding ---------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        self._check_open()
        return self._delay_control.cancel(handle, key, topic)

    def reschedule(
        self, handle: str | None = None, deliver_ms: int = 0, *, key: str | None = None, topic: str | None = None
    ) -> ScheduleChange:
        self._check_open()
        return self._delay_control.reschedule(handle, deliver_ms, key, topic)

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        self._check_open()
        return self._pending.page(query, max_count, cursor)

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        self._check_open()
        return self._pending.count(query, bucket_ms)

    def change_delay_levels(self, text: str) -> None:
        """Use another level table, such as ``"1s 10s 2h"``, from now on.

        What waits keeps the time it was promised. The table is the settings' again after a restart.

        Raises:
            ConfigurationError: It is no such table.
        """
        self.levels = levels = DelayLevels.parse(text)
        self.drafts.change_levels(levels)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        self._check_open()
        return self._finder.by_id(offset_msg_id)

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
        return self._finder.by_key(topic, key, max_count, begin_ms, end_ms, unique=unique)

    def _rebalance(self) -> None:
        for group in list(self._groups.values()):
            group.rebalance()

    def _offsets_of(self, spec: ConsumerSpec) -> ConsumerOffsets:
        """Where a member's progress is kept: the members of a broadcasting group each have their own."""
        if spec.message_model is MessageModel.CLUSTERING:
            return self.offsets
        key = (spec.instance_name, spec.group)
        offsets = self._broadcast_offsets.get(key)
        if offsets is None:
            name = f"broadcast/{spec.instance_name}/{spec.group}.json"
            offsets = ConsumerOffsets(self._store_files, self.clock, name, self.store.flush)
            offsets.load()
            offsets.on_change(self._offsets_service.changed)
            self._broadcast_offsets[key] = offsets
        return offsets

    def _persist_offsets(self) -> None:
        self.offsets.persist()
        for offsets in list(self._broadcast_offsets.values()):
            offsets.persist()
