"""One connection of a client or of a server: both sides send requests and responses."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerError, MessageError, RemoteConnectError, RemoteProtocolError, RemoteTimeoutError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import READ, WRITE, IoLoop, Timer
from mqtemplate.remoting.protocol.codec import Frame, FrameDecoder, encode_head
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.settings import ConnectionLimits, MemoryLimit
from mqtemplate.remoting.sockets import OutboundBuffer, Stream, TlsStream, reason_of

_log = get_logger("mqtemplate.remoting")

_JOIN_BYTES = 8_192
"""A body up to this size is copied into one part with its header: one part is sent faster than two."""
_TURN_S = 0.002
"""A connection with more complete commands than it can process in this time waits until the others had their turn."""

_ids = itertools.count(1)


# --- requests of this side to which the peer has not responded yet --------------------------------


InvokeCallback = Callable[[RemotingCommand | BrokerError], None]
"""Called once per request, with its response or with the error; it must not block."""

_opaques = itertools.count()


def next_opaque() -> int:
    """Return the next opaque; all connections of this process share the count. It wraps as Java's: 32 bits, signed."""
    return ((next(_opaques) + 0x8000_0000) & 0xFFFF_FFFF) - 0x8000_0000


class _Pending:
    __slots__ = ("callback", "timer")

    def __init__(self, callback: InvokeCallback) -> None:
        self.callback = callback
        self.timer: Timer | None = None


