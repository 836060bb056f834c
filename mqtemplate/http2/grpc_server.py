"""Server for gRPC over HTTP/2: its connections, and methods by name, in the I/O thread or in worker threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from logging import ERROR
from typing import NamedTuple, Protocol

from mqtemplate.clock import Clock
from mqtemplate.durations import format_ms
from mqtemplate.http2.connection import Http2Connection
from mqtemplate.http2.frames import ErrorCode, Http2Error
from mqtemplate.http2.grpc_call import (
    CallConnection,
    GatheredHandler,
    GrpcCall,
    GrpcStreamHandler,
    StreamOpener,
    UnaryHandler,
)
from mqtemplate.http2.grpc_wire import GrpcStatus
from mqtemplate.http2.limits import AddressBudgets, GrpcLimits, Http2Limits
from mqtemplate.http2.streams import Http2Stream
from mqtemplate.message import HostAddress
from mqtemplate.metrics import OTHER, Counter, Metrics
from mqtemplate.remoting.io_loop import TURN_S
from mqtemplate.remoting.settings import LoadedTls
from mqtemplate.remoting.sockets import Stream
from mqtemplate.remoting.tcp_server import ALPN_HTTP2, TcpServer
from mqtemplate.remoting.transport import SocketOwner
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
_MAX_GATHERED = 64
"""Most calls that are processed together: less than a millisecond in the I/O thread."""
_MAX_GATHERED_BYTES = 256 << 10
_JOIN_BYTES = 65_536
"""Output up to this size is sent as one part: one part is sent faster than many."""


# --- connection -----------------------------------------------------------------------------------


class GrpcOwner(SocketOwner, Protocol):
    """Server that a connection belongs to.

    Attributes:
        resets: Numbers of streams that may end by RST_STREAM, by the clients' addresses.
    """

    grpc_limits: GrpcLimits
    resets: AddressBudgets

    def open_call(self, connection: GrpcConnection, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        """Return the call of a new stream."""

    def on_closed(self, connection: GrpcConnection, reason: str) -> None:
        """Handle the end of the connection."""


class GrpcConnection(CallConnection):
    """Connection of a gRPC client. All calls that arrive in one read are answered with one write.

    Attributes:
        loop: The I/O loop, in whose thread the calls are.
        read_ms: Time of the last read.
        max_message_bytes: Size of the largest message of the client.
        held_messages: Bytes of messages that are not passed to their handler yet.
    """

    def __init__(self, stream: Stream, remote: HostAddress, owner: GrpcOwner) -> None:
        super().__init__(stream, remote, owner, self._receive)
        self.loop = owner.loop
        self.max_message_bytes = owner.grpc_limits.max_message_bytes
        self.held_messages = 0
        self.read_ms = self._last_call_ms = self.loop.now_ms()
        self._owner = owner
        self._http2 = Http2Connection(
            owner.grpc_limits.http2,
            self._open_call,
            self.loop.now_ms,
            self._plan_output,
            self.process_gathered,
            owner.resets.of(remote.ip),
        )
        self._new_calls: list[GrpcCall] = []
        self._gathered: list[tuple[GrpcCall, bytes]] = []  # of one method
        self._gathered_bytes = 0
        self._gathered_handler: GatheredHandler | None = None
        self._queued_bytes = 0  # as it was counted
        self._ending: deque[Callable[[], None]] = deque()  # reports of the end of the connection to its calls

    @property
    def unread_bytes(self) -> int:
        return self._outbound.size + self._queued_bytes

    @property
    def open_calls(self) -> int:
        """Number of calls whose response is not complete."""
        return len(self._http2.outbound.streams)

    def start(self) -> None:
        """Watch the socket, and send the settings."""
        self._send_output()
        self._http2.outbound.is_collecting = False
        super().start()

    def drain(self, reason: str) -> None:
        """Let the client open no more calls on this connection. Called in the I/O thread."""
        if not self._is_ended and not self._http2.is_going_away:
            self._http2.go_away(Http2Error(ErrorCode.NO_ERROR, reason))
            self._send_output()  # at once: the server may close the connection next

    def log_failure(self, call: GrpcCall, exc: Exception) -> None:
        self._owner.peer_log.log(ERROR, "grpc.call_failed", call=str(call), exc_info=exc)

    # --- protocol -----------------------------------------------------------------------------------

    def _open_call(self, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        call = self._owner.open_call(self, stream, headers)
        self._new_calls.append(call)
        return call

    def gather(self, call: GrpcCall, message: bytes, handler: GatheredHandler) -> None:
        if handler is not self._gathered_handler:
            self.process_gathered()
            self._gathered_handler = handler
        self._gathered.append((call, message))
        self._gathered_bytes += len(message)
        if len(self._gathered) >= _MAX_GATHERED or self._gathered_bytes >= _MAX_GATHERED_BYTES:
            self.process_gathered()

    def process_gathered(self) -> None:
        handler, calls = self._gathered_handler, self._gathered
        if not calls or handler is None:
            return
        self._gathered, self._gathered_bytes, self._gathered_handler = [], 0, None
        try:
            handler(calls)
        except Exception as exc:
            for call, _ in calls:
                call.fail(exc)

    def _receive(self, data: memoryview) -> None:
        self.read_ms = self._last_traffic_ms
        self._http2.feed(bytes(data))

    def _held_bytes(self) -> int:
        return self._http2.partial_bytes + self.held_messages

    def _process_until(self, limit: int, end_s: float) -> bool:
        try:
            has_more = self._http2.process(end_s)
        finally:
            self._units_read = self._http2.frames_read
            self._send_output()
        if self._new_calls:
            self._last_call_ms = self.read_ms
            calls, self._new_calls = self._new_calls, []
            for call in calls:
                call.start_timer()
        return has_more or self._outbound.size > limit

    def _plan_output(self) -> None:
        self.loop.call_soon(self._send_output)

    def _send_output(self) -> None:
        """Send the frames that are ready, and count what the client's windows do not permit yet."""
        outbound = self._http2.outbound
        parts = outbound.take_output()
        if parts and not self._is_ended:
            if len(parts) > 1 and sum(map(len, parts)) <= _JOIN_BYTES:
                parts = [b"".join(parts)]
            if self._send(parts):
                outbound.note_written(self._outbound.size)
        if outbound.queued_bytes != self._queued_bytes:
            added, self._queued_bytes = outbound.queued_bytes - self._queued_bytes, outbound.queued_bytes
            self._owner.unread_output.add(added)
            if self._queued_bytes > self._limits.max_unread_bytes:
                self._close(f"the client does not permit to send {self._queued_bytes} bytes of responses", is_bad=True)

    def accepted_bytes(self, stream: Http2Stream) -> int:
        self._http2.outbound.note_accepted(self._outbound.size + self._lost_bytes)
        return stream.accepted_bytes

    def when_read(self, stream: Http2Stream, on_read: Callable[[], None]) -> None:
        def answered() -> None:
            if not self._http2.was_reset(stream.id):
                on_read()

        self._http2.ping(answered)

    # --- ends ---------------------------------------------------------------------------------------

    def _check_timeouts(self) -> None:
        if self._is_ended:
            return
        now, idle_ms = self.loop.now_ms(), self._limits.idle_ms
        if self.open_calls:
            self._last_call_ms = now
        stall_ms = self._owner.grpc_limits.stall_ms
        for stream in self._http2.outbound.stalled(now - stall_ms):
            self._owner.peer_log.warning(
                "grpc.call_stalled",
                remote=str(self.remote),
                reason=f"the client read nothing for {format_ms(stall_ms)}",
            )
            if isinstance(stream.receiver, GrpcCall):
                stream.receiver.cancel(ErrorCode.CANCEL)
        if not self.open_calls and now - self._last_call_ms >= idle_ms:
            self.drain("no calls")
            self.end(f"no calls for {format_ms(idle_ms)}")
        elif now - self.read_ms >= idle_ms:
            self.end(f"the client has sent nothing for {format_ms(idle_ms)}, and did not respond to a PING")
        elif now - self.read_ms >= idle_ms / 2:
            self._http2.ping()
        super()._check_timeouts()

    def _on_ended(self, reason: str) -> None:
        self._owner.unread_output.add(-self._queued_bytes)
        self._queued_bytes = 0
        self._owner.resets.keep(self.remote.ip, self._http2.resets)
        self._feed = _ignore  # the other function refers to this object
        # The responses of the latter were complete.
        streams = self._http2.outbound.unaccepted()
        unaccepted = [stream.receiver for stream in streams]
        self._ending.extend(partial(receiver.on_reset, reason) for receiver in self._http2.close())
        self._ending.extend(call.report_unsent for call in unaccepted if isinstance(call, GrpcCall))
        for stream in streams:
            stream.receiver = None  # it refers to the stream
        self._end_calls()

    def take_turn(self) -> None:
        if self._is_ended:
            self._end_calls()
        else:
            super().take_turn()

    def _end_calls(self) -> None:
        """Tell the handlers of the calls for one turn that the connection is closed: there may be a thousand."""
        self._is_in_line = False
        end_s = time.monotonic() + TURN_S
        while self._ending:
            self._ending.popleft()()
            if self._ending and time.monotonic() >= end_s:
                self._wait_for_turn()
                return
        self._owner.on_closed(self, self._end_reason)


