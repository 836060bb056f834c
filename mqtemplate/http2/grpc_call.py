"""gRPC on one HTTP/2 connection: each stream is a call with messages, a deadline and a status.

Source: grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from logging import ERROR
from typing import Protocol
from urllib.parse import quote

from mqtemplate.durations import format_ms
from mqtemplate.http2.connection import Http2Connection
from mqtemplate.http2.frames import ErrorCode, Http2Error
from mqtemplate.http2.limits import GrpcLimits
from mqtemplate.http2.streams import Fields, Http2Stream
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import Timer
from mqtemplate.remoting.sockets import Stream
from mqtemplate.remoting.transport import SocketConnection, SocketOwner
from mqtemplate.user_code import error_text


class GrpcStatus(IntEnum):
    """Status of a call. Source: grpc/grpc, doc/statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class GrpcStreamHandler(Protocol):
    """Handler of one call whose client sends a stream of messages. It is called in the I/O thread."""

    def on_message(self, message: bytes) -> None:
        """Handle the next message."""

    def on_half_closed(self) -> None:
        """Handle the end of the messages: the client sends no more of them."""

    def on_closed(self) -> None:
        """Handle the end of the call before `GrpcCall.finish`."""


UnaryHandler = Callable[["GrpcCall", bytes], None]
StreamOpener = Callable[["GrpcCall"], GrpcStreamHandler]

# --- fields and messages on the wire --------------------------------------------------------------


PREFIX_BYTES = 5
"""A message starts with a flag (1: it is compressed), and its length in four bytes."""

_HEAD: Fields = ((":status", "200"), ("content-type", "application/grpc"))
_OK: Fields = (("grpc-status", "0"),)
_MAX_DETAILS_BYTES = 2_000
"""Each may become three, and clients limit the size of trailers to 8 KiB."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_MS = {"H": 3_600_000.0, "M": 60_000.0, "S": 1_000.0, "m": 1.0, "u": 0.001, "n": 0.000_001}
_LONGEST_TIMER_MS = 3_600_000.0
"""Deadlines may be decades ahead, which no operating system takes as a timeout."""


def parse_timeout(text: str) -> float | None:
    """Return the milliseconds of a ``grpc-timeout``; None if it has another form."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]


def status_fields(status: GrpcStatus, details: str) -> Fields:
    """Return the trailers of a status. The details are percent-encoded UTF-8."""
    if status is GrpcStatus.OK and not details:
        return _OK
    fields = ("grpc-status", str(int(status)))
    if not details:
        return (fields,)
    text = details.encode("utf-8", "replace")[:_MAX_DETAILS_BYTES].decode("utf-8", "ignore")
    return (fields, ("grpc-message", quote(text, safe=_PRINTABLE)))


