"""A non-blocking socket, plain or under TLS, as bytes in and bytes out."""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

_RECORD_BYTES = 16_384
"""The most that TLS puts into a record."""
_MOST_PARTS = 64
"""Parts handed over in one call; the system takes 1,024."""


class Stream(Protocol):
    """Bytes in and out of a non-blocking socket. Raises OSError when the connection is broken."""

    socket: socket.socket

    def receive_into(self, buffer: memoryview) -> int | None:
        """How many bytes came; 0 at the end, None when there are none yet."""

    def has_more(self) -> bool:
        """Whether there are bytes that the selector does not know of."""

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """How many bytes of *parts* were taken: as many as can be without waiting."""


class PlainStream:
    """The socket as it is. One thread may receive while another sends."""

    __slots__ = ("socket",)

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def receive_into(self, buffer: memoryview) -> int | None:
        try:
            return self.socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def has_more(self) -> bool:
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts[:_MOST_PARTS])
        except (BlockingIOError, InterruptedError):
            return 0


class TlsStream:
    """A socket whose handshake is done. OpenSSL's state belongs to one thread at a time, in both directions: a lock."""

    __slots__ = ("_lock", "_tls", "socket")

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.socket: socket.socket = sock
        self._tls = sock
        self._lock = threading.Lock()

    def receive_into(self, buffer: memoryview) -> int | None:
        with self._lock:
            try:
                return self._tls.recv_into(buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None

    def has_more(self) -> bool:
        with self._lock:
            return self._tls.pending() > 0

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Whoever is told that not all was taken must come with the same bytes again: OpenSSL has begun with them."""
        taken = 0
        with self._lock:
            try:
                for chunk in _chunks(parts):
                    at = 0
                    while at < len(chunk):
                        sent = self._tls.send(chunk[at:])
                        at += sent
                        taken += sent
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
        return taken


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Small parts joined, up to a record; large ones as they are: each piece becomes a record of its own."""
    small: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        if small and size + len(part) > _RECORD_BYTES:
            yield memoryview(b"".join(small))
            small, size = [], 0
        if len(part) >= _RECORD_BYTES:
            yield memoryview(part)
        elif part:
            small.append(part)
            size += len(part)
    if small:
        yield memoryview(b"".join(small))


class Outbox:
    """What the peer has not taken yet: parts, kept as they were given. Its owner has a lock around it.

    Attributes:
        size: Bytes.
    """

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: deque[bytes | memoryview] = deque()
        self.size = 0

    def add(self, parts: Sequence[bytes | memoryview], size: int, taken: int = 0) -> None:
        """Keep *parts*, *size* bytes altogether, without the first *taken* of them."""
        self._parts.extend(parts)
        self.size += size
        if taken:
            self._drop(taken)

    def flush(self, stream: Stream) -> None:
        """Send what the peer takes without waiting. Raises OSError; what was sent before is gone from here."""
        while self.size:
            parts = list(islice(self._parts, _MOST_PARTS))
            taken = stream.send(parts)
            self._drop(taken)
            if taken < sum(map(len, parts)):
                break

    def clear(self) -> None:
        self._parts.clear()
        self.size = 0

    def _drop(self, taken: int) -> None:
        self.size -= taken
        parts = self._parts
        while taken:
            first = parts[0]
            if len(first) > taken:
                parts[0] = memoryview(first)[taken:]
                return
            taken -= len(parts.popleft())
