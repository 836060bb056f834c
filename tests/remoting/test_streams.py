"""What the peer does not take at once is kept, and sent as it was."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.remoting.streams import _RECORD_BYTES, Outbox, PlainStream, _chunks


class Stubborn:
    """Takes as many bytes each time as it is told to."""

    socket: socket.socket

    def __init__(self, appetites: list[int]) -> None:
        self.appetites = iter(appetites)
        self.taken = b""

    def receive_into(self, buffer: memoryview) -> int | None:
        return None

    def has_more(self) -> bool:
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        data = b"".join(parts)[: next(self.appetites, 1 << 30)]
        self.taken += data
        return len(data)


@given(st.lists(st.lists(st.binary(max_size=9), min_size=1, max_size=80)), st.lists(st.integers(0, 30)))
def test_whatever_the_peer_takes_the_bytes_and_their_order_stay(
    frames: list[list[bytes]], appetites: list[int]
) -> None:
    outbox, stream = Outbox(), Stubborn(appetites)

    for frame in frames:
        outbox.add(frame, sum(map(len, frame)))
        outbox.flush(stream)
    while outbox.size:
        outbox.flush(stream)

    expected = b"".join(part for frame in frames for part in frame)
    assert stream.taken == expected


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_what_was_sent_before_the_rest_was_kept_is_not_sent_again(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    taken = data.draw(st.integers(0, len(whole)))
    outbox, stream = Outbox(), Stubborn([])

    outbox.add(parts, len(whole), taken)
    outbox.flush(stream)

    assert stream.taken == whole[taken:]


def test_a_full_socket_takes_nothing_and_says_so() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        stream = PlainStream(left)

        while stream.send([bytes(65_536)]):
            pass

        assert stream.send([b"a", b"b"]) == 0
        assert PlainStream(left).receive_into(memoryview(bytearray(8))) is None


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_records_of_tls_hold_what_was_given_and_are_few(sizes: list[int]) -> None:
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]

    chunks = [bytes(chunk) for chunk in _chunks(parts)]

    assert b"".join(chunks) == b"".join(parts)
    assert all(chunks)
    small = [len(chunk) for chunk in chunks if len(chunk) < _RECORD_BYTES]
    assert len(small) <= 2 * (sum(sizes) // _RECORD_BYTES) + 1 + sum(size >= _RECORD_BYTES for size in sizes)


def test_more_parts_than_the_system_takes_at_once_are_sent() -> None:
    """It takes 1,024, and refuses more altogether."""
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        outbox = Outbox()
        parts = [b"%05d" % number for number in range(3_000)]

        taken = PlainStream(left).send(parts)
        outbox.add(parts, 15_000, taken)
        outbox.flush(PlainStream(left))

        assert outbox.size == 0
        assert right.recv(15_000, socket.MSG_WAITALL) == b"".join(parts)
