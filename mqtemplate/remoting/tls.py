"""TLS: what both ends can be told, and the contexts made of it. Frames inside are the same; there is no STARTTLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import Enum

from mqtemplate.errors import ConfigurationError

FIRST_TLS_BYTE = 0x16
"""How a connection begins that speaks TLS; a frame of RocketMQ's would have 369 million bytes."""


class TlsMode(Enum):
    """What a server makes of a connection. RocketMQ: ``tls.server.mode``."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    """Each connection says by its first byte whether it speaks TLS."""
    ENFORCING = "enforcing"
    """A plain connection is closed."""


class ClientAuth(Enum):
    """Whether a client must show a certificate. RocketMQ: ``tls.server.need.client.auth``."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The server's side. Paths name files in PEM form.

    Attributes:
        cert_path: The server's certificate, its issuers behind it. RocketMQ: ``tls.server.certPath``.
        key_path: Its private key.
        key_password: None where the key is not encrypted.
        trust_cert_path: Who may issue certificates of clients.
    """

    cert_path: str
    key_path: str
    key_password: str | None = field(default=None, repr=False)
    mode: TlsMode = TlsMode.PERMISSIVE
    client_auth: ClientAuth = ClientAuth.NONE
    trust_cert_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """The client's side. Paths name files in PEM form.

    Attributes:
        trust_cert_path: Who may issue certificates of servers; None: whoever this machine trusts.
        cert_path: The client's own certificate, where servers ask for one.
        key_path: Its private key.
        key_password: None where the key is not encrypted.
        check_host_name: Whether the certificate must be for the host that was asked for.
        insecure: Trust whoever answers: for trials only. RocketMQ: ``tls.test.mode.enable``, there the default.
    """

    trust_cert_path: str | None = None
    cert_path: str | None = None
    key_path: str | None = None
    key_password: str | None = field(default=None, repr=False)
    check_host_name: bool = True
    insecure: bool = False


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """The context of *tls*.

    Raises:
        ConfigurationError: A file is missing, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_own(context, tls.cert_path, tls.key_path, tls.key_password)
    if tls.client_auth is not ClientAuth.NONE:
        if tls.trust_cert_path is None:
            raise ConfigurationError(
                f"TLS: client_auth is {tls.client_auth.value}, but trust_cert_path is not set; "
                "name the file with the certificates of who may issue certificates of clients"
            )
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_auth is ClientAuth.REQUIRE else ssl.CERT_OPTIONAL
        _load_trusted(context, tls.trust_cert_path)
    return context


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """The context of *tls*.

    Raises:
        ConfigurationError: A file is missing, or is not what it should be.
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
        # An empty password rather than none: OpenSSL would ask for one at the terminal.
        context.load_cert_chain(cert_path, key_path, password or "")
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"TLS: certificate {cert_path} with private key {key_path or 'in the same file'} cannot be used "
            f"({_reason(exc)}); both must be PEM files, the key must belong to the certificate, and an encrypted key "
            "needs its password"
        ) from exc


def _load_trusted(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"TLS: trust_cert_path {path} cannot be used ({_reason(exc)}); it must be a PEM file with certificates"
        ) from exc


def _reason(exc: Exception) -> str:
    return (isinstance(exc, OSError) and exc.strerror) or str(exc)
