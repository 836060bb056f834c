"""Addresses, sockets, and connected sockets as streams of bytes, with and without TLS."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerError, ConfigurationError, RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.numbers import parse_number

# --- addresses and sockets ------------------------------------------------------------------------


_BACKLOG = 4_096
"""Connections that may wait while the I/O thread is busy; the system may have a lower limit, such as Linux'
``net.core.somaxconn``. A client that does not find a place tries again after 1, 2 and 4 s (``man 7 tcp``)."""
_MAPPED = "::ffff:"


# --- addresses --------------------------------------------------------------------------------------


def parse_address(text: str) -> HostAddress:
    """Return the address that a text ``host:port`` or ``[::1]:port`` contains; the host may be a name.

    Raises:
        ConfigurationError: The text has another form.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address without brackets: its end is ambiguous
    number = parse_number(port)
    if not colon or not host or number is None or not 0 <= number <= 65_535:
        raise ConfigurationError(
            f"{text!r:.200} is not the address of a broker or name server; write host:port, with an IPv6 address in "
            "brackets: 127.0.0.1:10911, broker.example.org:10911, [::1]:10911"
        )
    return HostAddress(host, number)


_PORT = re.compile(r":(\d+|\*)")
_NOT_IN_HOSTS = frozenset("{}* /")


