"""The service ``apache.rocketmq.v2.MessagingService`` on a gRPC server: every method of RocketMQ's proxy.

PullMessage, UpdateOffset, GetOffset and QueryOffset are not registered, as in RocketMQ's proxy: gRPC answers
UNIMPLEMENTED.

Source: RocketMQ ``proxy: GrpcMessagingApplication``, ``DefaultGrpcMessingActivity``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple
from weakref import WeakSet

from mqtemplate.engine.pop.pop import PopService
from mqtemplate.errors import StoreError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.http2.grpc_server import GrpcCall, GrpcLimits, GrpcServer, GrpcStatus, GrpcStreamHandler
from mqtemplate.message import HostAddress
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.remoting.worker_pool import HeavyWork
from mqtemplate.server.core.server_core import ServerCore
from mqtemplate.server.fast_path.pipelines import INLINE_MESSAGES
from mqtemplate.server.grpc_api.answers import GrpcAnswers, ok
from mqtemplate.server.grpc_api.checks import (
    INLINE_BYTES,
    check_encoded_fields,
    check_encoded_messages,
    check_encoded_settings,
)
from mqtemplate.server.grpc_api.clients import GrpcClients, status_command
from mqtemplate.server.grpc_api.consuming import GrpcConsuming
from mqtemplate.server.grpc_api.context import GrpcContext, GrpcContexts
from mqtemplate.server.grpc_api.gathered import GatheredAcks, GatheredSends
from mqtemplate.server.grpc_api.producing import GrpcProducing
from mqtemplate.server.grpc_api.status import GrpcRefusedError, code_of, error_status, is_expected
from mqtemplate.server.requests.registration import MAX_BODY_BYTES

_Handler = Callable[[GrpcContext, Any], Any]

_WITH_BODIES = "SendMessage"
"""The only method whose messages may be larger than `MAX_BODY_BYTES`."""
_ENTRIES = {"SendMessage": "messages", "AckMessage": "entries"}
"""Repeated field of a request, each entry of which is work."""


class GrpcEndpoint:
    """The gRPC server of a broker server, and its service.

    Args:
        advertised: Address in routes. Its port 0 stands for the real one. None: *host*, with the real port.
        remoting: TLS and limits of the connections are the same for both protocols.
        host: Returns the host that clients of the other protocol connect to.

    Attributes:
        server: The listener socket and its connections.
        service: The methods.

    Raises:
        ConfigurationError: A file in the TLS settings cannot be used.
    """

    def __init__(
        self,
        core: ServerCore,
        listen: HostAddress,
        advertised: HostAddress | None,
        remoting: RemotingServerSettings,
        heavy: HeavyWork,
        host: Callable[[], str],
    ) -> None:
        engine = core.registration.engine
        given = {each.name: getattr(remoting, each.name) for each in fields(RemotingServerSettings)}
        del given["max_partial_bytes"]  # a frame of this protocol may be larger
        self.server = GrpcServer(listen, engine.clock, GrpcLimits(**given), engine.metrics, heavy=heavy)
        self._advertised = advertised
        self._host = host
        self.service = MessagingService(self.server, core, engine.pop, lambda: self.address)

    @property
    def address(self) -> HostAddress:
        """Address in routes."""
        port = self.server.address.port
        if self._advertised is None:
            return HostAddress(self._host(), port)
        return HostAddress(self._advertised.ip, self._advertised.port or port)

    def stop(self, timeout_s: float) -> None:
        """End all calls and close all connections. It waits for calls in progress up to *timeout_s*."""
        # First the clients get GOAWAY: they must not repeat a receive on the connection on which it was answered.
        self.server.drain()
        self.service.close()
        self.server.stop(timeout_s)


class _UnaryMethod(NamedTuple):
    """A unary or server streaming method.

    Attributes:
        request: Class of its message.
        handler: Returns the answer; None if it answers later.
    """

    name: str
    request: Any
    handler: _Handler


class MessagingService:
    """RocketMQ 5's gRPC protocol over the core of a server.

    Args:
        address: Returns the address that routes tell clients: all calls go there.

    Attributes:
        clients: The clients by their IDs.
        consuming: The methods of consumers, with the receives that wait.
        max_subscriptions: Most subscriptions of a consumer.
    """

    def __init__(
        self, server: GrpcServer, core: ServerCore, pop: PopService, address: Callable[[], HostAddress]
    ) -> None:
        engine = core.registration.engine
        self._server = server
        self._answers = GrpcAnswers(server, engine.clock)
        self._contexts = GrpcContexts(core.access, engine.clock)
        self._creations = core.creations
        self._max_batch = core.settings.max_batch_messages
        self.max_subscriptions = core.settings.max_subscriptions_per_connection
        producing = GrpcProducing(core, self._answers, address)
        self.clients = GrpcClients(core, producing.check_command, pop, server.loop.call_later)
        self.consuming = consuming = GrpcConsuming(core, pop, self._answers, self.clients, address)
        self._streams_lock = threading.Lock()
        self._streams: WeakSet[_Telemetry] = WeakSet()  # one that the server finishes is not reported
        engine.metrics.gauge("server.grpc_clients", lambda: len(self.clients))
        has_fast_path = not core.sends.decodes_all and core.access.settings is None
        for name, handler in (
            ("QueryRoute", producing.query_route),
            ("Heartbeat", self._heartbeat),
            ("SendMessage", producing.send),
            ("QueryAssignment", consuming.query_assignment),
            ("ReceiveMessage", consuming.receive),
            ("AckMessage", consuming.ack),
            ("ForwardMessageToDeadLetterQueue", consuming.forward),
            ("EndTransaction", producing.end_transaction),
            ("NotifyClientTermination", self._terminate),
            ("ChangeInvisibleDuration", consuming.change_invisible),
            ("RecallMessage", producing.recall),
            ("SyncLiteSubscription", _refuse_lite),
        ):
            method = self._unary(_UnaryMethod(name, getattr(protos, f"{name}Request"), handler))
            gathered = None
            if name == "SendMessage" and has_fast_path:
                gathered = GatheredSends(core, producing, self._contexts, method).process
            elif name == "AckMessage" and has_fast_path:
                gathered = GatheredAcks(consuming, self._contexts, method).process
            server.register(protos.method_path(name), method, gathered)
        server.register_stream(protos.method_path("Telemetry"), self._open_telemetry)
        server.on_close(lambda connection: core.access.client_ids.forget(connection.id))

    def _unary(self, method: _UnaryMethod) -> Callable[[GrpcCall, bytes], None]:
        name, request_class, handler = method
        contexts, answers, entries = self._contexts, self._answers, _ENTRIES.get(name)

        def handle(call: GrpcCall, data: bytes) -> None:
            try:
                context = contexts.of(call, name)
                is_short = len(data) <= INLINE_BYTES or self._is_short(name, data)
            except Exception as exc:
                answers.fail(call, exc)
            else:
                if is_short:
                    decode(context, data)
                else:
                    self._server.run(call, lambda: decode(context, data, in_worker=True))

        def decode(context: GrpcContext, data: bytes, *, in_worker: bool = False) -> None:
            call = context.call
            try:
                if in_worker and name == _WITH_BODIES:
                    check_encoded_messages(data, self._max_batch)
                elif in_worker:
                    check_encoded_fields(data)
                request = request_class.FromString(data)
                contexts.check_rights(context, name, request)
            except protos.DecodeError as exc:
                call.finish(GrpcStatus.INTERNAL, f"the message is not a {name}Request: {exc}")
            except Exception as exc:
                answers.fail(call, exc)
            else:
                if not in_worker and entries is not None and len(getattr(request, entries)) > INLINE_MESSAGES:
                    answers.later(call, lambda: handler(context, request))
                else:
                    answers.now(call, lambda: handler(context, request))

        return handle

    def _is_short(self, name: str, data: bytes) -> bool:
        """Return True if a large request takes little time to decode: it has few messages.

        Raises:
            GrpcRefusedError: It is too large.
        """
        if name == _WITH_BODIES:
            return check_encoded_messages(data, self._max_batch, most_inline=INLINE_MESSAGES)
        if len(data) > MAX_BODY_BYTES:
            raise GrpcRefusedError(
                Code.PAYLOAD_TOO_LARGE, f"the request has {len(data)} bytes, allowed are {MAX_BODY_BYTES}"
            )
        return False

    # --- clients -------------------------------------------------------------------------------

    def _heartbeat(self, context: GrpcContext, request: Any) -> Any:
        client = self.clients.find(context)
        if client is not None and client.group is not None and not self._creations.has_group(client.group):
            self._answers.later(context.call, lambda: self._heard(context, request))  # the group was deleted
            return None
        return self._heard(context, request)

    def _heard(self, context: GrpcContext, request: Any) -> Any:
        self.clients.heartbeat(context, request.group.name)
        return protos.HeartbeatResponse(status=ok())

    def _terminate(self, context: GrpcContext, request: Any) -> Any:
        self.clients.terminate(context)
        return protos.NotifyClientTerminationResponse(status=ok())

    def close(self) -> None:
        """Answer the receives that wait, and end the streams of all clients: the server stops."""
        self.consuming.close()
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.end()

    # --- telemetry -----------------------------------------------------------------------------

    def _open_telemetry(self, call: GrpcCall) -> GrpcStreamHandler:
        try:
            context = self._contexts.of(call, "Telemetry")
        except GrpcRefusedError as exc:
            call.write(status_command(error_status(exc)))
            call.finish()
            return _ClosedStream()
        stream = _Telemetry(self, context)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def forget(self, stream: _Telemetry, context: GrpcContext) -> None:
        """Forget a stream that has ended."""
        with self._streams_lock:
            self._streams.discard(stream)
        self.clients.detach(context)

    def run(self, context: GrpcContext, work: Callable[[], None]) -> None:
        """Do work of a stream in a worker thread."""
        self._server.run(context.call, work)

    def report(self, context: GrpcContext, command: Any) -> None:
        """Take over the settings of a client, and answer with the ones that hold."""
        call = context.call
        try:
            self._contexts.check_rights(context, "Telemetry", command)
            settings = self.clients.report(context, command.settings)
        except Exception as exc:
            self.end_telemetry(call, exc)
            return
        # Python ignores an answer without the status.
        answer = protos.TelemetryCommand(status=ok(), settings=settings)
        self.clients.attach(context, answer.SerializeToString())

    def end_telemetry(self, call: GrpcCall, error: Exception) -> None:
        """End a stream of telemetry after an error."""
        code = code_of(error)
        if code is Code.UNAUTHORIZED:
            call.write(status_command(error_status(error)))
            call.finish()
        elif code in _INVALID:
            call.finish(GrpcStatus.INVALID_ARGUMENT, str(error))
        elif code is Code.TOO_MANY_REQUESTS:
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, str(error))
        else:
            if not is_expected(error) and not isinstance(error, StoreError):
                self._answers.log_unexpected(call, error)
            call.finish(GrpcStatus.INTERNAL, str(error) or type(error).__name__)


_INVALID = frozenset(
    {code for code in Code if Code.BAD_REQUEST <= code < Code.UNAUTHORIZED} | {Code.CONSUMER_GROUP_NOT_FOUND}
)
"""Codes of settings that are wrong: a client that sends them again gets the same answer."""


class _ClosedStream:
    """Ignores what still arrives on a stream that was ended when it opened."""

    def on_message(self, message: bytes) -> None:
        """Ignore it."""

    def on_half_closed(self) -> None:
        """Ignore it."""

    def on_closed(self) -> None:
        """Ignore it."""


class _Telemetry:
    """The stream of one client: it sends settings, and the server commands."""

    def __init__(self, service: MessagingService, context: GrpcContext) -> None:
        self._service = service
        self._context = context

    def on_message(self, message: bytes) -> None:
        call = self._context.call
        if len(message) > MAX_BODY_BYTES:
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, f"a command has at most {MAX_BODY_BYTES} bytes")
        elif len(message) > INLINE_BYTES:
            self._service.run(self._context, lambda: self._decode(message, in_worker=True))
        else:
            self._decode(message)

    def _decode(self, message: bytes, *, in_worker: bool = False) -> None:
        call = self._context.call
        try:
            if in_worker:
                check_encoded_settings(message, self._service.max_subscriptions)
            command = protos.TelemetryCommand.FromString(message)
        except GrpcRefusedError as exc:
            self._service.end_telemetry(call, exc)
            return
        except protos.DecodeError as exc:
            call.finish(GrpcStatus.INTERNAL, f"the message is not a TelemetryCommand: {exc}")
            return
        kind = command.WhichOneof("command")
        if kind == "settings" and in_worker:  # it takes many times the memory of the message, so it must not wait
            self._service.report(self._context, command)
        elif kind == "settings":
            # In a worker thread: a group may have to be created.
            self._service.run(self._context, lambda: self._service.report(self._context, command))
        elif kind in ("thread_stack_trace", "verify_message_result"):
            client = self._service.clients.find(self._context)
            if client is not None:
                client.answered(getattr(command, kind).nonce, command)

    def on_half_closed(self) -> None:
        self.end()

    def on_closed(self) -> None:
        self._service.forget(self, self._context)

    def end(self) -> None:
        """End the stream. The client opens another one; when it sees the end, it gets no more commands on this one."""
        self._service.forget(self, self._context)
        self._context.call.finish()


def _refuse_lite(context: GrpcContext, request: Any) -> Any:
    raise GrpcRefusedError(
        Code.NOT_IMPLEMENTED, "lite topics are not implemented; use an ordinary topic with filters by tag"
    )
