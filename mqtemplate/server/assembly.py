"""The processors of one server, and the parts that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.fast_path.pipeline import FastPath
from mqtemplate.server.processors.broker_admin import BrokerAdminProcessor
from mqtemplate.server.processors.client import ClientProcessor, LockProcessor
from mqtemplate.server.processors.delayed import (
    DelayedMessageProcessor,
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
        fast_path: Of sends and pulls; None if it is switched off.
        send, pull, send_back, sequenced, client, offset, delayed: Processors.
        client_processors: All processors of the requests that producers and consumers send.
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
        clock, store = engine.clock, engine.store
        self._engine, self._settings, self._boot_ms = engine, settings, clock.now_ms()
        self.topics = topics = TopicConfigs(engine, settings)
        self.groups = groups = SubscriptionGroupTable(
            store.store_files, clock, auto_create=settings.auto_create_subscription_group
        )
        self.limits = limits = ClientLimits(
            settings,
            clock,
            engine.metrics,
            lambda: topics.count() - groups.count(),  # each group has a retry topic, which does not count
            groups.count,
            has_accounts=access.settings is not None,
        )
        creations = ClientCreations(topics, groups, limits)
        self.peer_log = LimitedLog(get_logger("mqtemplate.server"), clock.steady_ms)
        self.clients = ClientRegistry(clock, limits.groups, limits.subscriptions, self.peer_log)
        self.remote_clients = RemoteClients(engine, self.clients, groups, access, self.peer_log)
        self.clients.on_members_changed(self.remote_clients.notify_members)
        topics.on_created(self.remote_clients.notify_topic_created)
        subscriptions = Subscriptions(self.clients, settings)
        self.locks = QueueLockTable(clock, settings.rebalance_lock_max_live_ms, limits.locks)
        self._raw = raw = RawReader(store, engine.queues, ReadAhead(store) if fast_path else None)
        checks = PullChecks(engine, topics, groups, subscriptions, settings)
        self.fast_path = FastPath(engine, settings, topics, raw, checks) if fast_path else None
        self.hold = PullHold(raw, clock, limits.pulls)
        self.deferred_work = work = DeferredWork(clock, heavy)
        self.traffic = Traffic(store, engine.offsets, clock)
        # --- processors of producers and consumers
        self.send = SendProcessor(engine, settings, topics, creations, self.locks, access, work, fast_path=fast_path)
        self.pull = PullProcessor(engine, settings, creations, checks, subscriptions, raw, self.hold, work)
        self.send_back = SendBackProcessor(engine, topics, creations, access, work, self.peer_log)
        self.sequenced = SequencedSendProcessor(engine, creations, access, settings.default_topic_queue_nums)
        registration = ClientRegistration(engine, self.clients, creations, settings.strict_subscriptions)
        capabilities = announced_capabilities(engine, settings)
        self.client = ClientProcessor(registration, access, work, subscriptions, capabilities)
        self.offset = OffsetProcessor(engine, topics, creations, raw, work)
        self.delayed = DelayedMessageProcessor(engine, settings)
        self.client_processors: Sequence[object] = (
            self.send,
            self.pull,
            LockProcessor(self.locks, limits),
            self.send_back,
            self.offset,
            self.client,
            TransactionProcessor(engine, access, self.peer_log),
            ReplyProcessor(engine, self.remote_clients),
            self.delayed,
            RecordBlockProcessor(topics, raw),
            self.sequenced,
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
