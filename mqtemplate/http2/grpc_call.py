"""gRPC on one HTTP/2 connection: each stream is a call with messages, a deadline and a status.

Source: grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from mqtemplate.http2.frames import ErrorCode
from mqtemplate.http2.grpc_wire import (
    HEAD_FIELDS,
    OK_FIELDS,
    PREFIX_BYTES,
    GrpcStatus,
    framed,
    parse_timeout,
    status_fields,
)
from mqtemplate.http2.streams import Fields, Http2Stream
from mqtemplate.remoting.io_loop import IoLoop, Timer
from mqtemplate.remoting.transport import SocketConnection
from mqtemplate.user_code import error_text


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
GatheredCalls = Sequence[tuple["GrpcCall", bytes]]
"""Calls of one method and one connection, each with its only message, in their order."""
GatheredHandler = Callable[[GatheredCalls], None]

_LONGEST_TIMER_MS = 3_600_000.0
"""Deadlines may be decades ahead, which no operating system takes as a timeout."""


_MAX_AT_ONCE = 16
"""Most messages in one DATA frame, which could have 3,000. They are handled in one turn of the connection."""

# --- call -----------------------------------------------------------------------------------------


class CallConnection(SocketConnection, ABC):
    """Connection of calls, as they use it; see `GrpcConnection`."""

    loop: IoLoop
    max_message_bytes: int
    held_messages: int

    @property
    @abstractmethod
    def unread_bytes(self) -> int:
        """Number of bytes that the client has not accepted yet, or does not permit to send."""

    @abstractmethod
    def gather(self, call: GrpcCall, message: bytes, handler: GatheredHandler) -> None:
        """Process a call together with those that are read with it. Nothing waits for calls that may come."""

    @abstractmethod
    def process_gathered(self) -> None:
        """Process the calls that were gathered."""

    @abstractmethod
    def accepted_bytes(self, stream: Http2Stream) -> int:
        """Return the number of bytes of a tracked stream's data that the socket has accepted."""

    @abstractmethod
    def when_read(self, stream: Http2Stream, on_read: Callable[[], None]) -> None:
        """Call *on_read* when the client has read the response of a stream that has ended; see `GrpcCall.when_read`."""

    @abstractmethod
    def log_failure(self, call: GrpcCall, exc: Exception) -> None:
        """Log an unexpected exception of a handler."""


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
        "_gathered",
        "_handler",
        "_is_finished",
        "_is_lost",
        "_is_sending",
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
        self, method: str, metadata: Mapping[str, str], connection: CallConnection, stream: Http2Stream, start_ms: float
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
        self._gathered: GatheredHandler | None = None
        self._handler: GrpcStreamHandler | None = None
        self._ends: list[int] | None = None  # position in the response after each message
        self._buffer: bytearray | None = None  # received bytes of an incomplete message
        self._message: bytes | None = None  # of a unary call that the client has not half-closed yet
        self._is_finished = self._is_lost = False
        self._is_sending = False  # finished by another thread, whose messages this one has not sent yet
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

    def write_all(self, messages: Sequence[bytes]) -> None:
        """Send several messages: in fewer frames than one for each of them."""
        if not self._is_finished:
            self._run(self._send_messages, messages)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, details: str = "") -> None:
        """End the call; *details* is a text for the client's programmer."""
        if not self._is_finished:
            self._is_finished = self._is_sending = True
            self._run(self._send_status, status, details)

    def reply(self, message: bytes) -> None:
        """Send the only message, and end the call with OK."""
        if self._is_finished:
            return
        self._is_finished = True
        if self.connection.loop.is_current_thread and not self._stream.has_sent_headers:
            self._stream.respond(HEAD_FIELDS, b"\0" + len(message).to_bytes(4, "big") + message, OK_FIELDS)
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
        self._send_messages((message,))

    def _send_messages(self, messages: Sequence[bytes]) -> None:
        stream = self._stream
        if not stream.has_sent_headers:
            stream.send_headers(HEAD_FIELDS, is_frequent=True)
        if self.on_unsent is not None:
            if self._ends is None:
                self._ends = []
                stream.is_tracked = True
            end = self._ends[-1] if self._ends else 0
            for message in messages:
                end += len(message) + PREFIX_BYTES
                self._ends.append(end)
        stream.send_data(b"".join(map(framed, messages)))

    def _send_last(self, message: bytes) -> None:
        self._send_message(message)
        self._send_status(GrpcStatus.OK, "")

    def _send_status(self, status: GrpcStatus, details: str) -> None:
        self._is_sending = False
        fields = status_fields(status, details)
        if not self._stream.has_sent_headers:
            fields = (*HEAD_FIELDS, *fields)
        if not self._stream.is_open:  # it ended before this thread had sent all messages
            self.report_unsent()
        self._stream.send_trailers(fields, is_frequent=fields is OK_FIELDS)
        self._forget()
        self.on_closed = self.on_leaving = self._handler = None  # they refer to this object

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

    def start(
        self, unary: UnaryHandler | None, open_stream: StreamOpener | None, gathered: GatheredHandler | None
    ) -> None:
        """Pass the messages to a handler."""
        self._unary = unary
        self._gathered = gathered
        if open_stream is not None:
            try:
                self._handler = open_stream(self)
            except Exception as exc:
                self.fail(exc)

    def start_timer(self) -> None:
        """End the call at its deadline, if it has one and is still open."""
        if self._is_finished or not self._stream.is_open:
            return
        text = self.metadata.get("grpc-timeout")
        if text is None:
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
        count = 0
        while len(buffer) >= PREFIX_BYTES and not self._is_finished:
            size = int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            if not self._accepts(buffer[0], size) or len(buffer) < PREFIX_BYTES + size:
                break
            message = bytes(memoryview(buffer)[PREFIX_BYTES : PREFIX_BYTES + size])
            del buffer[: PREFIX_BYTES + size]
            self.connection.held_messages -= PREFIX_BYTES + size
            count += 1
            if count > _MAX_AT_ONCE:
                self._refuse(
                    GrpcStatus.RESOURCE_EXHAUSTED,
                    f"a frame has more than {_MAX_AT_ONCE} messages; wait for answers before you send more",
                )
                break
            self._on_message(message)
        if not buffer or self._is_finished:
            self._drop_buffer()

    def _accepts(self, flag: int, size: int) -> bool:
        """Refuse a message by its prefix, or return True."""
        if flag > 1:
            self._refuse(GrpcStatus.INTERNAL, f"the prefix of a message starts with {flag}, allowed are 0 and 1")
        elif flag:
            encoding = self.metadata.get("grpc-encoding", "identity")
            self._refuse_encoding(encoding)
        elif size > self.connection.max_message_bytes:
            self._refuse(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes, allowed are {self.connection.max_message_bytes}",
            )
        else:
            return True
        return False

    def _refuse(self, status: GrpcStatus, details: str) -> None:
        """End the call, whose handler does not know why."""
        self._close()
        self.finish(status, details)

    def _refuse_encoding(self, encoding: str) -> None:
        if encoding == "identity":
            self._refuse(GrpcStatus.INTERNAL, "a message is compressed, but the call has no grpc-encoding")
            return
        self._close()
        self._is_finished = True
        details = f"messages with the grpc-encoding {encoding:.50} are not supported; send them with identity"
        fields = status_fields(GrpcStatus.UNIMPLEMENTED, details)
        if not self._stream.has_sent_headers:
            fields = (*HEAD_FIELDS, ("grpc-accept-encoding", "identity"), *fields)
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
            self._refuse(GrpcStatus.INTERNAL, "the request ends inside a message")
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
        self.request_bytes = len(message)
        if self._gathered is not None:
            self.connection.gather(self, message, self._gathered)
            return
        self.connection.process_gathered()  # they were sent before this call
        unary = self._unary
        assert unary is not None, "a call has one of two handlers"
        try:
            unary(self, message)
        except Exception as exc:
            self.fail(exc)

    # --- ends ---------------------------------------------------------------------------------------

    def on_goaway(self) -> None:
        self._notify(self.on_leaving)

    def on_reset(self, reason: str) -> None:
        self._close()

    def on_accepted(self) -> None:
        self.on_unsent = None  # it refers to this object

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
        on_closed, handler = self.on_closed, self._handler
        self.on_closed = self.on_leaving = self._handler = None  # they refer to this object
        if not self._is_finished:
            self._notify(on_closed if handler is None else handler.on_closed)
        elif not self._is_sending:  # else another thread has finished it: `_send_status`, which comes, reports all
            self.report_unsent()

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
