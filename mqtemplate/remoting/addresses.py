"""Addresses as texts, as sockets tell them, and as values."""

from __future__ import annotations

from typing import Any

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress

_MAPPED = "::ffff:"


def parse_address(text: str) -> HostAddress:
    """Read ``host:port`` or ``[::1]:port``; the host may be a name.

    Raises:
        ConfigurationError: It is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # of an IPv6 address without brackets nobody knows where it ends
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ConfigurationError(
            f"{text!r} is not the address of a broker or name server; write host:port, with an IPv6 address in "
            "brackets: 127.0.0.1:10911, broker.example.org:10911, [::1]:10911"
        )
    return HostAddress(host, int(port))


def peer_address(sockaddr: Any) -> HostAddress:
    """What ``accept`` or ``getpeername`` told; an IPv4 address mapped into IPv6 becomes IPv4, a zone is dropped."""
    ip, port = sockaddr[0], sockaddr[1]
    if ip.startswith(_MAPPED) and "." in ip:
        ip = ip[len(_MAPPED) :]
    return HostAddress(ip.partition("%")[0], port)
