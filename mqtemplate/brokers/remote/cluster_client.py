"""Client of a cluster: the parts of a remote broker, from its start to its close."""

from __future__ import annotations

import structlog

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.client_instance import ClientInstance, GroupMember, Handler, create_client_id
from mqtemplate.brokers.remote.consuming.admin_requests import AdminRequests
from mqtemplate.brokers.remote.consuming.members import Members
from mqtemplate.brokers.remote.consuming.send_back import RetrySender, has_timers
from mqtemplate.brokers.remote.name_servers import NameServers
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.periodic_service import PeriodicService
from mqtemplate.brokers.remote.producing.producer import Producer
from mqtemplate.brokers.remote.producing.recall import Recall
from mqtemplate.brokers.remote.producing.requests import Requests
from mqtemplate.brokers.remote.producing.send_request import SendRequestFactory
from mqtemplate.brokers.remote.producing.transactions import Transactions
from mqtemplate.brokers.remote.queries import Queries
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.brokers.remote.topics import Topics
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.services import Service
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_INCOMPLETE_REBALANCE_MS = 1_000
_NO_RETRY_MS = 3_600_000  # without failed pulls; a failure triggers the service
_FAILED_REFRESH_MS = 5_000
_FAILED_HEARTBEAT_MS = (1_000, 2_000, 4_000, 8_000, 16_000)


