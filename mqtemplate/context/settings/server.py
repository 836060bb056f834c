"""The section ``mqtemplate.server.*``: the server of ``python -m mqtemplate broker``."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass

from mqtemplate.context.config.contradiction import ContradictionError
from mqtemplate.context.settings.properties import (
    SECTION_CONFIG,
    HostPort,
    Milliseconds,
    OptionalSecret,
    OptionalText,
    Properties,
    UpperCase,
    duration_in,
    host_and_port,
)
from mqtemplate.message import HostAddress
from mqtemplate.server.state.settings import ServerOptions


def _right(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    words = sorted(word.strip().upper() for word in value.split("|"))
    return "|".join(words)


def _none_or_address(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


_OptionalHostPort = Annotated[HostPort | None, BeforeValidator(_none_or_address)]
_Right = Annotated[Literal["DENY", "PUB", "SUB", "PUB|SUB"], BeforeValidator(_right)]


class AccountSettings(Properties):
    """One account; the names are those of RocketMQ's ``plain_acl.yml``."""

    access_key: str = Field(min_length=7)
    """Access key in the account's requests."""
    secret_key: SecretStr
    """Secret key that signs the requests; it is never sent."""
    admin: bool = False
    """True: all requests are allowed, those of administrators too."""
    default_topic_perm: _Right = "DENY"
    """Permission on topics that are not in ``topic-perms``: PUB, SUB, PUB|SUB, or DENY."""
    default_group_perm: _Right = "DENY"
    """Permission on groups that are not in ``group-perms``."""
    topic_perms: dict[str, _Right] = Field(default_factory=dict)
    """Topic -> permission."""
    group_perms: dict[str, _Right] = Field(default_factory=dict)
    """Group -> permission."""


class AclSection(Properties):
    """Access control; off by default. See [server](server.md)."""

    enabled: bool = False
    """True: one of the accounts must sign each request."""
    accounts: tuple[AccountSettings, ...] = ()
    """A list; each has ``access-key``, ``secret-key``, ``admin``, ``default-topic-perm``, ``default-group-perm``,
    ``topic-perms`` and ``group-perms``."""
    replay_window_ms: Milliseconds = Field(default=0, ge=0, le=3_600_000)
    """Milliseconds in which a signature may not be used again by a request that changes something; 0 permits that. It
    refuses recorded requests, also those with another code, and a client's identical second try. See
    [security](security.md)."""

    @model_validator(mode="after")
    def _check_accounts(self) -> Self:
        if self.accounts and not self.enabled:
            raise ContradictionError("are given, but 'enabled' is not true; set it, or remove them", "accounts")
        if self.enabled and not self.accounts:
            raise ContradictionError("is true, but there are no accounts: no client could connect", "enabled")
        return self


class ServerTlsSettings(Properties):
    """TLS of the server. Files are in PEM form."""

    mode: Annotated[Literal["DISABLED", "PERMISSIVE", "ENFORCING"], UpperCase] = "DISABLED"
    """DISABLED: plain connections only. PERMISSIVE: both, as the client chooses. ENFORCING: TLS only."""
    cert_path: OptionalText = None
    """The server's certificate, followed by those of its issuers."""
    key_path: OptionalText = None
    """Private key of the certificate."""
    key_password: OptionalSecret = None
    """Password of the private key, if it has one."""
    client_auth: Annotated[Literal["NONE", "OPTIONAL", "REQUIRE"], UpperCase] = "NONE"
    """Client certificates: NONE, OPTIONAL or REQUIRE."""
    trust_cert_path: OptionalText = None
    """Certificates of the issuers that client certificates may have."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.mode != "DISABLED" and not (self.cert_path and self.key_path):
            raise ContradictionError("needs 'cert-path' and 'key-path' beside it", "mode")
        if self.client_auth != "NONE" and not self.trust_cert_path:
            raise ContradictionError("needs 'trust-cert-path' beside it", "client_auth")
        return self


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class ServerSettings(ServerOptions):
    """The broker as a server, started by ``python -m mqtemplate broker``. Applications do not use it."""

    name_server: _OptionalHostPort = HostAddress("127.0.0.1", 9876)
    """Address of the name server; ``none`` for no listener socket of its own, since the broker's does the same."""
    advertise: _OptionalHostPort = None
    """Address that clients get, if it is not ``listen``: needed if that is ``0.0.0.0``."""
    max_connections: Annotated[int, Field(ge=1)] = 20_000
    """Most connections at one time; one more is closed at once. A quarter of the limit of open files remains for other
    files, so a lower limit lets fewer connections in."""
    max_connections_per_address: Annotated[int, Field(ge=1)] | None = None
    """The same for one IP address; half of those that are possible if not given."""
    busy_poll_us: Annotated[int, Field(ge=0, le=1_000)] = 300
    """Microseconds for which the server polls its sockets before it sleeps, while requests follow each other that
    closely: responses are sooner, for more processor time. Only with ``flush-disk-type: ASYNC_FLUSH``, and with more
    than one processor; 0 for never."""
    acl: AclSection = AclSection()
    tls: ServerTlsSettings = ServerTlsSettings()

    _address = field_validator("listen", mode="before")(host_and_port)
    _milliseconds = field_validator("max_suspend_ms", mode="before")(duration_in(1))

    @field_validator("listen", "name_server", "advertise")
    @classmethod
    def _check_address(cls, value: HostAddress | None) -> HostAddress | None:
        if value is None:
            return None
        try:
            ipaddress.ip_address(value.ip)
        except ValueError:
            raise ValueError("must be a numeric address and a port, for example 127.0.0.1:10911") from None
        if not 0 <= value.port <= 65_535:
            raise ValueError("must have a port from 0 to 65535 (0: one that is free)")
        return value

    @model_validator(mode="after")
    def _check_advertise(self) -> Self:
        if self.advertise is None and ipaddress.ip_address(self.listen.ip).is_unspecified:
            raise ContradictionError(
                f"is {self.listen}, which no client can connect to; say in 'advertise' the address they reach this "
                "machine at",
                "listen",
            )
        if self.name_server is not None and self.name_server == self.listen and self.listen.port:
            raise ContradictionError(
                "is the broker's address too; give another port, or 'none': the broker's listener socket answers "
                "the requests for a name server too",
                "name_server",
            )
        return self
