"""What a server and a client of the wire can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.remoting.protocol import MAX_FRAME_BYTES
from mqtemplate.remoting.tls import ClientTls, ServerTls

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may cost. Sizes in bytes.

    Attributes:
        max_frame_bytes: The largest frame taken, its first four bytes included.
        frame_timeout_ms: How long a frame may be on its way, from its first byte to its last; a TLS handshake too.
        idle_ms: A connection without a byte in either direction for so long is closed. RocketMQ: 120 s.
        pause_reading_bytes: With so many bytes waiting to be read by the peer, nothing more is read from it.
        max_unread_bytes: With more than this waiting to be read by the peer, the connection is closed.
        max_unanswered: A further request, while so many are unanswered, is refused as SYSTEM_BUSY.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    frame_timeout_ms: int = 30_000
    idle_ms: int = 120_000
    pause_reading_bytes: int = 4 * _MIB
    max_unread_bytes: int = 64 * _MIB
    max_unanswered: int = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who a client is: its requests are signed with the secret key, which is never sent.

    Attributes:
        security_token: Travels with each request where an access key was lent for a time.
    """

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingServerSettings:
    """Of a `RemotingServer`.

    Attributes:
        tls: None: plain only.
        limits: What one connection may cost.
        max_connections: One more is closed as soon as it has come.
        max_partial_bytes: What all connections together may hold of frames that are not complete; beyond it, who
            holds most is closed.
        max_unread_bytes: What all peers together may leave unread; beyond it, who leaves most is closed.
        slow_workers: Threads for processors that are registered as slow.
        slow_queue: A request for a slow processor, while so many wait for a thread, is refused as SYSTEM_BUSY.
        slow_queue_bytes: Likewise, while the bodies of those that wait are more than this.
        drain_ms: How long `RemotingServer.stop` waits for requests that are being answered.
    """

    tls: ServerTls | None = None
    limits: ConnectionLimits = ConnectionLimits()
    max_connections: int = 20_000
    max_partial_bytes: int = 256 * _MIB
    max_unread_bytes: int = 512 * _MIB
    slow_workers: int = 4
    slow_queue: int = 1_000
    slow_queue_bytes: int = 64 * _MIB
    drain_ms: int = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotingClientSettings:
    """Of a `RemotingClient`.

    Attributes:
        tls: None: plain. It is for name servers and brokers alike.
        credentials: None: requests are not signed.
        limits: What one connection may cost.
        request_workers: Threads for requests that come from brokers.
    """

    connect_timeout_ms: int = 3_000
    tls: ClientTls | None = None
    credentials: Credentials | None = None
    limits: ConnectionLimits = ConnectionLimits()
    request_workers: int = 4