class AddressMap:
    """Addresses at which this machine reaches brokers that register others, as those behind NAT or in containers do.

    Args:
        entries: Registered address -> address to connect to. A registered one is ``host`` or ``host:port``, in which
            ``*`` stands for any characters; of several that match, one without ``*`` is used, else the first. An
            address to connect to may contain ``{host}`` and ``{port}`` of the registered one; without a port it gets
            that port.

    Raises:
        ConfigurationError: An entry has another form.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = [
            (_address_pattern(registered), reached.strip())
            for registered, reached in sorted(entries.items(), key=lambda entry: "*" in entry[0])
        ]
        for registered, reached in entries.items():
            try:
                host = parse_address(_filled(reached.strip(), "127.0.0.1", "10911")).ip
            except ConfigurationError:
                host = ""
            if not host or not _NOT_IN_HOSTS.isdisjoint(host):
                raise ConfigurationError(
                    f"{registered!r} has {reached!r}, which is no address; write host, host:port, or "
                    "either with {host} and {port} of the registered address"
                )

    def __call__(self, address: str) -> str:
        """Return the address to connect to for a registered ``host:port``; the same if no entry matches."""
        host, _, port = address.rpartition(":")
        for pattern, reached in self._entries:
            if pattern.fullmatch(address):
                return _filled(reached, host, port)
        return address


def _address_pattern(text: str) -> re.Pattern[str]:
    """Return the expression for registered addresses of an entry; without a port it matches each port."""
    host, port = text.strip(), r":\d+"
    found = _PORT.fullmatch(host, max(host.rfind(":"), 0))
    if found and (host.startswith("[") or host.count(":") == 1):
        host = host[: found.start()]
        port = port if found[1] == "*" else found[0]
    elif ":" in host and not host.startswith("["):
        host = f"[{host}]"
    if not host or any(character.isspace() for character in host):
        raise ConfigurationError(
            f"{text!r} is no address that brokers register; write host or host:port, with * for any "
            "characters: 172.18.*, 172.18.*:10911, broker-0"
        )
    return re.compile(re.escape(host).replace(r"\*", ".*") + port, re.IGNORECASE)


def _filled(reached: str, host: str, port: str) -> str:
    if reached.count(":") > 1 and not reached.startswith("["):
        reached = f"[{reached}]"
    has_port = reached.endswith(":{port}") or _PORT.fullmatch(reached, max(reached.rfind(":"), 0))
    return (reached if has_port else f"{reached}:{{port}}").replace("{host}", host).replace("{port}", port)


def peer_address(sockaddr: Any) -> HostAddress:
    """Return the address of ``accept`` or ``getpeername``, with a mapped IPv4 address as IPv4, and without a zone."""
    ip, port = sockaddr[0], sockaddr[1]
    if ip.startswith(_MAPPED) and "." in ip:
        ip = ip[len(_MAPPED) :]
    return HostAddress(ip.partition("%")[0], port)


# --- sockets ----------------------------------------------------------------------------------------


def set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and detect peers that disappeared.

    Raises:
        OSError: The connection has ended.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def listen_at(address: HostAddress) -> socket.socket:
    """Return a non-blocking socket that listens at *address*.

    Raises:
        BrokerError: The address is in use or is not one of this machine.
    """
    is_ipv6 = ":" in address.ip
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    both = is_ipv6 and address.ip == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server((address.ip, address.port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as exc:
        raise BrokerError(
            f"cannot listen at {address} ({reason_of(exc)}); is another server running there, and is the address one "
            "of this machine? Port 0 lets the system choose"
        ) from exc
    sock.setblocking(False)
    return sock


def connect(address: HostAddress, timeout_s: float, context: ssl.SSLContext | None) -> tuple[Stream, HostAddress]:
    """Connect to a server, with a TLS handshake if there is a *context*; block for *timeout_s* at most.

    Returns:
        The stream, and the server's address as the socket reports it.

    Raises:
        RemoteConnectError: The connection failed; the text names the reason and what to check.
    """
    deadline = time.monotonic() + timeout_s
    sock = _connect_tcp(address, timeout_s)
    try:
        set_tcp_options(sock)
        if context is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock = _handshake(sock, address, context)
        sock.setblocking(False)
        remote = peer_address(sock.getpeername())
    except OSError as exc:
        sock.close()
        raise RemoteConnectError(f"{address} closed the connection at once ({reason_of(exc)})") from exc
    except BaseException:
        sock.close()
        raise
    return (TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)), remote


def _connect_tcp(address: HostAddress, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((address.ip, address.port), max(timeout_s, 0.001))
        if sock.getsockname() == sock.getpeername():
            # TCP self-connection: the system chose the port of *address* as our own port, and no server listens there.
            sock.close()
            raise ConnectionRefusedError("Connection refused")
    except TimeoutError as exc:
        within = format_ms(round(max(timeout_s, 0) * 1_000))
        raise RemoteConnectError(
            f"cannot connect to {address} within {within}; is the address right, and does a firewall let it through?"
        ) from exc
    except (OSError, UnicodeError) as exc:
        raise RemoteConnectError(
            f"cannot connect to {address} ({reason_of(exc)}); is a broker or name server running there, and is the "
            "address right?"
        ) from exc
    return sock


def _handshake(sock: socket.socket, address: HostAddress, context: ssl.SSLContext) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=address.ip)
    except ssl.SSLCertVerificationError as exc:
        raise RemoteConnectError(
            f"the certificate of {address} is refused ({exc.verify_message}); set trust_cert_path to the certificate "
            "of its issuer, and check_host_name to false if it is for another name"
        ) from exc
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or reason_of(exc)
        raise RemoteConnectError(
            f"no TLS with {address} ({reason}); does that server use TLS, and does it require a client certificate?"
        ) from exc


# --- streams --------------------------------------------------------------------------------------


_RECORD_BYTES = 16_384
"""Largest content of a TLS record."""
_HAS_SENDMSG = hasattr(socket.socket, "sendmsg")  # not on Windows
_MAX_PARTS = 64
"""Number of parts for one ``sendmsg``; Linux refuses more than 1,024 (IOV_MAX)."""


class Stream(Protocol):
    """Bytes from and to a non-blocking socket. Its methods raise OSError if the connection has ended."""

    socket: socket.socket

    def receive_into(self, buffer: memoryview) -> int | None:
        """Return the number of received bytes; 0 at the end of the stream, None before the next ones arrive."""

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
            if len(parts) == 1:
                return self.socket.send(parts[0])
            if _HAS_SENDMSG:
                return self.socket.sendmsg(parts[:_MAX_PARTS])
            return self.socket.send(b"".join(parts[:_MAX_PARTS]))
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
