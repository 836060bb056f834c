"""The processors of one server, and the parts that they share: what is made of what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.heavy_work import HeavyWork
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.fast_path.pipeline import FastPath
from mqtemplate.server.processors.broker_admin import BrokerAdminProcessor
from mqtemplate.server.processors.client import ClientProcessor, LockProcessor
from mqtemplate.server.processors.delayed import (
    DelayedMessageProcessor,
    PendingPositionsProcessor,
    RecallProcessor,
    announced_capabilities,
)
from mqtemplate.server.processors.offset_admin import OffsetAdmin
from mqtemplate.server.processors.producer import ReplyProcessor, TransactionProcessor
from mqtemplate.server.processors.pull import PullProcessor, RecordBlockProcessor
from mqtemplate.server.processors.queues import OffsetProcessor, QueryProcessor
from mqtemplate.server.processors.relay import RelayProcessor
from mqtemplate.server.processors.send import SendBackProcessor, SendProcessor, SequencedSendProcessor
from mqtemplate.server.processors.statistics import QueueStatistics, Traffic
from mqtemplate.server.processors.topic_admin import GroupAdmin, TopicAdmin
from mqtemplate.server.pulls.pull_checks import PullChecks
from mqtemplate.server.pulls.pull_hold import PullHold
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.pulls.read_ahead import ReadAhead
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.state.creations import ClientCreations, ClientRegistration
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.subscriptions import Subscriptions
from mqtemplate.server.state.topics import TopicConfigs


class ServerAssembly:
    """Makes the processors of one server. Each part is created once, and each processor gets the parts that it uses.

    Args:
        access: The accounts and their rights.
        heavy: Of the server's sockets.
        fast_path: See `BrokerServer`.

    Attributes:
        topics: Topics in the types of the protocol, and for messages.
        groups: Settings of the consumer groups.
        limits: What clients may hold and create.
        peer_log: Log of warnings about clients.
        clients: Connected clients.
        remote_clients: Requests to the connected clients.
        locks: Locks of queues for ordered consumers.
        hold: Held pulls.
        deferred_work: Threads for requests that must not block the I/O thread.
        traffic: Samples of the counts.
    """

    def __init__(
        self,
        engine: Engine,
        settings: BrokerServerSettings,
        access: AccessControl,
        heavy: HeavyWork,
        *,
        fast_path: bool = True,
    ) -> None:
        self._engine, self._settings, self._access, self._is_fast = engine, settings, access, fast_path
        clock, store = engine.clock, engine.store
        self._boot_ms = clock.now_ms()
        self.topics = topics = TopicConfigs(engine, settings)
        self.groups = groups = SubscriptionGroupTable(
            store.store_files, clock, auto_create=settings.auto_create_subscription_group
        )
        self.limits = ClientLimits(
            settings,
            clock,
            engine.metrics,
            lambda: topics.count() - groups.count(),  # each group has a retry topic, which does not count
            groups.count,
            has_accounts=access.settings is not None,
        )
        self._creations = ClientCreations(topics, groups, self.limits)
        self.peer_log = LimitedLog(get_logger("mqtemplate.server"), clock.steady_ms)
        self.clients = ClientRegistry(clock, self.limits.groups, self.limits.subscriptions, self.peer_log)
        self.remote_clients = RemoteClients(engine, self.clients, groups, access, self.peer_log)
        self.clients.on_members_changed(self.remote_clients.notify_members)
        topics.on_created(self.remote_clients.notify_topic_created)
        self._subscriptions = Subscriptions(self.clients, settings)
        self.locks = QueueLockTable(clock, settings.rebalance_lock_max_live_ms, self.limits.locks)
        self._raw = RawReader(store, engine.queues, ReadAhead(store) if fast_path else None)
        self._pull_checks = PullChecks(engine, topics, groups, self._subscriptions, settings)
        self.hold = PullHold(self._raw, clock, self.limits.pulls)
        self.deferred_work = DeferredWork(clock, heavy)
        self.traffic = Traffic(store, engine.offsets, clock)

    # --- processors ----------------------------------------------------------------------------

    def send(self) -> SendProcessor:
        """Return the processor of sends."""
        return SendProcessor(
            *(self._engine, self._settings, self.topics, self._creations),
            *(self.locks, self._access, self.deferred_work),
            fast_path=self._is_fast,
        )

    def pull(self) -> PullProcessor:
        """Return the processor of pulls."""
        return PullProcessor(
            *(self._engine, self._settings, self._creations, self._pull_checks),
            *(self._subscriptions, self._raw, self.hold, self.deferred_work),
        )

    def fast_path(self) -> FastPath:
        """Return the fast path of sends and pulls."""
        return FastPath(self._engine, self._settings, self.topics, self._raw, self._pull_checks)

    def send_back(self) -> SendBackProcessor:
        """Return the processor of messages that consumers send back."""
        return SendBackProcessor(
            self._engine, self.topics, self._creations, self._access, self.deferred_work, self.peer_log
        )

    def sequenced(self) -> SequencedSendProcessor:
        """Return the processor of sequenced sends."""
        return SequencedSendProcessor(
            self._engine, self._creations, self._access, self._settings.default_topic_queue_nums
        )

    def client(self) -> ClientProcessor:
        """Return the processor of heartbeats."""
        registration = ClientRegistration(
            self._engine, self.clients, self._creations, self._settings.strict_subscriptions
        )
        capabilities = announced_capabilities(self._engine, self._settings)
        return ClientProcessor(registration, self._access, self.deferred_work, self._subscriptions, capabilities)

    def offset(self) -> OffsetProcessor:
        """Return the processor of offsets."""
        return OffsetProcessor(self._engine, self.topics, self._creations, self._raw, self.deferred_work)

    def delayed(self) -> DelayedMessageProcessor:
        """Return the processor of pending messages."""
        return DelayedMessageProcessor(self._engine, self._settings)

    def pending_positions(self) -> PendingPositionsProcessor:
        """Return the processor of positions in the files."""
        return PendingPositionsProcessor(self._engine.delayed)

    def clients_processors(self) -> Sequence[object]:
        """Return the processors of the requests that producers and consumers send, without sends and pulls."""
        return (
            LockProcessor(self.locks, self.limits),
            self.send_back(),
            self.offset(),
            self.client(),
            TransactionProcessor(self._engine, self._access, self.peer_log),
            ReplyProcessor(self._engine, self.remote_clients),
            self.delayed(),
            RecordBlockProcessor(self.topics, self._raw),
            self.sequenced(),
        )

    def admin_processors(self, address: Callable[[], str]) -> Sequence[object]:
        """Return the processors of the requests of administrators.

        Args:
            address: Returns the address that clients connect to. The port may be chosen when the server starts.
        """
        engine, offsets = self._engine, self._engine.offsets
        statistics = QueueStatistics(self._raw, offsets, self.traffic, engine.name)
        return (
            TopicAdmin(self.topics, statistics, self.clients, offsets),
            GroupAdmin(self.groups, self.clients, offsets, engine.clock),
            OffsetAdmin(offsets, self.topics, self.groups, self.clients, statistics),
            BrokerAdminProcessor(engine, self._settings, self.topics, self.traffic, address, self._boot_ms),
            QueryProcessor(engine, self._raw, self.clients),
            RelayProcessor(self._raw, self.topics, self.clients),
            RecallProcessor(engine, self.topics, self._settings),
        )
