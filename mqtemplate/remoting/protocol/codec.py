"""Frames: commands to bytes, and bytes in pieces of any size to commands. No socket, thread or clock. Big-endian.

==  =======  ===============  ==================================================
 0  i4       length           size of what follows
 4  u1       serialize_type   encoding of the header: `SerializeType`
 5  u3, n    header           see `json_header` and `binary_header`
    rest     body             may be empty
==  =======  ===============  ==================================================

Source: RocketMQ ``remoting: NettyDecoder``, ``RemotingCommand.decode``.
"""

from __future__ import annotations

import struct
from collections import deque

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.binary_header import LARGEST_BINARY_CODE, decode_binary_header, encode_binary_header
from mqtemplate.remoting.protocol.codes import MAX_FRAME_BYTES, SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import decode_json_header, encode_json_header

_HEAD = struct.Struct(">iI")
_LENGTH = struct.Struct(">i")
_SMALLEST_LENGTH = 4

_OTHER_PROTOCOLS = (
    (b"\x16\x03", "it is a TLS handshake: one side uses TLS, the other does not"),
    (b"GET ", "it is an HTTP request: this port expects RocketMQ's protocol"),
    (b"POST", "it is an HTTP request: this port expects RocketMQ's protocol"),
    (b"HTTP", "it is an HTTP response: this address is a web server's"),
    (b"PRI ", "it is HTTP/2, as gRPC uses: for RocketMQ's proxy take its remoting port"),
    (b"PROX", "it is a PROXY preamble: switch it off in the load balancer"),
    (b"\r\n\r\n", "it is a PROXY preamble: switch it off in the load balancer"),
)


def encode_head(command: RemotingCommand, body_size: int) -> bytes:
    """Return the part of a frame before a body of *body_size* bytes, for a caller that sends the body separately.

    A command with a code too large for a binary header gets a JSON header; each frame names its own encoding.

    Raises:
        MessageError: The frame would be larger than `MAX_FRAME_BYTES`, or the header cannot be encoded.
    """
    if command.serialize_type is SerializeType.JSON or command.code > LARGEST_BINARY_CODE:
        header, serialize_type = encode_json_header(command), 0
    else:
        header, serialize_type = encode_binary_header(command), 1 << 24
    size = len(header)
    length = 4 + size + body_size
    if length > MAX_FRAME_BYTES - 4:
        raise MessageError(
            f"{command}: its frame has {length + 4} bytes, allowed are {MAX_FRAME_BYTES}; send less at once"
        )
    return _HEAD.pack(length, serialize_type | size) + header


def json_frame_head(header: bytes, body_size: int = 0) -> bytes:
    """Return what `encode_head` returns, for a header in JSON and a frame far smaller than `MAX_FRAME_BYTES`."""
    size = len(header)
    return _HEAD.pack(4 + size + body_size, size) + header


def encode_command(command: RemotingCommand) -> bytes:
    """Return the frame of *command*; see `encode_head`."""
    body = command.body
    return encode_head(command, len(body)) + body


def decode_command(frame: bytes) -> RemotingCommand:
    """Return the command in one whole frame.

    Raises:
        RemoteProtocolError: *frame* is not one whole frame.
    """
    decoder = FrameDecoder(max(len(frame), MAX_FRAME_BYTES))
    decoder.feed(frame)
    command = decoder.next_command()
    if command is None or decoder.buffered:
        raise RemoteProtocolError(f"{len(frame)} bytes are not one whole frame")
    return command


Frame = tuple[int, bytes, bytes]
"""A whole frame whose header is not decoded: serialize type, header and body."""


