"""Frames: commands as bytes, and bytes, cut anywhere, as commands. No socket, no thread, no clock. Big-endian.

==  =======  ===============  ==================================================
 0  i4       length           of what follows
 4  u1       serialize_type   how the header is written: `SerializeType`
 5  u3, n    header           see `json_header` and `binary_header`
    rest     body             may be empty
==  =======  ===============  ==================================================

Source: RocketMQ ``remoting: NettyDecoder``, ``RemotingCommand.decode``.
"""

from __future__ import annotations

import struct

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.binary_header import (
    LARGEST_BINARY_CODE,
    decode_binary_header,
    encode_binary_header,
)
from mqtemplate.remoting.protocol.codes import SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import decode_json_header, encode_json_header

MAX_FRAME_BYTES = 16_777_216
"""The largest frame that RocketMQ takes, its first four bytes included."""

_HEAD = struct.Struct(">iI")
_LENGTH = struct.Struct(">i")
_SMALLEST_LENGTH = 4

_FOREIGN = (
    (b"\x16\x03", "it begins as TLS does: one side speaks TLS, the other does not"),
    (b"GET ", "it is an HTTP request: this port speaks RocketMQ's protocol"),
    (b"POST", "it is an HTTP request: this port speaks RocketMQ's protocol"),
    (b"HTTP", "it is an HTTP answer: this address is a web server's"),
    (b"PRI ", "it is HTTP/2, as gRPC has it: for RocketMQ's proxy take its remoting port"),
    (b"PROX", "it is a PROXY preamble: switch it off in the load balancer"),
    (b"\r\n\r\n", "it is a PROXY preamble: switch it off in the load balancer"),
)


def encode_head(command: RemotingCommand, body_size: int) -> bytes:
    """All of a frame that stands before a body of *body_size* bytes; for who writes the body by itself.

    A binary header is written as JSON where the code does not fit into it: each frame says what it is.

    Raises:
        MessageError: The frame would be larger than `MAX_FRAME_BYTES`, or the header cannot be written.
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
    """The frame of *command*; see `encode_head`."""
    body = command.body
    return encode_head(command, len(body)) + body


def decode_command(frame: bytes) -> RemotingCommand:
    """The command in one whole frame.

    Raises:
        RemoteProtocolError: It is not one whole frame.
    """
    decoder = FrameDecoder(max(len(frame), MAX_FRAME_BYTES))
    decoder.feed(frame)
    command = decoder.next_command()
    if command is None or decoder.buffered:
        raise RemoteProtocolError(f"{len(frame)} bytes are not one whole frame")
    return command


class FrameDecoder:
    """Turn bytes, cut anywhere, into whole commands.

    - It holds what was fed and not yet read: at most a frame and a piece, if each piece is read out before the next.
    - A length or a header that cannot be is refused as soon as its bytes have come, not when the frame is complete.
    - After an error the place of the next frame is unknown: each later call raises that error again.
    - Not thread-safe: who reads the connection owns it.

    Args:
        max_frame_bytes: The largest frame taken, its first four bytes included.
    """

    __slots__ = ("_buffer", "_longest", "_problem")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._longest = max_frame_bytes - 4
        self._buffer = bytearray()
        self._problem: str | None = None

    @property
    def buffered(self) -> int:
        """Bytes that wait for the rest of their frame. Not 0 at the end of a connection: the last frame was cut off."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take what came; after an error it is dropped."""
        if self._problem is None:
            self._buffer += data

    def next_command(self) -> RemotingCommand | None:
        """Return the next command, or None while its last byte has not come.

        Raises:
            RemoteProtocolError: What came is not RocketMQ's protocol; close the connection.
        """
        if self._problem is not None:
            raise RemoteProtocolError(self._problem)
        buffer = self._buffer
        try:
            if len(buffer) < 8:
                self._check_length()
                return None
            length, word = _HEAD.unpack_from(buffer)
            header_end, end = 8 + (word & 0xFF_FFFF), 4 + length
            if not _SMALLEST_LENGTH <= length <= self._longest or header_end > end or word >> 24 > 1:
                self._check_length()
                raise _bad_head(length, word)
            if len(buffer) < end:
                return None
            with memoryview(buffer) as view:
                header, body = bytes(view[8:header_end]), bytes(view[header_end:end])
            del buffer[:end]
            command = decode_binary_header(header) if word >> 24 else decode_json_header(header)
        except RemoteProtocolError as exc:
            self._problem = str(exc)
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
            hint = next((f"; {text}" for start, text in _FOREIGN if first.startswith(start)), "")
            raise RemoteProtocolError(
                f"a frame of {length} bytes announced, allowed are {_SMALLEST_LENGTH} to {self._longest}{hint}"
            )


def _bad_head(length: int, word: int) -> RemoteProtocolError:
    if word >> 24 > 1:
        return RemoteProtocolError(f"serialize type {word >> 24} is unknown; 0 is JSON, 1 is ROCKETMQ")
    return RemoteProtocolError(f"a header of {word & 0xFF_FFFF} bytes announced in a frame of {length}")
