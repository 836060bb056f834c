"""Client of a cluster: the parts of a remote broker, from its start to its close."""

from __future__ import annotations

from collections.abc import Callable

from mqtemplate.broker import Capability, DelayConsole, DelayedMessages
from mqtemplate.brokers.remote.cluster.client import ClientContext, ClientInstance, GroupMember, Handler, SentOffsets
from mqtemplate.brokers.remote.cluster.failures import LostBrokers, Outages, log_failure
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID, NameServers, RouteTable
from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.brokers.remote.consuming.consumer import AdminRequests
from mqtemplate.brokers.remote.consuming.members import Members
from mqtemplate.brokers.remote.consuming.pop import RemotePop
from mqtemplate.brokers.remote.delayed.backlog import DelayConfigs, Recalls
from mqtemplate.brokers.remote.delayed.control import PendingKeySends, RocketMQCluster
from mqtemplate.brokers.remote.delayed.index import PendingIndex
from mqtemplate.brokers.remote.delayed.index_reader import ClusterDelayConsole, IndexReader
from mqtemplate.brokers.remote.delayed.our_server import OurServer
from mqtemplate.brokers.remote.producing.answers import RemoteRequests, RemoteTransactions
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.clock import Clock
from mqtemplate.engine.topics import UnknownTopics
from mqtemplate.errors import BrokerError, RemoteConnectError, UnsupportedError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import ConsumerGroupRequestHeader
from mqtemplate.remoting.sockets import AddressMap
from mqtemplate.services import PeriodicService, Service
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = get_logger("mqtemplate.remote")

_FAILED_REFRESH_MS = 5_000
_REFUSED_HEARTBEAT_MS = (1_000, 2_000, 4_000, 8_000, 16_000)
_RECOVERY_MS = 1_000
_SETTLE_MS = 10_000  # the first registration of a broker may lack topics; RocketMQ: registerNameServerPeriod
_NO_RECOVERY_MS = 3_600_000  # without lost brokers; the loss of one triggers the service


OnCapabilities = Callable[[frozenset[Capability]], None]


