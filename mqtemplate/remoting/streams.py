"""Streams of bytes over non-blocking sockets, with and without TLS, and the buffer of bytes that are not sent yet."""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

_RECORD_BYTES = 16_384
"""Largest content of a TLS record."""
_MAX_PARTS = 64
"""Number of parts for one ``sendmsg``; Linux refuses more than 1,024 (IOV_MAX)."""


class Stream(Protocol):
    """Bytes from and to a non-blocking socket. Its methods raise OSError if the connection has ended."""

    socket: socket.socket

    def receive_into(self, buffer: memoryview) -> int | None:
        """Return the number of received bytes; 0 at the end of the stream, None if there are none yet."""

    def has_buffered(self) -> bool:
        """Return True if there are received bytes of which the selector has no event."""

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send as many bytes of *parts* as possible without waiting, and return their number."""


def reason_of(exc: Exception) -> str:
    """Return the text of an error of a socket, as the operating system words it."""
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


class PlainStream:
    """A socket without TLS. One thread may receive while another sends."""

    __slots__ = ("socket",)

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def receive_into(self, buffer: memoryview) -> int | None:
        try:
            return self.socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def has_buffered(self) -> bool:
        return False

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        try:
            return self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts[:_MAX_PARTS])
        except (BlockingIOError, InterruptedError):
            return 0


class TlsStream:
    """A socket after its TLS handshake. A lock, since only one thread may use OpenSSL's state, in either direction."""

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

    def has_buffered(self) -> bool:
        with self._lock:
            return self._tls.pending() > 0

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send as `Stream.send`. The next call must start with the bytes that were not sent: OpenSSL retains them."""
        sent = 0
        with self._lock:
            try:
                for chunk in _chunks(parts):
                    at = 0
                    while at < len(chunk):
                        count = self._tls.send(chunk[at:])
                        at += count
                        sent += count
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass
        return sent


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield small parts joined up to one TLS record, and large parts as they are: each chunk starts a record."""
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


class OutboundBuffer:
    """Parts that the socket has not accepted yet. Not thread-safe: the connection has a lock.

    Bytes are not copied. A view is: the memory that it belongs to may be much larger, and would not be counted.

    Attributes:
        size: Number of bytes.
    """

    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: deque[bytes | memoryview] = deque()
        self.size = 0

    def add(self, parts: Sequence[bytes | memoryview], size: int, sent: int = 0) -> None:
        """Append *parts*, which have *size* bytes together, without the first *sent* bytes."""
        self._parts.extend(bytes(part) if type(part) is memoryview else part for part in parts)
        self.size += size
        if sent:
            self._drop(sent)

    def flush(self, stream: Stream) -> None:
        """Send as much as possible without waiting. Raises OSError; bytes sent before the error are removed."""
        while self.size:
            parts = list(islice(self._parts, _MAX_PARTS))
            sent = stream.send(parts)
            self._drop(sent)
            if sent < sum(map(len, parts)):
                break

    def clear(self) -> None:
        """Drop all parts."""
        self._parts.clear()
        self.size = 0

    def _drop(self, sent: int) -> None:
        self.size -= sent
        parts = self._parts
        while sent:
            first = parts[0]
            if len(first) > sent:
                parts[0] = memoryview(first)[sent:]
                return
            sent -= len(parts.popleft())