def framed(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


# --- call -----------------------------------------------------------------------------------------


class GrpcCall:
    """One call of a client.

    Any thread may call `write`, `finish` and `reply`; several calls of one thread take effect in their order. After the
    end of the call they do nothing. Everything else belongs to the I/O thread.

    Attributes:
        method: Full name: ``/apache.rocketmq.v2.MessagingService/SendMessage``.
        metadata: Fields of the request by lower-case name, without those of HTTP/2 itself.
        connection: The client's connection.
        on_closed: Called in the I/O thread if the call ends before `finish`: the client reset it, its deadline has
            passed, or the connection was lost. Not for handlers of streams, which have a method for it.
        on_leaving: Called in the I/O thread if the client opens no more calls on the connection (GOAWAY), and may wait
            for the end of this one before it closes it.
        on_unsent: Called in the I/O thread if the call ended after `finish`, and not all messages were passed to the
            socket: with the number of those that were. Set it before the first `write`.
        request_bytes: Size of the last message of the client.
    """

    __slots__ = (
        "_buffer",
        "_ends",
        "_handler",
        "_is_finished",
        "_is_lost",
        "_message",
        "_stream",
        "_timer",
        "_unary",
        "connection",
        "metadata",
        "method",
        "on_closed",
        "on_leaving",
        "on_unsent",
        "request_bytes",
        "start_ms",
    )

    def __init__(
        self, method: str, metadata: Mapping[str, str], connection: GrpcConnection, stream: Http2Stream, start_ms: float
    ) -> None:
        self.method = method
        self.metadata = metadata
        self.connection = connection
        self.start_ms = start_ms
        self.on_closed: Callable[[], None] | None = None
        self.on_leaving: Callable[[], None] | None = None
        self.on_unsent: Callable[[int], None] | None = None
        self.request_bytes = 0
        self._stream = stream
        self._unary: UnaryHandler | None = None
        self._handler: GrpcStreamHandler | None = None
        self._ends: list[int] | None = None  # position in the response after each message
        self._buffer: bytearray | None = None  # received bytes of an incomplete message
        self._message: bytes | None = None  # of a unary call that the client has not half-closed yet
        self._is_finished = self._is_lost = False
        self._timer: Timer | None = None

    def __str__(self) -> str:
        return f"{self.method} of {self.connection}"

    # --- for handlers, in any thread ----------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False after `finish`, and after the end of the call for another reason."""
        return not self._is_finished and self._stream.is_open

    @property
    def deadline_ms(self) -> float | None:
        """Time of the deadline on the steady clock of the I/O loop, `IoLoop.now_ms`; None without one."""
        text = self.metadata.get("grpc-timeout")
        timeout_ms = None if text is None else parse_timeout(text)
        return None if timeout_ms is None else self.start_ms + timeout_ms

    def write(self, message: bytes) -> None:
        """Send a message."""
        if not self._is_finished:
            self._run(self._send_message, message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, details: str = "") -> None:
        """End the call; *details* is a text for the client's programmer."""
        if not self._is_finished:
            self._is_finished = True
            self._run(self._send_status, status, details)

    def reply(self, message: bytes) -> None:
        """Send the only message, and end the call with OK."""
        if self._is_finished:
            return
        self._is_finished = True
        if self.connection.loop.is_current_thread and not self._stream.has_sent_headers:
            self._stream.respond(_HEAD, b"\0" + len(message).to_bytes(4, "big") + message, _OK)
            if self._timer is not None:
                self._forget()
        else:
            self._run(self._send_last, message)

    def fail(self, exc: Exception) -> None:
        """End the call after an unexpected exception, which is logged."""
        self.connection.log_failure(self, exc)
        self.finish(GrpcStatus.INTERNAL, error_text(exc))

    def _run(self, step: Callable[..., None], *arguments: object) -> None:
        if self.connection.loop.is_current_thread:
            step(*arguments)
        else:
            self.connection.loop.call_soon(partial(step, *arguments))

    # --- sending: in the I/O thread -----------------------------------------------------------------

    def _send_message(self, message: bytes) -> None:
        stream = self._stream
        if not stream.has_sent_headers:
            stream.send_headers(_HEAD, is_frequent=True)
        if self.on_unsent is not None:
            if self._ends is None:
                self._ends = []
                stream.is_tracked = True
            self._ends.append(len(message) + PREFIX_BYTES + (self._ends[-1] if self._ends else 0))
        stream.send_data(framed(message))

    def _send_last(self, message: bytes) -> None:
        self._send_message(message)
        self._send_status(GrpcStatus.OK, "")

    def _send_status(self, status: GrpcStatus, details: str) -> None:
        fields = status_fields(status, details)
        if not self._stream.has_sent_headers:
            fields = (*_HEAD, *fields)
        if not self._stream.is_open:  # it ended before this thread had sent all messages
            self.report_unsent()
        self._stream.send_trailers(fields, is_frequent=fields is _OK)
        self._forget()

    def send_http(self, fields: Fields) -> None:
        """Respond to a request that is no call of gRPC."""
        self._is_finished = True
        self._stream.send_trailers(fields)

    def when_read(self, on_read: Callable[[], None]) -> bool:
        """Call *on_read* in the I/O thread, from which this is called after `finish`, when the client has read it all.

        What the socket has accepted is not read yet, but a client responds to a PING after all that it read before. If
        the client resets the call, or the connection ends, *on_read* is not called: it may have been read or not.

        Returns:
            False if the client's windows do not permit to send the whole response yet: call this again later.
        """
        if not self._stream.is_open and not self._is_lost:
            self.connection.when_read(self._stream, partial(self._notify, on_read))
        return not self._stream.is_open

    # --- receiving: in the I/O thread ---------------------------------------------------------------

    def start(self, unary: UnaryHandler | None, open_stream: StreamOpener | None) -> None:
        """Pass the messages to a handler."""
        self._unary = unary
        if open_stream is not None:
            try:
                self._handler = open_stream(self)
            except Exception as exc:
                self.fail(exc)

    def start_timer(self) -> None:
        """End the call at its deadline, if it has one and is still open."""
        text = self.metadata.get("grpc-timeout")
        if text is None or self._is_finished or not self._stream.is_open:
            return
        timeout_ms = parse_timeout(text)
        if timeout_ms is None:
            self.finish(GrpcStatus.INTERNAL, f"grpc-timeout is {text!r:.50}, allowed are 1 to 8 digits and H M S m u n")
            return
        self._wait_for(self.start_ms + timeout_ms)

    def _wait_for(self, deadline_ms: float) -> None:
        left_ms = deadline_ms - self.connection.loop.now_ms()
        if left_ms > 0:
            delay_ms = min(left_ms, _LONGEST_TIMER_MS)
            self._timer = self.connection.loop.call_later(delay_ms, partial(self._wait_for, deadline_ms))
        elif self.is_open:
            self._close()
            self.finish(GrpcStatus.DEADLINE_EXCEEDED, "the deadline of the call has passed")

    def on_data(self, data: bytes, *, is_last: bool) -> None:
        if self._is_finished:
            return
        if self._buffer is None and is_last and self._unary is not None and self._message is None:
            # The usual call: its message is one frame, which ends the request.
            size = len(data) - PREFIX_BYTES
            is_whole = size >= 0 and not data[0] and int.from_bytes(data[1:PREFIX_BYTES], "big") == size
            if is_whole and size <= self.connection.max_message_bytes:
                self._deliver(data[PREFIX_BYTES:])
                return
        self._add(data)
        if is_last and not self._is_finished:
            self._end_messages()

    def _add(self, data: bytes) -> None:
        """Add received bytes, and handle the messages that are complete."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = bytearray()
        buffer += data
        self.connection.held_messages += len(data)
        while len(buffer) >= PREFIX_BYTES and not self._is_finished:
            size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            if not self._accepts(buffer[0], size) or len(buffer) < PREFIX_BYTES + size:
                break
            message = bytes(memoryview(buffer)[PREFIX_BYTES : PREFIX_BYTES + size])
            del buffer[: PREFIX_BYTES + size]
            self.connection.held_messages -= PREFIX_BYTES + size
            self._on_message(message)
        if not buffer or self._is_finished:
            self._drop_buffer()

    def _accepts(self, flag: int, size: int) -> bool:
        """Refuse a message by its prefix, or return True."""
        if flag > 1:
            self.finish(GrpcStatus.INTERNAL, f"the prefix of a message starts with {flag}, allowed are 0 and 1")
        elif flag:
            encoding = self.metadata.get("grpc-encoding", "identity")
            self._refuse_encoding(encoding)
        elif size > self.connection.max_message_bytes:
            self.finish(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes, allowed are {self.connection.max_message_bytes}",
            )
        else:
            return True
        return False

    def _refuse_encoding(self, encoding: str) -> None:
        if encoding == "identity":
            self.finish(GrpcStatus.INTERNAL, "a message is compressed, but the call has no grpc-encoding")
            return
        self._is_finished = True
        details = f"messages with the grpc-encoding {encoding:.50} are not supported; send them with identity"
        fields = status_fields(GrpcStatus.UNIMPLEMENTED, details)
        if not self._stream.has_sent_headers:
            fields = (*_HEAD, ("grpc-accept-encoding", "identity"), *fields)
        self._stream.send_trailers(fields)

    def _on_message(self, message: bytes) -> None:
        if self._handler is not None:
            self.request_bytes = len(message)
            try:
                self._handler.on_message(message)
            except Exception as exc:
                self.fail(exc)
        elif self._message is None:
            self._message = message
            self.connection.held_messages += len(message)
        else:
            self.finish(GrpcStatus.INTERNAL, "the client sent more than one message; this method takes one")

    def _end_messages(self) -> None:
        if self._buffer:
            self._drop_buffer()
            self.finish(GrpcStatus.INTERNAL, "the request ends inside a message")
        elif self._handler is not None:
            try:
                self._handler.on_half_closed()
            except Exception as exc:
                self.fail(exc)
        elif self._message is None:
            self.finish(GrpcStatus.INTERNAL, "the client sent no message; this method takes one")
        else:
            message = self._message
            self._forget()
            self._deliver(message)

    def _deliver(self, message: bytes) -> None:
        unary = self._unary
        assert unary is not None, "a call has one of two handlers"
        self.request_bytes = len(message)
        try:
            unary(self, message)
        except Exception as exc:
            self.fail(exc)

    # --- ends ---------------------------------------------------------------------------------------

    def on_goaway(self) -> None:
        self._notify(self.on_leaving)

    def on_reset(self, reason: str) -> None:
        self._close()

    def report_unsent(self) -> None:
        """Report the number of messages that the socket has accepted, once, unless it is all of them."""
        on_unsent, self.on_unsent = self.on_unsent, None
        if on_unsent is None:
            return
        accepted, ends = self.connection.accepted_bytes(self._stream), self._ends or [0]
        if ends[-1] != accepted:
            self._notify(partial(on_unsent, bisect_right(ends, accepted)))

    def _notify(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            try:
                callback()
            except Exception as exc:
                self.connection.log_failure(self, exc)

    def cancel(self, code: ErrorCode) -> None:
        """End the call without a status."""
        self._stream.reset(code)
        self._close()

    def _close(self) -> None:
        """Report the end to the handler, unless it has finished the call."""
        self._is_lost = True
        self._forget()
        if self._is_finished:
            self.report_unsent()
        else:
            self._notify(self.on_closed if self._handler is None else self._handler.on_closed)

    def _forget(self) -> None:
        """Free what the call holds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_buffer()
        if self._message is not None:
            self.connection.held_messages -= len(self._message)
            self._message = None

    def _drop_buffer(self) -> None:
        if self._buffer is not None:
            self.connection.held_messages -= len(self._buffer)
            self._buffer = None


# --- connection -----------------------------------------------------------------------------------


_JOIN_BYTES = 65_536
"""Output up to this size is sent as one part: one part is sent faster than many."""


class GrpcOwner(SocketOwner, Protocol):
    """Server that a connection belongs to."""

    grpc_limits: GrpcLimits

    def open_call(self, connection: GrpcConnection, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        """Return the call of a new stream."""

    def on_closed(self, connection: GrpcConnection, reason: str) -> None:
        """Handle the end of the connection."""


class GrpcConnection(SocketConnection):
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
        self._http2 = Http2Connection(owner.grpc_limits.http2, self._open_call, self.loop.now_ms, self._plan_output)
        self._new_calls: list[GrpcCall] = []
        self._queued_bytes = 0  # as it was counted

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that the client has not accepted yet, or does not permit to send."""
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
        """Log an unexpected exception of a handler."""
        self._owner.peer_log.log(ERROR, "grpc.call_failed", call=str(call), exc_info=exc)

    # --- protocol -----------------------------------------------------------------------------------

    def _open_call(self, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        call = self._owner.open_call(self, stream, headers)
        self._new_calls.append(call)
        return call

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
        """Return the number of bytes of a tracked stream's data that the socket has accepted."""
        self._http2.outbound.note_accepted(self._outbound.size + self._lost_bytes)
        return stream.accepted_bytes

    def when_read(self, stream: Http2Stream, on_read: Callable[[], None]) -> None:
        """Call *on_read* when the client has read the response of a stream that has ended; see `GrpcCall.when_read`."""
        self._http2.ping(lambda: None if self._http2.was_reset(stream.id) else on_read())

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
        self._http2.outbound.end_all(reason)
        for stream in self._http2.outbound.unaccepted():  # their responses were complete, so they are not open any more
            if isinstance(stream.receiver, GrpcCall):
                stream.receiver.report_unsent()
        self._owner.on_closed(self, reason)
