"""Bytes that the socket does not accept at once are buffered, and sent unchanged."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.sockets import _RECORD_BYTES, OutboundBuffer, PlainStream, _chunks


class LimitedStream:
    """A stream that accepts a given number of bytes in each call."""

    socket: socket.socket

    def __init__(self, limits: list[int]) -> None:
        self.limits = iter(limits)
        self.sent = b""

    def receive_into(self, buffer: memoryview) -> int | None:
        return None

    def has_buffered(self) -> bool:
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        data = b"".join(parts)[: next(self.limits, 1 << 30)]
        self.sent += data
        return len(data)


@given(st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=80)), st.lists(st.integers(0, 30)))
def test_bytes_are_sent_in_order_whatever_the_socket_accepts(frames: list[list[bytes]], limits: list[int]) -> None:
    outbound, stream = OutboundBuffer(), LimitedStream(limits)

    for frame in frames:
        outbound.add(frame, sum(map(len, frame)))
        outbound.flush(stream)
    while outbound.size:
        outbound.flush(stream)

    expected = b"".join(part for frame in frames for part in frame)
    assert stream.sent == expected


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_bytes_that_were_sent_before_are_not_buffered(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    sent = data.draw(st.integers(0, len(whole)))
    outbound, stream = OutboundBuffer(), LimitedStream([])

    outbound.add(parts, len(whole), sent)
    outbound.flush(stream)

    assert stream.sent == whole[sent:]


def test_a_view_is_copied_so_that_its_memory_is_free() -> None:
    """A response may be a small part of what was read with it."""
    memory = bytearray(b"abcdef")
    outbound, stream = OutboundBuffer(), LimitedStream([])
    view = memoryview(memory)[1:3]

    outbound.add([b"0", view], 3)
    view.release()
    memory.clear()  # fails while a view exists
    outbound.flush(stream)

    assert stream.sent == b"0bc"


def test_a_full_socket_accepts_no_bytes() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        stream = PlainStream(left)

        while stream.send([bytes(65_536)]):
            pass

        assert stream.send([b"a", b"b"]) == 0
        assert PlainStream(left).receive_into(memoryview(bytearray(8))) is None


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_tls_records_contain_all_bytes_and_are_few(sizes: list[int]) -> None:
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]

    chunks = [bytes(chunk) for chunk in _chunks(parts)]

    assert b"".join(chunks) == b"".join(parts)
    assert all(chunks)
    small = [len(chunk) for chunk in chunks if len(chunk) < _RECORD_BYTES]
    assert len(small) <= 2 * (sum(sizes) // _RECORD_BYTES) + 1 + sum(size >= _RECORD_BYTES for size in sizes)


def test_more_parts_than_one_system_call_accepts_are_sent() -> None:
    """Linux accepts 1,024 and fails with more."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        outbound = OutboundBuffer()
        parts = [b"%05d" % number for number in range(3_000)]

        sent = PlainStream(left).send(parts)
        outbound.add(parts, 15_000, sent)
        outbound.flush(PlainStream(left))

        assert outbound.size == 0
        assert right.recv(15_000, socket.MSG_WAITALL) == b"".join(parts)
