"""The server's side of one HTTP/2 connection, without sockets: bytes in, bytes out. Source: RFC 9113.

An error of the peer ends one stream (RST_STREAM) or the connection (GOAWAY), as the RFC demands. Everything that a peer
can make this side hold or do has a bound: `Http2Limits`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mqtemplate.http2 import frames
from mqtemplate.http2.frames import HEAD, HEAD_BYTES, ErrorCode, Http2Error, frame
from mqtemplate.http2.hpack import (
    HeaderBombError,
    HeaderField,
    HeaderListTooLargeError,
    HpackDecoder,
    HpackError,
    is_valid_field,
)
from mqtemplate.http2.limits import Budget, Http2Limits
from mqtemplate.http2.streams import CREDIT_BYTES, Http2Stream, Outbound, StreamReceiver

_MAX_SENT_FRAME_BYTES = 65_536
_MAX_SETTINGS = 64
"""Number of settings in one frame. HTTP/2 and its extensions define less than 20."""
_LARGE_LIST_FRAMES = 50
"""Control frames for which a list of fields above the limit counts: it takes as long to decode."""
_MAX_VALID_NAMES = 16
_MAX_CACHED_NAMES = 64
_MAX_UNPINGED = 10_000
"""Most functions that wait for the next PING. A peer that responds to none does not make them grow."""

_PSEUDO_FIELDS = {":method", ":scheme", ":path", ":authority"}
_REQUIRED = {":method", ":scheme", ":path"}
_OF_CONNECTIONS = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
"""RFC 9113, 8.2.2: fields of HTTP/1.1 that make a request malformed."""


# --- connection -----------------------------------------------------------------------------------


class Http2Connection:
    """State of a connection: frames to calls of the streams' owners, and responses to frames. Not thread-safe.

    - `feed` adds received bytes and `process` handles whole frames; `take_output` returns the bytes to send.
    - After an `Http2Error` of `process` the last output is a GOAWAY; the connection must be closed after it.
    - Frames of a stream that this side has reset are ignored: the peer may have sent them before it knew.

    Args:
        open_stream: Returns the owner of a new stream, with the fields of the request.
        now_ms: A monotonic time.
        plan_output: Called once when there is output outside of `process`, until `take_output`.
        on_processed: Called in `process` after the last frame, and before the GOAWAY of an error.
        resets: Number of streams that may end by RST_STREAM, if connections share it. None: that of *limits*.

    Attributes:
        outbound: The open streams, and the frames to send.
        is_going_away: True after GOAWAY of this side: the peer opens no more streams here.
        frames_read: Number of whole frames.
        last_stream_id: The highest stream of the peer.
        resets: Number of streams that may end by RST_STREAM.
    """

    def __init__(
        self,
        limits: Http2Limits,
        open_stream: Callable[[Http2Stream, dict[str, str]], StreamReceiver],
        now_ms: Callable[[], float],
        plan_output: Callable[[], None] = lambda: None,
        on_processed: Callable[[], None] = lambda: None,
        resets: Budget | None = None,
    ) -> None:
        self._control = Budget(limits.max_control_frames, limits.control_frames_per_s, now_ms)
        self.resets = resets or Budget(limits.max_resets, limits.resets_per_s, now_ms)
        self.outbound = Outbound(limits.max_streams, now_ms, self._control.earn, plan_output)
        self._streams = self.outbound.streams
        self.frames_read = 0
        self.last_stream_id = 0
        self.is_going_away = False
        self._limits = limits
        self._open_stream = open_stream
        self._on_processed = on_processed
        self._decoder = HpackDecoder(limits.max_header_bytes)
        self._data = b""
        self._at = 0
        self._has_preface = self._has_settings = self._is_peer_leaving = False
        self._block: bytearray | None = None  # of a HEADERS frame that CONTINUATION frames follow
        self._block_stream = self._block_flags = 0
        self._receive_window = limits.connection_window_bytes
        self._late_resets: dict[int, None] = {}  # streams that the peer reset after their end; the oldest first
        self._pings = 0
        self._pinged: list[Callable[[], None]] = []  # called when the peer responds to the last PING
        self._unpinged: list[Callable[[], None]] = []  # called when it responds to the next one
        self._valid_names: set[tuple[str, ...]] = set()
        self._handlers = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.PRIORITY: self._on_priority,
            frames.RST_STREAM: self._on_rst_stream,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push_promise,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }
        settings = {
            frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
            frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
        }
        self.outbound.is_collecting = True  # until the owner has started to read
        self.outbound.emit(frames.settings_frame(settings))
        if limits.connection_window_bytes > frames.DEFAULT_WINDOW:
            more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
            self.outbound.emit(frames.window_update_frame(0, more))

    # --- input --------------------------------------------------------------------------------------

    @property
    def partial_bytes(self) -> int:
        """Number of received bytes that are not processed, and those of an incomplete header block."""
        return len(self._data) - self._at + (0 if self._block is None else len(self._block))

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def process(self, end_s: float = float("inf")) -> bool:
        """Handle the frames that are complete, until ``time.monotonic()`` is *end_s*; return True if there are more.

        Raises:
            Http2Error: The connection has to be closed.
        """
        self.outbound.is_collecting = True
        try:
            try:
                return self._process(end_s)
            finally:
                self._on_processed()
        except HpackError as exc:
            raise self.go_away(Http2Error(ErrorCode.COMPRESSION_ERROR, str(exc))) from exc
        except Http2Error as exc:
            raise self.go_away(exc) from None
        finally:
            self.outbound.is_collecting = False

    def _process(self, end_s: float) -> bool:
        if not self._has_preface and not self._read_preface():
            return False
        data, at = self._data, self._at
        end = len(data)
        handlers, unpack, now_s = self._handlers, HEAD.unpack_from, time.monotonic
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack(data, at)
            length = high << 8 | low
            if length > frames.MIN_FRAME_BYTES:
                raise Http2Error(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, allowed are {frames.MIN_FRAME_BYTES}"
                )
            start = at + HEAD_BYTES
            at = start + length
            if at > end:
                break
            self._at = at
            self.frames_read += 1
            stream_id &= frames.MAX_STREAM_ID
            if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block_stream):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"frame {kind} inside the header block of another")
            handler = handlers.get(kind)
            if handler is None:
                self._control.spend(1, "frames of unknown types")
            else:
                try:
                    handler(flags, stream_id, data[start:at])
                except Http2Error as exc:
                    if not exc.stream_id:
                        raise
                    self._on_stream_error(exc)
            if now_s() >= end_s:
                return bool(end - at >= HEAD_BYTES)
        if self._at == end:
            self._data, self._at = b"", 0
        return False

    def _read_preface(self) -> bool:
        preface = frames.PREFACE
        if not preface.startswith(self._data[: len(preface)]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the connection does not start with the preface of HTTP/2")
        if len(self._data) < len(preface):
            return False
        self._at = len(preface)
        self._has_preface = True
        return True

    def _on_stream_error(self, exc: Http2Error) -> None:
        """End a stream by the peer's fault, which may be a way to make this side work for nothing: count it."""
        self.resets.spend(1, "streams with errors")
        stream = self._streams.get(exc.stream_id)
        if stream is None:
            self.outbound.refuse(exc.stream_id, exc.code)
        else:
            receiver = stream.receiver
            self.outbound.reset_stream(stream, exc.code)
            if receiver is not None:
                receiver.on_reset(str(exc))

    # --- frames of requests -------------------------------------------------------------------------

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"HEADERS of stream {stream_id}, which a client cannot open")
        self._need_settings()
        if flags & frames.PADDED:
            payload = frames.without_padding("HEADERS", flags, payload, 0)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "HEADERS with an incomplete priority")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, payload, ends_stream=flags & frames.END_STREAM != 0)
        else:
            self._block, self._block_stream, self._block_flags = bytearray(payload), stream_id, flags

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block before it")
        # Small frames are not worth their cost, and there is no reason to send many.
        self._control.spend(1 if len(payload) >= CREDIT_BYTES else 100, "CONTINUATION frames")
        block += payload
        if len(block) > max(self._limits.max_header_bytes, frames.MIN_FRAME_BYTES):
            raise Http2Error(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of {len(block)} bytes, allowed are {self._limits.max_header_bytes}",
            )
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(stream_id, bytes(block), ends_stream=self._block_flags & frames.END_STREAM != 0)

    def _on_block(self, stream_id: int, block: bytes, *, ends_stream: bool) -> None:
        """Handle the fields of a request, or its trailers. Each block must be decoded, also of a refused request."""
        try:
            fields = self._decoder.decode(block)
        except HeaderListTooLargeError as exc:
            self._control.spend(_LARGE_LIST_FRAMES, "lists of fields above the limit")
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, str(exc), self._new_id(stream_id)) from None
        except HeaderBombError as exc:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, str(exc)) from None
        if stream_id <= self.last_stream_id:
            self._on_trailers(stream_id, fields, ends_stream=ends_stream)
            return
        self._new_id(stream_id)
        if self.is_going_away:
            raise Http2Error(ErrorCode.REFUSED_STREAM, "the connection is about to be closed", stream_id)
        if len(self._streams) >= self._limits.max_streams:
            raise Http2Error(ErrorCode.REFUSED_STREAM, f"more than {self._limits.max_streams} streams", stream_id)
        headers = self._request(stream_id, fields)
        stream = Http2Stream(stream_id, self.outbound, self._limits.stream_window_bytes)
        if "content-length" in headers:
            stream.content_length = _content_length(headers["content-length"], stream_id)
        if ends_stream and stream.content_length:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "less data than content-length", stream_id)
        self._streams[stream_id] = stream
        stream.remote_ended = ends_stream
        self._control.earn(10)
        receiver = stream.receiver = self._open_stream(stream, headers)
        if ends_stream and stream.is_open:
            receiver.on_data(b"", is_last=True)

    def _new_id(self, stream_id: int) -> int:
        self.last_stream_id = max(self.last_stream_id, stream_id)
        return stream_id

    def _request(self, stream_id: int, fields: list[HeaderField]) -> dict[str, str]:
        """Return the fields of a request by name. RFC 9113, 8.2 and 8.3."""
        headers = dict(fields)
        if len(headers) != len(fields):
            headers = _joined(fields, stream_id)
        if self._decoder.is_suspect:
            for name, value in fields:
                if not is_valid_field(name, value):
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a field that HTTP/2 does not allow", stream_id)
        names = tuple(headers)
        if names not in self._valid_names:
            _check_names(names, stream_id)
            if len(self._valid_names) >= _MAX_VALID_NAMES:
                self._valid_names.clear()
            if len(names) <= _MAX_CACHED_NAMES:
                self._valid_names.add(names)
        if headers.get("te", "trailers") != "trailers":
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the field te may only have the value trailers", stream_id)
        if not headers[":path"]:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "an empty path", stream_id)
        return headers

    def _on_trailers(self, stream_id: int, fields: list[HeaderField], *, ends_stream: bool) -> None:
        """Handle the trailers of a request. Their fields have no meaning for gRPC."""
        stream = self._live(stream_id, "HEADERS")
        if stream is None:
            return
        if stream.remote_ended:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "HEADERS after the end of the request", stream_id)
        if not ends_stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the request", stream_id)
        if any(name.startswith(":") or not is_valid_field(name, value) for name, value in fields):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a field that HTTP/2 does not allow in trailers", stream_id)
        if stream.content_length:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "less data than content-length", stream_id)
        stream.remote_ended = True
        self._on_part(stream, b"", is_last=True)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        length = len(payload)
        self._receive_window -= length  # padding included
        if self._receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the connection")
        if self._receive_window * 2 < self._limits.connection_window_bytes:
            self.outbound.emit(
                frames.window_update_frame(0, self._limits.connection_window_bytes - self._receive_window)
            )
            self._receive_window = self._limits.connection_window_bytes
        stream = self._streams.get(stream_id) or self._live(stream_id, "DATA")
        if stream is None:
            return
        if stream.remote_ended:
            raise Http2Error(ErrorCode.STREAM_CLOSED, "DATA after the end of the request", stream_id)
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window of the stream", stream_id)
        if flags & frames.PADDED:
            payload = frames.without_padding("DATA", flags, payload, 0)
        is_last = flags & frames.END_STREAM != 0
        if not payload and not is_last:
            self._control.spend(1, "empty DATA frames")
        if stream.content_length is not None:
            stream.content_length -= len(payload)
            if stream.content_length < 0 or (is_last and stream.content_length):
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "data of another size than content-length", stream_id)
        stream.remote_ended = is_last
        self._on_part(stream, payload, is_last=is_last)

    def _on_part(self, stream: Http2Stream, data: bytes, *, is_last: bool) -> None:
        if stream.receiver is not None:
            stream.receiver.on_data(data, is_last=is_last)
        if not is_last and stream.is_open and stream.receive_window * 2 < self._limits.stream_window_bytes:
            self.outbound.emit(
                frames.window_update_frame(stream.id, self._limits.stream_window_bytes - stream.receive_window)
            )
            stream.receive_window = self._limits.stream_window_bytes

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM with {len(payload)} bytes")
        self._check_not_idle(stream_id, "RST_STREAM")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._control.spend(1, "frames of closed streams")
            self._late_resets[stream_id] = None
            if len(self._late_resets) > self._limits.max_streams:
                del self._late_resets[next(iter(self._late_resets))]
            return
        self.resets.spend(1, "streams that the client resets")
        stream.remote_ended = True
        receiver = stream.receiver
        self.outbound.end_stream(stream)
        if receiver is not None:
            receiver.on_reset(f"the client reset the call, code {int.from_bytes(payload, 'big')}")

    # --- frames of the connection -------------------------------------------------------------------

    def _need_settings(self) -> None:
        if not self._has_settings:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS of stream {stream_id}")
        if flags & frames.ACK:
            if payload:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame that is an ACK has content")
            self._need_settings()
            self._control.spend(1, "SETTINGS frames")
            return
        settings = frames.parse_settings(payload)
        if len(settings) > _MAX_SETTINGS:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, f"{len(settings)} settings in one frame")
        # The new window has to be added to each stream.
        self._control.spend(1 + len(self._streams) // 10, "SETTINGS frames")
        self._has_settings = True
        # Only the last value of each counts: the peer must not make this side apply a setting many times.
        last = dict(settings)
        if frames.HEADER_TABLE_SIZE in last:
            self.outbound.encoder.set_limit(last[frames.HEADER_TABLE_SIZE])
        if frames.MAX_FRAME_SIZE in last:
            self.outbound.max_frame_bytes = min(last[frames.MAX_FRAME_SIZE], _MAX_SENT_FRAME_BYTES)
        self.outbound.emit(frame(frames.SETTINGS, frames.ACK, 0, b""))
        if frames.INITIAL_WINDOW_SIZE in last:
            self.outbound.set_stream_window(last[frames.INITIAL_WINDOW_SIZE])

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"PING of stream {stream_id}")
        if len(payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PING with {len(payload)} bytes")
        self._control.spend(1, "PING frames")
        if not flags & frames.ACK:
            self.outbound.emit(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _ping_payload(self._pings) and self._pinged:
            answered, self._pinged, self._unpinged = self._pinged, self._unpinged, []
            if self._pinged:
                self._send_ping()
            for callback in answered:
                callback()

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE with {len(payload)} bytes")
        self._control.spend(1, "WINDOW_UPDATE frames")
        increment = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if stream_id:
            self._check_not_idle(stream_id, "WINDOW_UPDATE")
        if not increment:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE without an increment", stream_id)
        if not stream_id:
            self.outbound.enlarge_window(increment)
        elif (stream := self._streams.get(stream_id)) is not None:
            self.outbound.enlarge_stream_window(stream, increment)

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PRIORITY of stream 0")
        self._control.spend(1, "PRIORITY frames")
        if len(payload) != 5:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY with {len(payload)} bytes", stream_id)

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"GOAWAY of stream {stream_id}")
        if len(payload) < 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY with {len(payload)} bytes")
        # It is about streams that a server opens, and there are none: but the peer opens none either any more.
        self._control.spend(1, "GOAWAY frames")
        if not self._is_peer_leaving:
            self._is_peer_leaving = True
            for stream in list(self._streams.values()):
                if stream.receiver is not None:
                    stream.receiver.on_goaway()

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    # --- streams that are not open ------------------------------------------------------------------

    def _check_not_idle(self, stream_id: int, kind: str) -> None:
        self._need_settings()
        if not stream_id & 1 or stream_id > self.last_stream_id:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{kind} of stream {stream_id}, which is not open")

    def _live(self, stream_id: int, kind: str) -> Http2Stream | None:
        """Return the stream of a frame; None if this side ended it, so the peer may have sent the frame before."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id, kind)
            self._control.spend(1, "frames of closed streams")
            if not self.outbound.ended_first(stream_id):
                raise Http2Error(ErrorCode.STREAM_CLOSED, f"{kind} of stream {stream_id}, which is closed")
        return stream

    # --- for the owner ------------------------------------------------------------------------------

    def ping(self, answered: Callable[[], None] | None = None) -> None:
        """Send a PING, to which a living peer responds.

        Args:
            answered: Called when it responds: it has processed all frames that were sent before this call. It is not
                called if the connection ends, or if the peer leaves too many unanswered.
        """
        if answered is not None:
            if not self._pinged:
                self._pinged = [answered]
            elif len(self._unpinged) < _MAX_UNPINGED:
                self._unpinged.append(answered)  # one PING after the other: a peer may count them
                return
        self._send_ping()

    def _send_ping(self) -> None:
        self._pings += 1
        self._control.earn(1)
        self.outbound.emit(frame(frames.PING, 0, 0, _ping_payload(self._pings)))

    def was_reset(self, stream_id: int) -> bool:
        """Return True if the peer reset a stream after this side had sent the end of the response."""
        return stream_id in self._late_resets

    def close(self) -> list[StreamReceiver]:
        """Free what the connection holds, since it is closed. Return the owners of the streams that were open."""
        self._data, self._at, self._block = b"", 0, None
        self._handlers.clear()  # they refer to this object, and the other one to the owner
        self._open_stream, self._on_processed = _open_none, _do_nothing
        self._pinged, self._unpinged = [], []  # they refer to the owner, too
        return self.outbound.end_all()

    def go_away(self, error: Http2Error) -> Http2Error:
        """Send GOAWAY, and return *error*. The peer may open no more streams; without a fault the open ones go on."""
        self.is_going_away = True
        self.outbound.emit(frames.goaway_frame(self.last_stream_id, error.code, error.reason))
        return error


def _do_nothing() -> None:
    """Take the place of a function of the owner of a closed connection."""


def _ping_payload(number: int) -> bytes:
    return number.to_bytes(8, "big")


# --- requests -------------------------------------------------------------------------------------


def _open_none(stream: Http2Stream, headers: dict[str, str]) -> StreamReceiver:
    raise Http2Error(ErrorCode.REFUSED_STREAM, "the connection is closed", stream.id)


def _joined(fields: list[HeaderField], stream_id: int) -> dict[str, str]:
    """Return fields by name, the values of one name joined by commas. RFC 9110, 5.3."""
    headers: dict[str, str] = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        elif name.startswith(":"):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"{name} occurs twice", stream_id)
        else:
            headers[name] += f", {value}"
    return headers


def _check_names(names: tuple[str, ...], stream_id: int) -> None:
    """Check the names of a request's fields. RFC 9113, 8.2.2 and 8.3.1."""
    count = sum(name.startswith(":") for name in names)
    if not _REQUIRED <= {*names[:count]} <= _PSEUDO_FIELDS:
        raise Http2Error(
            ErrorCode.PROTOCOL_ERROR,
            "the request does not start with its method, scheme and path, or has another pseudo-header field",
            stream_id,
        )
    if not _OF_CONNECTIONS.isdisjoint(names):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a field of an HTTP/1.1 connection", stream_id)


def _content_length(value: str, stream_id: int) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "content-length is not a number", stream_id)
    return int(value)
