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

from mqtemplate.errors import ConversionError, UnsupportedError
from mqtemplate.record.layout import SysFlag


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


def decompress_body(body: bytes, sys_flag: int) -> bytes:
    """Return the original body. Without the flag for compression this is *body* itself.

    Raises:
        ConversionError: The body does not match the flag.
        UnsupportedError: The package for this method is not installed.
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
    # As a stream: RocketMQ's frames do not contain the length of their content.
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
            f"{kind.name} bodies need the package {package}: pip install {package}, or let producers use ZLIB"
        ) from exc
