"""One connection of a client or of a server: both sides send requests and responses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerError, MessageError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.event_log import get_logger
from mqtemplate.message import HostAddress
from mqtemplate.remoting.io_loop import Timer
from mqtemplate.remoting.protocol.codec import Frame, FrameDecoder, encode_head
from mqtemplate.remoting.protocol.codes import FLAG_ONE_WAY, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.sockets import Stream
from mqtemplate.remoting.transport import SocketConnection, SocketOwner

_log = get_logger("mqtemplate.remoting")

_JOIN_BYTES = 8_192
"""A body up to this size is copied into one part with its header: one part is sent faster than two."""

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


class ConnectionOwner(SocketOwner, Protocol):
    """Server or client that a connection belongs to. The connection calls it in the I/O thread."""

    def on_request(self, connection: Connection, request: RemotingCommand) -> None:
        """Handle a request of the peer."""

    def new_pipeline(self, connection: Connection) -> RequestPipeline:
        """Return the pipeline of a new connection."""

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Handle the end of the connection."""

    def sign(self, request: RemotingCommand) -> None:
        """Sign a request before it is encoded. Called in the thread that sends it."""


class Connection(SocketConnection):
    """A connection of RocketMQ's protocol. Any thread may call its public methods, which do not block.

    Each request of the peer gets one response. A response without a pending request is dropped.
    """

    def __init__(self, stream: Stream, remote: HostAddress, owner: ConnectionOwner) -> None:
        self._decoder = FrameDecoder(owner.limits.max_frame_bytes)
        super().__init__(stream, remote, owner, self._decoder.feed)
        self._owner = owner
        self._pending = PendingInvocations()
        self._unanswered: set[int] = set()  # opaques of the peer's requests
        self._answering: set[int] = set()  # ids of the response objects that are not in the buffer yet
        self._pipeline = owner.new_pipeline(self)

    # --- for any thread -----------------------------------------------------------------------------

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

    # --- in the I/O thread --------------------------------------------------------------------------

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

    def _held_bytes(self) -> int:
        return self._decoder.buffered

    def _on_ended(self, reason: str) -> None:
        self._unanswered.clear()
        self._pending.fail_all(lambda: self._lost_error(reason))
        self._owner.on_closed(self, reason)

    def _process_until(self, limit: int, end_s: float) -> bool:
        pipeline = self._pipeline
        try:
            return self._process_frames(pipeline, limit, end_s)
        finally:
            pipeline.process()

    def _process_frames(self, pipeline: RequestPipeline, limit: int, end_s: float) -> bool:
        decoder = self._decoder
        while (frame := decoder.next_frame()) is not None:
            self._units_read += 1
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
