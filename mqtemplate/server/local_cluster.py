"""A whole cluster in one process: an engine, the broker's door, and the name server's."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import HostAddress
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.server.acl import AclGuard
from mqtemplate.server.acl_settings import AclSettings
from mqtemplate.server.broker_server import BrokerServer
from mqtemplate.server.response import problem_response
from mqtemplate.server.settings import BrokerServerSettings


class LocalCluster:
    """What ``python -m mqtemplate broker`` runs.

    - It opens from the inside out: files, broker, name server. So a route never leads to a closed door.
    - It closes the other way round, and the engine last, which writes all progress.
    - Access control and TLS hold at both doors.

    Args:
        engine: It is started and closed here.
        name_server: Where the name server listens; None: the broker's door is the only one, and answers as such too.
        remoting: Limits of the connections, and TLS.
        acl: None: whoever reaches a door may do everything.

    Attributes:
        broker: The server in front of the engine.

    Raises:
        ConfigurationError: A file of the TLS settings cannot be used.
    """

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings | None = None,
        name_server: HostAddress | None = None,
        *,
        remoting: RemotingServerSettings | None = None,
        acl: AclSettings | None = None,
    ) -> None:
        self.engine = engine
        guard = None if acl is None else AclGuard(acl)
        self.broker = BrokerServer(engine, settings, remoting=remoting, guard=guard)
        self._names = None if name_server is None else self._second_door(name_server, remoting, guard)
        self._closing = ExitStack()

    def _second_door(
        self, listen: HostAddress, remoting: RemotingServerSettings | None, guard: AclGuard | None
    ) -> RemotingServer:
        door = RemotingServer(
            listen,
            remoting or RemotingServerSettings(),
            self.engine.clock,
            guard=guard,
            error_response=problem_response,
        )
        self.broker.administration.register_name_server(door)
        return door

    @property
    def address(self) -> HostAddress:
        """Where clients reach the broker."""
        return self.broker.address

    @property
    def name_server_address(self) -> HostAddress:
        """Where clients reach the name server."""
        return self.broker.address if self._names is None else self._names.address

    def start(self) -> None:
        """Open everything, or nothing.

        Raises:
            BrokerError: An address cannot be listened at.
            StoreError: The files cannot be opened.
        """
        with ExitStack() as opened:
            opened.callback(self.engine.close)
            opened.callback(self.broker.stop)
            self.broker.start()
            if self._names is not None:
                self._names.start()
                opened.callback(self._names.stop)
            self._closing = opened.pop_all()

    def stop(self) -> None:
        """Close everything; what was acknowledged and committed is in the files then. Twice is harmless."""
        self._closing.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
