"""The parts of a broker server that its processors share."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.heavy_work import HeavyWork
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.processors.queue_locks import QueueLocks
from mqtemplate.server.processors.queue_statistics import QueueStatistics
from mqtemplate.server.processors.traffic import Traffic
from mqtemplate.server.pulls.pull_checks import PullChecks
from mqtemplate.server.pulls.pull_hold import PullHold
from mqtemplate.server.pulls.raw_reader import RawReader
from mqtemplate.server.pulls.read_ahead import ReadAhead
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.state.client_limits import ClientLimits
from mqtemplate.server.state.groups import SubscriptionGroupTable
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.subscriptions import Subscriptions
from mqtemplate.server.state.topics import TopicConfigs


class ServerParts:
    """The parts that the processors of one server share. Each part is created once.

    Args:
        address: Returns the address that clients connect to. The port may be chosen when the server starts.
        access: The accounts and their rights.
        heavy: That of the server's sockets.
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
        boot_ms: When the server was created.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings,
        address: Callable[[], str],
        access: AccessControl,
        heavy: HeavyWork,
        *,
        fast_path: bool = True,
    ) -> None:
        clock, store = engine.clock, engine.store
        self.engine = engine
        self.settings = settings
        self.address = address
        self.fast_path = fast_path
        self.access = access
        self.boot_ms = clock.now_ms()
        self.topics = TopicConfigs(engine, settings)
        self.groups = SubscriptionGroupTable(
            store.store_files, clock, auto_create=settings.auto_create_subscription_group
        )
        self.limits = ClientLimits(
            settings,
            clock,
            engine.metrics,
            lambda: engine.topics.count() - self.groups.count(),  # each group has a retry topic, which does not count
            self.groups.count,
            has_accounts=access.settings is not None,
        )
        self.peer_log = LimitedLog(get_logger("mqtemplate.server"), clock.steady_ms)
        self.clients = ClientRegistry(clock, self.limits, self.peer_log)
        self.remote_clients = RemoteClients(engine, self.clients, self.groups, access, self.peer_log)
        self.clients.on_members_changed(self.remote_clients.notify_members)
        self.topics.on_created(self.remote_clients.notify_topic_created)
        self.subscriptions = Subscriptions(self.clients, settings)
        self.locks = QueueLocks(clock, settings.rebalance_lock_max_live_ms, self.limits)
        self.raw = RawReader(store, engine.reader, ReadAhead(store) if fast_path else None)
        self.pull_checks = PullChecks(engine, self.topics, self.groups, self.clients, self.subscriptions, settings)
        self.hold = PullHold(self.raw, clock, self.limits.pulls)
        self.deferred_work = DeferredWork(clock, heavy)
        self.traffic = Traffic(store, engine.offsets, clock)
        self.statistics = QueueStatistics(self.raw, engine.offsets, self.traffic, engine.name)

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Return True if neither the topic nor the file of the queue has to be created. A disk may take 100 ms.

        Args:
            queue_id: If negative, any queue.
        """
        return self.topics.has(topic) and (queue_id < 0 or self.engine.store.has_queue(topic, queue_id))

    def group_for(self, connection: Connection, request: RemotingCommand, group: str) -> SubscriptionGroupConfig:
        """Return the settings of the group in a request. Create it if it is missing.

        Raises:
            RefusedError: The group is missing, and its client may not create it.
            StoreError: The table could not be written.
        """
        found = self.groups.find(group)
        if found is not None:
            return found
        self.groups.check_new(group)
        self.limits.new_groups.take(self.limits.owner(connection, request))
        return self.groups.ensure(group)
