"""Compressed bodies from producers that nobody controls: a small body may become a large one."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mqtemplate.errors import BodyTooLargeError, ConversionError
from mqtemplate.message import MessageExt, PackedBody
from mqtemplate.record.codec import RecordDraft, parse_record, to_message_ext
from mqtemplate.record.compression import CompressionType, compress_body, decompress_body, max_body_bytes
from mqtemplate.remoting.protocol.messages import decode_messages

_MIB = 1 << 20


@contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the largest memory that Python allocated inside the block."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stored(body: bytes, sys_flag: int) -> bytes:
    return RecordDraft("orders", 0, body, b"", sys_flag=sys_flag).encode(0, 0, 1, b"\x7f\0\0\1\0\0\0\0")


@pytest.mark.parametrize("kind", list(CompressionType))
def test_a_body_that_becomes_too_large_is_refused_without_being_built(kind: CompressionType) -> None:
    """256 MiB of zeros take some hundred kilobytes (8 KB as Zstandard)."""
    packed, flag = packed_zeros(kind, 256 * _MIB)

    with peak_bytes() as peak:
        with pytest.raises(BodyTooLargeError) as caught:
            decompress_body(packed, flag, _MIB)
        used = peak()

    assert used < 32 * _MIB
    assert str(caught.value) == (
        f"the body of {len(packed)} bytes has more than 1048576 bytes when it is decompressed ({kind.name}); it was "
        "left compressed: raise max-decompressed-size, or let producers send less in one message"
    )


def need_library(kind: CompressionType) -> None:
    pytest.importorskip({CompressionType.ZLIB: "zlib", CompressionType.LZ4: "lz4.frame"}.get(kind, "zstandard"))


def packed_zeros(kind: CompressionType, size: int) -> tuple[bytes, int]:
    need_library(kind)
    if kind is CompressionType.ZLIB:
        stream = zlib.compressobj(9)
        return b"".join([stream.compress(bytes(_MIB)) for _ in range(size // _MIB)]) + stream.flush(), kind.sys_flag
    return compress_body(bytes(size), kind)


@pytest.mark.parametrize("kind", list(CompressionType))
@pytest.mark.parametrize("size", [1, 999, 1_000])
def test_a_body_up_to_the_limit_is_decompressed(kind: CompressionType, size: int) -> None:
    need_library(kind)
    packed, flag = compress_body(b"x" * size, kind)

    assert decompress_body(packed, flag, 1_000) == b"x" * size
    with pytest.raises(BodyTooLargeError):
        decompress_body(*compress_body(b"x" * 1_001, kind), 1_000)
    with pytest.raises(ConversionError, match="its end is missing|does not decompress"):
        decompress_body(packed[:-5], flag, 1_000)


@pytest.mark.parametrize("read", ["embedded", "remote"])
def test_a_too_large_body_stays_compressed_and_has_the_reason(read: str) -> None:
    """The other messages of the queue are read as usual."""
    packed, flag = compress_body(bytes(1_001))
    data = stored(packed, flag)

    message: MessageExt
    if read == "embedded":
        message = to_message_ext(parse_record(data), "broker-a", 1_000)
    else:
        message, other = decode_messages(data + stored(b"fine", 0), "broker-a", 1_000)
        assert other.body == b"fine"

    assert isinstance(message.body, PackedBody)
    assert (message.body, message.sys_flag) == (packed, flag)
    assert "has more than 1000 bytes when it is decompressed (ZLIB)" in message.body.reason


def test_the_limit_follows_the_largest_message_unless_it_is_set() -> None:
    assert max_body_bytes(None, 1_000) == 4_000
    assert max_body_bytes(77, 1_000) == 77
