"""Bodies made smaller, and what the message's ``sys_flag`` says of it.

Bit 0 says that a body is compressed, the bits of ``0x700`` how: 1 is an LZ4 frame, 2 is Zstandard, 3 and 0 (what older
clients write) are zlib. Flag and body travel together; a broker touches neither.

Source: RocketMQ ``common: compression``, ``MessageSysFlag``.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from importlib import import_module
from typing import Any

from mqtemplate.errors import ConversionError, UnsupportedError

__all__ = [
    "COMPRESSED_FLAG",
    "COMPRESSION_MASK",
    "CompressionType",
    "compress_body",
    "compression_type",
    "decompress_body",
]

COMPRESSED_FLAG = 0x1
COMPRESSION_MASK = 0x700


class CompressionType(IntEnum):
    """Its number on the wire."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3

    @property
    def sys_flag(self) -> int:
        """The bits of a message compressed in this way."""
        return COMPRESSED_FLAG | self << 8


_LIBRARIES = {CompressionType.LZ4: ("lz4.frame", "lz4"), CompressionType.ZSTD: ("zstandard", "zstandard")}


def compression_type(sys_flag: int) -> CompressionType | None:
    """How a body is compressed; None if it is not.

    Raises:
        ConversionError: In a way that nobody knows.
    """
    if not sys_flag & COMPRESSED_FLAG:
        return None
    number = (sys_flag & COMPRESSION_MASK) >> 8
    try:
        return CompressionType(number or CompressionType.ZLIB)
    except ValueError:
        raise ConversionError(
            f"the body is compressed in way {number}; known are 1 (LZ4), 2 (ZSTD), 3 and 0 (ZLIB)"
        ) from None


def compress_body(body: bytes, kind: CompressionType = CompressionType.ZLIB, level: int = 5) -> tuple[bytes, int]:
    """The smaller body, and the bits to set in the message's ``sys_flag``.

    Args:
        level: Of zlib and Zstandard.

    Raises:
        UnsupportedError: The library for it is not installed.
    """
    if kind is CompressionType.ZLIB:
        return zlib.compress(body, level), kind.sys_flag
    library = _library_for(kind)
    if kind is CompressionType.LZ4:
        return bytes(library.compress(body)), kind.sys_flag
    return bytes(library.ZstdCompressor(level=level).compress(body)), kind.sys_flag


def decompress_body(body: bytes, sys_flag: int) -> bytes:
    """The body as it was; *body* itself if the flag says that it is not compressed.

    Raises:
        ConversionError: It is not what the flag says.
        UnsupportedError: The library for it is not installed.
    """
    kind = compression_type(sys_flag)
    if kind is None:
        return body
    library: Any = zlib if kind is CompressionType.ZLIB else _library_for(kind)
    problems = (RuntimeError, EOFError, ValueError, getattr(library, "ZstdError", zlib.error))
    try:
        return _decompress_zstd(library, body) if kind is CompressionType.ZSTD else bytes(library.decompress(body))
    except problems as exc:
        raise ConversionError(f"the body does not decompress as {kind.name}: {exc}") from exc


def _decompress_zstd(library: Any, body: bytes) -> bytes:
    """A stream, since RocketMQ's frames do not say how long their content is."""
    stream = library.ZstdDecompressor().decompressobj()
    content = bytes(stream.decompress(body))
    if not stream.eof:
        raise ValueError("its end is missing")
    return content


def _library_for(kind: CompressionType) -> Any:
    module, package = _LIBRARIES[kind]
    try:
        return import_module(module)
    except ImportError as exc:
        raise UnsupportedError(
            f"{kind.name} bodies need the package {package}: pip install {package}, or have senders use ZLIB"
        ) from exc
