"""Frames of HTTP/2: their bytes, error codes and settings. Source: RFC 9113, sections 4, 6 and 7."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from mqtemplate.errors import RemoteProtocolError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a client. RFC 9113, 3.4."""

HEAD: Final = struct.Struct(">HBBBI")
"""Head of a frame: length (the upper 16 bits, and the lower 8), type, flags, stream (its first bit is ignored).

==  ==  ======  ====================================
 0  u3  length  bytes of the payload
 3  u1  type    as below; unknown ones are ignored
 4  u1  flags   of that type
 5  u4  stream  0: the connection
==  ==  ======  ====================================
"""
HEAD_BYTES: Final = 9
assert HEAD.size == HEAD_BYTES

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1  # DATA, HEADERS
ACK: Final = 0x1  # SETTINGS, PING
END_HEADERS: Final = 0x4  # HEADERS, CONTINUATION
PADDED: Final = 0x8  # DATA, HEADERS
HAS_PRIORITY: Final = 0x20  # HEADERS

MAX_STREAM_ID: Final = 0x7FFF_FFFF
MAX_WINDOW: Final = 0x7FFF_FFFF
DEFAULT_WINDOW: Final = 65_535
MIN_FRAME_BYTES: Final = 16_384
"""Largest payload that each side must accept, and the default."""
MAX_FRAME_BYTES: Final = 16_777_215

# --- errors ---------------------------------------------------------------------------------------


class ErrorCode(IntEnum):
    """Reason of the end of a stream or of a connection. RFC 9113, 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2Error(RemoteProtocolError):
    """The peer violates HTTP/2, or a limit of this server.

    Attributes:
        code: Sent to the peer.
        stream_id: The stream that ends; 0: the connection ends.
    """

    def __init__(self, code: ErrorCode, reason: str, stream_id: int = 0) -> None:
        super().__init__(f"{reason} ({code.name}{f', stream {stream_id}' if stream_id else ''})")
        self.code = code
        self.reason = reason
        self.stream_id = stream_id


# --- settings: RFC 9113, 6.5.2 --------------------------------------------------------------------


HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

_SETTING = struct.Struct(">HI")
_ALLOWED = {
    # setting -> smallest value, largest value, error otherwise
    ENABLE_PUSH: (0, 1, ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: (0, MAX_WINDOW, ErrorCode.FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: (MIN_FRAME_BYTES, MAX_FRAME_BYTES, ErrorCode.PROTOCOL_ERROR),
}


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return settings and values in their order; a later value replaces an earlier one. Unknown settings are included.

    Raises:
        Http2Error: The length is wrong, or a value is not allowed.
    """
    if len(payload) % _SETTING.size:
        raise Http2Error(
            ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS with {len(payload)} bytes, which is no multiple of {_SETTING.size}"
        )
    settings = list(_SETTING.iter_unpack(payload))
    for setting, value in settings:
        lowest, highest, code = _ALLOWED.get(setting, (0, 0xFFFF_FFFF, ErrorCode.PROTOCOL_ERROR))
        if not lowest <= value <= highest:
            raise Http2Error(code, f"setting {setting} has the value {value}, allowed are {lowest} to {highest}")
    return settings


# --- frames ---------------------------------------------------------------------------------------


def frame_head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the first 9 bytes of a frame."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame."""
    length = len(payload)
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def settings_frame(settings: Mapping[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings.items()))


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def rst_stream_frame(stream_id: int, code: ErrorCode) -> bytes:
    """Return an RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Return a GOAWAY frame; *reason* is text for the logs of the peer."""
    text = reason.encode("utf-8", "replace")[:1_000]
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text)


def header_frames(stream_id: int, block: bytes, max_frame_bytes: int, *, ends_stream: bool) -> bytes:
    """Return a header block as a HEADERS frame, and CONTINUATION frames if it is larger than a frame."""
    flags = END_STREAM if ends_stream else 0
    if len(block) <= max_frame_bytes:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    frames = [frame(HEADERS, flags, stream_id, block[:max_frame_bytes])]
    for at in range(max_frame_bytes, len(block), max_frame_bytes):
        is_last = at + max_frame_bytes >= len(block)
        rest = block[at : at + max_frame_bytes]
        frames.append(frame(CONTINUATION, END_HEADERS if is_last else 0, stream_id, rest))
    return b"".join(frames)


def without_padding(kind: str, flags: int, payload: bytes, stream_id: int) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding.

    Raises:
        Http2Error: The padding is longer than the payload.
    """
    if not flags & PADDED:
        return payload
    if not payload:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a padded {kind} frame of stream {stream_id} is empty")
    length = len(payload) - payload[0]
    if length < 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"the padding of a {kind} frame of stream {stream_id} is too long")
    return payload[1:length]
