"""The identity of a client: its credentials, and the files of its TLS connections.

The settings of every application contain it, so this module imports nothing of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.processes import absolute_path


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
        resolve_paths(self)


def resolve_paths(settings: object) -> None:
    """Replace the relative paths of TLS settings by absolute ones."""
    for name in ("cert_path", "key_path", "trust_cert_path"):
        path = getattr(settings, name)
        if path:
            object.__setattr__(settings, name, str(absolute_path(path)))
