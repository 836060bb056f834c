"""Settings of both sides: limits of connections, TLS. Credentials and TLS of a client are in `identity`."""

from __future__ import annotations

import math
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.processes import descriptor_limit, raise_descriptor_limit
from mqtemplate.remoting.identity import ClientTls, Credentials, resolve_paths
from mqtemplate.remoting.protocol.codes import MAX_FRAME_BYTES
from mqtemplate.remoting.sockets import reason_of

# --- limits ---------------------------------------------------------------------------------------


_MIB = 1 << 20
_FEW = 64
"""Number of connections that each address may have, even if its share is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection. Sizes are in bytes.

    Attributes:
        max_frame_bytes: Size of the largest accepted frame, including its first four bytes.
        frame_timeout_ms: Longest time from the first byte of a frame to its last; also for a TLS handshake.
        idle_ms: A connection without a byte in either direction for this time is closed. RocketMQ: 120 s.
        pause_reading_bytes: With more unread output than this, the connection does not read from the peer.
        max_unread_bytes: With more unread output than this, the connection is closed.
        max_unanswered: With this many requests unanswered, the next one is refused with SYSTEM_BUSY.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    frame_timeout_ms: int = 30_000
    idle_ms: int = 120_000
    pause_reading_bytes: int = 4 * _MIB
    max_unread_bytes: int = 64 * _MIB
    max_unanswered: int = 50_000


class MemoryLimit:
    """Thread-safe counter of bytes that several connections hold together.

    Args:
        limit: Largest allowed sum.
        on_exceeded: Called by the adding thread after each addition while the sum is larger.

    Attributes:
        held: Current sum.
    """

    __slots__ = ("_limit", "_lock", "_on_exceeded", "held")

    def __init__(self, limit: float = math.inf, on_exceeded: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._on_exceeded = on_exceeded
        self._lock = threading.Lock()
        self.held = 0

    @property
    def is_exceeded(self) -> bool:
        """True while the sum is larger than the limit."""
        return self.held > self._limit

    def add(self, count: int) -> None:
        """Add *count* bytes; a negative number releases them."""
        with self._lock:
            self.held += count
        if count > 0 and self.is_exceeded:
            self._on_exceeded()


class ConnectionLimit:
    """Decides about each new connection, and counts those that are open. Not thread-safe: the I/O thread uses it.

    The system gives each new socket the lowest free descriptor (``man accept``). So its number tells how many
    descriptors the process has in use, and the last quarter of them remains for the files of the store: a client that
    opens connections cannot stop the others from storing messages.

    Args:
        max_connections: Largest number of connections.
        max_per_address: Largest number for one IP address. None: half of those that are possible.
    """

    def __init__(self, max_connections: int, max_per_address: int | None) -> None:
        self._max_connections = max_connections
        self._max_per_address_setting = max_per_address
        self._per_address: dict[str, int] = {}
        self._total = 0
        self._read_descriptor_limit()

    def start(self) -> None:
        """Raise the limit of open files of this process, as far as it may."""
        raise_descriptor_limit()
        self._read_descriptor_limit()

    def _read_descriptor_limit(self) -> None:
        self._descriptors = descriptor_limit()
        self._max_descriptor = self._descriptors - self._descriptors // 4
        possible = min(self._max_connections, self._max_descriptor)
        share = max(possible // 2, min(_FEW, possible))
        self._max_per_address = share if self._max_per_address_setting is None else self._max_per_address_setting

    def refusal(self, sock: socket.socket, remote: HostAddress) -> str | None:
        """Count a new connection, or return why it is refused."""
        of_address = self._per_address.get(remote.ip, 0)
        if self._total >= self._max_connections:
            return f"max-connections is {self._max_connections}"
        if sock.fileno() >= self._max_descriptor:
            return (
                f"the process may have {self._descriptors} open files, and the last {self._descriptors // 4} are not "
                "for connections; raise the limit (ulimit -n, or LimitNOFILE)"
            )
        if of_address >= self._max_per_address:
            return f"max-connections-per-address is {self._max_per_address}"
        self._per_address[remote.ip] = of_address + 1
        self._total += 1
        return None

    def leave(self, remote: HostAddress) -> None:
        """Count a connection that has ended."""
        self._total -= 1
        left = self._per_address[remote.ip] - 1
        if left:
            self._per_address[remote.ip] = left
        else:
            del self._per_address[remote.ip]


# --- TLS ------------------------------------------------------------------------------------------


FIRST_TLS_BYTE = 0x16
"""First byte of a TLS connection. A frame that starts with it would have at least 369 million bytes."""


class TlsMode(Enum):
    """A server's use of TLS. RocketMQ: ``tls.server.mode``."""

    DISABLED = "disabled"
    """No TLS."""
    PERMISSIVE = "permissive"
    """The first byte of each connection decides."""
    ENFORCING = "enforcing"
    """Connections without TLS are closed."""


class ClientAuth(Enum):
    """A server's demand for client certificates. RocketMQ: ``tls.server.need.client.auth``."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """TLS settings of a server. Paths name PEM files; relative ones are resolved when the settings are created.

    Attributes:
        cert_path: The server's certificate, followed by its issuers. RocketMQ: ``tls.server.certPath``.
        key_path: Its private key.
        key_password: None if the key is not encrypted.
        trust_cert_path: Certificates of the authorities that may issue client certificates.
    """

    cert_path: str
    key_path: str
    key_password: str | None = field(default=None, repr=False)
    mode: TlsMode = TlsMode.PERMISSIVE
    client_auth: ClientAuth = ClientAuth.NONE
    trust_cert_path: str | None = None

    def __post_init__(self) -> None:
        resolve_paths(self)


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """Return the context of a server.

    Raises:
        ConfigurationError: A file is missing or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_own(context, tls.cert_path, tls.key_path, tls.key_password)
    if tls.client_auth is not ClientAuth.NONE:
        if tls.trust_cert_path is None:
            raise ConfigurationError(
                f"TLS: client_auth is {tls.client_auth.value}, but trust_cert_path is not set; set it to a file with "
                "the certificates of the authorities that issue client certificates"
            )
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_auth is ClientAuth.REQUIRE else ssl.CERT_OPTIONAL
        _load_trusted(context, tls.trust_cert_path)
    return context


