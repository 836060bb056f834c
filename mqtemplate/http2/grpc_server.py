"""Server for gRPC over HTTP/2: methods by name, in the I/O thread or in worker threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.http2.grpc_call import (
    GrpcCall,
    GrpcConnection,
    GrpcStreamHandler,
    StreamOpener,
    UnaryHandler,
)
from mqtemplate.http2.grpc_wire import GrpcStatus
from mqtemplate.http2.limits import GrpcLimits, Http2Limits
from mqtemplate.http2.streams import Http2Stream
from mqtemplate.message import HostAddress
from mqtemplate.metrics import OTHER, Counter, Metrics
from mqtemplate.remoting.settings import LoadedTls
from mqtemplate.remoting.sockets import Stream
from mqtemplate.remoting.tcp_server import ALPN_HTTP2, TcpServer
from mqtemplate.remoting.worker_pool import HeavyWork

__all__ = [
    "GrpcCall",
    "GrpcConnection",
    "GrpcLimits",
    "GrpcServer",
    "GrpcStatus",
    "GrpcStreamHandler",
    "Http2Limits",
]

_CONTENT_TYPE = "application/grpc"


class _GrpcMethod(NamedTuple):
    unary: UnaryHandler | None
    open_stream: StreamOpener | None
    calls: Counter


class GrpcServer(TcpServer[GrpcConnection]):
    """Server that passes each call to the handler of its method.

    - Handlers are called in the I/O thread, and must not block; `run` moves work that blocks to a worker thread.
    - A call whose handler raises an exception ends with INTERNAL, a call of an unknown method with UNIMPLEMENTED, one
      above a limit with RESOURCE_EXHAUSTED.
    - When it stops, clients get GOAWAY, after which they open no more calls. It waits for those that are open.
    """

    def __init__(
        self,
        listen: HostAddress,
        clock: Clock,
        limits: GrpcLimits,
        metrics: Metrics,
        *,
        heavy: HeavyWork | None = None,
    ) -> None:
        refused = metrics.counter("grpc.refused_connections")
        super().__init__(listen, "mqtemplate-grpc", limits, clock, refused_connections=refused, heavy=heavy)
        self.grpc_limits = limits
        self._metrics = metrics
        self._methods: dict[str, _GrpcMethod] = {}
        self._unknown = metrics.counter("grpc.calls", method=OTHER)
        metrics.gauge("grpc.connections", lambda: len(self._connections))
        metrics.gauge("grpc.open_calls", lambda: sum(each.open_calls for each in self.connections()))
        self.use_tls(self.tls)

    # --- for its owner ------------------------------------------------------------------------------

    def register(self, method: str, unary: UnaryHandler) -> None:
        """Pass the only message of each call of *method* to *unary*, with the call; it may respond with many.

        Args:
            method: Full name: ``/package.Service/Method``.
        """
        self._methods[method] = _GrpcMethod(unary, None, self._metrics.counter("grpc.calls", method=method))

    def register_stream(self, method: str, open_stream: StreamOpener) -> None:
        """Let *open_stream* return the handler of each call of *method*, whose client sends a stream of messages."""
        self._methods[method] = _GrpcMethod(None, open_stream, self._metrics.counter("grpc.calls", method=method))

    def use_tls(self, tls: LoadedTls | None) -> None:
        """Use another certificate, or other settings of TLS, for new connections. The open ones stay as they are."""
        if tls is not None:
            tls.context.set_alpn_protocols([ALPN_HTTP2])
        super().use_tls(tls)

    def drain(self) -> None:
        """Send GOAWAY to all clients, which then open their next calls on other connections. `stop` does it, too."""
        self._start_draining()

    def run(self, call: GrpcCall, work: Callable[[], None], held_bytes: int = 0) -> None:
        """Do *work* of a call in a worker thread, where it may block. The clients' connections take turns.

        The call ends with RESOURCE_EXHAUSTED if too much work waits already, and with INTERNAL if *work* raises an
        exception. Work of a call that has ended is dropped.

        Args:
            held_bytes: Size of what *work* holds beside the request.
        """

        def run_if_open() -> None:
            if call.is_open:
                try:
                    work()
                except Exception as exc:
                    call.fail(exc)

        self._heavy.move_to_thread()
        if not self._workers.submit(call.connection, run_if_open, call.request_bytes + held_bytes):
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, "too many calls wait for a thread already; try again later")

    # --- interface of connections -------------------------------------------------------------------

    def open_call(self, connection: GrpcConnection, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        """Return the call of a new stream."""
        self.request_count += 1
        self._heavy.count_inline()
        path, verb = headers.pop(":path"), headers.pop(":method")
        del headers[":scheme"]
        headers.pop(":authority", None)
        call = GrpcCall(path, headers, connection, stream, connection.read_ms)
        content_type = headers.get("content-type", "")
        if verb != "POST":
            call.send_http(((":status", "405"), ("allow", "POST")))
        elif content_type != _CONTENT_TYPE and not content_type.startswith((f"{_CONTENT_TYPE}+", f"{_CONTENT_TYPE};")):
            call.send_http(((":status", "415"), ("accept", _CONTENT_TYPE)))
        elif (method := self._methods.get(path)) is None:
            self._unknown.add()
            call.finish(GrpcStatus.UNIMPLEMENTED, f"this server has no method {path:.200}")
        else:
            method.calls.add()
            call.start(method.unary, method.open_stream)
        return call

    # --- connections --------------------------------------------------------------------------------

    def _new_connection(self, stream: Stream, remote: HostAddress) -> GrpcConnection:
        return GrpcConnection(stream, remote, self)

    def _start_draining(self) -> None:
        self.loop.call_soon(self._drain_connections)

    def _drain_connections(self) -> None:
        for connection in self.connections():
            connection.drain("the server is stopped")

    def _is_busy(self, connection: GrpcConnection) -> bool:
        return bool(connection.open_calls or connection.unread_bytes)
