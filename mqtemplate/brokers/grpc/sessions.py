"""Sessions of clients at a proxy: settings and commands over telemetry streams, heartbeats; and the routes of topics.

Source: RocketMQ ``client-java: ClientImpl``, ``ClientSessionImpl``.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from mqtemplate.brokers.grpc.channels import Channels, RpcError, check_status, is_invalid_argument, rpc_error
from mqtemplate.brokers.grpc.settings import Endpoints, GrpcSettings
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DestinationError,
    RemoteConnectError,
    RemoteTimeoutError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import AddressScheme, ClientType, Code, GrpcMessageType, Permission
from mqtemplate.message import HostAddress, MessageQueue, create_unique_id
from mqtemplate.remoting.sockets import AddressMap, parse_address

_log = get_logger("mqtemplate.remote")

_SETTINGS_MS = 3_000
_REOPEN_S = 1.0
_LEAVE_MS = 1_000
_PYTHON = 6  # Language.PYTHON


@dataclass(frozen=True, slots=True)
class ProxyContext:
    """Settings and connections that the parts of one client share.

    Attributes:
        own_id: Client id of requests that belong to no session of their own, such as those for routes.
    """

    settings: GrpcSettings
    channels: Channels
    own_id: str

    def resource(self, name: str) -> Any:
        """Return a topic or a group as requests name it."""
        return protos.Resource(resource_namespace=self.settings.namespace, name=name)


def new_client_id() -> str:
    """Return an id of a client, unique over all machines."""
    return f"{socket.gethostname()}@{os.getpid()}@{create_unique_id()}"


def endpoints_message(endpoints: Endpoints) -> Any:
    """Return endpoints as requests name them."""
    scheme = {4: AddressScheme.IPv4, 6: AddressScheme.IPv6}.get(endpoints.ip_version or 0, AddressScheme.DOMAIN_NAME)
    addresses = [protos.Address(host=host, port=port) for host, port in endpoints.addresses]
    return protos.Endpoints(scheme=scheme, addresses=addresses)


# --- telemetry ------------------------------------------------------------------------------------


class TelemetryStream:
    """The telemetry stream of one session at one address. Its thread opens it again a second after it has ended."""

    def __init__(self, session: ClientSession, endpoints: Endpoints) -> None:
        self._session = session
        self._endpoints = endpoints
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._failure: BrokerError | None = None
        self._was_accepted = False  # then requests report a lost connection, and a new stream is opened meanwhile
        self._call: Any = None
        name = f"mqtemplate-telemetry-{endpoints}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_for_settings(self, timeout_ms: int) -> None:
        """Return when the proxy has answered the settings once.

        Raises:
            BrokerError: It refused them, or did not answer in time.
        """
        if not self._settled.wait(timeout_ms / 1_000):
            raise RemoteTimeoutError(
                f"{self._endpoints} did not answer the settings of {self._session} in {timeout_ms} ms"
            )
        if (failure := self._failure) is not None:
            raise failure

    def send(self, command: Any) -> None:
        if not self._closed.is_set():
            self._requests.put(command)

    def close(self) -> None:
        self._closed.set()
        self._requests.put(None)
        if (call := self._call) is not None:
            call.cancel()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(_REOPEN_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            failure = self._stream()
            if self._closed.is_set():
                return
            if failure is not None:
                _log.debug("remote.telemetry_ended", server=str(self._endpoints), reason=str(failure))
                if not (self._was_accepted and isinstance(failure, RemoteConnectError)):
                    self._failure = failure
                    self._settled.set()
            self._closed.wait(_REOPEN_S)

    def _stream(self) -> BrokerError | None:
        """Run one stream until it ends. Return its error; None if the proxy ended it without one."""
        operation = f"settings of {self._session}"
        requests = self._requests = SimpleQueue()
        requests.put(self._session.settings_command())
        try:
            self._call = self._session.context.channels.stream(
                self._endpoints, self._session.id, "Telemetry", iter(requests.get, None)
            )
            for command in self._call:
                self._on_command(command, operation)
        except RpcError as exc:
            return _telemetry_error(exc, operation, self._endpoints)
        except BrokerError as exc:
            return exc
        finally:
            requests.put(None)  # ends the thread of grpcio that reads the requests
        return None

    def _on_command(self, command: Any, operation: str) -> None:
        kind = command.WhichOneof("command")
        if command.HasField("status") and kind in (None, "settings"):
            check_status(command.status, operation, self._endpoints)
        if kind == "settings":
            self._session.merged = command.settings
            self._failure = None
            self._was_accepted = True
            self._settled.set()
        elif kind == "reconnect_endpoints_command":
            self._call.cancel()
        elif kind is not None:
            answer = self._session.on_command(kind, command, self._endpoints)
            if answer is not None:
                self.send(answer)


def _telemetry_error(failure: Any, operation: str, endpoints: Endpoints) -> BrokerError:
    if not is_invalid_argument(failure):
        return rpc_error(failure, operation, endpoints, 0)
    return BrokerError.during(
        operation,
        f"{endpoints} refused them: {failure.details()}; the group must exist (mqadmin updateSubGroup), and its topics "
        "and selectors must be valid",
    )


class ClientSession:
    """One client as the proxy sees it: the producer, or one member of a group.

    Args:
        kind: PRODUCER, PUSH_CONSUMER or SIMPLE_CONSUMER.
        title: Name for errors, such as "the producer".
        fill: Writes the part of the settings that depends on the kind.
        on_check: Called with a command to check a transaction, and the address that sent it.

    Attributes:
        merged: Settings as the proxy answered them; None before the first answer.
    """

    def __init__(
        self,
        context: ProxyContext,
        kind: ClientType,
        title: str,
        fill: Callable[[Any], None],
        on_check: Callable[[Any, Endpoints], None] | None = None,
        group: str | None = None,
    ) -> None:
        self.context = context
        self.id = new_client_id()
        self.merged: Any = None
        self._kind = kind
        self._title = title
        self._fill = fill
        self._on_check = on_check
        self._group = group
        self._lock = threading.Lock()
        self._streams: dict[Endpoints, TelemetryStream] = {}
        self._is_closed = False

    def __str__(self) -> str:
        return self._title

    def settings_command(self) -> Any:
        """Return the command that tells the proxy the settings of this client."""
        settings = protos.Settings(
            client_type=int(self._kind), access_point=endpoints_message(self.context.settings.parsed_endpoints)
        )
        settings.request_timeout.FromMilliseconds(self.context.settings.request_timeout_ms)
        settings.user_agent.language = _PYTHON
        settings.user_agent.version = "mqtemplate"
        settings.user_agent.platform = platform.platform()
        settings.user_agent.hostname = socket.gethostname()
        self._fill(settings)
        return protos.TelemetryCommand(settings=settings)

    def join(self, endpoints: Sequence[Endpoints]) -> None:
        """Return when the proxy at each address knows this client.

        Raises:
            BrokerError: One of them refused it, or does not answer.
        """
        timeout_ms = _SETTINGS_MS + self.context.settings.request_timeout_ms
        for each in endpoints:
            stream = self._streams.get(each)
            if stream is None:
                with self._lock:
                    if self._is_closed:
                        raise BrokerClosedError(f"{self._title} is closed; start the broker again")
                    stream = self._streams.get(each)
                    if stream is None:
                        stream = self._streams[each] = TelemetryStream(self, each)
            stream.wait_for_settings(timeout_ms)

    def send_settings(self) -> None:
        """Send the settings again, without waiting for the answer."""
        for stream in list(self._streams.values()):
            stream.send(self.settings_command())

    def heartbeat(self) -> None:
        """Tell each proxy that this client is alive. One that does not know it any more gets the settings again."""
        request = protos.HeartbeatRequest(client_type=int(self._kind))
        if self._group is not None:
            request.group.CopyFrom(self.context.resource(self._group))
        for endpoints, stream in list(self._streams.items()):
            try:
                answer = self.request(endpoints, "Heartbeat", request, f"heartbeat of {self._title}")
            except BrokerError as exc:
                _log.debug("remote.heartbeat_failed", server=str(endpoints), reason=str(exc))
                continue
            if answer.status.code != Code.OK:
                _log.debug("remote.heartbeat_refused", server=str(endpoints), reason=answer.status.message)
                stream.send(self.settings_command())

    def request(
        self, endpoints: Endpoints, method: str, request: Any, operation: str, timeout_ms: int | None = None
    ) -> Any:
        """Send a request of this client, and return the answer."""
        timeout_ms = self.context.settings.request_timeout_ms if timeout_ms is None else timeout_ms
        return self.context.channels.call(endpoints, self.id, method, request, operation, timeout_ms)

    def on_command(self, kind: str, command: Any, endpoints: Endpoints) -> Any:
        """Handle a command of the proxy that is not about settings. Return the answer to it, or None."""
        if kind == "recover_orphaned_transaction_command" and self._on_check is not None:
            self._on_check(command.recover_orphaned_transaction_command, endpoints)
        elif kind == "print_thread_stack_trace_command":
            answer = protos.TelemetryCommand()
            answer.status.code = Code.OK
            answer.thread_stack_trace.nonce = command.print_thread_stack_trace_command.nonce
            answer.thread_stack_trace.thread_stack_trace = _stacks()
            return answer
        elif kind == "verify_message_command":
            answer = protos.TelemetryCommand()
            answer.status.code = Code.NOT_IMPLEMENTED
            answer.status.message = "this client does not consume a message on request of an administrator"
            answer.verify_message_result.nonce = command.verify_message_command.nonce
            return answer
        return None

    def leave(self) -> None:
        """Unregister at each proxy, and close the streams."""
        with self._lock:
            self._is_closed = True
            streams, self._streams = dict(self._streams), {}
        request = protos.NotifyClientTerminationRequest()
        if self._group is not None:
            request.group.CopyFrom(self.context.resource(self._group))
        for endpoints in streams:
            try:
                self.request(endpoints, "NotifyClientTermination", request, f"end of {self._title}", _LEAVE_MS)
            except BrokerError as exc:
                _log.debug("remote.unregister_failed", server=str(endpoints), reason=str(exc))
        for stream in streams.values():
            stream.close()
        for stream in streams.values():
            stream.join()


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


# --- routes ---------------------------------------------------------------------------------------


_READABLE = (Permission.READ, Permission.READ_WRITE)
_WRITABLE = (Permission.WRITE, Permission.READ_WRITE)


@dataclass(frozen=True, slots=True)
class RouteQueue:
    """One queue in a route, and the proxy that serves it."""

    queue: MessageQueue
    endpoints: Endpoints
    is_readable: bool
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Route:
    """Queues of a topic.

    Attributes:
        types: Types of the messages that the topic accepts; empty if the proxy does not say.
    """

    topic: str
    queues: tuple[RouteQueue, ...]
    types: frozenset[GrpcMessageType]

    @property
    def writable(self) -> tuple[RouteQueue, ...]:
        """Queues that accept messages."""
        return tuple(each for each in self.queues if each.is_writable)

    @property
    def endpoints(self) -> tuple[Endpoints, ...]:
        """Addresses of all proxies of the topic, each once."""
        return tuple(dict.fromkeys(each.endpoints for each in self.queues))

    def of_brokers(self) -> tuple[RouteQueue, ...]:
        """Return one readable queue of each broker."""
        found: dict[tuple[str, Endpoints], RouteQueue] = {}
        for each in self.queues:
            if each.is_readable:
                found.setdefault((each.queue.broker_name, each.endpoints), each)
        return tuple(found.values())


class Routes:
    """Routes of topics, as the proxy answered last."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context
        self._reached_at = AddressMap(context.settings.address_map)
        self._routes: dict[str, Route] = {}

    def get(self, topic: str) -> Route:
        """Return the route of a topic.

        Raises:
            DestinationError: There is no such topic.
            BrokerError: The proxy does not answer, or refuses it.
        """
        found = self._routes.get(topic)
        if found is None:
            found = self._routes[topic] = self._query(topic)
        return found

    def forget(self, topic: str) -> None:
        """Request the route again when it is needed the next time."""
        self._routes.pop(topic, None)

    def refresh(self) -> None:
        """Request all known routes again. One that the proxy refuses stays as it is.

        Raises:
            RemoteConnectError, RemoteTimeoutError: The proxy does not answer.
        """
        for topic in list(self._routes):
            try:
                self._routes[topic] = self._query(topic)
            except DestinationError:
                self._routes.pop(topic, None)
            except (RemoteConnectError, RemoteTimeoutError):
                raise
            except BrokerError as exc:
                _log.warning("remote.route_refresh_failed", topic=topic, reason=str(exc))

    def _query(self, topic: str) -> Route:
        context, operation = self._context, f"route of {topic!r}"
        endpoints = context.settings.parsed_endpoints
        request = protos.QueryRouteRequest(topic=context.resource(topic), endpoints=endpoints_message(endpoints))
        timeout_ms = context.settings.request_timeout_ms
        answer = context.channels.call(endpoints, context.own_id, "QueryRoute", request, operation, timeout_ms)
        if answer.status.code in (Code.TOPIC_NOT_FOUND, Code.ILLEGAL_TOPIC):
            raise unknown_topic(topic, endpoints, answer.status.message)
        check_status(answer.status, operation, endpoints)
        queues = tuple(self._route_queue(topic, each) for each in answer.message_queues)
        types = {kind for each in answer.message_queues for kind in each.accept_message_types}
        return Route(topic, queues, frozenset(GrpcMessageType(kind) for kind in types if kind in _KNOWN_TYPES))

    def _route_queue(self, topic: str, given: Any) -> RouteQueue:
        named = [str(HostAddress(each.host, each.port)) for each in given.broker.endpoints.addresses]
        reached = [parse_address(self._reached_at(name)) for name in named]
        endpoints = Endpoints(tuple((address.ip, address.port) for address in reached))
        queue = MessageQueue(topic, given.broker.name, given.id)
        return RouteQueue(queue, endpoints, given.permission in _READABLE, given.permission in _WRITABLE)


_KNOWN_TYPES = frozenset(map(int, GrpcMessageType)) - {0}


def unknown_topic(topic: str, endpoints: Endpoints, reason: str) -> DestinationError:
    """Return the error for a topic that the proxy does not have."""
    return DestinationError(
        f"topic {topic!r} is not known at {endpoints} ({reason}); the protocol creates no topics: let an administrator "
        f"do it, as by mqadmin updateTopic -c DefaultCluster -t {topic} -a +message.type=NORMAL"
    )
