"""The engine: a broker without sockets. It stores messages in a store directory or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mqtemplate.broker import BrokerLifecycle, Capability
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.delay.settings import DelayLevels, tags_code_of
from mqtemplate.engine.checkers import TransactionChecker
from mqtemplate.engine.clients import ConsumerGroupInfo
from mqtemplate.engine.delayed import ChangedDelayLevels, LocalDelayedMessages
from mqtemplate.engine.drafts import DraftMaker
from mqtemplate.engine.figures import FiguresRing
from mqtemplate.engine.groups import CommittedOffsets, Groups, LocalGroups
from mqtemplate.engine.pop.journal import PopJournal
from mqtemplate.engine.pop.pop import PopService
from mqtemplate.engine.reader import MessageFinder, QueueReader, Reader
from mqtemplate.engine.requests import LocalRequests, UnansweredRequests
from mqtemplate.engine.retention import Retention
from mqtemplate.engine.sends import LocalSends, MessageWriter
from mqtemplate.engine.sequences import SequencedSender
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.engine.topics import EntryWriter, TopicRoutes
from mqtemplate.engine.transactions import TransactionService
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageExt
from mqtemplate.metrics import Metrics
from mqtemplate.processes import absolute_path
from mqtemplate.services import Service, ServiceThread
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.tables import HAND_OVER_FILE, TopicTable
from mqtemplate.topics import REVIVE_TOPIC_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from mqtemplate.engine.hand_over import LocalHandOver

_log = get_logger("mqtemplate.broker")

_SCHEDULE_QUEUES = 18  # as RocketMQ, independent of the number of levels
_FLUSH_THREAD = "mqtemplate-flush"


class ConnectedClients(TransactionChecker, Protocol):
    """The remote clients of an engine. A server passes them to `Engine.attach`."""

    def has_members(self, group: str) -> bool:
        """Return True if a remote client is a member of the consumer group."""

    def consumer_groups(self) -> Iterable[ConsumerGroupInfo]:
        """Return the consumer groups with remote members."""

    def deliver_reply(self, reply: MessageExt) -> bool:
        """Send a reply to the remote client that it names; return False if that client is not connected."""


class Engine:
    """A broker without sockets: `EmbeddedBroker` is its face in this process, and a server its face for others.

    - On a virtual clock it starts no thread: a harness steps ``services()``.
    - It is started once, and works in the process that starts it.
    - Five parts have the methods that users of a broker call, and check that it is open: *sends*, *reader*, *groups*,
      *transactions* and *delayed*. The other attributes are for servers.

    Args:
        path: The store directory, created if missing; None for memory. A relative path is resolved here, once.
        store_files: Store files to use instead of a directory, for tests with a simulated disk.

    Attributes:
        store: Commit log and consume queues.
        topics: The table of topics.
        entry_writer: Writes the topics and groups that clients create by using them.
        routes: The queues of the topics.
        sends: Stores messages.
        reader: Reads messages.
        groups: Consumer groups.
        transactions: Half messages and transaction checks.
        pop: Messages that are delivered and acknowledged one by one.
        delayed: Delayed messages.
        requests: Requests of this process, and replies.
        queues: Reads messages by queue offset.
        finder: Finds messages by id and by key.
        drafts: Creates the records of messages.
        writer: Stores the records of messages.
        offsets: Committed offsets of the clustering groups.
        sequences: Stores the messages of sequenced sends.
        retention: Keeps unread messages and dead letters.
        lifecycle: Whether the engine is open.
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
        self.name = name = settings.broker_name
        self.path = None if path is None else absolute_path(path)
        self.capabilities = self._capabilities()
        self._store_files: StoreFiles = store_files or (
            MemoryStoreFiles() if self.path is None else FolderStoreFiles(self.path)
        )
        where = "in memory" if self.path is None else f"store directory {self.path}"
        self.lifecycle = lifecycle = BrokerLifecycle(name, where)
        self._threads: dict[str, ServiceThread] = {}
        self._hand_over: LocalHandOver | None = None
        self._remote: ConnectedClients | None = None
        self.levels = self._parsed_levels(settings.message_delay_level)
        self._changed_levels = ChangedDelayLevels(self._store_files, self.levels)
        self.store = store = MessageStore(
            self._store_files,
            settings,
            clock,
            tags_code_of=lambda topic, properties, stored_ms: tags_code_of(topic, properties, stored_ms, self.levels),
        )
        host, max_body_bytes = settings.listen_host, settings.max_body_bytes()
        self.topics, local_groups = TopicTable(self._store_files, clock), LocalGroups()
        self.entry_writer = EntryWriter(clock, settings.flush_consumer_offset_interval_ms, self.topics.file)
        self.routes = TopicRoutes(
            *(self.topics, name, settings.default_topic_queue_nums, local_groups.rebalance),
            auto_create=settings.auto_create_topic_enable,
        )
        self.queues = QueueReader(store, name, max_body_bytes)
        self.finder = MessageFinder(store, name, host, max_body_bytes)
        self.reader = Reader(store, self.queues, self.finder, lifecycle)
        committed = CommittedOffsets(store, settings.flush_consumer_offset_interval_ms)
        self.offsets = committed.clustering
        self.drafts = drafts = DraftMaker(self.levels, settings.timer_limits(), settings.max_message_size, host)
        self.delayed = LocalDelayedMessages(store, settings, self.topics.names, lifecycle, self.routes, drafts)
        control = self.delayed.control
        self.transactions = TransactionService(store, self.topics, self.offsets, drafts, settings, lifecycle, control)
        self.writer = MessageWriter(store, drafts, self.transactions.prepare, control.pending_keys, name, host)
        self.sequences = SequencedSender(store, drafts, settings.max_send_sequences)
        self.sends = LocalSends(store, self.routes, drafts, self.writer, self.sequences, host, lifecycle.check)
        self.pop = pop = self._create_pop()
        self._services_of_rocketmq: list[Service] = []
        self.groups = Groups(
            store, self.queues, self.routes, local_groups, self.sends.send_back, committed, pop, lifecycle
        )
        self.retention = Retention(store, settings, self.queues, self.offsets, local_groups, lifecycle)
        self._figures = FiguresRing(store, self.offsets, self.delayed.waiting_count)
        self.requests = LocalRequests(
            *(UnansweredRequests("broker.requests", clock, store.metrics), name, host, clock),
            lambda message, queue: self.sends.send_async([message], queue),
            lifecycle.check,
        )

    @property
    def hand_over(self) -> LocalHandOver:
        """The part of this broker in a hand-over to another one; few brokers have it."""
        self.lifecycle.check()
        if self._hand_over is None:
            self._hand_over = self._create_hand_over()
        return self._hand_over

    def _create_hand_over(self) -> LocalHandOver:
        from mqtemplate.engine.hand_over import LocalHandOver

        return LocalHandOver(
            *(self.store, self.topics, self.offsets, self.delayed, self.transactions, self.finder, self.lifecycle)
        )

    def _create_pop(self) -> PopService:
        return PopService(
            *(self.store, self.topics, self.offsets, self.queues, self.name),
            *(
                self.sends.make_dead_letter,
                self.routes.create,
                PopJournal(self.store, self.topics, self.settings.pop_unwritten_max_bytes),
            ),
            max_in_flight=self.settings.pop_in_flight_max,
            max_held=self.settings.max_held_pops,
            check_open=self.lifecycle.check,
        )

    def _capabilities(self) -> frozenset[Capability]:
        timers = {Capability.TIMER, Capability.TIMER_CHANGE, Capability.RETRY_DELAY}
        missing = set() if self.settings.timer_wheel_enable else timers
        if self.path is None:
            missing.add(Capability.LOCAL_FILES)
        return frozenset(Capability) - missing

    @property
    def metrics(self) -> Metrics:
        """Metrics of this broker; docs/metrics.md has their names."""
        return self.store.metrics

    def change_delay_levels(self, text: str) -> None:
        """Use another level table, such as ``"1s 10s 2h"``.

        Pending messages keep their deliver time. The table survives a restart, until the configuration has another one
        than now; see `ChangedDelayLevels`.

        Raises:
            ConfigurationError: *text* is not a level table.
            StoreError: The table cannot be stored; nothing has changed.
        """
        levels = self._parsed_levels(text)
        if not self.lifecycle.is_open:
            self.configure_delay_levels(text)
            return
        self.lifecycle.owner.check()
        self._changed_levels.keep(levels)
        self._use(levels)

    def configure_delay_levels(self, text: str) -> None:
        """Use the level table that the configuration has now. It replaces one of `change_delay_levels`.

        Raises:
            ConfigurationError: *text* is not a level table.
        """
        levels = self._parsed_levels(text)
        if self.lifecycle.is_open:
            self.lifecycle.owner.check()
        self._changed_levels.configure(levels, is_open=self.lifecycle.is_open)
        self._use(levels)

    def _parsed_levels(self, text: str) -> DelayLevels:
        return DelayLevels.parse(text, is_clamping=self.settings.clamp_delay_level)

    def _use(self, levels: DelayLevels) -> None:
        self.levels = levels
        self.drafts.change_levels(levels)

    # --- start and close -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the files and recover.

        Raises:
            StoreLockedError: Another process owns the store directory.
            StoreFormatError: The store directory was created with other file sizes.
            ForkedError: The parent process has started it.
        """
        if self.lifecycle.is_open:
            self.lifecycle.owner.check()
            return
        self.lifecycle.begin()
        was_clean = not self._store_files.was_left_open()
        self._use(self._changed_levels.in_force())  # before the recovery, which computes deliver times
        kept = self.pop.journal.kept(self.delayed.control)
        self.store.load([*self.delayed.followers, self.sequences], kept)
        try:
            self._load_tables()
            self.pop.load()
            self.delayed.start()
            self.transactions.load(was_clean=was_clean)
            self._services_of_rocketmq = self._create_services_of_rocketmq()
            if self._store_files.read_bytes(HAND_OVER_FILE):
                self._hand_over = self._create_hand_over()
        except BaseException:
            self.delayed.timers.close()
            self.store.release()
            raise
        self.lifecycle.is_open = True
        if not self.clock.is_virtual:
            self._start_threads()
        where = str(self.path or "memory")
        _log.debug("broker.started", broker=self.name, store_files=where, end_offset=self.store.end_offset)

    def _load_tables(self) -> None:
        self.topics.load()
        self.topics.create(SCHEDULE_TOPIC, _SCHEDULE_QUEUES)
        self.topics.create(TIMER_TOPIC, 1)
        self.routes.unknown.expect(self.settings.topics)
        for topic in self.settings.topics:
            self.routes.queues(topic)
        self.offsets.load()
        self.retention.activity.load()

    def _create_services_of_rocketmq(self) -> list[Service]:
        """Return the services that continue work of a RocketMQ broker that used the store directory before."""
        if not any(name.startswith(REVIVE_TOPIC_PREFIX) for name in self.topics.names()):
            return []
        from mqtemplate.engine.pop.checkpoints import RocketMQCheckpoints  # few directories need it

        return [RocketMQCheckpoints(self.store, self.topics, self.offsets, self.routes.create)]

    def _services_of_threads(self) -> dict[str, list[Service]]:
        # A checkpoint flushes each queue that has changed; producers wait for the other thread only.
        return {
            "mqtemplate-delay": self.delayed.services(),
            _FLUSH_THREAD: [self.store.flush_service],
            "mqtemplate-store": [
                *(*self.store.services(), self.groups.committed.service, self.entry_writer.service),
                self.pop.journal.snapshots,
            ],
            "mqtemplate-cleaning": [self.retention.activity, self.store.cleaning, *self._figures_service()],
            "mqtemplate-transactions": [self.transactions, self.requests.pending],
            "mqtemplate-pop": [*self.pop.services(), *self._services_of_rocketmq],
        }

    def _figures_service(self) -> list[Service]:
        # In memory there are no figures: the dashboard reads the file.
        return [] if self.path is None else [self._figures.service]

    def _start_threads(self) -> None:
        self.store.start()
        for name, services in self._services_of_threads().items():
            self._threads[name] = thread = ServiceThread(name, services, self.clock, self.store.report)
            thread.start()

    def services(self) -> Sequence[Service]:
        """Return the services that the owner of a virtual clock steps."""
        if self.lifecycle.is_open:
            self.lifecycle.owner.check()
        return [service for services in self._services_of_threads().values() for service in services]

    def close(self) -> None:
        """Close the files. The process that did not start the engine cannot close it."""
        if not self.lifecycle.is_open or not self.lifecycle.owner.is_current:
            return
        self.retention.close()
        self.pop.end_holds()
        self.groups.local.close()
        self.transactions.local_checkers.close()
        for name in sorted(self._threads, key=_FLUSH_THREAD.__eq__):  # last, since the others may wait for a flush
            self._threads[name].stop()
        self.lifecycle.is_open = False
        self.requests.pending.close()
        self.transactions.save_progress()
        with ExitStack() as stack:  # close all of them even if one raises: the lock of the store directory is released
            stack.callback(self.delayed.timers.close)
            stack.callback(self.store.close)
            stack.callback(self._figures.close)
            stack.callback(self.groups.committed.persist)
            stack.callback(self.entry_writer.persist)
            self.pop.journal.save()
        _log.debug("broker.stopped", broker=self.name)

    # --- remote clients ------------------------------------------------------------------------

    def attach(self, clients: ConnectedClients) -> None:
        """Serve remote clients too: a server calls it when it starts.

        Producers among them answer transaction checks and get replies. A consumer group has either remote members or
        members in this process.
        """
        self._remote = clients
        self.transactions.add_checker(clients)
        self.groups.connect_remote(clients.has_members, clients.consumer_groups)
        self.retention.members.connect_remote(clients.consumer_groups)
        self.requests.connect_remote(clients.deliver_reply)

    def detach(self) -> None:
        """Serve no remote clients any more. Without a server this has no effect."""
        if self._remote is not None:
            self.transactions.remove_checker(self._remote)
            self.groups.connect_remote(lambda group: False, tuple)
            self.retention.members.connect_remote(tuple)
            self.requests.connect_remote(lambda reply: False)
            self._remote = None


class EngineOwner(Protocol):
    """Something that has an engine, such as an embedded broker. It starts and closes more than the engine."""

    @property
    def engine(self) -> Engine:
        """The engine."""

    def start(self) -> None:
        """Start the engine, and what the owner adds to it."""

    def close(self) -> None:
        """Close both."""


def engine_of(owner: Engine | EngineOwner) -> Engine:
    """Return an engine, or the engine of its owner."""
    return owner if isinstance(owner, Engine) else owner.engine
