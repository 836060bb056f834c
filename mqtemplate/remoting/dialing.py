"""Making a connection to a server. It blocks, up to a time-out."""

from __future__ import annotations

import socket
import ssl
import time

from mqtemplate.errors import RemoteConnectError
from mqtemplate.message import HostAddress
from mqtemplate.remoting.streams import PlainStream, Stream, TlsStream


def dial(address: HostAddress, timeout_s: float, context: ssl.SSLContext | None) -> Stream:
    """Connect, and shake hands where there is a *context*; all within *timeout_s*.

    Raises:
        RemoteConnectError: It did not come about; the text says why, and what to look at.
    """
    deadline = time.monotonic() + timeout_s
    sock = _connect(address, timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if context is None:
            sock.setblocking(False)
            return PlainStream(sock)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        tls = _shake_hands(sock, address, context)
        tls.setblocking(False)
        return TlsStream(tls)
    except BaseException:
        sock.close()
        raise


def _connect(address: HostAddress, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection((address.ip, address.port), max(timeout_s, 0.001))
        if sock.getsockname() == sock.getpeername():
            # Nobody listens at a port that the system gives to clients: it gave it to us, and we answered ourselves.
            sock.close()
            raise ConnectionRefusedError("Connection refused")
    except TimeoutError as exc:
        raise RemoteConnectError(
            f"cannot connect to {address} within {max(timeout_s, 0) * 1_000:.0f} ms; is the address right, and does a "
            "firewall let it through?"
        ) from exc
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise RemoteConnectError(
            f"cannot connect to {address} ({reason}); is a broker or name server running there, and is the address "
            "right?"
        ) from exc
    return sock


def _shake_hands(sock: socket.socket, address: HostAddress, context: ssl.SSLContext) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=address.ip)
    except ssl.SSLCertVerificationError as exc:
        raise RemoteConnectError(
            f"the certificate of {address} is refused ({exc.verify_message}); set trust_cert_path to who issued it, "
            "and check_host_name to false where it is for another name"
        ) from exc
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None) or getattr(exc, "strerror", None) or str(exc)
        raise RemoteConnectError(
            f"no TLS with {address} ({reason}); does that server speak TLS, and does it ask for a "
            "certificate of the client?"
        ) from exc
