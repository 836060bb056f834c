"""The parts of a remote broker put together, from when it is started until it is closed."""

from __future__ import annotations

import structlog

from mqtemplate.broker import Capability, Consumer, ConsumerSpec
from mqtemplate.brokers.remote.client_instance import ClientInstance, Handler
from mqtemplate.brokers.remote.consuming.admin_requests import MemberAdmin
from mqtemplate.brokers.remote.consuming.consumer import MemberParts
from mqtemplate.brokers.remote.consuming.members import Members, PullRetries
from mqtemplate.brokers.remote.consuming.offsets import BrokerOffsets
from mqtemplate.brokers.remote.consuming.send_back import SendBack
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.outbound import OutboundMaker
from mqtemplate.brokers.remote.periodic_service import PeriodicService
from mqtemplate.brokers.remote.producer import RemoteSender
from mqtemplate.brokers.remote.queries import RemoteQueries
from mqtemplate.brokers.remote.recall import RemoteRecall
from mqtemplate.brokers.remote.requests import RemoteRequests
from mqtemplate.brokers.remote.routes import NameServers, RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.brokers.remote.topics import RemoteTopics
from mqtemplate.brokers.remote.transactions import RemoteTransactions
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting import Channel
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, Version
from mqtemplate.services import Service
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_SOON_MS = 1_000
_NAMES_PAUSE_MS = 5_000
_HEARTBEAT_PAUSES_MS = (1_000, 2_000, 4_000, 8_000, 16_000)