class PendingInvocations:
    """Callbacks of pending requests by opaque.

    Thread-safe: the thread that removes an entry calls its callback, so each callback is called once.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, opaque: int, callback: InvokeCallback, start_timer: Callable[[], Timer] | None = None) -> None:
        """Add a request. Its timer starts after that, so that even the shortest one finds the entry."""
        pending = self._pending[opaque] = _Pending(callback)
        if start_timer is not None:
            pending.timer = start_timer()

    def complete(self, opaque: int, result: RemotingCommand | BrokerError) -> bool:
        """Call the callback of a request; return False if the request is not pending any more."""
        pending = self._pending.pop(opaque, None)
        if pending is None:
            return False
        if pending.timer is not None:
            pending.timer.cancel()
        call_safely(pending.callback, result)
        return True

    def remove(self, opaque: int) -> bool:
        """Remove a request without a call; return False if it is not pending any more."""
        return self._pending.pop(opaque, None) is not None

    def fail_all(self, error: Callable[[], BrokerError]) -> None:
        """Call all callbacks, each with an error of its own: several threads must not raise the same exception."""
        while self._pending:
            try:
                opaque = next(iter(self._pending))
            except (StopIteration, RuntimeError):  # another thread changed the dictionary at this moment
                continue
            self.complete(opaque, error())


def call_safely(callback: InvokeCallback, result: RemotingCommand | BrokerError) -> None:
    """Call *callback*, and log its exception."""
    try:
        callback(result)
    except BaseException:  # this is the I/O thread: all connections need it
        _log.exception("remoting.callback_failed", result=str(result))


# --- connection -----------------------------------------------------------------------------------


class RequestPipeline(Protocol):
    """Requests of one connection that are processed together, without decoding each. Used in the I/O thread only."""

    def accept(self, frame: Frame) -> bool:
        """Accept a request. Return False if it has to be processed as a command, after those that were accepted."""

    def process(self) -> None:
        """Process the requests that were accepted, if there are any."""


class CommandsOnly:
    """Pipeline that accepts nothing: each request is processed as a command."""

    def accept(self, frame: Frame) -> bool:
        return False

    def process(self) -> None:
        """Do nothing: no request was accepted."""


class ConnectionOwner(Protocol):
    """Server or client that a connection belongs to. The connection calls it in the I/O thread."""

    loop: IoLoop
    limits: ConnectionLimits
    partial_input: MemoryLimit
    unread_output: MemoryLimit
    peer_log: LimitedLog

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Handle a request of the peer."""

    def new_pipeline(self, connection: Connection) -> RequestPipeline:
        """Return the pipeline of a new connection."""

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Handle the end of the connection."""

    def sign(self, request: RemotingCommand) -> None:
        """Sign a request before it is encoded. Called in the thread that sends it."""


class Connection:
    """One TCP connection. Any thread may call its public methods, which do not block.

    - The I/O thread reads and owns the decoder. A thread that responds or sends a request writes to the socket itself
      if the outbound buffer is empty. The buffer takes what the socket does not accept, and the I/O thread sends it.
    - The connection does not read from a peer that does not read its responses.
    - Each request of the peer gets one response. A response without a pending request is dropped.

    Attributes:
        id: Unique number in this process.
        remote: Address of the peer as this side sees it; a mapped IPv4 address is an IPv4 address.
        is_tls: True if the connection uses TLS.
    """

    def __init__(self, stream: Stream, remote: HostAddress, owner: ConnectionOwner) -> None:
        self.id = next(_ids)
        self.remote = remote
        self.is_tls = isinstance(stream, TlsStream)
        self._stream = stream
        self._owner = owner
        self._loop = owner.loop
        self._limits = owner.limits
        self._decoder = FrameDecoder(owner.limits.max_frame_bytes)
        self._pending = PendingInvocations()
        self._unanswered: set[int] = set()  # opaques of the peer's requests
        self._answering: set[int] = set()  # ids of the response objects that are not in the buffer yet
        self._lock = threading.Lock()  # protects the three attributes that follow
        self._outbound = OutboundBuffer()
        self._is_open = True
        self._is_corked = False  # True while the I/O thread collects responses, to send them together
        self._is_ended = False
        self._is_paused = False
        self._interest = 0
        self._commands_read = 0
        self._partial_bytes = 0
        self._partial_since_ms: float | None = None
        self._last_traffic_ms = self._loop.now_ms()
        self._timeout_timer: Timer | None = None
        self._end_reason = "it is closed"
        self._pipeline = owner.new_pipeline(self)

    def __str__(self) -> str:
        return f"connection {self.id} with {self.remote}"

    # --- for any thread -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True until the connection is closed by either side."""
        return self._is_open

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that the peer has not accepted yet."""
        return self._outbound.size

    @property
    def partial_bytes(self) -> int:
        """Number of received bytes of an incomplete frame."""
        return self._partial_bytes

    @property
    def unanswered(self) -> int:
        """Number of requests of the peer whose response is not in the buffer."""
        return len(self._unanswered) + len(self._answering)

    @property
    def pending(self) -> int:
        """Number of requests to the peer without a response."""
        return len(self._pending)

    def reply(self, response: RemotingCommand, *, body: Sequence[bytes] = ()) -> None:
        """Send the response to a request of the peer.

        It is dropped if the connection is closed, the request was a one-way request, or it has a response already.

        Args:
            body: Parts of the body, which are written without joining them, instead of ``response.body``.
        """
        self._answering.add(id(response))  # before the removal, or a server that stops would not wait for it
        try:
            try:
                self._unanswered.remove(response.opaque)
            except KeyError:
                _log.debug("remoting.response_dropped", remote=str(self.remote), response=str(response))
                return
            self._send(self._frame_of(response, body))
        finally:
            self._answering.discard(id(response))

    def reply_together(self, opaques: Collection[int], parts: Sequence[bytes | memoryview]) -> None:
        """Send the responses to requests that a pipeline accepted: one encoded frame for each opaque, in parts.

        All are dropped if the connection is closed. They count as unanswered until this returns.
        """
        try:
            self._send(parts)
        finally:
            self._unanswered.difference_update(opaques)

    def _frame_of(self, response: RemotingCommand, body: Sequence[bytes]) -> Sequence[bytes]:
        try:
            return _frame(response, body)
        except MessageError as exc:
            self._owner.peer_log.warning("remoting.response_failed", remote=str(self.remote), error=str(exc))
            return _frame(RemotingCommand(ResponseCode.SYSTEM_ERROR, response.opaque, response.flag, remark=str(exc)))

    def send_one_way(self, request: RemotingCommand) -> None:
        """Send a request that the peer must not answer, and set its opaque and flag. It is dropped after the end.

        Raises:
            MessageError: The frame would be too large.
        """
        request.opaque = next_opaque()
        request.flag = FLAG_ONE_WAY
        self._owner.sign(request)
        self._send(_frame(request))

    def request(self, request: RemotingCommand, timeout_ms: int, callback: InvokeCallback) -> None:
        """Send a request to the peer, and set its opaque.

        *callback* is called exactly once: with the response, a `RemoteTimeoutError`, or a `RemoteConnectError`. It runs
        in the I/O thread, or in this thread if the connection is closed.

        Raises:
            MessageError: The frame would be too large; *callback* is not called.
        """
        opaque = request.opaque = next_opaque()

        def time_out() -> None:
            self._pending.complete(opaque, self.timeout_error(request, timeout_ms))

        self.start_request(request, callback, partial(self._loop.call_later, timeout_ms, time_out))

    def start_request(
        self, request: RemotingCommand, callback: InvokeCallback, start_timer: Callable[[], Timer] | None = None
    ) -> None:
        """Send a request as `request` does, for a caller that sets the opaque and waits for the timeout itself."""
        self._owner.sign(request)
        parts = _frame(request)
        self._pending.add(request.opaque, callback, start_timer)
        if not self._send(parts):
            self._pending.complete(request.opaque, self._lost_error(self._end_reason, was_sent=False))

    def cancel_request(self, opaque: int) -> bool:
        """Ignore the response to a request; return False if its callback has been called."""
        return self._pending.remove(opaque)

    def timeout_error(self, request: RemotingCommand, timeout_ms: int) -> RemoteTimeoutError:
        """Return the error for a request without a response in time."""
        return RemoteTimeoutError(
            f"{self.remote} did not answer request {RequestCode.text(request.code)} within {format_ms(timeout_ms)}; "
            "it may have been carried out all the same. Is the broker overloaded? Try again, or give it more time"
        )

    def end_pipeline(self) -> None:
        """Process each request as a command from now on."""
        self._pipeline = CommandsOnly()

    def close(self, reason: str) -> None:
        """Close the connection. Responses that are ready are sent as far as the socket accepts them at once."""
        self._close(reason, is_bad=False)

    def _close(self, reason: str, *, is_bad: bool) -> None:
        if self._is_open:
            self._is_open, self._end_reason = False, reason
            self._loop.call_soon(partial(self.end, reason, is_bad=is_bad))

    # --- sending ------------------------------------------------------------------------------------

    def _send(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send what the socket accepts, and buffer the rest; return False if the connection is closed."""
        size = sum(map(len, parts))
        with self._lock:
            if not self._is_open:
                return False
            outbound = self._outbound
            if outbound.size or self._is_corked:
                outbound.add(parts, size)
                rest = size
            else:
                try:
                    sent = self._stream.send(parts)
                except OSError as exc:
                    self.close(reason_of(exc))
                    return False
                rest = size - sent
                if sent:
                    self._last_traffic_ms = self._loop.now_ms()
                if rest:
                    outbound.add(parts, size, sent)
            is_corked = self._is_corked
        if rest:
            self._on_buffered(rest, is_corked)
        return True

    def _on_buffered(self, added: int, is_corked: bool) -> None:
        self._owner.unread_output.add(added)
        if self._outbound.size > self._limits.max_unread_bytes:
            self._close(f"the peer leaves {self._outbound.size} bytes of responses unread", is_bad=True)
        elif not is_corked:
            self._loop.call_soon(self._set_interest)

    def _flush(self) -> None:
        """Send buffered bytes as far as the socket accepts them. Called in the I/O thread."""
        if not self._is_corked and not self._outbound.size:
            return
        with self._lock:
            self._is_corked = False
            if not self._outbound.size:
                return
            before, error = self._outbound.size, None
            try:
                self._outbound.flush(self._stream)
            except OSError as exc:
                error = reason_of(exc)
            sent = before - self._outbound.size
        if sent:
            self._owner.unread_output.add(-sent)
            self._last_traffic_ms = self._loop.now_ms()
        if error is not None:
            self.end(error)

    # --- in the I/O thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Watch the socket."""
        if not self._is_ended:
            self._set_interest()
            self._check_timeouts()
            if self._stream.has_buffered():
                self._read()

    def on_ready(self, events: int) -> None:
        if self._is_ended:
            return
        if events & WRITE:
            self._flush()
            self._resume()
            self._set_interest()
        if events & READ and not self._is_paused and not self._is_ended:
            self._read()

    def begin(self, opaque: int) -> bool:
        """Count a request that a pipeline accepts. Return False if its opaque is in use, or too many are unanswered."""
        unanswered = self._unanswered
        if opaque in unanswered or len(unanswered) >= self._limits.max_unanswered:
            return False
        unanswered.add(opaque)
        return True

    def process_as_command(self, opaque: int, frame: Frame) -> None:
        """Process a request that a pipeline accepted after all as any other."""
        self._unanswered.discard(opaque)
        self._process(self._decoder.decode(frame))

    def abort(self, reason: str) -> None:
        self.end(f"internal error: {reason}", is_bad=True)

    def _read(self) -> None:
        buffer = self._loop.buffer
        try:
            count = self._stream.receive_into(buffer)
        except OSError as exc:
            self.end(reason_of(exc))
            return
        if count is None:
            return
        if count == 0:
            cut_off = self._partial_bytes
            self.end(f"the peer closed it after {cut_off} bytes of an incomplete frame" if cut_off else "closed")
            return
        self._last_traffic_ms = self._loop.now_ms()
        self._decoder.feed(buffer[:count])
        self._process_commands()

    def _resume(self) -> None:
        """Process the next commands, unless the peer has to read responses first."""
        if self._is_paused and not self._is_ended and self._outbound.size <= self._limits.pause_reading_bytes // 2:
            self._is_paused = False
            self._process_commands()

    def _process_commands(self) -> None:
        """Process complete commands for one turn. Stop reading if there are more, or too much output is unread."""
        limit, end_s = self._limits.pause_reading_bytes, time.monotonic() + _TURN_S
        read_before, has_more = self._commands_read, True
        while has_more and not self._is_ended:
            try:
                has_more = self._process_until(limit, end_s)
            except RemoteProtocolError as exc:
                self._flush()
                self.end(str(exc), is_bad=True)
                return
            self._flush()
            if has_more and (self._outbound.size > limit or time.monotonic() >= end_s):
                self._is_paused = True  # until the next turn, and until the peer has read half of the output
                self._loop.call_soon(self._resume)
                break
        if not self._is_ended:
            self._track_partial_frame(self._commands_read > read_before)
            self._set_interest()
            # The selector does not report bytes that OpenSSL has decrypted already.
            if self._stream.has_buffered() and not self._is_paused:
                self._loop.call_soon(partial(self.on_ready, READ))

    def _process_until(self, limit: int, end_s: float) -> bool:
        """Process requests; return True if the buffered output is larger than *limit*, or there are more at *end_s*."""
        pipeline = self._pipeline
        try:
            return self._process_frames(pipeline, limit, end_s)
        finally:
            pipeline.process()

    def _process_frames(self, pipeline: RequestPipeline, limit: int, end_s: float) -> bool:
        decoder = self._decoder
        while (frame := decoder.next_frame()) is not None:
            self._commands_read += 1
            if not pipeline.accept(frame):
                pipeline.process()
                if decoder.has_more:
                    self._is_corked = True  # more commands follow: their responses leave together
                self._process(decoder.decode(frame))
            if self._outbound.size > limit:
                return True
            if time.monotonic() >= end_s:
                return decoder.has_more
            if self._is_ended:
                break
        return False

    def _process(self, command: RemotingCommand) -> None:
        if command.is_response:
            if not self._pending.complete(command.opaque, command):
                _log.debug("remoting.response_ignored", remote=str(self.remote), response=str(command))
            return
        if not command.is_one_way:
            is_busy = len(self._unanswered) >= self._limits.max_unanswered
            self._unanswered.add(command.opaque)
            if is_busy:
                remark = f"{self._limits.max_unanswered} requests of this connection are unanswered already"
                self.reply(command.response(ResponseCode.SYSTEM_BUSY, remark=remark))
                return
        self._owner.on_request(self, command)

    def _track_partial_frame(self, has_progressed: bool) -> None:
        """Remember the start time of an incomplete frame, and count its bytes."""
        held = self._decoder.buffered
        if held != self._partial_bytes:
            added, self._partial_bytes = held - self._partial_bytes, held
            self._owner.partial_input.add(added)
        if not held or self._is_paused:
            self._partial_since_ms = None
        elif has_progressed or self._partial_since_ms is None:
            self._partial_since_ms = self._loop.now_ms()

    def _set_interest(self) -> None:
        if self._is_ended:
            return
        interest = (0 if self._is_paused else READ) | (WRITE if self._outbound.size else 0)
        if interest != self._interest:
            self._interest = interest
            self._loop.watch(self._stream.socket, interest, self)

    def _check_timeouts(self) -> None:
        """Close the connection if it is idle or a frame takes too long; else check again at the next possible time."""
        if self._is_ended:
            return
        now, limits = self._loop.now_ms(), self._limits
        idle_at = self._last_traffic_ms + limits.idle_ms
        late_at = limits.frame_timeout_ms + (now if self._partial_since_ms is None else self._partial_since_ms)
        if late_at <= now:
            self.end(f"a frame is not complete after {format_ms(limits.frame_timeout_ms)}", is_bad=True)
        elif idle_at <= now:
            self.end(f"idle for {format_ms(limits.idle_ms)}")
        else:
            self._timeout_timer = self._loop.call_later(min(idle_at, late_at) - now, self._check_timeouts)

    def end(self, reason: str, *, is_bad: bool = False) -> None:
        """Close the connection now, in the I/O thread; *is_bad*: by a fault of the peer, so log a warning."""
        if self._is_ended:
            return
        self._is_ended = True
        with self._lock:
            self._is_open, self._end_reason = False, reason
            before = self._outbound.size
            try:
                self._outbound.flush(self._stream)
            except OSError:
                pass  # the peer has closed the connection
            unread = self._outbound.size
            self._outbound.clear()
        log = self._owner.peer_log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self.remote), reason=reason, unread_bytes=unread)
        self._loop.unwatch(self._stream.socket)
        # Safe although other threads may send: they check `_is_open` first, under the lock.
        self._stream.socket.close()
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        self._owner.unread_output.add(-before)
        self._owner.partial_input.add(-self._partial_bytes)
        self._unanswered.clear()
        self._pending.fail_all(lambda: self._lost_error(reason))
        self._owner.on_closed(self, reason)

    def _lost_error(self, reason: str, *, was_sent: bool = True) -> RemoteConnectError:
        carried_out = "may have been carried out all the same" if was_sent else "was not sent"
        return RemoteConnectError(
            f"the connection to {self.remote} was lost before the response arrived ({reason}); the request "
            f"{carried_out}. The next use opens a new connection",
            was_sent=was_sent,
        )


def _frame(command: RemotingCommand, body: Sequence[bytes] = ()) -> Sequence[bytes]:
    """Return a frame in few parts: small bodies are joined with the header, large ones are not copied."""
    if not body:
        single = command.body
        head = encode_head(command, len(single))
        return (head + single,) if len(single) <= _JOIN_BYTES else (head, single)
    size = sum(map(len, body))
    head = encode_head(command, size)
    return (b"".join((head, *body)),) if size <= _JOIN_BYTES else (head, *body)
