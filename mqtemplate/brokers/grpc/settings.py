"""Settings of a broker that is reached over gRPC, and the addresses of a proxy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, NamedTuple

from annotated_types import Gt

from mqtemplate.delay.settings import DEFAULT_DELAY_LEVELS
from mqtemplate.errors import ConfigurationError
from mqtemplate.record.compression import max_body_bytes
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.remoting.sockets import AddressMap

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:;,/\[\]]+)):(?P<port>\d{1,5})")
_ALLOWED = "'host:port', or several numeric addresses as '10.0.0.1:8081;10.0.0.2:8081'"


class Endpoints(NamedTuple):
    """Addresses of one proxy: the client connects to the first one that answers.

    Attributes:
        addresses: Host and port of each. Several are numeric and of one IP version.
    """

    addresses: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Endpoints:
        """Parse ``host:port``, or several separated by semicolons.

        Raises:
            ValueError: The text has another form.
        """
        found = [_ADDRESS.fullmatch(part.strip()) for part in re.split("[;,]", text) if part.strip()]
        if not found:
            raise ValueError(f"allowed are {_ALLOWED}")
        addresses = []
        for match in found:
            if match is None or not 0 < int(match["port"]) < 1 << 16:
                raise ValueError(f"allowed are {_ALLOWED}; the port of RocketMQ's proxy is 8081 by default")
            addresses.append((match["v6"] or match["host"], int(match["port"])))
        endpoints = cls(tuple(addresses))
        if len(addresses) > 1 and endpoints.ip_version is None:
            raise ValueError("several addresses must all be numeric IPv4 or all IPv6; for names give one 'host:port'")
        return endpoints

    @property
    def ip_version(self) -> int | None:
        """4 or 6 if all hosts are numeric addresses of this version, else None."""
        versions = {_version(host) for host, _ in self.addresses}
        return versions.pop() if len(versions) == 1 else None

    @property
    def target(self) -> str:
        """Name of the addresses for grpcio."""
        texts = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses]
        scheme = {4: "ipv4:", 6: "ipv6:"}.get(self.ip_version or 0, "dns:///")
        return scheme + ",".join(texts if self.ip_version else texts[:1])

    def __str__(self) -> str:
        return ";".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)


def _version(host: str) -> int | None:
    try:
        address: IPv4Address | IPv6Address = ip_address(host)
    except ValueError:
        return None
    return address.version


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """Address of RocketMQ 5's proxy and how to use it. The intervals are those of RocketMQ's own clients."""

    endpoints: str
    """Address of the proxy as ``host:port``."""

    address_map: Mapping[str, str] = field(default_factory=dict)
    """Address of a proxy in routes -> address to connect to; see `AddressMap`."""

    namespace: str = ""
    """Namespace of topics and groups, sent beside them; empty for none."""

    credentials: Credentials | None = None
    """Access key and secret key; None for a proxy without access control."""

    tls: ClientTls | None = None
    """TLS settings; None for plain connections."""

    request_timeout_ms: Annotated[int, Gt(0)] = 3_000
    """Timeout of requests without a timeout of their own. The wait for messages is added to it."""

    retry_times_when_send_failed: int = 2
    """Retries of a synchronous send, within its timeout."""

    retry_times_when_send_async_failed: int = 2
    """Retries of an asynchronous send."""

    max_message_size: int = 4 << 20
    """Largest body in bytes. The proxy has a limit of its own."""

    max_decompressed_size: int | None = None
    """Largest body in bytes that is decompressed for a listener; four times ``max_message_size`` if not given."""

    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """Table of delay levels. The protocol has deliver times only, so the client turns a level into its time."""

    clamp_delay_level: bool = False
    """True: a message with a level above the table gets the highest one; False: it is refused."""

    topics: tuple[str, ...] = ()
    """Topics of transactions. A client is asked about open transactions of these topics, and of those that it has sent
    to, so name them if transactions are to be checked after a restart."""

    invisible_ms: Annotated[int, Gt(0)] = 60_000
    """Time for which received messages are invisible to other members, where no listener sets it. The proxy renews it
    while this client is alive."""

    poll_route_interval_ms: Annotated[int, Gt(0)] = 30_000
    """Milliseconds between two requests for the routes of topics."""

    heartbeat_interval_ms: Annotated[int, Gt(0)] = 10_000
    """Milliseconds between two heartbeats."""

    settings_interval_ms: Annotated[int, Gt(0)] = 300_000
    """Milliseconds after which a client sends its settings again, for a proxy that has lost them."""

    @property
    def parsed_endpoints(self) -> Endpoints:
        """The address as the client uses it."""
        return Endpoints.parse(self.endpoints)

    @property
    def max_body_bytes(self) -> int:
        """Largest body that is decompressed."""
        return max_body_bytes(self.max_decompressed_size, self.max_message_size)

    def __post_init__(self) -> None:
        AddressMap(self.address_map)
        try:
            Endpoints.parse(self.endpoints)
        except ValueError as exc:
            raise ConfigurationError.of_value("endpoints", f"{exc}, got {self.endpoints!r}") from exc