def _ignore(data: memoryview) -> None:
    """Ignore bytes: the connection is closed."""


# --- server ---------------------------------------------------------------------------------------


class _GrpcMethod(NamedTuple):
    unary: UnaryHandler | None
    open_stream: StreamOpener | None
    gathered: GatheredHandler | None
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
        self.resets = AddressBudgets(limits.http2.max_resets, limits.http2.resets_per_s, self.loop.now_ms)
        self._metrics = metrics
        self._methods: dict[str, _GrpcMethod] = {}
        self._unknown = metrics.counter("grpc.calls", method=OTHER)
        metrics.gauge("grpc.connections", lambda: len(self._connections))
        metrics.gauge("grpc.open_calls", lambda: sum(each.open_calls for each in self.connections()))
        self.use_tls(self.tls)

    # --- for its owner ------------------------------------------------------------------------------

    def register(self, method: str, unary: UnaryHandler, gathered: GatheredHandler | None = None) -> None:
        """Pass the only message of each call of *method* to *unary*, with the call; it may respond with many.

        Args:
            method: Full name: ``/package.Service/Method``.
            gathered: Gets the calls instead, those together that were read together.
        """
        self._methods[method] = _GrpcMethod(unary, None, gathered, self._metrics.counter("grpc.calls", method=method))

    def register_stream(self, method: str, open_stream: StreamOpener) -> None:
        """Let *open_stream* return the handler of each call of *method*, whose client sends a stream of messages."""
        self._methods[method] = _GrpcMethod(None, open_stream, None, self._metrics.counter("grpc.calls", method=method))

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

        self._count_inline(-1)
        if not self._workers.submit(call.connection, run_if_open, call.request_bytes + held_bytes):
            call.finish(GrpcStatus.RESOURCE_EXHAUSTED, "too many calls wait for a thread already; try again later")

    # --- interface of connections -------------------------------------------------------------------

    def open_call(self, connection: GrpcConnection, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        """Return the call of a new stream."""
        self.request_count += 1
        self._count_inline()
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
            call.start(method.unary, method.open_stream, method.gathered)
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
