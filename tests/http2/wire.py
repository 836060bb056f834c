"""The client's side of HTTP/2, which can break every rule of it."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import NamedTuple

from mqtemplate.http2 import frames
from mqtemplate.http2.connection import Http2Connection
from mqtemplate.http2.frames import HEAD, HEAD_BYTES, ErrorCode, Http2Error, frame
from mqtemplate.http2.grpc_wire import framed
from mqtemplate.http2.hpack import HeaderField, HpackDecoder, HpackEncoder
from mqtemplate.http2.limits import Http2Limits
from mqtemplate.http2.streams import Http2Stream
from mqtemplate.message import HostAddress
from tests.waiting import PATIENCE_S

REQUEST: tuple[HeaderField, ...] = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Service/Echo"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> ErrorCode:
        """Error code of RST_STREAM or GOAWAY."""
        at = 0 if self.kind == frames.RST_STREAM else 4
        return ErrorCode(int.from_bytes(self.payload[at : at + 4], "big"))


def parse(data: bytes) -> tuple[list[Frame], bytes]:
    """Return whole frames, and the bytes after them."""
    found, at = [], 0
    while len(data) - at >= HEAD_BYTES:
        high, low, kind, flags, stream_id = HEAD.unpack_from(data, at)
        end = at + HEAD_BYTES + (high << 8 | low)
        if end > len(data):
            break
        found.append(Frame(kind, flags, stream_id, data[at + HEAD_BYTES : end]))
        at = end
    return found, data[at:]


def hello(settings: dict[int, int] | None = None) -> bytes:
    """Return the first bytes of a client."""
    return frames.PREFACE + frames.settings_frame(settings or {})


def headers(
    stream_id: int,
    fields: Iterable[HeaderField] = REQUEST,
    flags: int = frames.END_HEADERS | frames.END_STREAM,
) -> bytes:
    """Return a HEADERS frame without use of the dynamic table."""
    return frame(frames.HEADERS, flags, stream_id, HpackEncoder().encode(tuple(fields)))


def changed(*fields: HeaderField, without: str = "") -> tuple[HeaderField, ...]:
    """Return the usual request with other fields in addition, or without one."""
    return (*(each for each in REQUEST if each[0] != without), *fields)


def data(stream_id: int, content: bytes, flags: int = frames.END_STREAM) -> bytes:
    return frame(frames.DATA, flags, stream_id, content)


def call(stream_id: int, path: str, message: bytes = b"", **fields: str) -> bytes:
    """Return a whole unary call."""
    more = tuple((name.replace("_", "-"), value) for name, value in fields.items())
    head = headers(stream_id, ((":path", path), *changed(*more, without=":path")), frames.END_HEADERS)
    return head + data(stream_id, framed(message))


class Receiver:
    """Owner of a stream that notes everything."""

    def __init__(self, stream: Http2Stream, fields: dict[str, str]) -> None:
        self.stream = stream
        self.fields = fields
        self.data = b""
        self.is_complete = False
        self.reset: str | None = None
        self.goaways = 0

    def on_goaway(self) -> None:
        self.goaways += 1

    def on_data(self, data: bytes, *, is_last: bool) -> None:
        self.data += data
        self.is_complete = is_last

    def on_reset(self, reason: str) -> None:
        self.reset = reason

    def on_accepted(self) -> None:
        raise AssertionError("no stream of these tests is tracked")


class ConnectionPeer:
    """A connection without a socket, and its client.

    Attributes:
        receivers: Owners of the streams by id.
        error: The error that ended the connection.
    """

    def __init__(
        self, limits: Http2Limits | None = None, *, settings: dict[int, int] | None = None, greets: bool = True
    ) -> None:
        self.now_ms = 0.0
        self.receivers: dict[int, Receiver] = {}
        self.error: Http2Error | None = None
        self.connection = Http2Connection(limits or Http2Limits(), self._open, lambda: self.now_ms)
        self._decoder = HpackDecoder(1 << 20)
        self._rest = b""
        self.greeting = self.take()
        if greets:
            self.send(hello(settings))

    def _open(self, stream: Http2Stream, fields: dict[str, str]) -> Receiver:
        receiver = self.receivers[stream.id] = Receiver(stream, fields)
        return receiver

    def process(self) -> None:
        try:
            self.connection.process()
        except Http2Error as exc:
            self.error = exc

    def send(self, *parts: bytes) -> list[Frame]:
        """Send bytes, and return the frames that are the response."""
        for part in parts:
            self.connection.feed(part)
            self.process()
            if self.error is not None:
                break
        return self.take()

    def take(self) -> list[Frame]:
        """Return the frames since the last time."""
        found, self._rest = parse(self._rest + b"".join(self.connection.outbound.take_output()))
        return found

    def fields(self, received: Frame) -> list[HeaderField]:
        """Return the fields of a HEADERS frame. Frames must be passed in their order."""
        return self._decoder.decode(received.payload)


class SocketPeer:
    """A client with a socket.

    Args:
        source: Address of the client, in the network 127.0.0.0/8.
    """

    def __init__(
        self,
        address: HostAddress,
        *,
        settings: dict[int, int] | None = None,
        greets: bool = True,
        source: str = "127.0.0.1",
    ) -> None:
        self.socket = socket.create_connection(
            (address.ip, address.port), timeout=PATIENCE_S, source_address=(source, 0)
        )
        self._decoder = HpackDecoder(1 << 20)
        self._data = b""
        self._frames: list[Frame] = []
        if greets:
            self.send(hello(settings))

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def next_frame(self) -> Frame | None:
        """Return the next frame; None at the end of the connection."""
        while not self._frames:
            try:
                received = self.socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not received:
                return None
            found, self._data = parse(self._data + received)
            self._frames += found
        return self._frames.pop(0)

    def until(self, kind: int) -> Frame:
        """Return the next frame of a type; others are dropped."""
        while (found := self.next_frame()) is not None:
            if found.kind == kind:
                return found
            if found.kind == frames.HEADERS:
                self._decoder.decode(found.payload)
        raise AssertionError(f"the connection ended before frame {kind}")

    def response(self) -> tuple[dict[str, str], list[bytes]]:
        """Return the fields and trailers of the next response, and its messages. There must be one open stream."""
        fields: dict[str, str] = {}
        content = b""
        while (found := self.next_frame()) is not None:
            if found.kind == frames.HEADERS:
                fields |= dict(self._decoder.decode(found.payload))
            elif found.kind == frames.DATA:
                content += found.payload
            if found.kind in (frames.HEADERS, frames.DATA) and found.flags & frames.END_STREAM:
                return fields, messages(content)
            if found.kind == frames.RST_STREAM and found.code is not ErrorCode.NO_ERROR:
                return {"reset": found.code.name}, []
        return {"reset": "connection"}, []

    def responses(self, count: int) -> dict[int, tuple[dict[str, str], list[bytes]]]:
        """Return the next responses by stream: fields and trailers, and messages."""
        fields: dict[int, dict[str, str]] = {}
        contents: dict[int, bytes] = {}
        ended: list[int] = []
        while len(ended) < count and (found := self.next_frame()) is not None:
            if found.kind == frames.HEADERS:
                received = fields.setdefault(found.stream_id, {})
                received |= dict(self._decoder.decode(found.payload))
            elif found.kind == frames.DATA:
                contents[found.stream_id] = contents.get(found.stream_id, b"") + found.payload
            if found.kind in (frames.HEADERS, frames.DATA) and found.flags & frames.END_STREAM:
                ended.append(found.stream_id)
        return {each: (fields[each], messages(contents.get(each, b""))) for each in ended}

    def is_ended(self) -> bool:
        """Read to the end of the connection."""
        while self.next_frame() is not None:
            pass
        return True


def messages(content: bytes) -> list[bytes]:
    """Return the messages of a response."""
    found = []
    while content:
        size = int.from_bytes(content[1:5], "big")
        found.append(content[5 : 5 + size])
        content = content[5 + size :]
    return found
