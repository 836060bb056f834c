"""``mqtemplate.server.*``: the broker as a server, for ``python -m mqtemplate broker``."""

from __future__ import annotations

import ipaddress
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from mqtemplate.context.settings.properties import (
    ContradictionError,
    HostPort,
    OptionalSecret,
    OptionalText,
    Properties,
    UpperCase,
)
from mqtemplate.message import HostAddress


class AclRight(Enum):
    """What an account may do with a topic or a group."""

    DENY = "DENY"
    PUB = "PUB"
    SUB = "SUB"
    PUB_AND_SUB = "PUB|SUB"


def _right(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    words = sorted(word.strip().upper() for word in value.split("|"))
    return "|".join(words)


def _none_or_address(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


_OptionalHostPort = Annotated[HostPort | None, BeforeValidator(_none_or_address)]
_Right = Annotated[AclRight, BeforeValidator(_right)]


class AccountSettings(Properties):
    """One access key; the names are those of RocketMQ's ``plain_acl.yml``."""

    access_key: str = Field(min_length=7)
    """The name that requests carry."""
    secret_key: SecretStr
    """What requests are signed with; it is never sent."""
    admin: bool = False
    """Whether it may do everything, also what administrators do."""
    default_topic_perm: _Right = AclRight.DENY
    """The right on topics that are not named below: PUB, SUB, PUB|SUB, or DENY."""
    default_group_perm: _Right = AclRight.DENY
    """The right on groups that are not named below."""
    topic_perms: dict[str, _Right] = Field(default_factory=dict)
    """Topic -> right."""
    group_perms: dict[str, _Right] = Field(default_factory=dict)
    """Group -> right."""


class AclSection(Properties):
    """Access control: off unless switched on. See [server](server.md)."""

    enabled: bool = False
    """Whether each request must be signed by one of the accounts."""
    accounts: tuple[AccountSettings, ...] = ()
    """A list; each has ``access-key``, ``secret-key``, ``admin``, ``default-topic-perm``, ``default-group-perm``,
    ``topic-perms`` and ``group-perms``."""

    @model_validator(mode="after")
    def _check_accounts(self) -> Self:
        if self.accounts and not self.enabled:
            raise ContradictionError("are given, but 'enabled' is not true; set it, or remove them", "accounts")
        if self.enabled and not self.accounts:
            raise ContradictionError("is true, but there are no accounts: nobody could come in", "enabled")
        return self


class ServerTlsMode(Enum):
    """What the server makes of a connection."""

    DISABLED = "DISABLED"
    PERMISSIVE = "PERMISSIVE"
    ENFORCING = "ENFORCING"


class ClientAuthMode(Enum):
    """Whether a client must show a certificate."""

    NONE = "NONE"
    OPTIONAL = "OPTIONAL"
    REQUIRE = "REQUIRE"


class ServerTlsSettings(Properties):
    """TLS of the server. Files are in PEM form."""

    mode: Annotated[ServerTlsMode, UpperCase] = ServerTlsMode.DISABLED
    """DISABLED, PERMISSIVE (each client as it likes) or ENFORCING (TLS only)."""
    cert_path: OptionalText = None
    """The server's certificate, those of its issuers behind it."""
    key_path: OptionalText = None
    """Its private key."""
    key_password: OptionalSecret = None
    """The password of the private key, if it has one."""
    client_auth: Annotated[ClientAuthMode, UpperCase] = ClientAuthMode.NONE
    """Whether clients must show a certificate: NONE, OPTIONAL or REQUIRE."""
    trust_cert_path: OptionalText = None
    """Who may issue certificates of clients."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.mode is not ServerTlsMode.DISABLED and not (self.cert_path and self.key_path):
            raise ContradictionError("needs 'cert-path' and 'key-path' beside it", "mode")
        if self.client_auth is not ClientAuthMode.NONE and not self.trust_cert_path:
            raise ContradictionError("needs 'trust-cert-path' beside it", "client_auth")
        return self


class ServerSettings(Properties):
    """The broker as a server, started by ``python -m mqtemplate broker``. Applications do not read it."""

    listen: HostPort = HostAddress("127.0.0.1", 10911)
    """Where the broker waits for clients."""
    name_server: _OptionalHostPort = HostAddress("127.0.0.1", 9876)
    """Where its name server waits for them; ``none`` for no door of its own, since the broker's answers alike."""
    advertise: _OptionalHostPort = None
    """The address that clients are told, if it is not ``listen``: needed where that is ``0.0.0.0``."""
    cluster_name: str = Field("DefaultCluster", min_length=1)
    """The cluster's name in routes and in the property ``CLUSTER`` of messages."""
    auto_create_topic_enable: bool = True
    """Whether a first message makes its topic."""
    default_topic_queue_nums: int = Field(8, ge=1, le=1_024)
    """How many queues a topic gets at most that a client's first message makes; Java's clients ask for 4."""
    auto_create_subscription_group: bool = True
    """Whether a first consumer makes its group."""
    enable_property_filter: bool = True
    """Whether consumers may select by SQL92."""
    recall_message_enable: bool = True
    """Whether producers may call waiting messages back."""
    max_connections: int = Field(20_000, ge=1)
    """Connections at one time; one more is closed as soon as it has come."""
    acl: AclSection = AclSection()
    tls: ServerTlsSettings = ServerTlsSettings()

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
                "is the broker's address too; give another port, or 'none': the broker's door answers as a name "
                "server as well",
                "name_server",
            )
        return self
