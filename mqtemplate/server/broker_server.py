"""TCP server for a broker: RocketMQ's remoting protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from mqtemplate.engine.clients import ClientExpiry
from mqtemplate.engine.engine import Engine, EngineOwner, engine_of
from mqtemplate.errors import ConfigurationError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings, ServerTls, TlsMode, load_tls
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.callers import Callers
from mqtemplate.server.acl.guard import AclGuard
from mqtemplate.server.acl.settings import AclSettings
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.fast_path.pipelines import FastPath
from mqtemplate.server.name_server import KVConfig, NameServer, RegisteredBrokers
from mqtemplate.server.processors.broker_admin import BrokerAdminProcessor, QueueStatistics, Reload, Traffic
from mqtemplate.server.processors.client import (
    ClientProcessor,
    DelayedMessageProcessor,
    LockProcessor,
    RecallProcessor,
    RelayProcessor,
    ReplyProcessor,
    TransactionProcessor,
    announced_capabilities,
)
from mqtemplate.server.processors.mqadmin import (
    REASONS,
    AccountProcessor,
    AssignmentProcessor,
    HandOverProcessor,
    MaintenanceProcessor,
)
from mqtemplate.server.processors.pop import AckProcessor, PopProcessor
from mqtemplate.server.processors.pull import OffsetProcessor, PullProcessor, QueryProcessor, RecordBlockProcessor
from mqtemplate.server.processors.send import (
    ChangeSendProcessor,
    SendBackProcessor,
    SendProcessor,
    SequencedSendProcessor,
)
from mqtemplate.server.processors.topic_admin import GroupAdmin, OffsetAdmin, TopicAdmin
from mqtemplate.server.pulls.client_pops import ClientPops
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.registration import register
from mqtemplate.server.requests.response import SendResponses, problem_response
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.services import Service, ServiceThread
from mqtemplate.topics import AUTO_CREATE_TOPIC

if TYPE_CHECKING:
    from mqtemplate.server.grpc_api.service import GrpcEndpoint


class ServerAssembly:
    """Makes the processors of one server. Each part is created once, and each processor gets the parts that it uses.

    Args:
        access: The accounts and their rights.
        heavy: Of the server's sockets.
        fast_path: See `BrokerServer`.

    Attributes:
        core: Carries out the requests of clients, in any protocol.
        remote_clients: Requests to the connected clients.
        deferred_work: Threads for requests that must not block the I/O thread.
        traffic: Samples of the counts.
        fast_path: Of sends and pulls; None if it is switched off.
        pops: Held pops.
        send, pull, pop, send_back, sequenced, client, offset, delayed: Processors.
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
        self._access = access
        self.core = core = ServerCore(engine, settings, access, heavy.pause, fast_path=fast_path)
        topics, creations = core.topics, core.creations
        self.remote_clients = RemoteClients(engine, core.clients, core.groups, access, core.peer_log)
        core.clients.on_members_changed(self.remote_clients.notify_members)
        topics.on_created(self.remote_clients.notify_topics_created)
        raw, checks, subscriptions = core.raw, core.checks, core.subscriptions
        self.fast_path = FastPath(engine, settings, topics, raw, checks) if fast_path else None
        self.deferred_work = work = DeferredWork(clock, heavy)
        self.traffic = Traffic(store, engine.offsets, clock)
        # --- processors of producers and consumers
        callers = Callers(has_accounts=access.settings is not None)
        responses = SendResponses(settings.added_properties())
        self.send = SendProcessor(store, callers, core.sends, responses, work)
        self.pull = PullProcessor(engine, callers, settings, creations, checks, subscriptions, raw, core.hold, work)
        self.pops = pops = ClientPops(engine.pop, store, clock, core.limits.pulls)
        self.pop = PopProcessor(engine, callers, settings, creations, checks, subscriptions, raw, pops, work)
        self.send_back = SendBackProcessor(store, callers, core.send_backs, work)
        self.sequenced = SequencedSendProcessor(store, callers, core.sequenced_sends)
        capabilities = announced_capabilities(engine, settings)
        self.client = ClientProcessor(core.registration, access, callers, work, subscriptions, capabilities)
        self.offset = OffsetProcessor(engine, callers, topics, creations, raw, work)
        self.delayed = DelayedMessageProcessor(engine, core.recalls)
        self.client_processors: Sequence[object] = (
            self.send,
            self.pull,
            self.pop,
            AckProcessor(engine, topics),
            LockProcessor(callers, core.queue_locks),
            self.send_back,
            self.offset,
            self.client,
            TransactionProcessor(store, callers, core.transaction_ends),
            ReplyProcessor(engine, self.remote_clients),
            self.delayed,
            HandOverProcessor(engine),
            RecordBlockProcessor(topics, raw),
            self.sequenced,
            ChangeSendProcessor(engine.delayed, core.recalls, callers, core.change_sends),
        )

    def assignment_processor(self, route: Callable[[str], TopicRouteData | None]) -> AssignmentProcessor:
        """Return the processor of assignments of queues.

        Args:
            route: Returns the route of a topic; see `NameServer.route`.
        """
        core = self.core
        return AssignmentProcessor(core.modes, core.topics, core.groups, core.clients, self.remote_clients, route)

    def admin_processors(self, address: Callable[[], str], reload: Reload) -> Sequence[object]:
        """Return the processors of the requests of administrators.

        Args:
            address: Returns the address that clients connect to. The port may be chosen when the server starts.
            reload: Reads the configuration of the server again.
        """
        engine, settings, core = self._engine, self._settings, self.core
        topics, groups, clients, raw = core.topics, core.groups, core.clients, core.raw
        offsets = engine.offsets
        statistics = QueueStatistics(raw, offsets, self.traffic, engine.pop, engine.name)
        return (
            TopicAdmin(topics, statistics, clients, offsets, engine.pop, core.modes),
            GroupAdmin(groups, clients, offsets, engine.pop, core.modes, engine.clock),
            OffsetAdmin(offsets, engine.pop, topics, groups, clients, statistics),
            BrokerAdminProcessor(engine, settings, topics, self.traffic, address, self._boot_ms, reload),
            QueryProcessor(engine, raw, clients),
            RelayProcessor(raw, topics, clients),
            RecallProcessor(core.recalls, settings.region_id),
            MaintenanceProcessor(engine),
            AccountProcessor(self._access),
        )