class FrameDecoder:
    """Decoder of bytes, received in pieces of any size, to frames and commands.

    - It buffers what was fed and not yet read: at most a frame and a piece, if the caller reads all commands after
      each piece.
    - An invalid length or header is refused when its own bytes have arrived, not when the frame is complete.
    - After an error the start of the next frame is unknown: each later call raises that error again.
    - Not thread-safe: one thread, the reader of the connection, uses it.

    Args:
        max_frame_bytes: Size of the largest accepted frame, including its first four bytes.
    """

    __slots__ = ("_buffer", "_error", "_frames", "_longest")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._longest = max_frame_bytes - 4
        self._buffer = bytearray()
        self._frames: deque[Frame] = deque()
        self._error: str | None = None

    @property
    def buffered(self) -> int:
        """Bytes that were fed and not read. At the end of a connection, those of an incomplete frame."""
        frames = sum(8 + len(header) + len(body) for _, header, body in self._frames) if self._frames else 0
        return frames + len(self._buffer)

    @property
    def has_more(self) -> bool:
        """True if bytes were fed and not read."""
        return bool(self._frames or self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. After an error they are dropped."""
        if self._error is not None:
            return
        if self._buffer:
            self._buffer += data
            with memoryview(self._buffer) as view:
                end = self._split(view)
            del self._buffer[:end]
        else:  # mostly there are whole frames only, which need no buffer
            with memoryview(data) as view:
                end = self._split(view)
                self._buffer += view[end:]

    def next_command(self) -> RemotingCommand | None:
        """Return the next command, or None if it is not complete yet.

        Raises:
            RemoteProtocolError: The bytes are not RocketMQ's protocol; close the connection.
        """
        frame = self.next_frame()
        return None if frame is None else self.decode(frame)

    def next_frame(self) -> Frame | None:
        """Return the next frame, or None if it is not complete yet. Errors as `next_command`; pass it to `decode`."""
        if self._frames:
            return self._frames.popleft()
        if self._error is not None:
            raise RemoteProtocolError(self._error)
        if self._buffer:
            self._check_head()
        return None

    def decode(self, frame: Frame) -> RemotingCommand:
        """Return the command in a frame. Errors as `next_command`."""
        serialize_type, header, body = frame
        try:
            command = decode_binary_header(header) if serialize_type else decode_json_header(header)
        except RemoteProtocolError as exc:
            self._fail(exc)
            raise
        command.body = body
        return command

    def _fail(self, error: RemoteProtocolError) -> None:
        self._error = str(error)
        self._buffer.clear()
        self._frames.clear()

    def _split(self, view: memoryview) -> int:
        """Copy the whole frames at the start to `_frames`. Return their end; an invalid one may follow."""
        longest, at, size = self._longest, 0, len(view)
        while size - at >= 8:
            length, word = _HEAD.unpack_from(view, at)
            header_end, end = at + 8 + (word & 0xFF_FFFF), at + 4 + length
            if not _SMALLEST_LENGTH <= length <= longest or header_end > end or word >> 24 > 1 or end > size:
                break
            self._frames.append((word >> 24, bytes(view[at + 8 : header_end]), bytes(view[header_end:end])))
            at = end
        return at

    def _check_head(self) -> None:
        """Raise an error if the frame in the buffer is invalid, as far as it has arrived."""
        try:
            self._check_length()
            if len(self._buffer) >= 8:
                length, word = _HEAD.unpack_from(self._buffer)
                if 4 + (word & 0xFF_FFFF) > length or word >> 24 > 1:
                    raise _head_error(length, word)
        except RemoteProtocolError as exc:
            self._fail(exc)
            raise

    def _check_length(self) -> None:
        if len(self._buffer) < 4:
            return
        (length,) = _LENGTH.unpack_from(self._buffer)
        if not _SMALLEST_LENGTH <= length <= self._longest:
            first = bytes(self._buffer[:4])
            hint = next((f"; {text}" for start, text in _OTHER_PROTOCOLS if first.startswith(start)), "")
            raise RemoteProtocolError(
                f"a frame of {length} bytes announced, allowed are {_SMALLEST_LENGTH} to {self._longest}{hint}"
            )


def _head_error(length: int, word: int) -> RemoteProtocolError:
    if word >> 24 > 1:
        return RemoteProtocolError(f"serialize type {word >> 24} is unknown; 0 is JSON, 1 is ROCKETMQ")
    return RemoteProtocolError(f"a header of {word & 0xFF_FFFF} bytes announced in a frame of {length}")