class LoadedTls(NamedTuple):
    """TLS of a server, with its files as they were when they were read.

    Attributes:
        expires_at: Time (epoch s) at which the first certificate of ``cert_path`` expires; None if it is not known.
    """

    context: ssl.SSLContext
    mode: TlsMode
    expires_at: int | None


def load_tls(tls: ServerTls | None) -> LoadedTls | None:
    """Read the files of a server; None without TLS.

    Raises:
        ConfigurationError: A file is missing or has the wrong content.
    """
    if tls is None or tls.mode is TlsMode.DISABLED:
        return None
    return LoadedTls(server_context(tls), tls.mode, certificate_end(tls.cert_path))


_PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def certificate_end(path: str) -> int | None:
    """Return the time (epoch s) at which the first of the certificates in a PEM file expires.

    Returns:
        None if the file cannot be read, or has no certificate.
    """
    try:
        blocks = _PEM.findall(Path(path).read_text("ascii", "replace"))
        return min((_not_after(ssl.PEM_cert_to_DER_cert(block)) for block in blocks), default=None)
    except (OSError, ValueError, IndexError):
        return None


def _not_after(certificate: bytes) -> int:
    """Return the end of the validity (epoch s) in a certificate in DER. Source: RFC 5280, 4.1."""
    inside, _ = _der(certificate, _der(certificate, 0)[0])  # Certificate, and TBSCertificate in it
    if certificate[inside] == _VERSION:
        inside = _der(certificate, inside)[1]
    for _ in ("serialNumber", "signature", "issuer"):
        inside = _der(certificate, inside)[1]
    not_before, _ = _der(certificate, inside)
    not_after = _der(certificate, not_before)[1]
    start, end = _der(certificate, not_after)
    text = certificate[start:end].decode("ascii")
    if certificate[not_after] == _UTC_TIME:  # two digits: from 1950 to 2049
        text = ("19" if text[:2] >= "50" else "20") + text
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())


_VERSION = 0xA0
_UTC_TIME = 0x17


def _der(data: bytes, at: int) -> tuple[int, int]:
    """Return the start and the end of the content of the element at a position."""
    length, start = data[at + 1], at + 2
    if length >= 0x80:
        start += length - 0x80
        length = int.from_bytes(data[at + 2 : start], "big")
    return start, start + length


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """Return the context of a client.

    Raises:
        ConfigurationError: A file is missing or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.check_hostname = tls.check_host_name
        if tls.trust_cert_path is None:
            context.load_default_certs()
        else:
            _load_trusted(context, tls.trust_cert_path)
    if tls.cert_path is not None:
        _load_own(context, tls.cert_path, tls.key_path, tls.key_password)
    return context


def _load_own(context: ssl.SSLContext, cert_path: str, key_path: str | None, password: str | None) -> None:
    try:
        # Without a password OpenSSL would prompt at the terminal; an empty one only fails.
        context.load_cert_chain(cert_path, key_path, password or "")
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"TLS: certificate {cert_path} with private key {key_path or 'in the same file'} cannot be used "
            f"({reason_of(exc)}); both must be PEM files, the key must belong to the certificate, and an encrypted key "
            "needs its password"
        ) from exc


def _load_trusted(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"TLS: trust_cert_path {path} cannot be used ({reason_of(exc)}); it must be a PEM file with certificates"
        ) from exc


# --- server and client ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingServerSettings:
    """Settings of a `RemotingServer`.

    Attributes:
        tls: None: no TLS.
        limits: Limits of one connection.
        max_connections: A further connection is closed at once. A quarter of the limit of open files remains for other
            files, so a lower limit lets fewer connections in.
        max_connections_per_address: The same for one IP address. None: half of those that are possible.
        max_partial_bytes: Limit of incomplete frames on all connections together. Above it, the connection that holds
            most of them is closed.
        max_unread_bytes: Limit of unread output on all connections together. Above it, the connection that has most of
            it is closed.
        slow_workers: Number of threads for processors that are registered as slow.
        slow_queue: With this many requests in the queue of slow processors, the next one is refused with SYSTEM_BUSY.
        slow_queue_per_connection: The same for the requests of one connection.
        slow_queue_bytes: The same for the bodies of the requests in that queue.
        drain_ms: Longest time that `RemotingServer.stop` waits for requests in progress, whatever clients do.
        busy_poll_us: Time for which the I/O thread polls its sockets before it sleeps, while requests follow each other
            that closely. It needs a second processor.
    """

    tls: ServerTls | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    max_connections: int = 20_000
    max_connections_per_address: int | None = None
    max_partial_bytes: int = 128 * _MIB
    max_unread_bytes: int = 128 * _MIB
    slow_workers: int = 4
    slow_queue: int = 1_000
    slow_queue_per_connection: int = 100
    slow_queue_bytes: int = 64 * _MIB
    drain_ms: int = 3_000
    busy_poll_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingClientSettings:
    """Settings of a `RemotingClient`.

    Attributes:
        tls: None: no TLS. The same for name servers and brokers.
        credentials: None: requests are not signed.
        limits: Limits of one connection.
        request_workers: Number of threads for requests that brokers send.
    """

    connect_timeout_ms: int = 3_000
    tls: ClientTls | None = None
    credentials: Credentials | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    request_workers: int = 4
