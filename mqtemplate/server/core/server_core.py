"""The core of one server, for the requests of clients of any protocol."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.core.clients import ClientLocks, ClientRegistration
from mqtemplate.server.core.producers import ClientRecalls, ClientTransactionEnds
from mqtemplate.server.core.sends import ClientChangeSends, ClientSendBacks, ClientSends, ClientSequencedSends
from mqtemplate.server.pulls.pull_checks import PullChecks, Subscriptions
from mqtemplate.server.pulls.pull_hold import PullHold
from mqtemplate.server.pulls.raw_reader import RawReader, ReadAhead
from mqtemplate.server.state.groups import ClientCreations, RequestModes, SubscriptionGroupTable
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs


class ServerCore:
    """The parts that carry out the requests of clients. The servers of all protocols share it. Thread-safe.

    Its methods take the `Caller` and values, and return values: they neither answer nor wait for the disk. Beside one
    that may write a table there is a question, for a server that does not write tables in its I/O thread.

    Args:
        access: The accounts and their rights.
        pause: Called between the parts of long work, without a lock; see `HeavyWork.pause`.
        fast_path: See `BrokerServer`.

    Attributes:
        settings: The *settings* of the arguments.
        access: The *access* of the arguments. It binds client IDs to accounts.
        topics: Topics in the types of the protocol, and for messages.
        groups: Settings of the consumer groups.
        modes: Way in which the members of a group get the messages of a topic.
        limits: What clients may hold and create.
        creations: Creates topics and groups that clients use first.
        peer_log: Log of warnings about clients.
        clients: Connected clients.
        lock_table: Locks of queues for ordered consumers.
        subscriptions, checks: Selectors and checks of pulls.
        raw: Reader of records as bytes.
        hold: Held pulls.
        sends, sequenced_sends, send_backs: Every way in which clients store messages.
        transaction_ends, recalls: Requests of producers after a send.
        registration, queue_locks: Groups and locks of connected clients.
    """

    def __init__(
        self,
        engine: Engine,
        settings: BrokerServerSettings,
        access: AccessControl,
        pause: Callable[[], None],
        *,
        fast_path: bool = True,
    ) -> None:
        clock, store = engine.clock, engine.store
        self.settings = settings
        self.access = access
        self.topics = topics = TopicConfigs(engine, settings)
        self.groups = groups = SubscriptionGroupTable(
            store.store_files, clock, engine.entry_writer, auto_create=settings.auto_create_subscription_group
        )
        self.modes = RequestModes(store.store_files)
        self.limits = limits = ClientLimits(
            settings,
            clock,
            engine.metrics,
            lambda: topics.table.count() - groups.count(),  # each group has a retry topic, which does not count
            groups.count,
        )
        self.creations = creations = ClientCreations(topics, groups, limits, pause)
        self.peer_log = log = LimitedLog(get_logger("mqtemplate.server"), clock.steady_ms)
        self.clients = ClientRegistry(clock, limits.groups, limits.subscriptions, log)
        self.lock_table = locks = QueueLockTable(clock, settings.rebalance_lock_max_live_ms, limits.locks)
        self.subscriptions = Subscriptions(self.clients, settings)
        self.checks = PullChecks(engine, topics, groups, self.subscriptions, settings)
        self.raw = RawReader(store, engine.queues, ReadAhead(store) if fast_path else None)
        self.hold = PullHold(self.raw, clock, limits.pulls)
        self.recalls = ClientRecalls(engine, topics, settings)
        self.sends = ClientSends(
            engine, settings, topics, creations, locks, access, self.recalls, decodes_all=not fast_path
        )
        self.sequenced_sends = ClientSequencedSends(engine, creations, access, settings.default_topic_queue_nums)
        self.change_sends = ClientChangeSends(engine, settings, creations, access)
        self.send_backs = ClientSendBacks(engine, topics, creations, access, log)
        self.transaction_ends = ClientTransactionEnds(engine, access, log)
        self.registration = ClientRegistration(engine, self.clients, creations, settings.strict_subscriptions)
        self.queue_locks = ClientLocks(locks)

    def forget(self, connection: int, most: int = 1 << 62) -> bool:
        """Release what the clients of a closed connection hold. The server of each protocol calls it.

        Args:
            most: Most objects of each kind that are released now.

        Returns:
            True if some are left: call it again.
        """
        has_more = self.lock_table.forget(connection, most)
        has_more |= self.hold.forget(connection, most)
        self.access.client_ids.forget(connection)
        # The last: it notifies other clients, which may fail.
        return self.clients.forget(connection, most) or has_more
