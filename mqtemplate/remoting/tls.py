"""TLS: settings of both sides, and the `ssl.SSLContext` for them. TLS starts with the first byte: no STARTTLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import Enum

from mqtemplate.errors import ConfigurationError
from mqtemplate.processes import absolute_path
from mqtemplate.remoting.streams import reason_of

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
        _resolve_paths(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """TLS settings of a client. Paths name PEM files; relative ones are resolved when the settings are created.

    Attributes:
        trust_cert_path: Certificates of the authorities that may issue server certificates; None: those that this
            machine trusts.
        cert_path: The client's own certificate, if servers require one.
        key_path: Its private key.
        key_password: None if the key is not encrypted.
        check_host_name: True: the certificate must be for the host that the client connects to.
        insecure: Trust every server, for tests only. RocketMQ: ``tls.test.mode.enable``, which is its default.
    """

    trust_cert_path: str | None = None
    cert_path: str | None = None
    key_path: str | None = None
    key_password: str | None = field(default=None, repr=False)
    check_host_name: bool = True
    insecure: bool = False

    def __post_init__(self) -> None:
        _resolve_paths(self)


def _resolve_paths(settings: ServerTls | ClientTls) -> None:
    for name in ("cert_path", "key_path", "trust_cert_path"):
        path = getattr(settings, name)
        if path:
            object.__setattr__(settings, name, str(absolute_path(path)))


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
