"""One connection, of a client or of a server: both sides may ask, and both may answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog

from mqtemplate.errors import MessageError, RemoteConnectError, RemoteProtocolError, RemoteTimeoutError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.budget import Budget
from mqtemplate.remoting.io_loop import READ, WRITE, IoLoop
from mqtemplate.remoting.outstanding import Done, Outstanding, next_opaque
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, RequestCode, ResponseCode, encode_head
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY
from mqtemplate.remoting.settings import ConnectionLimits
from mqtemplate.remoting.streams import Outbox, Stream
from mqtemplate.remoting.timers import Timer

_log = structlog.stdlib.get_logger("mqtemplate.remoting")

_JOIN_BYTES = 8_192
"""A body up to this size is copied behind its header: one part is sent faster than two."""

_ids = itertools.count(1)


class Owner(Protocol):
    """The server or the client that a connection belongs to. Called in the I/O thread."""

    loop: IoLoop
    limits: ConnectionLimits
    partial_input: Budget
    unread_output: Budget

    def on_request(self, connection: Connection, request: RemotingCommand) -> None: ...

    def on_closed(self, connection: Connection, reason: str) -> None: ...

    def sign(self, request: RemotingCommand) -> None:
        """Called in the thread that sends a request, as the last thing before it becomes bytes."""


class Connection:
    """One TCP connection. What is public may be called from any thread, and does not block.

    - The loop's thread reads, and owns the decoder. Whoever answers or asks sends at once, as long as nothing waits to
      be sent before it; what the peer does not take is kept, and sent by the loop.
    - A peer that does not read what it asked for is not read from either.
    - Each request of the peer is answered once; an answer that nobody asked for is dropped.

    Attributes:
        id: Counted by this process; no two connections have the same.
        remote: The peer as this side sees it; an IPv4 address mapped into IPv6 is told as IPv4.
        is_tls: Whether it is under TLS.
    """

    def __init__(self, stream: Stream, remote: HostAddress, owner: Owner, *, is_tls: bool = False) -> None:
        self.id = next(_ids)
        self.remote = remote
        self.is_tls = is_tls
        self._stream = stream
        self._owner = owner
        self._loop = owner.loop
        self._limits = owner.limits
        self._decoder = FrameDecoder(owner.limits.max_frame_bytes)
        self._outstanding = Outstanding()
        self._unanswered: set[int] = set()  # opaques of the peer's requests
        self._lock = threading.Lock()  # around everything below that says so
        self._outbox = Outbox()  # lock
        self._is_open = True  # lock
        self._is_corked = False  # lock: the loop gathers answers, and sends them together
        self._is_ended = False
        self._is_paused = False
        self._interest = 0
        self._taken = 0  # commands
        self._partial_bytes = 0
        self._partial_since_ms: float | None = None
        self._last_traffic_ms = self._loop.now_ms()
        self._check_timer: Timer | None = None
        self._end_reason = "it is closed"

    def __str__(self) -> str:
        return f"connection {self.id} with {self.remote}"

    # --- for any thread -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def unread_bytes(self) -> int:
        """What waits to be read by the peer."""
        return self._outbox.size

    @property
    def partial_bytes(self) -> int:
        """What has come of a frame that is not complete."""
        return self._partial_bytes

    @property
    def unanswered(self) -> int:
        """How many requests of the peer have no answer yet."""
        return len(self._unanswered)

    @property
    def outstanding(self) -> int:
        """How many requests to the peer have no answer yet."""
        return len(self._outstanding)

    def reply(self, response: RemotingCommand, *, body: Sequence[bytes] = ()) -> None:
        """Answer a request of the peer; dropped when closed, or when it was a one-way request or is answered already.

        Args:
            body: Parts of the body, written without joining them, in place of ``response.body``.
        """
        try:
            self._unanswered.remove(response.opaque)
        except KeyError:
            _log.debug("remoting.answer_dropped", remote=str(self.remote), answer=str(response))
            return
        try:
            parts = _frame(response, body)
        except MessageError as exc:
            _log.warning("remoting.answer_impossible", remote=str(self.remote), error=str(exc))
            refusal = RemotingCommand(ResponseCode.SYSTEM_ERROR, response.opaque, response.flag, remark=str(exc))
            parts = _frame(refusal)
        self._send(parts)

    def send_one_way(self, request: RemotingCommand) -> None:
        """Send a request that the peer must not answer; it is marked so, and given its opaque. Dropped when closed.

        Raises:
            MessageError: The frame would be too large.
        """
        request.opaque = next_opaque()
        request.flag = FLAG_ONE_WAY
        self._owner.sign(request)
        self._send(_frame(request))

    def request(self, request: RemotingCommand, timeout_ms: int, done: Done) -> None:
        """Ask the peer, giving *request* its opaque.

        *done* is called exactly once, in the I/O thread (or at once, where the connection is closed): with the answer,
        a `RemoteTimeoutError`, or a `RemoteConnectError`.

        Raises:
            MessageError: The frame would be too large; *done* is not called.
        """
        opaque = request.opaque = next_opaque()

        def give_up() -> None:
            self._outstanding.finish(opaque, self.timeout_error(request, timeout_ms))

        self.ask(request, done, partial(self._loop.call_later, timeout_ms, give_up))

    def ask(self, request: RemotingCommand, done: Done, start_timer: Callable[[], Timer] | None = None) -> None:
        """`request` for who keeps the time, and has given the opaque: see `forget`."""
        self._owner.sign(request)
        parts = _frame(request)
        self._outstanding.add(request.opaque, done, start_timer)
        if not self._send(parts):
            self._outstanding.finish(request.opaque, self._lost(self._end_reason))

    def forget(self, opaque: int) -> bool:
        """Wait for that answer no longer; False if it has come, or the connection was lost: then *done* was called."""
        return self._outstanding.forget(opaque)

    def timeout_error(self, request: RemotingCommand, timeout_ms: int) -> RemoteTimeoutError:
        code = RequestCode.of(request.code)
        name = f"{code} {code.name}" if isinstance(code, RequestCode) else str(code)
        return RemoteTimeoutError(
            f"{self.remote} did not answer request {name} within {timeout_ms} ms; it may have been carried out all the "
            "same. Is the broker overloaded? Try again, or give it more time"
        )

    def close(self, reason: str) -> None:
        """End it; what was answered already is still sent as far as the peer takes it at once."""
        self._close(reason, is_bad=False)

    def _close(self, reason: str, *, is_bad: bool) -> None:
        if self._is_open:
            self._is_open, self._end_reason = False, reason
            self._loop.call_soon(partial(self.end, reason, is_bad=is_bad))

    # --- sending ------------------------------------------------------------------------------------

    def _send(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send now what the peer takes, and keep the rest; False when closed."""
        size = sum(map(len, parts))
        with self._lock:
            if not self._is_open:
                return False
            outbox = self._outbox
            if outbox.size or self._is_corked:
                outbox.add(parts, size)
                rest = size
            else:
                try:
                    taken = self._stream.send(parts)
                except OSError as exc:
                    self.close(_reason(exc))
                    return False
                rest = size - taken
                if taken:
                    self._last_traffic_ms = self._loop.now_ms()
                if rest:
                    outbox.add(parts, size, taken)
            is_corked = self._is_corked
        if rest:
            self._on_unread(rest, is_corked)
        return True

    def _on_unread(self, grown: int, is_corked: bool) -> None:
        """The peer has *grown* bytes more to read than before."""
        self._owner.unread_output.add(grown)
        if self._outbox.size > self._limits.max_unread_bytes:
            self._close(f"the peer leaves {self._outbox.size} bytes of answers unread", is_bad=True)
        elif not is_corked:
            self._loop.call_soon(self._set_interest)

    def _flush(self) -> None:
        """Send what waits, as far as the peer takes it. In the loop's thread."""
        with self._lock:
            self._is_corked = False
            if not self._outbox.size:
                return
            before, problem = self._outbox.size, None
            try:
                self._outbox.flush(self._stream)
            except OSError as exc:
                problem = _reason(exc)
            sent = before - self._outbox.size
        if sent:
            self._owner.unread_output.add(-sent)
            self._last_traffic_ms = self._loop.now_ms()
        if problem is not None:
            self.end(problem)

    # --- in the loop's thread -----------------------------------------------------------------------

    def begin(self) -> None:
        """Watch the socket."""
        if not self._is_ended:
            self._set_interest()
            self._check()
            if self._stream.has_more():
                self._read()

    def on_ready(self, events: int) -> None:
        if self._is_ended:
            return
        if events & WRITE:
            self._flush()
            if self._is_paused and self._outbox.size <= self._limits.pause_reading_bytes // 2:
                self._is_paused = False
                self._take_commands()
            self._set_interest()
        if events & READ and not self._is_paused and not self._is_ended:
            self._read()

    def abort(self, reason: str) -> None:
        self.end(f"internal error: {reason}", is_bad=True)

    def _read(self) -> None:
        buffer = self._loop.buffer
        try:
            count = self._stream.receive_into(buffer)
        except OSError as exc:
            self.end(_reason(exc))
            return
        if count is None:
            return
        if count == 0:
            cut_off = self._partial_bytes
            self.end(f"the peer closed it within a frame of which {cut_off} bytes had come" if cut_off else "closed")
            return
        self._last_traffic_ms = self._loop.now_ms()
        self._decoder.feed(buffer[:count])
        self._take_commands()
        if self._stream.has_more() and not self._is_paused:
            self._loop.call_soon(partial(self.on_ready, READ))

    def _take_commands(self) -> None:
        """Carry out what has come, until it is done or the peer has too much to read."""
        limit = self._limits.pause_reading_bytes
        taken_before, has_more = self._taken, True
        while has_more and not self._is_ended:
            try:
                has_more = self._take_some(limit)
            except RemoteProtocolError as exc:
                self._flush()
                self.end(str(exc), is_bad=True)
                return
            self._flush()
            if has_more and self._outbox.size > limit:
                self._is_paused = True  # until the peer has read half of it
                break
        if not self._is_ended:
            self._note_partial(self._taken > taken_before)
            self._set_interest()

    def _take_some(self, limit: int) -> bool:
        """Carry out commands until none is complete (False), or answers of more than *limit* bytes wait (True)."""
        decoder = self._decoder
        while (command := decoder.next_command()) is not None:
            if decoder.buffered:
                self._is_corked = True
            self._taken += 1
            self._take(command)
            if self._outbox.size > limit:
                return True
            if self._is_ended:
                break
        return False

    def _take(self, command: RemotingCommand) -> None:
        if command.is_response:
            if not self._outstanding.finish(command.opaque, command):
                _log.debug("remoting.answer_unknown", remote=str(self.remote), answer=str(command))
            return
        if not command.is_one_way:
            is_busy = len(self._unanswered) >= self._limits.max_unanswered
            self._unanswered.add(command.opaque)
            if is_busy:
                remark = f"{self._limits.max_unanswered} requests of this connection wait for an answer already"
                self.reply(command.response(ResponseCode.SYSTEM_BUSY, remark=remark))
                return
        self._owner.on_request(self, command)

    def _note_partial(self, has_progressed: bool) -> None:
        """Remember since when a frame is on its way, and what all of them hold."""
        held = self._decoder.buffered
        if held != self._partial_bytes:
            grown, self._partial_bytes = held - self._partial_bytes, held
            self._owner.partial_input.add(grown)
        if not held or self._is_paused:
            self._partial_since_ms = None
        elif has_progressed or self._partial_since_ms is None:
            self._partial_since_ms = self._loop.now_ms()

    def _set_interest(self) -> None:
        if self._is_ended:
            return
        interest = (0 if self._is_paused else READ) | (WRITE if self._outbox.size else 0)
        if interest != self._interest:
            self._interest = interest
            self._loop.watch(self._stream.socket, interest, self)

    def _check(self) -> None:
        """Close it when it idles, or when a frame is too long on its way; else look again when that could be."""
        if self._is_ended:
            return
        now, limits = self._loop.now_ms(), self._limits
        idle_at = self._last_traffic_ms + limits.idle_ms
        late_at = limits.frame_timeout_ms + (now if self._partial_since_ms is None else self._partial_since_ms)
        if late_at <= now:
            self.end(f"a frame is not complete after {limits.frame_timeout_ms} ms", is_bad=True)
        elif idle_at <= now:
            self.end(f"idle for {limits.idle_ms} ms")
        else:
            self._check_timer = self._loop.call_later(min(idle_at, late_at) - now, self._check)

    def end(self, reason: str, *, is_bad: bool = False) -> None:
        """Close it now; *is_bad*: for a fault of the peer's, which deserves a line in the log."""
        if self._is_ended:
            return
        self._is_ended = True
        with self._lock:
            self._is_open, self._end_reason = False, reason
            before = self._outbox.size
            try:
                self._outbox.flush(self._stream)
            except OSError:
                pass  # the peer has gone
            unread = self._outbox.size
            self._outbox.clear()
        log = _log.warning if is_bad else _log.debug
        log("remoting.connection_closed", remote=str(self.remote), reason=reason, unread_bytes=unread)
        self._loop.forget(self._stream.socket)
        self._stream.socket.close()  # who sends looks whether it is open first, under the lock
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._owner.unread_output.add(-before)
        self._owner.partial_input.add(-self._partial_bytes)
        self._unanswered.clear()
        self._outstanding.fail_all(lambda: self._lost(reason))
        self._owner.on_closed(self, reason)

    def _lost(self, reason: str) -> RemoteConnectError:
        return RemoteConnectError(
            f"the connection to {self.remote} was lost before the answer came ({reason}); what was asked may have been "
            "carried out all the same. The next use makes a new connection"
        )


Channel = Connection
"""What a client's ``on_request`` is given to answer by."""


def _frame(command: RemotingCommand, body: Sequence[bytes] = ()) -> Sequence[bytes]:
    """A frame in as few parts as is cheap."""
    if not body:
        single = command.body
        head = encode_head(command, len(single))
        return (head + single,) if len(single) <= _JOIN_BYTES else (head, single)
    size = sum(map(len, body))
    head = encode_head(command, size)
    return (b"".join((head, *body)),) if size <= _JOIN_BYTES else (head, *body)


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