class ClusterClient:
    """All parts of a `RemoteBroker` between one start and the next close.

    Args:
        on_capabilities: Called with the capabilities when they have changed since the start: a broker came, or was
            upgraded.

    Attributes:
        known_capabilities: The capabilities that were found last; see `capabilities`.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock, on_capabilities: OnCapabilities) -> None:
        self.name = "cluster"
        self._settings = settings
        self._clock = clock
        self._namespace = Namespace(settings.namespace)
        self._is_closing = False
        self._is_proxy = False
        self._lists_brokers = False  # True if the name servers tell all brokers of the cluster
        self._on_capabilities = on_capabilities
        self.known_capabilities = frozenset[Capability]()
        self._seen_changes = 0  # `ClientInstance.changes` before they were found
        self._refused_heartbeats = 0
        self._lost = LostBrokers(clock)
        self._unsettled_until_ms = 0
        self._recovery = PeriodicService("remote.recovery", self._recover, clock, _NO_RECOVERY_MS)
        self._refreshes = PeriodicService("remote.routes", self._refresh, clock, settings.poll_name_server_interval_ms)
        self._heartbeats = PeriodicService(
            "remote.heartbeat", self._heartbeat, clock, settings.heartbeat_broker_interval_ms
        )

        self.outages = Outages(clock, settings.request_timeout_ms)
        first = self._first = self._new_instance()
        names = self._name_servers = NameServers(
            settings.name_servers,
            first.invoke,
            settings.request_timeout_ms,
            self._namespace,
            AddressMap(settings.address_map),
        )
        unknown = UnknownTopics(_log, auto_create=settings.auto_create_topic_enable, known=settings.topics)
        self._routes = RouteTable(
            names,
            clock,
            settings.default_topic_queue_nums,
            self._on_route_changed,
            unknown,
            on_moved=self._on_broker_moved,
        )
        self.context = context = ClientContext(
            settings, clock, self._namespace, first, self._routes, SentOffsets(clock)
        )
        # They need each other: the sends under a pending key use this producer.
        self.producer = Producer(context, lambda *send: self._pending_key_sends.send(*send))  # noqa: PLW0108
        self.queries = Queries(context)
        self.transactions = RemoteTransactions(context)
        self.requests = RemoteRequests(context, self.producer)
        self.our_server = OurServer(context, self.producer.factory)
        self._recalls = Recalls(context)
        self.delay_configs = DelayConfigs(context)
        path = settings.pending_index
        index = None if path is None else IndexReader(context, self.queries, self.delay_configs, PendingIndex(path))
        self._console = ClusterDelayConsole(context, self.queries, self.delay_configs, index)
        self._rocketmq_cluster = RocketMQCluster(
            context, self.queries, self.producer, self._recalls, self.delay_configs, index
        )
        self._pending_key_sends = PendingKeySends(context, self._rocketmq_cluster, self.producer, self._recalls)
        self.members = Members(context, self.queries, self.producer, self._new_instance, self._heartbeats.trigger)
        self.pop = RemotePop(context, self.members)
        first.producer_groups.add(self._namespace.wrap(settings.producer_group))

    def _new_instance(self) -> ClientInstance:
        members: dict[str, GroupMember] = {}
        handlers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._on_group_changed,
            # Transactions and requests are created after the first instance, which their handlers are for.
            RequestCode.CHECK_TRANSACTION_STATE: lambda *check: self.transactions.on_check(*check),  # noqa: PLW0108
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: lambda channel, request: self.requests.on_reply(request),
            **AdminRequests(members, self._namespace, self._settings.name_servers).handlers(),
        }
        # The name servers are asked through the first instance.
        return ClientInstance(
            self._settings,
            self._clock,
            members,
            handlers,
            self._on_lost,
            self.outages,
            lambda address: self._name_servers.origin_of(address),  # noqa: PLW0108
        )

    # --- start and close -----------------------------------------------------------------------

    def open(self) -> None:
        """Find the brokers and register at them.

        Raises:
            RemoteConnectError: No name server answers.
        """
        cluster = self._routes.load_cluster()
        if isinstance(cluster, BrokerError):
            # Access control of a name server may refuse the request; only a proxy does not know it.
            self._is_proxy = isinstance(cluster, UnsupportedError)
            _log.debug("remote.cluster_info_refused", reason=str(cluster))
            self._routes.existing(AUTO_CREATE_TOPIC)
        else:
            self._lists_brokers = True
            names = sorted(cluster.broker_addr_table)
            self.name = names[0] if len(names) == 1 else "+".join(sorted(cluster.cluster_addr_table)) or "cluster"
        self._first.heartbeat(self._routes.masters())
        self._seen_changes = self._first.changes
        self.known_capabilities = self.capabilities()
        if self._awaits_brokers:
            self._recovery.trigger()

    @property
    def _awaits_brokers(self) -> bool:
        """True while no broker is registered at the name servers."""
        return self._lists_brokers and not self._routes.masters()

    def _follow_capabilities(self) -> None:
        """Report the capabilities if they have changed, once all brokers have registered this client again."""
        first, masters = self._first, self._routes.masters()
        changes = first.changes
        if changes == self._seen_changes or not masters or not all(map(first.is_registered, masters)):
            return
        found = self.capabilities()
        if found != self.known_capabilities:
            gained, lost = found - self.known_capabilities, self.known_capabilities - found
            _log.info("remote.capabilities_changed", gained=_names(gained), lost=_names(lost))
            self._on_capabilities(found)
        self.known_capabilities, self._seen_changes = found, changes

    def capabilities(self) -> frozenset[Capability]:
        """Return the capabilities that all brokers have.

        A server of this library announces its own; for one of RocketMQ the version decides, and its answer to a recall.
        The remoting port of RocketMQ's proxy has fewer than the brokers after it.
        """
        first = self._first
        known = set(first.versions)
        known = known.intersection(self._routes.masters()) or known  # an upgraded broker may have another address
        rocketmq = [first.versions[address] for address in known if not first.announced[address]]
        each = [announced for address in known if (announced := first.announced[address])]
        if rocketmq or not each:
            oldest = min(rocketmq, default=int(Version.V5_0_0))
            can_recall = not self._is_proxy and self._recalls.are_enabled()
            each.append(_rocketmq_capabilities(oldest, can_recall=can_recall, is_proxy=self._is_proxy))
        return frozenset.intersection(*each)

    def check_pop(self) -> None:
        """Raise `UnsupportedError` if a broker does not have `Capability.POP`, with the version of that broker."""
        if Capability.POP in self.capabilities():
            return
        pull = "leave request_mode out: then the listener pulls"
        if self._is_proxy:
            raise UnsupportedError(
                "a proxy of RocketMQ has POP on its gRPC port only; set rocketmq.endpoints to that port instead of "
                f"rocketmq.name-server, or {pull}"
            )
        first = self._first
        old = [
            address
            for address, announced in sorted(first.announced.items())
            if Capability.POP not in announced and (announced or first.is_before_5(address))
        ]
        raise UnsupportedError(
            f"POP needs RocketMQ 5.0 or a newer server of this library, and {', '.join(old) or 'this cluster'} is "
            f"older; upgrade it, or {pull}"
        )

    @property
    def delayed(self) -> DelayedMessages:
        """Pending messages: by our own requests if all brokers have announced them, else by RocketMQ's."""
        masters = self._routes.masters()
        self._first.register_at(masters)
        is_ours = all(Capability.PENDING in self._first.announced.get(address, ()) for address in masters)
        return self.our_server if masters and is_ours else self._rocketmq_cluster

    @property
    def delay_console(self) -> DelayConsole | None:
        """State of the brokers' delay services; None for servers of this library, which have pages of their own."""
        return self._console if self.delayed is self._rocketmq_cluster else None

    def leave(self) -> None:
        """Close the members and unregister, while the services still run."""
        self._is_closing = True
        self.transactions.close()
        self.pop.close()
        self.members.close()
        for group in sorted(self._first.producer_groups):
            self._first.unregister(self._routes.masters(), producer_group=group)

    def close(self) -> None:
        """Close the connections; pending requests end with an error."""
        self._is_closing = True
        self.producer.close()
        self.requests.pending.close()
        self.pop.release_arrived()  # as late as possible: brokers hold pops until the connections are closed
        for instance in self.members.instances():
            instance.close()

    def service_groups(self) -> dict[str, list[Service]]:
        """Return the services by thread: one that waits for a broker delays only the others of its thread."""
        return {
            "remote": [self._refreshes, self._heartbeats, self._recovery],
            "remote-groups": [self.members.rebalances],
            "remote-locks": [self.members.lock_renewals, self.members.lock_changes],
            "remote-offsets": [self.members.commits, self.pop.releases],
            "remote-timers": [self.members.pull_retries, self.requests.pending, self.outages],
        }

    # --- actions of the services ---------------------------------------------------------------

    def _refresh(self) -> int | None:
        try:
            self._routes.load_cluster()
            self._routes.refresh()
        except RemoteConnectError as exc:
            log_failure(_log, "remote.route_refresh_failed", exc)
            return _FAILED_REFRESH_MS
        return None

    def _heartbeat(self) -> int | None:
        is_answered = self.members.heartbeat()
        self._follow_capabilities()
        if is_answered:
            self._refused_heartbeats = 0
            return None
        if not self._lost.is_empty:
            return None  # `_recover` repeats it
        pause_ms = _REFUSED_HEARTBEAT_MS[min(self._refused_heartbeats, len(_REFUSED_HEARTBEAT_MS) - 1)]
        self._refused_heartbeats += 1
        return pause_ms

    def _recover(self) -> int | None:
        """Follow changes of the cluster while a broker is away, and register at brokers that do not know this client.

        So a restarted broker has all members within about a second, and the routes have its queues again.
        """
        if self._is_closing:
            return None
        now_ms = self._clock.steady_ms()
        try:
            if now_ms < self._unsettled_until_ms:
                self._routes.refresh()
            if (self._awaits_brokers or not self._lost.is_empty) and self._routes.follow():
                self._unsettled_until_ms = now_ms + _SETTLE_MS
        except RemoteConnectError as exc:
            log_failure(_log, "remote.route_refresh_failed", exc)
        self.members.register()
        self._follow_capabilities()
        self._lost.update(self._routes.brokers(), self.members.answered)
        is_settled = self._lost.is_empty and not self._awaits_brokers and now_ms >= self._unsettled_until_ms
        return None if is_settled else _RECOVERY_MS

    # --- events --------------------------------------------------------------------------------

    def _on_group_changed(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        self._routes.look_up_missing()  # our server also sends this request when a topic was created
        self.members.rebalance_group(request.header(ConsumerGroupRequestHeader).consumer_group)
        return None if request.is_one_way else request.response()

    def _on_route_changed(self, topic: str) -> None:
        self._recovery.trigger()  # the route may have a broker at which this client is not registered
        self.members.rebalance_topic(topic)

    def _on_broker_moved(self, address: str) -> None:
        for instance in self.members.instances():
            instance.disconnect(address)

    def _on_lost(self, address: str) -> None:
        if self._is_closing:
            return
        brokers = self._routes.brokers()
        for name, by_id in brokers.items():
            if by_id.get(MASTER_ID) == address:  # also if it is away already: locks may have been taken since
                self.members.lose_locks(name)
        if self._lost.add(address, brokers) is not None:
            self._recovery.trigger()


# The proxy has no requests for queries, settings of brokers, replies, and several acknowledgements. Source: RocketMQ
# ``proxy: RemotingProtocolServer.registerRemotingServer``.
_NOT_BY_PROXY = frozenset({Capability.QUERY, Capability.PENDING, Capability.REQUEST_REPLY, Capability.POP})


def _names(capabilities: frozenset[Capability]) -> list[str]:
    return sorted(each.name for each in capabilities)


def _rocketmq_capabilities(version: int, *, can_recall: bool, is_proxy: bool) -> frozenset[Capability]:
    """Return the capabilities of a RocketMQ broker, or of a proxy before it."""
    capabilities = {
        Capability.DELAY_LEVEL,
        Capability.QUERY,
        Capability.TRANSACTION,
        Capability.REQUEST_REPLY,
        Capability.SQL92,
        Capability.PENDING,
    }
    if version >= Version.V5_0_0:
        capabilities |= {Capability.TIMER, Capability.RETRY_DELAY, Capability.POP}
        if can_recall:
            capabilities |= {Capability.TIMER_CHANGE, Capability.PENDING_KEY_STEPS}
    return frozenset(capabilities - _NOT_BY_PROXY if is_proxy else capabilities)
