"""TCP server for a broker: RocketMQ's remoting protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from mqtemplate.engine.clients import ClientExpiry, ClientRegistry
from mqtemplate.engine.engine import Engine, EngineOwner, engine_of
from mqtemplate.engine.queue_locks import QueueLockTable
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings, TlsMode
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.guard import AclGuard
from mqtemplate.server.acl.settings import AclSettings
from mqtemplate.server.fast_path.pipelines import FastPath
from mqtemplate.server.name_server import KVConfig, NameServer, RegisteredBrokers
from mqtemplate.server.processors.broker_admin import BrokerAdminProcessor, QueueStatistics, Traffic
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
from mqtemplate.server.processors.pull import OffsetProcessor, PullProcessor, QueryProcessor, RecordBlockProcessor
from mqtemplate.server.processors.send import SendBackProcessor, SendProcessor, SequencedSendProcessor
from mqtemplate.server.processors.topic_admin import GroupAdmin, OffsetAdmin, TopicAdmin
from mqtemplate.server.pulls.pull_checks import PullChecks, Subscriptions
from mqtemplate.server.pulls.pull_hold import PullHold
from mqtemplate.server.pulls.raw_reader import RawReader, ReadAhead
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import register
from mqtemplate.server.requests.response import problem_response
from mqtemplate.server.state.groups import ClientCreations, ClientRegistration, SubscriptionGroupTable
from mqtemplate.server.state.limits import ClientLimits
from mqtemplate.server.state.remote_clients import RemoteClients
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.services import Service, ServiceThread
from mqtemplate.topics import AUTO_CREATE_TOPIC


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
            lambda: topics.table.count() - groups.count(),  # each group has a retry topic, which does not count
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


_log = get_logger("mqtemplate.server")

EngineT = TypeVar("EngineT", bound=Engine | EngineOwner)


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
        self._engine = core = engine_of(engine)
        self.settings = settings = settings or BrokerServerSettings()
        clock = core.clock
        access, self._is_private = AccessControl(acl), acl is not None and acl.is_private
        self.guard = None if acl is None else AclGuard(access, acl, clock)
        self._heavy = HeavyWork()
        self._parts = parts = ServerAssembly(core, settings, access, self._heavy, fast_path=fast_path)
        self.topics, self.groups, self.clients = parts.topics, parts.groups, parts.clients
        self.locks, self.hold, self.limits = parts.locks, parts.hold, parts.limits
        self.name_server = NameServer(
            parts.topics,
            KVConfig(core.store.store_files),
            RegisteredBrokers(core.name, clock, is_open=settings.broker_registration_enable),
            lambda: str(self.address),
        )
        self._remoting_settings = remoting or RemotingServerSettings()
        self._drain_s = self._remoting_settings.drain_ms / 1_000
        self.remoting = self.listener(settings.listen)
        self.remoting.on_close(lambda connection: self.locks.forget(connection.id))
        self.remoting.on_close(lambda connection: self.clients.forget(connection.id))
        self.remoting.on_close(self.hold.forget)
        self.remoting.on_close(access.client_ids.forget)
        if parts.fast_path is not None:
            self.remoting.use_pipelines(parts.fast_path.pipeline)
        self.processors = register(self.remoting, *parts.client_processors)
        admin = register(self.remoting, *parts.admin_processors(lambda: str(self.address)))
        self.all_processors = self.processors | admin | self.name_server.register(self.remoting)
        logs = (parts.peer_log, parts.topics.peer_log, self.remoting.peer_log)
        sweeps = (parts.locks.sweep, parts.limits.sweep, *(log.summarize for log in logs))
        expiry = ClientExpiry(self.clients, clock, settings.client_expire_ms, settings.client_scan_interval_ms, sweeps)
        self._services: list[Service] = [self.hold, expiry, parts.traffic]
        self._thread: ServiceThread | None = None
        core.metrics.add_collector(self._samples)

    def _samples(self) -> list[MetricSample]:
        return [
            MetricSample("server.connections", MetricKind.GAUGE, len(self.remoting.connections()), {}),
            MetricSample("server.requests", MetricKind.COUNTER, self.remoting.request_count, {}),
        ]

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
        )

    @property
    def address(self) -> HostAddress:
        """Address in routes: the engine's host, with the port that the server really listens on."""
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
        self._engine.start()
        self._engine.attach(self._parts.remote_clients)
        self._create_system_topics()
        self.groups.load()
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
        self.remoting.start()
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
        """
        left = TimeLeft(self._drain_s if timeout_s is None else timeout_s)
        self.hold.close(left.seconds / 2)  # First: `RemotingServer.stop` waits for the responses to all requests.
        self.remoting.stop(left.seconds)
        self._parts.deferred_work.close(left.seconds)
        if self._thread is not None:
            self._thread.stop(left.seconds)
        self._engine.detach()
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
            started.callback(self._engine.close)
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
