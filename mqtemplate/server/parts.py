"""The parts of a broker server that its processors share."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.admin.queue_statistics import QueueStatistics
from mqtemplate.server.admin.traffic import Traffic
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.processors.queue_locks import QueueLocks
from mqtemplate.server.pull_hold import PullHold
from mqtemplate.server.raw_reader import RawReader
from mqtemplate.server.remote_clients import RemoteClients
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.subscriptions import Subscriptions
from mqtemplate.server.topic_configs import TopicConfigs


class ServerParts:
    """The parts that the processors of one server share. Each part is created once.

    Args:
        address: Returns the address that clients connect to. The port may be chosen when the server starts.
        access: The accounts and their rights.

    Attributes:
        topics: Topics in the types of the protocol, and for messages.
        groups: Settings of the consumer groups.
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
    ) -> None:
        clock, store = engine.clock, engine.store
        self.engine = engine
        self.settings = settings
        self.address = address
        self.access = access
        self.boot_ms = clock.now_ms()
        self.topics = TopicConfigs(engine, settings)
        self.groups = SubscriptionGroupTable(
            store.store_files, clock, auto_create=settings.auto_create_subscription_group
        )
        self.clients = ClientRegistry(clock)
        self.remote_clients = RemoteClients(engine, self.clients, self.groups, access)
        self.clients.on_members_changed(self.remote_clients.notify_members)
        self.topics.on_created(self.remote_clients.notify_topic_created)
        self.subscriptions = Subscriptions(self.clients, settings)
        self.locks = QueueLocks(clock, settings.rebalance_lock_max_live_ms)
        self.raw = RawReader(store, engine.reader)
        self.hold = PullHold(self.raw, clock, settings.max_held_pulls)
        self.deferred_work = DeferredWork(clock)
        self.traffic = Traffic(store, engine.offsets, clock)
        self.statistics = QueueStatistics(self.raw, engine.offsets, self.traffic, engine.name)