class ClusterClient:
    """Everything that belongs to one start of a `RemoteBroker`.

    Args:
        settings: Where the cluster is.
    """

    def __init__(self, settings: RemoteSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.name = "cluster"
        self._is_closing = False
        self._failed_heartbeats = 0
        self._share_all = False
        self._shared_ms = clock.now_ms()
        self.namespace = namespace = Namespace(settings.namespace)
        self._make_services()
        self.first = first = self._new_instance()
        names = NameServers(settings.name_servers, first.invoke, settings.request_timeout_ms)
        self.routes = routes = RouteTable(names, namespace, clock, settings.default_topic_queue_nums)
        marks = SentOffsets(clock)
        maker = OutboundMaker(settings, namespace, clock)
        self.sender = RemoteSender(first, routes, maker, settings, clock, marks)
        self.queries = RemoteQueries(first, routes, namespace, settings, marks)
        self.topics = RemoteTopics(first, routes, namespace, settings.request_timeout_ms)
        own_group = namespace.wrap(settings.producer_group)
        self.transactions = RemoteTransactions(first, routes, namespace, maker, self.sender, own_group)
        self.requests = RemoteRequests(first, routes, namespace, maker, self.sender, clock)
        self.recall = RemoteRecall(
            first, routes, namespace, clock, settings.producer_group, settings.request_timeout_ms
        )
        self.offsets = BrokerOffsets(first, routes, namespace)
        self.members = Members(first, self._new_instance)
        self._retries = PullRetries(self.members)
        self._parts = MemberParts(
            settings=settings,
            clock=clock,
            namespace=namespace,
            routes=routes,
            queries=self.queries,
            brokers_offsets=self.offsets,
            marks=marks,
            send_back=SendBack(routes, namespace, maker, self.sender),
            need_heartbeat=self._heartbeats.soon,
            need_rebalance=self._rebalances.soon,
            left=lambda member: self.members.left(member, self._parts),
        )
        first.producer_groups.add(own_group)
        routes.on_change = self._route_changed

    def _make_services(self) -> None:
        settings, clock = self.settings, self.clock
        self._refreshes = PeriodicService("remote.routes", self._refresh, clock, settings.poll_name_server_interval_ms)
        self._heartbeats = PeriodicService(
            "remote.heartbeat", self._heartbeat, clock, settings.heartbeat_broker_interval_ms
        )
        self._rebalances = PeriodicService("remote.rebalance", self._rebalance, clock, settings.rebalance_interval_ms)
        self._commits = PeriodicService(
            "remote.offsets", self._commit, clock, settings.persist_consumer_offset_interval_ms
        )
        self._relocks = PeriodicService("remote.locks", self._relock, clock, settings.lock_interval_ms)

    def _new_instance(self) -> ClientInstance:
        admin = MemberAdmin(self.namespace)
        handlers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._ids_changed,
            RequestCode.CHECK_TRANSACTION_STATE: self._check_asked,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._reply_came,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: admin.reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: admin.status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: admin.running_info,
        }
        admin.instance = instance = ClientInstance(self.settings, self.clock, handlers, self._lost)
        return instance

    # --- life ----------------------------------------------------------------------------------

    def open(self) -> None:
        """Find the brokers, and be known to them.

        Raises:
            RemoteConnectError: No name server answers.
        """
        try:
            cluster = self.routes.load_cluster()
            names = sorted(cluster.broker_addr_table)
            self.name = names[0] if len(names) == 1 else "+".join(sorted(cluster.cluster_addr_table)) or "cluster"
        except RemoteConnectError:
            raise
        except BrokerError as exc:  # it may not tell everybody
            _log.info("remote.cluster_not_told", reason=str(exc))
            self.routes.existing(AUTO_CREATE_TOPIC)
        self.first.heartbeat(self.routes.masters())

    def capabilities(self) -> frozenset[Capability]:
        """What all brokers can do that were heard."""
        can = {
            Capability.DELAY_LEVEL,
            Capability.QUERY,
            Capability.TRANSACTION,
            Capability.REQUEST_REPLY,
            Capability.SQL92,
        }
        if min(self.first.versions.values(), default=int(Version.V5_0_0)) >= Version.V5_0_0:
            can.add(Capability.TIMER)
        return frozenset(can)

    def leave(self) -> None:
        """Close the members and tell the brokers, while everything still works."""
        self._is_closing = True
        self.transactions.close()
        self.members.close()
        for group in sorted(self.first.producer_groups):
            self.first.unregister(self.routes.masters(), producer_group=group)

    def close(self) -> None:
        """Close the connections; what waits for an answer gets an error."""
        self._is_closing = True
        self.requests.pending.close()
        for instance in self.members.instances():
            instance.close()

    def service_groups(self) -> dict[str, list[Service]]:
        """Thread name -> what runs in it: what waits for brokers does not hold up what does not."""
        return {
            "remote": [self._refreshes, self._heartbeats],
            "remote-groups": [self._rebalances, self._relocks, self._commits],
            "remote-timers": [self._retries, self.requests.pending],
        }

    # --- groups --------------------------------------------------------------------------------

    def join(self, spec: ConsumerSpec) -> Consumer:
        member = self.members.join(spec, self._parts)
        self._retries.wake()
        return member

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        self._flush_own(group, queue)
        return self.offsets.read(group, queue)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self._flush_own(group, queue)
        self.offsets.write_new(group, queue, queue_offset, self.queries)

    def _flush_own(self, group: str, queue: MessageQueue) -> None:
        """What members here have committed and not told yet is part of the answer."""
        for member in self.members.all():
            if member.spec.group == group and member.is_clustering:
                member.offsets.flush([queue])

    # --- again and again -----------------------------------------------------------------------

    def _refresh(self) -> int | None:
        try:
            self.routes.load_cluster()
        except RemoteConnectError as exc:
            _log.warning("remote.routes_not_refreshed", reason=str(exc))
            return _NAMES_PAUSE_MS
        except BrokerError:
            pass  # it may not tell everybody; routes name the brokers that matter
        self.routes.refresh()
        return None

    def _heartbeat(self) -> int | None:
        if self.members.heartbeat(self.routes.masters(), self.routes.addresses()):
            self._failed_heartbeats = 0
            return None
        pause = _HEARTBEAT_PAUSES_MS[min(self._failed_heartbeats, len(_HEARTBEAT_PAUSES_MS) - 1)]
        self._failed_heartbeats += 1
        return pause

    def _rebalance(self) -> int | None:
        now_ms = self.clock.now_ms()
        all_of_them = self._share_all or now_ms - self._shared_ms >= self.settings.rebalance_interval_ms
        if all_of_them:
            self._share_all, self._shared_ms = False, now_ms
        return None if self.members.rebalance(all_of_them=all_of_them) else _SOON_MS

    def _commit(self) -> int | None:
        self.members.flush_offsets()
        return None

    def _relock(self) -> int | None:
        self.members.renew_locks()
        return None

    # --- what happens by itself ----------------------------------------------------------------

    def _ids_changed(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        self._share_all = True
        self._rebalances.soon()
        return None if request.is_one_way else request.response()

    def _check_asked(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        self.transactions.on_check(channel, request)
        return None

    def _reply_came(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        return self.requests.on_reply(channel, request)

    def _route_changed(self, topic: str) -> None:
        route = self.routes.known(topic)
        if route is not None and not self.first.versions.keys() >= set(route.masters()):
            self._heartbeats.soon()  # a broker that does not know this client yet
        if self.members.all():
            self._share_all = True
            self._rebalances.soon()

    def _lost(self, address: str) -> None:
        if not self._is_closing:
            self._heartbeats.soon()
