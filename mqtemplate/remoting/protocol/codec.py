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


class FrameDecoder:
    """Decoder of bytes, received in pieces of any size, to commands.

    - It buffers what was fed and not yet read: at most a frame and a piece, if the caller reads all commands after
      each piece.
    - An invalid length or header is refused when its own bytes have arrived, not when the frame is complete.
    - After an error the start of the next frame is unknown: each later call raises that error again.
    - Not thread-safe: one thread, the reader of the connection, uses it.

    Args:
        max_frame_bytes: Size of the largest accepted frame, including its first four bytes.
    """

    __slots__ = ("_buffer", "_error", "_longest")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._longest = max_frame_bytes - 4
        self._buffer = bytearray()
        self._error: str | None = None

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame. If this is not 0 at the end of a connection, the last frame was cut off."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes. After an error they are dropped."""
        if self._error is None:
            self._buffer += data

    def next_command(self) -> RemotingCommand | None:
        """Return the next command, or None if it is not complete yet.

        Raises:
            RemoteProtocolError: The bytes are not RocketMQ's protocol; close the connection.
        """
        if self._error is not None:
            raise RemoteProtocolError(self._error)
        buffer = self._buffer
        try:
            if len(buffer) < 8:
                self._check_length()
                return None
            length, word = _HEAD.unpack_from(buffer)
            header_end, end = 8 + (word & 0xFF_FFFF), 4 + length
            if not _SMALLEST_LENGTH <= length <= self._longest or header_end > end or word >> 24 > 1:
                self._check_length()
                raise _head_error(length, word)
            if len(buffer) < end:
                return None
            with memoryview(buffer) as view:  # copies header and body once; a slice of the bytearray would copy twice
                header, body = bytes(view[8:header_end]), bytes(view[header_end:end])
            del buffer[:end]
            command = decode_binary_header(header) if word >> 24 else decode_json_header(header)
        except RemoteProtocolError as exc:
            self._error = str(exc)
            buffer.clear()
            raise
        command.body = body
        return command

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
