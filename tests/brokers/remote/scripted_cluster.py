"""A broker and name server with scripted responses, over real sockets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from mqtemplate.clock import SystemClock
from mqtemplate.message import HostAddress
from mqtemplate.remoting import Connection, RemotingServer, RemotingServerSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.route import BrokerData, ClusterInfo, QueueData, TopicRouteData
from mqtemplate.remoting.protocol.codes import Perm
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.remoting.protocol.headers.message import SendMessageRequestHeaderV2, SendMessageResponseHeader

Script = Callable[[RemotingCommand], RemotingCommand | Future[RemotingCommand] | None]
"""Returns the response to a request, now or later; None leaves the request without a response."""


class ScriptedBroker:
    """A name server and a broker at one address.

    Attributes:
        name: Name of the broker.
        routes: Topic -> its queues, on this broker and on *others*.
        others: Further brokers of the cluster.
        version: Version in the responses.
        seen: The received requests, in order.
        addresses: Broker name -> its addresses by broker id in routes; by default it is a master at its own address.
        is_registered: False: the name server has no broker.
    """

    def __init__(self, name: str = "broker-a", version: int = Version.V5_3_3, port: int = 0) -> None:
        self.name = name
        self.version = version
        self.routes: dict[str, list[QueueData]] = {}
        self.others: list[ScriptedBroker] = []
        self.seen: list[RemotingCommand] = []
        self.addresses: dict[str, dict[int, str]] = {}
        self.is_registered = True
        self._offsets: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = RemotingServer(HostAddress("127.0.0.1", port), RemotingServerSettings(), SystemClock())
        self.script(RequestCode.GET_ROUTEINFO_BY_TOPIC, self._route)
        self.script(RequestCode.GET_BROKER_CLUSTER_INFO, self._cluster)
        self.script(RequestCode.HEART_BEAT, RemotingCommand.response)
        self.script(RequestCode.UNREGISTER_CLIENT, RemotingCommand.response)
        self.script(RequestCode.SEND_MESSAGE_V2, self.accept)

    def script(self, code: int, answer: Script) -> None:
        """Set the function that responds to requests with a code."""

        def process(connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
            with self._lock:
                self.seen.append(request)
            response = answer(request)
            if isinstance(response, Future):
                response.add_done_callback(lambda done: connection.reply(self._stamped(done.result())))
                return None
            return None if response is None else self._stamped(response)

        self._server.register(code, process)

    def _stamped(self, response: RemotingCommand) -> RemotingCommand:
        response.version = self.version
        return response

    def refuse(self, code: int, with_code: int, remark: str = "no") -> None:
        """Respond to requests of a code with an error."""
        self.script(code, lambda request: request.response(with_code, remark=remark))

    def drop(self, code: int) -> None:
        """Close the connection when a request of a code arrives, without a response."""

        def process(connection: Connection, request: RemotingCommand) -> None:
            with self._lock:
                self.seen.append(request)
            connection.close("scripted")

        self._server.register(code, process)

    def count(self, code: int) -> int:
        """Return the number of received requests with a code."""
        with self._lock:
            return sum(request.code == code for request in self.seen)

    @property
    def address(self) -> str:
        return str(self._server.address)

    @property
    def port(self) -> int:
        return self._server.address.port

    def topic(self, name: str, queues: int = 4, perm: int = Perm.READ | Perm.WRITE) -> None:
        """Create a topic on this broker and the others."""
        self.routes[name] = [
            QueueData(broker_name=broker.name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
            for broker in (self, *self.others)
        ]

    def accept(self, request: RemotingCommand) -> RemotingCommand:
        """Respond to a send as a broker that has stored the message."""
        header = request.header(SendMessageRequestHeaderV2)
        offset = self._offsets[f"{header.topic}/{header.queue_id}"]
        self._offsets[f"{header.topic}/{header.queue_id}"] += 1
        msg_id = f"7F00000100002A9F{offset:016X}"
        return request.response(
            header=SendMessageResponseHeader(msg_id=msg_id, queue_id=header.queue_id, queue_offset=offset)
        )

    def _brokers(self) -> list[BrokerData]:
        return [
            BrokerData(
                cluster="c",
                broker_name=broker.name,
                broker_addrs=self.addresses.get(broker.name, {0: broker.address}),
            )
            for broker in ((self, *self.others) if self.is_registered else ())
        ]

    def move_to(self, other: ScriptedBroker) -> None:
        """Give this broker the address of another one in all routes. The name server stays."""
        self.addresses[self.name] = {0: other.address}

    def refuse_route_of(self, topic: str) -> None:
        """Refuse requests for the route of one topic."""

        def route(request: RemotingCommand) -> RemotingCommand:
            if request.header(GetRouteInfoRequestHeader).topic == topic:
                return request.response(ResponseCode.NO_PERMISSION, remark="no")
            return self._route(request)

        self.script(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)

    def _route(self, request: RemotingCommand) -> RemotingCommand:
        queues = self.routes.get(request.header(GetRouteInfoRequestHeader).topic)
        if queues is None:
            return request.response(ResponseCode.TOPIC_NOT_EXIST, remark="no such topic")
        return request.response(body=TopicRouteData(queue_datas=queues, broker_datas=self._brokers()).encode())

    def _cluster(self, request: RemotingCommand) -> RemotingCommand:
        brokers = {broker.broker_name: broker for broker in self._brokers()}
        return request.response(
            body=ClusterInfo(broker_addr_table=brokers, cluster_addr_table={"c": list(brokers)}).encode()
        )

    def lose_connections(self) -> None:
        """Close all connections."""
        for connection in self._server.connections():
            connection.close("scripted")

    def stop(self) -> None:
        """Close the listener socket and all connections."""
        self._server.stop()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.stop()
