"""The broker as a server: processors for what clients ask, the services behind them, and the door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.brokers.embedded.transactions.checkers import TransactionCheck
from mqtemplate.message import HostAddress, MessageExt
from mqtemplate.remoting.server import Guard, Processor, RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.server.admin.administration import Administration
from mqtemplate.server.client_expiry import ClientExpiry
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.processors.client import ClientProcessor
from mqtemplate.server.processors.lock import LockProcessor
from mqtemplate.server.processors.message_writer import MessageWriter
from mqtemplate.server.processors.offset import OffsetProcessor
from mqtemplate.server.processors.pull import PullProcessor, pull_response
from mqtemplate.server.processors.reply import ReplyProcessor
from mqtemplate.server.processors.send import SendProcessor
from mqtemplate.server.processors.send_back import SendBackProcessor
from mqtemplate.server.processors.transaction import TransactionProcessor
from mqtemplate.server.pull_hold import PullHold
from mqtemplate.server.queue_locks import QueueLocks
from mqtemplate.server.raw_reader import RawReader
from mqtemplate.server.response import problem_response
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.subscriptions import Subscriptions
from mqtemplate.server.topic_configs import TopicConfigs
from mqtemplate.server.topic_creation import TopicMaker
from mqtemplate.services import Service, ServiceThread
from mqtemplate.topics import AUTO_CREATE_TOPIC

_log = structlog.stdlib.get_logger("mqtemplate.server")


@dataclass(frozen=True, eq=False)
class _RemoteClients:
    """The clients of this server, for the embedded broker; see `EmbeddedBroker.attach`."""

    clients: ClientRegistry
    transactions: TransactionProcessor
    replies: ReplyProcessor

    def has_members(self, group: str) -> bool:
        return self.clients.consumer_group(group) is not None

    def deliver_reply(self, reply: MessageExt) -> bool:
        return self.replies.forward(reply)

    def can_check(self, group: str) -> bool:
        return self.transactions.can_check(group)

    def send_check(self, check: TransactionCheck) -> None:
        self.transactions.send_check(check)


class BrokerServer:
    """An embedded broker that RocketMQ's clients can use, of any language and of the versions 4.9 and 5.

    - The engine belongs to its owner, who closes it after the server; `start` starts it where that was not done.
    - Remote clients and consumers of this process see the same topics and offsets. A group has members of one kind
      only: who comes second with the other kind is refused.
    - On a virtual clock whoever owns the clock steps ``services()`` too; the door has its thread all the same.

    Args:
        remoting: Limits of the connections, and TLS.
        guard: Check of each request before its processor.

    Attributes:
        clients: Who is connected.
        groups: The settings of consumer groups.
        topics: The topics in the protocol's words.
        hold: The pulls that wait.
        locks: Which client has which queue of an ordered group.
        processors: Request code -> what answers it, of a broker's daily work.
        remoting: The door itself.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings | None = None,
        *,
        remoting: RemotingServerSettings | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings = settings or BrokerServerSettings()
        clock = engine.clock
        self.topics = TopicConfigs(
            engine.topics,
            engine.routes,
            settings.cluster_name,
            engine.name,
            auto_create=settings.auto_create_topic_enable,
        )
        self.groups = SubscriptionGroupTable(
            engine.store.store_files, clock, auto_create=settings.auto_create_subscription_group
        )
        self.clients = ClientRegistry(clock)
        self.locks = QueueLocks(clock, settings.rebalance_lock_max_live_ms)
        raw = RawReader(engine.store, engine.reader)
        self.hold = PullHold(engine.store, engine.reader, raw, clock, pull_response, settings.max_held_pulls)
        self.administration = Administration(
            engine, settings, self.topics, self.groups, self.clients, lambda: str(self.address)
        )
        self._deferred_work = DeferredWork(clock)
        self.remoting = RemotingServer(
            settings.listen, remoting or RemotingServerSettings(), clock, guard=guard, error_response=problem_response
        )
        self.remoting.on_close(self.clients.forget)
        self.remoting.on_close(self.hold.forget)
        self.processors = self._make_processors(raw)
        for code, processor in self.processors.items():
            self.remoting.register(code, processor, slow=code in OffsetProcessor.slow)
        self.administration.register(self.remoting)
        expiry = ClientExpiry(self.clients, clock, settings.client_expire_ms, settings.client_scan_interval_ms)
        self._services: list[Service] = [self.hold, expiry, *self.administration.services()]
        self._thread: ServiceThread | None = None

    def _make_processors(self, raw: RawReader) -> dict[int, Processor]:
        engine, settings, groups, later = self.engine, self.settings, self.groups, self._deferred_work
        writer = MessageWriter(engine.store)
        topic_maker = TopicMaker(engine.topics, settings)
        subscriptions = Subscriptions(self.clients, settings)
        clients = ClientProcessor(engine, self.clients, subscriptions, groups, topic_maker, later)
        self.clients.on_members_changed(clients.tell_members)
        transactions, replies = TransactionProcessor(engine, self.clients, writer), ReplyProcessor(engine, self.clients)
        self._remote_clients = _RemoteClients(self.clients, transactions, replies)
        pulls = PullProcessor(engine, settings, self.clients, groups, subscriptions, raw, self.hold, later)
        return {
            **SendProcessor(engine, settings, groups, self.locks, topic_maker, writer, later).processors(),
            **pulls.processors(),
            **OffsetProcessor(engine, raw, groups, later).processors(),
            **clients.processors(),
            **LockProcessor(self.locks).processors(),
            **SendBackProcessor(engine, groups, topic_maker, writer, later).processors(),
            **transactions.processors(),
            **replies.processors(),
        }

    @property
    def address(self) -> HostAddress:
        """What clients are told: the engine's host, at the port that the server really has."""
        host = self.engine.settings.listen_host
        if host.port in (0, self.settings.listen.port):
            return HostAddress(host.ip, self.remoting.address.port)
        return host

    # --- life ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Start the engine, and read what is kept beside its messages; `start` does that too.

        Raises:
            StoreError: The engine cannot be started, or a table cannot be read.
        """
        self.engine.start()
        self.engine.attach(self._remote_clients)
        self._make_system_topics()
        self.groups.load()
        self.administration.load()

    def _make_system_topics(self) -> None:
        """Routes tell clients how many queues a topic gets that they make, so the pattern has the settings' number."""
        self.topics.make_system_topics()
        if self.engine.topics.config(AUTO_CREATE_TOPIC) is not None:
            count = self.settings.default_topic_queue_nums
            self.engine.topics.update(AUTO_CREATE_TOPIC, {"readQueueNums": count, "writeQueueNums": count})

    def start(self) -> None:
        """Open the door.

        Raises:
            BrokerError: The address cannot be listened at.
            StoreError: The engine cannot be started; see `EmbeddedBroker.start`.
        """
        self.load()
        self.remoting.start()
        if not self.engine.clock.is_virtual:
            report = self.engine.store.report
            self._thread = ServiceThread("mqtemplate-server", self._services, self.engine.clock, report)
            self._thread.start()
        told, door = self.address, self.remoting.address
        if told.port != door.port and told.ip.startswith("127."):
            _log.warning(
                "server.address_differs",
                told=str(told),
                listens=str(door),
                hint="nobody listens where clients are sent; set listen_host of the engine's settings",
            )
        _log.info("server.started", broker=self.engine.name, address=str(told))

    def services(self) -> Sequence[Service]:
        """What has to be stepped on a virtual clock, beside the engine's services."""
        return self._services

    def stop(self) -> None:
        """Close the door; the engine goes on."""
        self.hold.close()  # first, since the door waits for what is not answered yet
        self.remoting.stop()
        self._deferred_work.close()
        if self._thread is not None:
            self._thread.stop()
        self.engine.detach()
        _log.info("server.stopped", broker=self.engine.name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
