"""One TCP connection of any protocol: bytes in and out, in turns with the other connections, within limits."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from mqtemplate.durations import format_ms
from mqtemplate.errors import RemoteProtocolError
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import READ, TURN_S, WRITE, IoLoop, Timer
from mqtemplate.remoting.settings import ConnectionLimits, MemoryLimit
from mqtemplate.remoting.sockets import OutboundBuffer, Stream, TlsStream, reason_of

_log = get_logger("mqtemplate.remoting")

_TURN_S = TURN_S
"""A connection with more complete requests than it can process in this time waits until the others had their turn."""
_BUSY_S = 0.1
"""A connection that needed a whole turn sends much. For this time it is read in its turn, after the others."""

_ids = itertools.count(1)


class SocketOwner(Protocol):
    """Server or client that a connection belongs to."""

    loop: IoLoop
    limits: ConnectionLimits
    partial_input: MemoryLimit
    unread_output: MemoryLimit
    peer_log: LimitedLog


class SocketConnection:
    """Base class of connections: the socket, the outbound buffer, and the timeouts.

    - The I/O thread reads, and passes the bytes to *feed* and to `_process_until` of the protocol.
    - A thread that sends writes to the socket itself if the outbound buffer is empty. The buffer takes what the socket
      does not accept, and the I/O thread sends it.
    - The connection does not read from a peer that does not read its output.
    - A peer that sends more than the I/O thread processes in one turn waits for the others: see `FairTurns`. Its bytes
      stay in the socket meanwhile, so it has to wait, too.

    Args:
        feed: Takes received bytes, which are valid during the call.

    Attributes:
        id: Unique number in this process, over all protocols.
        remote: Address of the peer as this side sees it; a mapped IPv4 address is an IPv4 address.
        is_tls: True if the connection uses TLS.
    """

    def __init__(
        self, stream: Stream, remote: HostAddress, owner: SocketOwner, feed: Callable[[memoryview], None]
    ) -> None:
        self.id = next(_ids)
        self.remote = remote
        self.is_tls = isinstance(stream, TlsStream)
        self._stream = stream
        self._socket_owner = owner
        self._feed = feed
        self._loop = owner.loop
        self._limits = owner.limits
        self._lock = threading.Lock()  # protects the three attributes that follow
        self._outbound = OutboundBuffer()
        self._is_open = True
        self._is_corked = False  # True while the I/O thread collects responses, to send them together
        self._is_ended = False
        self._is_paused = False  # True while it has requests to process, or the peer has responses to read
        self._is_in_line = False  # True while it waits for its turn
        self._busy_until_s = 0.0
        self._interest = 0
        self._units_read = 0  # frames or commands: complete ones
        self._partial_bytes = 0
        self._partial_since_ms: float | None = None
        self._lost_bytes = 0  # output that the socket had not accepted when the connection ended
        self._last_traffic_ms = self._loop.now_ms()
        self._timeout_timer: Timer | None = None
        self._end_reason = "it is closed"

    def __str__(self) -> str:
        return f"connection {self.id} with {self.remote}"

    # --- of the protocol ----------------------------------------------------------------------------

    def _process_until(self, limit: int, end_s: float) -> bool:
        """Process requests; return True if the buffered output is larger than *limit*, or there are more at *end_s*.

        Called in the I/O thread, as the others.

        Raises:
            RemoteProtocolError: The connection must be closed.
        """
        raise TypeError(f"{type(self).__name__} has no protocol")

    def _held_bytes(self) -> int:
        """Return the number of received bytes that wait for the rest of a request."""
        raise TypeError(f"{type(self).__name__} has no protocol")

    def _on_ended(self, reason: str) -> None:
        """Handle the end of the connection."""
        raise TypeError(f"{type(self).__name__} has no protocol")

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
        """Number of received bytes of an incomplete request."""
        return self._partial_bytes

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
        self._socket_owner.unread_output.add(added)
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
            self._socket_owner.unread_output.add(-sent)
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
            if self._is_paused and self._may_resume():
                self._wait_for_turn()
            self._set_interest()
        if events & READ and not self._is_paused and not self._is_in_line and not self._is_ended:
            if self._busy_until_s and time.monotonic() < self._busy_until_s:
                self._wait_for_turn()
            else:
                self._read()

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
        self._feed(buffer[:count])
        self._process_turn()

    def _wait_for_turn(self) -> None:
        if not self._is_in_line:
            self._is_in_line = True
            self._loop.turns.add(self.remote.ip, self)

    def take_turn(self) -> None:
        """Process the next requests, or read; but the peer may have to read responses first."""
        self._is_in_line = False
        if self._is_ended:
            return
        if not self._is_paused:
            self._read()
        elif self._may_resume():
            self._is_paused = False
            self._process_turn()

    def _may_resume(self) -> bool:
        return not self._is_ended and self._outbound.size <= self._limits.pause_reading_bytes // 2

    def _process_turn(self) -> None:
        """Process complete commands for one turn. Stop reading if there are more, or too much output is unread."""
        limit, end_s = self._limits.pause_reading_bytes, time.monotonic() + _TURN_S
        read_before, has_more = self._units_read, True
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
                self._busy_until_s = end_s + _BUSY_S
                self._wait_for_turn()
                break
        if not self._is_ended:
            self._track_partial_frame(self._units_read > read_before)
            self._set_interest()
            # The selector does not report bytes that OpenSSL has decrypted already.
            if self._stream.has_buffered() and not self._is_paused:
                self._wait_for_turn()

    def _track_partial_frame(self, has_progressed: bool) -> None:
        """Remember the start time of an incomplete frame, and count its bytes."""
        held = self._held_bytes()
        if held != self._partial_bytes:
            added, self._partial_bytes = held - self._partial_bytes, held
            self._socket_owner.partial_input.add(added)
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
            unread = self._lost_bytes = self._outbound.size
            self._outbound.clear()
        log = self._socket_owner.peer_log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self.remote), reason=reason, unread_bytes=unread)
        self._loop.unwatch(self._stream.socket)
        # Safe although other threads may send: they check `_is_open` first, under the lock.
        self._stream.socket.close()
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
        self._socket_owner.unread_output.add(-before)
        self._socket_owner.partial_input.add(-self._partial_bytes)
        self._on_ended(reason)