class ClusterClient:
    """All parts of a `RemoteBroker` between one start and the next close."""

    def __init__(self, settings: RemoteSettings, clock: Clock) -> None:
        self.name = "cluster"
        self._settings = settings
        self._clock = clock
        self._namespace = Namespace(settings.namespace)
        self._is_closing = False
        self._failed_heartbeats = 0
        self._all_members_due = False
        self._rebalanced_ms = clock.now_ms()
        self._create_services()

        first = self._new_instance()
        names = NameServers(settings.name_servers, first.invoke, settings.request_timeout_ms, self._namespace)
        routes = RouteTable(names, clock, settings.default_topic_queue_nums, self._on_route_changed)
        self._routes = routes
        self._first = first
        context = ClientContext(settings, clock, self._namespace, first, routes, SentOffsets(clock))
        factory = SendRequestFactory(settings, self._namespace, clock)
        self.producer = Producer(context, factory)
        self.queries = Queries(context)
        self.topics = Topics(context)
        self.transactions = Transactions(context, factory, self.producer.deliver)
        self.requests = Requests(context, factory, self.producer)
        self.recall = Recall(context)
        self.members = Members(
            context,
            self.queries,
            RetrySender(context, factory, self.producer.deliver),
            self._new_instance,
            self._heartbeats.trigger,
            self._rebalances.trigger,
            self._pull_retries.trigger,
        )
        first.producer_groups.add(self._namespace.wrap(settings.producer_group))

    def _create_services(self) -> None:
        settings, clock = self._settings, self._clock
        self._refreshes = PeriodicService("remote.routes", self._refresh, clock, settings.poll_name_server_interval_ms)
        self._heartbeats = PeriodicService(
            "remote.heartbeat", self._heartbeat, clock, settings.heartbeat_broker_interval_ms
        )
        self._rebalances = PeriodicService("remote.rebalance", self._rebalance, clock, settings.rebalance_interval_ms)
        self._commits = PeriodicService(
            "remote.offsets", self._flush_offsets, clock, settings.persist_consumer_offset_interval_ms
        )
        self._lock_renewals = PeriodicService("remote.locks", self._renew_locks, clock, settings.lock_interval_ms)
        self._pull_retries = PeriodicService("remote.pull", self._retry_pulls, clock, _NO_RETRY_MS)

    def _new_instance(self) -> ClientInstance:
        settings = self._settings
        members: dict[str, GroupMember] = {}
        handlers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._on_group_changed,
            RequestCode.CHECK_TRANSACTION_STATE: self._on_transaction_check,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._on_reply,
            **AdminRequests(members, self._namespace, settings.name_servers).handlers(),
        }
        return ClientInstance(
            create_client_id(settings.name_servers[0]),
            members,
            handlers,
            self._on_connection_lost,
            self._clock,
            RemotingClientSettings(
                connect_timeout_ms=settings.connect_timeout_ms, tls=settings.tls, credentials=settings.credentials
            ),
            request_timeout_ms=settings.request_timeout_ms,
            extra_fields={"nsd": "true", "ns": settings.namespace_v2} if settings.namespace_v2 else {},
        )

    # --- start and close -----------------------------------------------------------------------

    def open(self) -> None:
        """Find the brokers and register at them.

        Raises:
            RemoteConnectError: No name server answers.
        """
        try:
            cluster = self._routes.load_cluster()
            names = sorted(cluster.broker_addr_table)
            self.name = names[0] if len(names) == 1 else "+".join(sorted(cluster.cluster_addr_table)) or "cluster"
        except RemoteConnectError:
            raise
        except BrokerError as exc:  # access control may forbid this request
            _log.info("remote.cluster_info_refused", reason=str(exc))
            self._routes.existing(AUTO_CREATE_TOPIC)
        self._first.heartbeat(self._routes.masters())

    def capabilities(self) -> frozenset[Capability]:
        """Return the capabilities that all brokers have, by the versions in their heartbeat responses."""
        common = {
            Capability.DELAY_LEVEL,
            Capability.QUERY,
            Capability.TRANSACTION,
            Capability.REQUEST_REPLY,
            Capability.SQL92,
        }
        if has_timers(self._first.versions.values()):
            common |= {Capability.TIMER, Capability.RETRY_DELAY}
        return frozenset(common)

    def leave(self) -> None:
        """Close the members and unregister, while the services still run."""
        self._is_closing = True
        self.transactions.close()
        self.members.close()
        for group in sorted(self._first.producer_groups):
            self._first.unregister(self._routes.masters(), producer_group=group)

    def close(self) -> None:
        """Close the connections; pending requests end with an error."""
        self._is_closing = True
        self.requests.pending.close()
        for instance in self.members.instances():
            instance.close()

    def service_groups(self) -> dict[str, list[Service]]:
        """Return the services by thread: one that waits for a broker delays only those of its thread."""
        return {
            "remote": [self._refreshes, self._heartbeats],
            "remote-groups": [self._rebalances, self._lock_renewals],
            "remote-offsets": [self._commits],
            "remote-timers": [self._pull_retries, self.requests.pending],
        }

    # --- actions of the services ---------------------------------------------------------------

    def _refresh(self) -> int | None:
        try:
            self._routes.load_cluster()
        except RemoteConnectError as exc:
            _log.warning("remote.route_refresh_failed", reason=str(exc))
            return _FAILED_REFRESH_MS
        except BrokerError:
            pass  # access control may forbid this request; the routes contain the brokers in use
        self._routes.refresh()
        return None

    def _heartbeat(self) -> int | None:
        if self.members.heartbeat():
            self._failed_heartbeats = 0
            return None
        pause_ms = _FAILED_HEARTBEAT_MS[min(self._failed_heartbeats, len(_FAILED_HEARTBEAT_MS) - 1)]
        self._failed_heartbeats += 1
        return pause_ms

    def _rebalance(self) -> int | None:
        now_ms = self._clock.now_ms()
        all_members = self._all_members_due or now_ms - self._rebalanced_ms >= self._settings.rebalance_interval_ms
        if all_members:
            self._all_members_due, self._rebalanced_ms = False, now_ms
        return None if self.members.rebalance(all_members=all_members) else _INCOMPLETE_REBALANCE_MS

    def _flush_offsets(self) -> None:
        self.members.flush_offsets()

    def _renew_locks(self) -> None:
        self.members.renew_locks()

    def _retry_pulls(self) -> int | None:
        due_ms = self.members.retry_pulls()
        return None if due_ms is None else max(0, due_ms - self._clock.now_ms())

    # --- events --------------------------------------------------------------------------------

    def _on_group_changed(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        self._rebalance_all()
        return None if request.is_one_way else request.response()

    def _on_transaction_check(self, channel: Connection, request: RemotingCommand) -> None:
        self.transactions.on_check(channel, request)

    def _on_reply(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        return self.requests.on_reply(channel, request)

    def _on_route_changed(self, topic: str) -> None:
        route = self._routes.cached(topic)
        if route is not None and not self._first.versions.keys() >= set(route.masters()):
            self._heartbeats.trigger()  # the route has a broker at which this client is not registered
        if self.members.all():
            self._rebalance_all()

    def _rebalance_all(self) -> None:
        self._all_members_due = True
        self._rebalances.trigger()

    def _on_connection_lost(self, address: str) -> None:
        if not self._is_closing:
            self._heartbeats.trigger()
