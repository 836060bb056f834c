"""Streams, and the sending half of a connection: windows of the peer, queues, and the frames to send.

Source: RFC 9113, sections 5 and 6.9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from mqtemplate.http2 import frames
from mqtemplate.http2.frames import HEAD, HEAD_BYTES, ErrorCode, Http2Error, frame_head
from mqtemplate.http2.hpack import HeaderField, HpackEncoder

Fields = tuple[HeaderField, ...]

CREDIT_BYTES = 1_024
"""DATA frames with less than this do not permit the peer one more control frame."""


class StreamReceiver(Protocol):
    """Owner of a stream. The connection calls it while it processes frames."""

    def on_data(self, data: bytes, *, is_last: bool) -> None:
        """Take the content of a DATA frame; *is_last*: the peer has ended its side. The data may be empty then."""

    def on_goaway(self) -> None:
        """Handle that the peer opens no more streams on this connection, while this one is open."""

    def on_reset(self, reason: str) -> None:
        """Handle the end of the stream before this side has ended it."""

    def on_accepted(self) -> None:
        """Handle that the socket has accepted the whole response of a tracked stream."""


def _do_nothing() -> None:
    """Plan no output: the connection is closed."""


# --- stream ---------------------------------------------------------------------------------------


class Http2Stream:
    """One stream: a request and its response. Not thread-safe, as the connection.

    Data that the windows of the peer do not permit yet is queued; trailers follow it. After the end of the stream its
    methods do nothing.

    Attributes:
        receiver: Owner of the stream.
        is_open: False after the end of the stream.
        is_complete: True after this side has sent the end of the response.
        remote_ended: True after the last frame of the peer.
        is_tracked: True if the owner wants to know how much of the data the socket has accepted: *accepted_bytes*.
        sent_bytes: Bytes of queued data that became output.
        accepted_bytes: Those that the socket has accepted, after `Outbound.note_accepted`.
        queued_since_ms: Time since which the first part of the queue waits.
    """

    __slots__ = (
        "_outbound",
        "_queue",
        "_trailers",
        "accepted_bytes",
        "content_length",
        "has_sent_headers",
        "id",
        "is_complete",
        "is_open",
        "is_ready",
        "is_tracked",
        "queued_bytes",
        "queued_since_ms",
        "receive_window",
        "receiver",
        "remote_ended",
        "send_window",
        "sent_bytes",
    )

    def __init__(self, stream_id: int, outbound: Outbound, receive_window: int) -> None:
        self.id = stream_id
        self._outbound = outbound
        self.receive_window = receive_window
        self.send_window = outbound.stream_window
        self.receiver: StreamReceiver | None = None
        self.is_open = True
        self.is_complete = False
        self.remote_ended = False
        self.has_sent_headers = False
        self.content_length: int | None = None  # bytes that have to follow
        self.queued_bytes = 0
        self.queued_since_ms = 0.0
        self.is_tracked = False
        self.sent_bytes = self.accepted_bytes = 0
        self.is_ready = False  # True while it is in the connection's list of streams that may send
        self._queue: deque[bytes | memoryview] | None = None
        self._trailers: Fields | None = None

    def respond(self, head: Fields, data: bytes, trailers: Fields) -> None:
        """Send a whole response whose fields are those of many others."""
        if not self.is_open:
            return
        outbound = self._outbound
        size = len(data)
        if size > self.send_window or size > outbound.window or size > outbound.max_frame_bytes:
            self.send_headers(head, is_frequent=True)
            self.send_data(data)
            self.send_trailers(trailers, is_frequent=True)
            return
        stream_id = self.id
        encode = outbound.encoder.encode
        block = encode(head, is_frequent=True)
        last = encode(trailers, is_frequent=True)
        outbound.window -= size
        outbound.emit(
            b"".join(
                (
                    HEAD.pack(0, len(block), frames.HEADERS, frames.END_HEADERS, stream_id),
                    block,
                    HEAD.pack(size >> 8, size & 0xFF, frames.DATA, 0, stream_id),
                    data,
                    HEAD.pack(0, len(last), frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id),
                    last,
                )
            )
        )
        self.is_complete = True
        outbound.end_stream(self)

    def send_headers(self, fields: Fields, *, is_frequent: bool = False) -> None:
        """Send the first fields of the response."""
        if self.is_open:
            self.has_sent_headers = True
            self._outbound.emit_block(self.id, fields, ends_stream=False, is_frequent=is_frequent)

    def send_data(self, data: bytes) -> None:
        """Send data, or queue what the windows do not permit yet."""
        if self.is_open and data:
            if self._queue is None:
                self._queue = deque()
            if not self._queue:
                self.queued_since_ms = self._outbound.now_ms()
            self._queue.append(data)
            self.queued_bytes += len(data)
            self._outbound.add_queued(self, len(data))

    def send_trailers(self, fields: Fields, *, is_frequent: bool = False) -> None:
        """Send the last fields after the data, and end the stream."""
        if not self.is_open:
            return
        if self._queue:
            self._trailers = fields
        else:
            self._outbound.emit_block(self.id, fields, ends_stream=True, is_frequent=is_frequent)
            self.is_complete = True
            self._outbound.end_stream(self)

    def reset(self, code: ErrorCode) -> None:
        """End the stream without the rest of the response."""
        if self.is_open:
            self._outbound.reset_stream(self, code)

    def send_queued(self) -> None:
        """Send one DATA frame of the queue, whose stream and connection have a window; end the stream after the last.

        Called by the connection.
        """
        outbound = self._outbound
        queue = self._queue
        assert queue, "the stream is in the list of those that have something to send"
        first = queue[0]
        size = min(len(first), self.send_window, outbound.window, outbound.max_frame_bytes)
        if size == len(first):
            queue.popleft()
            self.queued_since_ms = outbound.now_ms()
            part = first
        else:
            view = memoryview(first)
            queue[0] = view[size:]
            part = view[:size]
        self.send_window -= size
        outbound.window -= size
        self.queued_bytes -= size
        self.sent_bytes += size
        outbound.emit_data(self, part, size)
        if not queue and self._trailers is not None:
            self.send_trailers(self._trailers)

    def drop_queue(self) -> None:
        """Forget what is queued."""
        self._queue = None
        self.queued_bytes = 0


# --- sending half of a connection -----------------------------------------------------------------


class Outbound:
    """Sending half of a connection. Not thread-safe.

    Args:
        max_remembered: Number of streams that this side ended before the peer, and that are remembered.
        now_ms: A monotonic time.
        on_sent: Called with a number of control frames that the peer may send more, since this side has sent data.
        plan_output: Called once when there is output, until `take_output`, unless `is_collecting`.

    Attributes:
        streams: Open streams by id.
        window: Bytes that the peer accepts on all streams together.
        stream_window: Bytes that the peer accepts on a new stream.
        max_frame_bytes: Largest payload of a frame.
        queued_bytes: Bytes that wait for the peer's windows.
        encoder: Encoder of all blocks, in the order in which they are sent.
        is_collecting: True while the owner processes frames, after which it takes the output itself.
    """

    def __init__(
        self,
        max_remembered: int,
        now_ms: Callable[[], float],
        on_sent: Callable[[int], None],
        plan_output: Callable[[], None],
    ) -> None:
        self.streams: dict[int, Http2Stream] = {}
        self.window = self.stream_window = frames.DEFAULT_WINDOW
        self.max_frame_bytes = frames.MIN_FRAME_BYTES
        self.queued_bytes = 0
        self.is_collecting = False
        self.now_ms = now_ms
        self._on_sent = on_sent
        self._plan_output = plan_output
        self._max_remembered = max_remembered
        self.encoder = HpackEncoder()
        self._output: list[bytes | memoryview] = []
        self._emitted = self._taken = self._written = 0  # positions in the output: its end, and that of parts of it
        # Position in the output, a tracked stream, and the bytes of its data up to there: not accepted by the socket.
        self._unaccepted: deque[tuple[int, Http2Stream, int]] = deque()
        self._is_planned = False
        self._ready: deque[Http2Stream] = deque()  # with queued data and a window of their own
        self._reset: dict[int, None] = {}  # streams that this side has ended before the peer; the oldest first
        self._ignored_below = 0  # older streams of that kind are not remembered

    # --- frames -------------------------------------------------------------------------------------

    def take_output(self) -> list[bytes | memoryview]:
        """Remove and return the bytes to send."""
        self._is_planned = False
        self._taken = self._emitted
        output, self._output = self._output, []
        return output

    def note_written(self, unread: int) -> None:
        """Note that the output that was taken last was passed to the socket, or to the buffer before it.

        Args:
            unread: Number of bytes in that buffer.
        """
        self._written = self._taken
        if self._unaccepted:
            self.note_accepted(unread)

    def note_accepted(self, unread: int) -> None:
        """Note that the socket has accepted all output that was passed to it but the last *unread* bytes."""
        accepted, pending = self._written - unread, self._unaccepted
        while pending and pending[0][0] <= accepted:
            _, stream, sent_bytes = pending.popleft()
            stream.accepted_bytes = sent_bytes
            if stream.is_complete:
                _forget_accepted(stream)

    def unaccepted(self) -> list[Http2Stream]:
        """Return the tracked streams with output that the socket has not accepted."""
        return [stream for _, stream, _ in self._unaccepted]

    def emit(self, data: bytes) -> None:
        """Add frames to the output."""
        self._output.append(data)
        self._emitted += len(data)
        if not self.is_collecting and not self._is_planned:
            self._is_planned = True
            self._plan_output()

    def emit_block(self, stream_id: int, fields: Fields, *, ends_stream: bool, is_frequent: bool) -> None:
        """Send fields."""
        block = self.encoder.encode(fields, is_frequent=is_frequent)
        self.emit(frames.header_frames(stream_id, block, frames.MIN_FRAME_BYTES, ends_stream=ends_stream))

    def emit_data(self, stream: Http2Stream, part: bytes | memoryview, size: int) -> None:
        """Send a part of a stream's queue."""
        self.queued_bytes -= size
        if size >= CREDIT_BYTES:
            self._on_sent(4)
        self._output.append(frame_head(size, frames.DATA, 0, stream.id))
        self._output.append(part)
        self._emitted += HEAD_BYTES + size
        if stream.is_tracked:
            self._unaccepted.append((self._emitted, stream, stream.sent_bytes))
        self.emit(b"")

    # --- windows ------------------------------------------------------------------------------------

    def set_stream_window(self, size: int) -> None:
        """Change the window of each stream, which may become negative. RFC 9113, 6.9.2."""
        change = size - self.stream_window
        self.stream_window = size
        for stream in list(self.streams.values()):
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, f"the window of stream {stream.id} is too large")
            self._set_ready(stream)
        self._send_queued()

    def enlarge_window(self, increment: int) -> None:
        """Enlarge the window of the connection."""
        self.window += increment
        if self.window > frames.MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")
        self._send_queued()

    def enlarge_stream_window(self, stream: Http2Stream, increment: int) -> None:
        """Enlarge the window of a stream."""
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of the stream is too large", stream.id)
        self._set_ready(stream)
        self._send_queued()

    def add_queued(self, stream: Http2Stream, size: int) -> None:
        """Count bytes that a stream has queued, and send them as far as the windows permit."""
        self.queued_bytes += size
        self._set_ready(stream)
        self._send_queued()
        if stream.queued_bytes:
            self.emit(b"")  # so that the owner sees what is queued

    def _set_ready(self, stream: Http2Stream) -> None:
        if stream.queued_bytes and stream.send_window > 0 and not stream.is_ready:
            stream.is_ready = True
            self._ready.append(stream)

    def _send_queued(self) -> None:
        """Send queued data, one frame of each stream in turns."""
        ready = self._ready
        while ready and self.window > 0:
            stream = ready.popleft()
            stream.is_ready = False
            if stream.is_open and stream.queued_bytes and stream.send_window > 0:
                stream.send_queued()
                self._set_ready(stream)

    # --- ends of streams ----------------------------------------------------------------------------

    def end_stream(self, stream: Http2Stream) -> None:
        """Close a stream after the last frame of this side, or of the peer. Called once for each.

        The stream forgets its owner, which refers to it: so both are freed without the garbage collector. The owner of
        a tracked one has to know first if the socket accepts the response.
        """
        stream.is_open = False
        if not stream.is_tracked:
            stream.receiver = None
        elif stream.is_complete:
            _forget_accepted(stream)
        if stream.queued_bytes:
            self.queued_bytes -= stream.queued_bytes
            stream.drop_queue()
        del self.streams[stream.id]
        if not stream.remote_ended:
            # The response is complete, so the client need not send the rest of its request. RFC 9113, 8.1.
            self.refuse(stream.id, ErrorCode.NO_ERROR)

    def reset_stream(self, stream: Http2Stream, code: ErrorCode) -> None:
        """End a stream by RST_STREAM."""
        stream.remote_ended = True
        self.end_stream(stream)
        self.refuse(stream.id, code)

    def refuse(self, stream_id: int, code: ErrorCode) -> None:
        """Send RST_STREAM for a stream that is not open any more, or never was."""
        self._reset[stream_id] = None
        if len(self._reset) > self._max_remembered:
            oldest = next(iter(self._reset))
            del self._reset[oldest]
            self._ignored_below = max(self._ignored_below, oldest)
        self.emit(frames.rst_stream_frame(stream_id, code))

    def ended_first(self, stream_id: int) -> bool:
        """Return True if this side ended a stream before the peer did, or if that is not known any more."""
        return stream_id in self._reset or stream_id <= self._ignored_below

    def end_all(self) -> list[StreamReceiver]:
        """Close all streams, since the connection is closed. Return their owners, which have to know it."""
        streams = list(self.streams.values())
        self.streams.clear()
        self.queued_bytes = 0
        self._output.clear()
        self._ready.clear()
        self._plan_output = _do_nothing
        receivers = [stream.receiver for stream in streams if stream.receiver is not None]
        for stream in streams:
            stream.is_open = False
            stream.receiver = None
            stream.drop_queue()
        return receivers

    def stalled(self, before_ms: float) -> list[Http2Stream]:
        """Return the streams whose first queued part has been waiting for the peer's windows since *before_ms*."""
        if not self.queued_bytes:
            return []
        return [each for each in self.streams.values() if each.queued_bytes and each.queued_since_ms <= before_ms]


def _forget_accepted(stream: Http2Stream) -> None:
    """Let a stream with a complete response forget its owner if the socket has accepted all of it."""
    receiver = stream.receiver
    if stream.accepted_bytes == stream.sent_bytes and receiver is not None:
        stream.receiver = None
        receiver.on_accepted()
