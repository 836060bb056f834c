"""Settings of a remoting server and of a remoting client."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.remoting.limits import ConnectionLimits
from mqtemplate.remoting.tls import ClientTls, ServerTls

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Identity of a client for ACL. Requests are signed with the secret key, which is never sent.

    Attributes:
        security_token: Sent with each request if the access key is a temporary one.
    """

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)


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
