"""Compressed bodies, and the bits of ``sys_flag`` that describe them.

Bit 0 marks a body as compressed. The bits of ``0x700`` name the method: 1 is an LZ4 frame, 2 is Zstandard, 3 is zlib.
Older clients write 0 for zlib. Flag and body belong together; a broker changes neither.

Source: RocketMQ ``common: compression``, ``MessageSysFlag``.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from importlib import import_module
from typing import Any

from mqtemplate.errors import BodyTooLargeError, ConversionError, UnsupportedError
from mqtemplate.record.layout import SysFlag

_SIZES_OF_A_MESSAGE = 4
MAX_BODY_BYTES = _SIZES_OF_A_MESSAGE * (4 << 20)
"""Largest body that is decompressed, if no setting says otherwise: four times the default of ``max-message-size``."""

_ZSTD_PIECE = 256
"""Bytes that Zstandard is fed at once. Each 4 of them may become 128 KiB: so much may the limit be exceeded by."""


class CompressionType(IntEnum):
    """Compression method, by its number in ``sys_flag``."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @property
    def sys_flag(self) -> int:
        """Bits of ``sys_flag`` for a body compressed in this way."""
        return SysFlag.COMPRESSED | self << 8


_LIBRARIES = {CompressionType.LZ4: ("lz4.frame", "lz4"), CompressionType.ZSTD: ("zstandard", "zstandard")}


def compression_type(sys_flag: int) -> CompressionType | None:
    """Return the compression method of a body; None if it is not compressed.

    Raises:
        ConversionError: The method is unknown.
    """
    if not sys_flag & SysFlag.COMPRESSED:
        return None
    number = (sys_flag & SysFlag.COMPRESSION_MASK) >> 8
    try:
        return CompressionType(number or CompressionType.ZLIB)
    except ValueError:
        raise ConversionError(
            f"the body is compressed with method {number}; known are 1 (LZ4), 2 (ZSTD), 3 and 0 (ZLIB)"
        ) from None


def compress_body(body: bytes, kind: CompressionType = CompressionType.ZLIB, level: int = 5) -> tuple[bytes, int]:
    """Return the compressed body, and the bits to set in the ``sys_flag`` of its message.

    Args:
        level: Of zlib and Zstandard.

    Raises:
        UnsupportedError: The package for this method is not installed.
    """
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, level), kind.sys_flag
    library = _library_for(kind)
    if kind is CompressionType.LZ4:
        return bytes(library.compress(body)), kind.sys_flag
    return bytes(library.ZstdCompressor(level=level).compress(body)), kind.sys_flag


def max_body_bytes(setting: int | None, max_message_size: int) -> int:
    """Return the setting ``max-decompressed-size``, or its default."""
    return _SIZES_OF_A_MESSAGE * max_message_size if setting is None else setting


def decompress_body(body: bytes, sys_flag: int, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the original body. Without the flag for compression this is *body* itself.

    Args:
        max_bytes: Decompression stops at a body of more bytes: a gigabyte of zeros takes 33 KB as Zstandard.

    Raises:
        BodyTooLargeError: The original body has more than *max_bytes*.
        ConversionError: The body does not match the flag.
        UnsupportedError: The package for this method is not installed.
    """
    kind = compression_type(sys_flag)
    if kind is None:
        return body
    library: Any = zlib if kind is CompressionType.ZLIB else _library_for(kind)
    problems = (RuntimeError, EOFError, ValueError, getattr(library, "ZstdError", zlib.error))
    try:
        content, is_whole = _STREAMS[kind](library, body, max_bytes)
    except problems as exc:
        raise ConversionError(f"the body does not decompress as {kind.name}: {exc}") from exc
    if len(content) > max_bytes:
        raise BodyTooLargeError(
            f"the body of {len(body)} bytes has more than {max_bytes} bytes when it is decompressed ({kind.name}); it "
            "was left compressed: raise max-decompressed-size, or let producers send less in one message"
        )
    if not is_whole:
        raise ConversionError(f"the body does not decompress as {kind.name}: its end is missing")
    return content


# Each returns the content, and True if it is whole. If the content is larger than *limit*, it returns more than that.


def _stream_zlib(library: Any, body: bytes, limit: int) -> tuple[bytes, bool]:
    # RocketMQ's gRPC clients pack by gzip, and set no bits for the method: the header says which it is.
    stream = library.decompressobj(zlib.MAX_WBITS | 32)
    return stream.decompress(body, limit + 1), stream.eof


def _stream_lz4(library: Any, body: bytes, limit: int) -> tuple[bytes, bool]:
    stream = library.LZ4FrameDecompressor()
    return bytes(stream.decompress(body, limit + 1)), stream.eof


def _stream_zstd(library: Any, body: bytes, limit: int) -> tuple[bytes, bool]:
    # As a stream: RocketMQ's frames do not contain the length of their content.
    stream = library.ZstdDecompressor().decompressobj()
    parts, size = [], 0
    for at in range(0, len(body), _ZSTD_PIECE):
        parts.append(stream.decompress(body[at : at + _ZSTD_PIECE]))
        size += len(parts[-1])
        if size > limit or stream.eof:
            break
    return b"".join(parts), stream.eof


_STREAMS = {
    CompressionType.LZ4: _stream_lz4,
    CompressionType.ZSTD: _stream_zstd,
    CompressionType.ZLIB: _stream_zlib,
}


def _library_for(kind: CompressionType) -> Any:
    module, package = _LIBRARIES[kind]
    try:
        return import_module(module)
    except ImportError as exc:
        raise UnsupportedError(
            f"{kind.name} bodies need the package {package}: pip install {package}, or let producers use ZLIB"
        ) from exc
