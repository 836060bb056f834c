"""Everything that a broker answers beside its daily work: routes, questions of tools, queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.remoting.server import Processor, RemotingServer
from mqtemplate.server.admin.broker import BrokerAdmin
from mqtemplate.server.admin.consume_stats import QueueFigures
from mqtemplate.server.admin.groups import GroupAdmin
from mqtemplate.server.admin.offsets import OffsetAdmin
from mqtemplate.server.admin.relay import RelayProcessor
from mqtemplate.server.admin.topics import TopicAdmin
from mqtemplate.server.admin.traffic import Traffic
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.name_server.kv_config import KVConfig
from mqtemplate.server.name_server.processor import NameServer
from mqtemplate.server.processors.query import QueryProcessor
from mqtemplate.server.processors.recall import RecallProcessor
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.topic_configs import TopicConfigs
from mqtemplate.services import Service


class Administration:
    """The processors for administrators and the name server of one broker, made of its parts.

    Args:
        address: Where clients reach the broker, ``host:port``.

    Attributes:
        entries: What tools keep at the name server.
        name_server: May answer at a door of its own too; see `register_name_server`.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings,
        topics: TopicConfigs,
        groups: SubscriptionGroupTable,
        clients: ClientRegistry,
        address: Callable[[], str],
    ) -> None:
        pulled = engine.metrics.counter("server.pulled")
        self.entries = KVConfig(engine.store.store_files)
        self._traffic = Traffic(engine.store, topics, engine.offsets, engine.clock, lambda: pulled.value)
        figures = QueueFigures(
            engine.store, engine.reader, topics, engine.offsets, self._traffic.topic_rate, self._traffic.group_rate
        )
        self.name_server = NameServer(topics, self.entries, address, engine.clock)
        queries = QueryProcessor(engine, clients)
        self._parts = (
            TopicAdmin(topics, figures, engine.offsets, clients),
            GroupAdmin(groups, engine.offsets, clients),
            OffsetAdmin(topics, groups, engine.offsets, figures, clients, engine.clock),
            BrokerAdmin(engine, settings, self._traffic, address),
            queries,
            RelayProcessor(clients, topics, queries.record_at),
            RecallProcessor(engine, topics, settings),
        )

    def load(self) -> None:
        """Read what is kept in the folder.

        Raises:
            StoreFormatError: It cannot be understood.
        """
        self.entries.load()

    def services(self) -> Sequence[Service]:
        """What works by itself."""
        return (self._traffic,)

    def register(self, remoting: RemotingServer) -> None:
        """Let *remoting* serve all of it: the name server's part as well, for whoever knows one address only."""
        for part in self._parts:
            processors: dict[int, Processor] = part.processors()
            for code, processor in processors.items():
                remoting.register(code, processor, slow=code in part.slow)
        self.register_name_server(remoting)

    def register_name_server(self, remoting: RemotingServer) -> None:
        """Let *remoting* be a name server."""
        remoting.on_close(self.name_server.others.forget)
        for code, processor in self.name_server.processors().items():
            remoting.register(code, processor, slow=code in self.name_server.slow)
