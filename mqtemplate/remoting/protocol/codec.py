"""Frames: commands to bytes, and bytes in pieces of any size to commands. No socket, thread or clock. Big-endian.

A frame:

==  =======  ===============  ==================================================
 0  i4       length           size of what follows
 4  u1       serialize_type   encoding of the header: `SerializeType`
 5  u3, n    header           in JSON (`json_header`), or binary
    rest     body             may be empty
==  =======  ===============  ==================================================

A binary header:

===  =====  ==============  ==========================================================
 0   i2     code            a larger code needs a JSON header
 2   i1     language
 3   i2     version
 5   i4     opaque
 9   i4     flag
13   i4, n  remark          length 0: no remark
     i4     ext_length      size of all that follows; 0: no fields
     i2, n  name            name and value repeat
     i4, n  value           length 0: no value, as if the name were missing
===  =====  ==============  ==========================================================

Source: RocketMQ ``remoting: NettyDecoder``, ``RemotingCommand.decode``, ``RocketMQSerializable``.
"""

from __future__ import annotations

import struct
from collections import deque

from mqtemplate.errors import MessageError, RemoteProtocolError
from mqtemplate.remoting.protocol.codes import MAX_FRAME_BYTES, LanguageCode, SerializeType
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.json_header import decode_json_header, encode_json_header

_HEAD = struct.Struct(">iI")
_SMALLEST_LENGTH = 4
_LARGEST_BINARY_CODE = 32_767

_FIXED = struct.Struct(">hbhiii")
_I2 = struct.Struct(">h")
_I4 = struct.Struct(">i")
assert _FIXED.size == 17
_SMALLEST_HEADER = _FIXED.size + _I4.size

_LANGUAGES = {language.value: language for language in LanguageCode}

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
    if command.serialize_type is SerializeType.JSON or command.code > _LARGEST_BINARY_CODE:
        header, serialize_type = encode_json_header(command), 0
    else:
        header, serialize_type = _encode_binary_header(command), 1 << 24
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
        """Bytes that were fed and not read; at the end of a connection, the bytes of an incomplete frame."""
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
            command = _decode_binary_header(header) if serialize_type else decode_json_header(header)
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
        (length,) = _I4.unpack_from(self._buffer)
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


# --- binary headers ---------------------------------------------------------------------------------


def _encode_binary_header(command: RemotingCommand) -> bytes:
    """Return the header of *command*, without fields whose value is empty: a reader takes them as missing.

    Raises:
        MessageError: A number is too large for its field, or a text is not valid Unicode.
    """
    try:
        remark = (command.remark or "").encode()
        entries: list[bytes] = []
        for name, value in command.ext_fields.items():
            if name and value:
                key, text = name.encode(), value.encode()
                entries += (_I2.pack(len(key)), key, _I4.pack(len(text)), text)
        fields = b"".join(entries)
        fixed = _FIXED.pack(command.code, command.language, command.version, command.opaque, command.flag, len(remark))
    except (struct.error, UnicodeEncodeError) as exc:
        raise MessageError(f"the header of {command} has no binary form: {exc}; send it with a JSON header") from exc
    return b"".join((fixed, remark, _I4.pack(len(fields)), fields))


def _decode_binary_header(data: bytes) -> RemotingCommand:
    """Return the command that has *data* as its header, without a body.

    Raises:
        RemoteProtocolError: The lengths are wrong, or a text is not UTF-8.
    """
    if len(data) < _SMALLEST_HEADER:
        raise RemoteProtocolError(f"a binary header has at least {_SMALLEST_HEADER} bytes, this one has {len(data)}")
    code, language, version, opaque, flag, remark_length = _FIXED.unpack_from(data)
    try:
        remark, at = _read_text(data, _FIXED.size, remark_length)
        (length,) = _I4.unpack_from(data, at)
        at += 4
        if at + length != len(data):
            raise RemoteProtocolError(f"ext fields of {length} bytes announced, {len(data) - at} bytes follow")
        ext_fields = _read_fields(data, at)
    except (struct.error, UnicodeDecodeError) as exc:
        raise RemoteProtocolError(f"the binary header cannot be read: {exc}") from exc
    sender = _LANGUAGES.get(language, LanguageCode.OTHER)
    return RemotingCommand(code, opaque, flag, sender, version, remark or None, ext_fields, b"", SerializeType.ROCKETMQ)


def _read_fields(data: bytes, at: int) -> dict[str, str]:
    fields = {}
    while at < len(data):
        (length,) = _I2.unpack_from(data, at)
        name, at = _read_text(data, at + 2, length)
        (length,) = _I4.unpack_from(data, at)
        value, at = _read_text(data, at + 4, length)
        if name and value:
            fields[name] = value
    return fields


def _read_text(data: bytes, at: int, length: int) -> tuple[str, int]:
    end = at + length
    if length < 0 or end > len(data):
        raise RemoteProtocolError(f"a text of {length} bytes announced, {len(data) - at} bytes follow")
    return data[at:end].decode(), end