_log = get_logger("mqtemplate.server")


def _refuse_reload(_reason: str) -> ReloadedConfig:
    raise RefusedError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "this server was started by a program, which gave it its settings: there is no configuration to read again",
    )


EngineT = TypeVar("EngineT", bound=Engine | EngineOwner)

_MOST_RELEASED = 100
"""Objects of each kind that are released in one round of the I/O thread: less than a millisecond."""


class TimeLeft:
    """A time limit that several steps share."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def seconds(self) -> float:
        """Time that is left; 0 after the deadline."""
        return max(self._deadline - time.monotonic(), 0)


class BrokerServer(Generic[EngineT]):
    """Server through which RocketMQ's clients use a broker: clients of any language, 4.9 and 5.x.

    - The caller owns the engine and closes it after the server. `start` starts the engine if necessary.
    - Remote clients and the consumers of this process use the same topics and offsets. All members of a group are of
      one kind: a consumer of the other kind is refused.
    - The server answers the requests to a name server too, for clients that know only one address.
    - On a virtual clock, the owner of the clock steps ``services()``. The sockets have a thread nevertheless.

    Args:
        engine: An engine, or an `EmbeddedBroker`, whose engine is served.
        remoting: TLS, and limits of the connections.
        acl: Access control. None: every client may send every request.
        fast_path: Read frequent requests without decoding each. The switch is for tests: the results are the same.

    Attributes:
        engine: The *engine* of the arguments.
        core: Carries out the requests of clients; for a server of another protocol beside this one.
        topics: Topics in the types of the protocol.
        groups: Settings of the consumer groups.
        clients: Connected clients.
        locks: Locks of queues for ordered consumers.
        hold: Held pulls.
        limits: What clients may hold and create.
        name_server: The name server.
        processors: Request code -> processor, of the requests that producers and consumers send.
        all_processors: Request code -> processor.
        guard: Check of each request before its processor; None without access control.
        remoting: The listener socket and its connections.
        grpc: The same for the gRPC protocol; None if it is not served.

    Raises:
        ConfigurationError: A package or a file that the settings need is missing.
    """

    def __init__(
        self,
        engine: EngineT,
        settings: BrokerServerSettings | None = None,
        *,
        remoting: RemotingServerSettings | None = None,
        acl: AclSettings | None = None,
        fast_path: bool = True,
    ) -> None:
        self.engine = engine
        self._engine = served = engine_of(engine)
        self.settings = settings = settings or BrokerServerSettings()
        clock = served.clock
        self._is_private = acl is not None and acl.is_private
        access = AccessControl(acl, self._has_group, served.topics.has)
        self.guard = None if acl is None else AclGuard(access, acl, clock)
        self._heavy = HeavyWork()
        self._parts = parts = ServerAssembly(served, settings, access, self._heavy, fast_path=fast_path)
        self.core = core = parts.core
        self.topics, self.groups, self.clients = core.topics, core.groups, core.clients
        self.locks, self.hold, self.limits = core.lock_table, core.hold, core.limits
        self.name_server = NameServer(
            core.topics,
            KVConfig(served.store.store_files),
            RegisteredBrokers(served.name, clock, is_open=settings.broker_registration_enable),
            lambda: str(self.address),
        )
        self._remoting_settings = remoting or RemotingServerSettings()
        self._drain_s = self._remoting_settings.drain_ms / 1_000
        self.remoting = self.listener(settings.listen)
        self.remoting.on_close(lambda connection: parts.pops.forget(connection.id))
        self.remoting.on_close(lambda connection: self._forget(connection.id))
        if parts.fast_path is not None:
            self.remoting.use_pipelines(parts.fast_path.pipeline)
        assignments = parts.assignment_processor(self.name_server.route)
        self.processors = register(self.remoting, *parts.client_processors, assignments)
        self._reload: Reload = _refuse_reload
        admin = register(self.remoting, *parts.admin_processors(lambda: str(self.address), self._reload_config))
        self.all_processors = self.processors | admin | self.name_server.register(self.remoting)
        logs = (core.peer_log, core.topics.peer_log, self.remoting.peer_log)
        self.grpc = self._grpc_endpoint()
        if self.grpc is not None:  # as RocketMQ's proxy: gRPC clients may use either port
            self.remoting.share_port(self.grpc.server.adopt)
        sweeps = [core.lock_table.sweep, core.limits.sweep, *(log.summarize for log in logs)]
        if self.grpc is not None:
            sweeps.append(self.grpc.service.clients.sweep)
        expiry = ClientExpiry(self.clients, clock, settings.client_expire_ms, settings.client_scan_interval_ms, sweeps)
        self._services: list[Service] = [self.hold, parts.pops, expiry, parts.traffic]
        self._thread: ServiceThread | None = None
        served.metrics.add_collector(self._samples)

    def _forget(self, connection: int) -> None:
        """Release what a closed connection held. It may be 10,000 pulls: some in each round of the I/O thread."""
        has_more = True
        try:
            has_more = self.core.forget(connection, _MOST_RELEASED)
        finally:  # after an error, too: a notice to another client may fail
            if has_more:
                self.remoting.loop.call_soon(partial(self._forget, connection))

    def _has_group(self, group: str) -> bool:
        """Return True if the group has settings here, or has members in this process or committed offsets."""
        return self.groups.find(group) is not None or bool(self._engine.offsets.topics_of(group))

    def _grpc_endpoint(self) -> GrpcEndpoint | None:
        """Return the server of the gRPC protocol, if the settings have an address for it.

        Raises:
            ConfigurationError: Its package is not installed.
        """
        settings = self.settings
        if settings.grpc_listen is None:
            return None
        try:
            from mqtemplate.server.grpc_api.service import GrpcEndpoint
        except ModuleNotFoundError as exc:
            raise ConfigurationError(f"grpc-listen is {settings.grpc_listen}, but {exc}") from exc
        advertised, remoting = settings.grpc_advertise, self._remoting_settings
        return GrpcEndpoint(self.core, settings.grpc_listen, advertised, remoting, self._heavy, lambda: self.address.ip)

    def _samples(self) -> list[MetricSample]:
        samples = [
            MetricSample("server.connections", MetricKind.GAUGE, len(self.remoting.connections()), {}),
            MetricSample("server.requests", MetricKind.COUNTER, self.remoting.request_count, {}),
        ]
        tls = self.remoting.tls
        if tls is not None and tls.expires_at is not None:
            left_ms = tls.expires_at * 1_000 - self._engine.clock.now_ms()
            samples.append(MetricSample("server.certificate_expiry_ms", MetricKind.GAUGE, left_ms, {}))
        return samples

    def on_reload(self, reload: Reload) -> None:
        """Answer requests to reload the configuration by *reload*. Until this is called they are refused."""
        self._reload = reload

    def _reload_config(self, reason: str) -> ReloadedConfig:
        return self._reload(reason)

    def use_accounts(self, acl: AclSettings) -> None:
        """Use the accounts of other settings of the access control, from the next request on.

        The held pulls, pops and receives of accounts that have changed are answered, so that their consumers send the
        next ones.
        """
        changed = self.core.access.change_accounts(acl)
        self.hold.answer_for(changed)
        self._parts.pops.answer_for(changed)
        if self.grpc is not None:
            self.grpc.service.consuming.answer_for(changed)

    def listener(self, listen: HostAddress) -> RemotingServer:
        """Return a listener socket with the limits, TLS and access control of this server. It is not started."""
        return RemotingServer(
            listen,
            self._remoting_settings,
            self._engine.clock,
            guard=self.guard,
            error_response=problem_response,
            refused_connections=self._engine.metrics.counter("server.refused.connections"),
            heavy=self._heavy,
            reasons=REASONS,
        )

    @property
    def address(self) -> HostAddress:
        """Address in routes: the advertised one, else the engine's host, with the port that the server really has."""
        if self.settings.advertise is not None:
            return HostAddress(self.settings.advertise.ip, self.settings.advertise.port or self.remoting.address.port)
        host = self._engine.settings.listen_host
        if host.port in (0, self.settings.listen.port):
            return HostAddress(host.ip, self.remoting.address.port)
        return host

    # --- start and stop ------------------------------------------------------------------------

    def load(self) -> None:
        """Start the engine and read the tables of the server. `start` calls this.

        Raises:
            StoreError: The engine cannot be started, or a table cannot be read.
        """
        self.engine.start()
        self._engine.attach(self._parts.remote_clients)
        self._create_system_topics()
        self.groups.load()
        self.core.modes.load()
        self.name_server.entries.load()

    def _create_system_topics(self) -> None:
        """Create the system topics. Clients read the number of queues of a new topic from `AUTO_CREATE_TOPIC`."""
        self.topics.create_system_topics()
        if self._engine.topics.config(AUTO_CREATE_TOPIC) is not None:
            count = self.settings.default_topic_queue_nums
            self._engine.topics.update(AUTO_CREATE_TOPIC, {"readQueueNums": count, "writeQueueNums": count})

    def start(self) -> None:
        """Load, then accept connections.

        Raises:
            BrokerError: The server cannot listen on its address.
            StoreError: The engine cannot be started; see `Engine.start`.
        """
        self.load()
        if self.grpc is not None:  # bound first: a port in use is an error before clients are served
            self.grpc.server.bind()
        self.remoting.start()
        if self.grpc is not None:
            self.grpc.server.start()
        if not self._engine.clock.is_virtual:
            report = self._engine.store.report
            self._thread = ServiceThread("mqtemplate-server", self._services, self._engine.clock, report)
            self._thread.start()
        self._warn()
        _log.debug("server.started", broker=self._engine.name, address=str(self.address))

    def _warn(self) -> None:
        """Log a warning for settings with which clients cannot connect, or which protect less than they seem to."""
        listens, advertised = self.remoting.address, self.address
        if advertised.port != listens.port and advertised.ip.startswith("127."):
            _log.warning(
                "server.address_differs",
                advertised=str(advertised),
                listens=str(listens),
                hint="clients cannot connect to the advertised address; set listen_host in the engine's settings",
            )
        tls = self._remoting_settings.tls
        # Requests of processes on this machine cannot be recorded by its other users.
        is_private = self._is_private and listens.ip in ("127.0.0.1", "::1")
        if self.guard is not None and not is_private and (tls is None or tls.mode is not TlsMode.ENFORCING):
            _log.warning(
                "acl.tls_not_enforced",
                hint="a recorded request stays valid, and with another request code too: set "
                "mqtemplate.server.tls.mode to enforcing",
            )

    def services(self) -> Sequence[Service]:
        """Return the services that the owner of a virtual clock steps, in addition to the engine's."""
        return self._services

    def stop(self, timeout_s: float | None = None) -> None:
        """Close all connections. The engine continues to run.

        Args:
            timeout_s: Longest time to wait for requests in progress, whatever clients do; by default the
                setting ``drain_ms`` of the sockets.

        Raises:
            StoreError: The new groups cannot be written. Everything else is done.
        """
        left = TimeLeft(self._drain_s if timeout_s is None else timeout_s)
        # First the held requests: `RemotingServer.stop` waits for the responses to all requests.
        self._parts.pops.close()
        self.hold.close(left.seconds / 2)
        if self.grpc is not None:
            self.grpc.stop(left.seconds / 2)
        self.remoting.stop(left.seconds)
        self._parts.deferred_work.close(left.seconds)
        if self._thread is not None:
            self._thread.stop(left.seconds)
        self._engine.detach()
        self.groups.file.persist()
        _log.debug("server.stopped", broker=self._engine.name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class LocalCluster(Generic[EngineT]):
    """A cluster in one process: an engine, its broker server and a name server.

    - ``python -m mqtemplate broker`` runs it.

    - The engine starts first and the name server last: a route never has the address of a broker that does not listen.
    - They stop in reverse order. The engine stores all progress when it closes.
    - Access control and TLS apply to both listener sockets.

    Args:
        engine: Engine, or `EmbeddedBroker`, that is started and closed with the cluster.
        name_server: Address of the name server. None: the broker server answers its requests on its own address.
        remoting: TLS, and limits of the connections.
        acl: Access control. None: every client may send every request.

    Attributes:
        broker: The broker server.

    Raises:
        ConfigurationError: A file in the TLS settings cannot be used.
    """

    def __init__(
        self,
        engine: EngineT,
        settings: BrokerServerSettings | None = None,
        name_server: HostAddress | None = None,
        *,
        remoting: RemotingServerSettings | None = None,
        acl: AclSettings | None = None,
    ) -> None:
        self.broker = BrokerServer(engine, settings, remoting=remoting, acl=acl)
        self.engine = engine
        self._engine = engine_of(engine)
        self._drain_s = (remoting or RemotingServerSettings()).drain_ms / 1_000
        self._stopping: TimeLeft | None = None
        self._name_server: RemotingServer | None = None
        if name_server is not None:
            self._name_server = self.broker.listener(name_server)
            self.broker.name_server.register(self._name_server)
        self._closing = ExitStack()

    @property
    def address(self) -> HostAddress:
        """Address of the broker."""
        return self.broker.address

    def use_tls(self, tls: ServerTls | None) -> None:
        """Read the files of TLS again, for new connections; the open ones stay as they are.

        Raises:
            ConfigurationError: A file cannot be used, or key and certificate are of different pairs. Nothing changes.
        """
        loaded = load_tls(tls)
        for server in (self.broker.remoting, self._name_server):
            if server is not None:
                server.use_tls(loaded)
        if self.broker.grpc is not None:
            self.broker.grpc.server.use_tls(load_tls(tls))

    @property
    def name_server_address(self) -> HostAddress:
        """Address of the name server."""
        return self.broker.address if self._name_server is None else self._name_server.address

    def start(self) -> None:
        """Start everything. If one part fails, stop the others.

        Raises:
            BrokerError: A server cannot listen on its address.
            StoreError: The store files cannot be opened.
        """
        with ExitStack() as started:
            started.callback(self.engine.close)
            started.callback(lambda: self.broker.stop(self._left_s()))
            self.broker.start()
            if self._name_server is not None:
                self._name_server.start()
                started.callback(partial(self._stop_name_server, self._name_server))
            self._closing = started.pop_all()

    def stop(self) -> None:
        """Stop everything. All acknowledged messages and committed offsets are on disk then. May be called twice.

        Both servers together wait for requests in progress as long as the setting ``drain_ms`` says, whatever clients
        do. Then the engine writes its progress.
        """
        self._stopping = TimeLeft(self._drain_s)
        self._closing.close()

    def _stop_name_server(self, server: RemotingServer) -> None:
        server.stop(self._left_s())

    def _left_s(self) -> float | None:
        return None if self._stopping is None else self._stopping.seconds

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
