"""Addresses, and sockets that listen or connect."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from mqtemplate.durations import format_ms
from mqtemplate.errors import BrokerError, ConfigurationError, RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.numbers import parse_number
from mqtemplate.remoting.streams import PlainStream, Stream, TlsStream, reason_of

_BACKLOG = 1_024
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
