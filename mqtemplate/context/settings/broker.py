"""The sections ``mqtemplate.broker.*``, ``.server.*`` and ``.cluster.*``: the embedded broker, its server, the client.

The client of a RocketMQ cluster has most of its keys in ``rocketmq.*``."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass

from mqtemplate.brokers.remote.cluster.settings import ClientIntervals, RemoteSettings
from mqtemplate.context.config.binding import ContradictionError, check_both_or_none
from mqtemplate.context.settings.properties import (
    SECTION_CONFIG,
    HostPort,
    Milliseconds,
    OptionalSecret,
    OptionalText,
    Properties,
    UpperCase,
    as_value_error,
    bytes_of,
    duration_in,
    host_and_port,
    same_as,
    section,
    upper_case,
)
from mqtemplate.delay.settings import DelayLevels, TopicShape
from mqtemplate.engine.settings import CopyOptions, EmbeddedSettings
from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress
from mqtemplate.server.acl.settings import Account, AccountRole, AclSettings, Right
from mqtemplate.server.state.settings import ServerOptions
from mqtemplate.store.settings import parse_delete_when
from mqtemplate.topics import check_send_topic

DEFAULT_STORE_PATH = Path("./mqtemplate-store")


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class BrokerSettings(EmbeddedSettings):
    """The embedded broker. Sizes are bytes, or text such as ``64MiB``; durations are numbers, or text such as
    ``1h 30m``; RocketMQ's broker has the same names."""

    store_path: Path = DEFAULT_STORE_PATH
    """Store directory, relative to the working directory; created if missing. One process at a time owns it."""

    _sizes = field_validator(
        "mapped_file_size_commit_log",
        "mapped_file_size_consume_queue",
        "mapped_file_size_timer_log",
        "max_message_size",
        mode="before",
    )(bytes_of)
    _milliseconds = field_validator(
        "flush_interval_commit_log_ms",
        "checkpoint_interval_ms",
        "flush_consumer_offset_interval_ms",
        "timer_precision_ms",
        "transaction_timeout_ms",
        "transaction_check_interval_ms",
        mode="before",
    )(duration_in(1))
    _seconds = field_validator("timer_max_delay_sec", mode="before")(duration_in(1_000))
    _hours = field_validator("file_reserved_time", "dead_letter_reserved_time", "group_reserved_time", mode="before")(
        duration_in(3_600_000)
    )
    _address = field_validator("listen_host", mode="before")(host_and_port)
    _flush_disk_type = field_validator("flush_disk_type", mode="before")(upper_case)

    @field_validator("topics", mode="before")
    @classmethod
    def _check_topics(cls, value: Any) -> Any:
        names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
        with as_value_error():
            for name in names if isinstance(names, list | tuple) else ():
                check_send_topic(str(name))
        return names

    @field_validator("topic_shapes")
    @classmethod
    def _check_shapes(cls, value: Mapping[str, TopicShape]) -> Mapping[str, TopicShape]:
        with as_value_error():
            for name, shape in value.items():
                check_send_topic(name)
                shape.check(name)
        return value

    @field_validator("delete_when", mode="before")
    @classmethod
    def _check_delete_when(cls, value: Any) -> Any:
        text = ";".join(map(str, value)) if isinstance(value, list) else str(value)
        with as_value_error():
            parse_delete_when(text)
        return text

    @field_validator("message_delay_level", mode="before")
    @classmethod
    def _check_levels(cls, value: Any) -> Any:
        text = " ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(text, str):
            with as_value_error():
                DelayLevels.parse(text)
        return text

    def __post_init__(self) -> None:
        if self.topic_shapes and not self.timer_wheel_enable:
            raise ContradictionError(
                "needs timers, but 'timer-wheel-enable' is false; set it to true, or remove the shapes", "topic_shapes"
            )
        try:
            super().__post_init__()
        except ConfigurationError as exc:  # the disk ratios: pydantic has checked the other rules
            ratios = ("disk_max_used_space_ratio", "disk_space_clean_forcibly_ratio", "disk_space_warning_level_ratio")
            raise ContradictionError(str(exc), *ratios) from exc


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class CopySettings(CopyOptions):
    """The continuous copy of the store directory of the embedded broker, or of the server; see [copy](copy.md).
    Durations are text such as ``1s``, or milliseconds."""

    _durations = field_validator(*("interval", "snapshot_interval", "keep", "max_lag", "lease"), mode="before")(
        duration_in(1)
    )

    @field_validator("to")
    @classmethod
    def _check_place(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("file:///", "s3://", "gs://", "az://")):
            raise ValueError("must be file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix")
        return value


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
    """One account, with the names of RocketMQ's ``plain_acl.yml``."""

    access_key: str = Field(min_length=7)
    """Access key in the account's requests."""
    secret_key: SecretStr
    """Secret key that signs the requests; it is never sent."""
    admin: bool = False
    """True: all requests are allowed, administrative ones too; in the dashboard the role admin."""
    role: Annotated[Literal["VIEWER", "OPERATOR"], UpperCase] = "VIEWER"
    """In the dashboard, of an account without ``admin``: a viewer only reads, an operator changes messages too."""
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
    """A list; each has ``access-key``, ``secret-key``, ``admin``, ``role``, ``default-topic-perm``,
    ``default-group-perm``, ``topic-perms`` and ``group-perms``."""
    sign_routes: bool = False
    """True: requests for routes and addresses must be signed too. False: everyone who can connect learns the names of
    topics and the addresses of brokers, as from RocketMQ's name server; some clients never sign these requests."""
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


def acl_settings(acl: AclSection, own: Account | None = None) -> AclSettings | None:
    """Return the access control of the settings; None if it is disabled.

    Args:
        own: A further account. With it access control is on in any case.
    """
    if not acl.enabled and own is None:
        return None
    accounts = [*map(_account, acl.accounts), *([] if own is None else [own])]
    return AclSettings(
        accounts=tuple(accounts),
        replay_window_ms=acl.replay_window_ms,
        sign_routes=acl.sign_routes,
        is_private=not acl.enabled,
    )


def _account(account: AccountSettings) -> Account:
    return Account(
        access_key=account.access_key,
        secret_key=account.secret_key.get_secret_value(),
        admin=account.admin,
        role=AccountRole[account.role],
        default_topic_perm=Right.parse(account.default_topic_perm),
        default_group_perm=Right.parse(account.default_group_perm),
        topic_perms={topic: Right.parse(right) for topic, right in account.topic_perms.items()},
        group_perms={group: Right.parse(right) for group, right in account.group_perms.items()},
    )


class ServerTlsSettings(Properties):
    """TLS of the server. Files are in PEM form."""

    mode: Annotated[Literal["DISABLED", "PERMISSIVE", "ENFORCING"], UpperCase] = "DISABLED"
    """DISABLED: plain connections only. PERMISSIVE: both, as the client chooses. ENFORCING: TLS only."""
    cert_path: OptionalText = None
    """The server's certificate, followed by the certificates of its issuers."""
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
    max_connections: Annotated[int, Field(ge=1)] = 20_000
    """Most connections at one time; one more is closed at once. A quarter of the limit of open files remains for other
    files, so a lower limit lets fewer connections in."""
    max_connections_per_address: Annotated[int, Field(ge=1)] | None = None
    """The same for one IP address; half of those that are possible if not given."""
    busy_poll_us: Annotated[int, Field(ge=0, le=1_000)] = 300
    """Microseconds for which the server polls its sockets before it sleeps, while requests follow each other that
    closely: responses are sooner, for more processor time. Only with ``flush-disk-type: ASYNC_FLUSH``, and with more
    than one processor; 0 for never."""
    acl: AclSection = section()
    tls: ServerTlsSettings = section()

    _address = field_validator("listen", mode="before")(host_and_port)
    _grpc_addresses = field_validator("advertise", "grpc_listen", "grpc_advertise", mode="before")(
        lambda value: host_and_port(found) if (found := _none_or_address(value)) is not None else None
    )
    _milliseconds = field_validator("max_suspend_ms", mode="before")(duration_in(1))

    @field_validator("advertise", "grpc_advertise")
    @classmethod
    def _check_advertised(cls, value: HostAddress | None) -> HostAddress | None:
        from mqtemplate.remoting.sockets import parse_address  # an embedded broker does without sockets

        with as_value_error():
            if value is not None:
                parse_address(str(value))
        return value

    @field_validator("listen", "grpc_listen", "name_server")
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
        self._check_grpc()
        return self

    def _check_grpc(self) -> None:
        grpc = self.grpc_listen
        if grpc is None:
            if self.grpc_advertise is not None:
                raise ContradictionError("is given, but 'grpc-listen' is not; set it too", "grpc_advertise")
            return
        if grpc.port and grpc in (self.listen, self.name_server):
            raise ContradictionError(f"is {grpc}, which another protocol uses; give another port", "grpc_listen")
        reached = self.grpc_advertise or self.advertise
        if reached is None and ipaddress.ip_address(grpc.ip).is_unspecified:
            raise ContradictionError(
                f"is {grpc}, which no client can connect to; say in 'grpc-advertise' the address they reach this "
                "machine at",
                "grpc_listen",
            )


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class ClusterSettings(ClientIntervals):
    """The client of a RocketMQ cluster; only ``rocketmq.name-server: host:port`` uses it, and in part
    ``rocketmq.endpoints``."""

    address_map: dict[str, str] = Field(default_factory=dict)
    """Address that a broker registers -> address at which this machine reaches it, for clusters in containers or behind
    NAT; see [addresses](remote.md#addresses)."""

    offset_path: Path | None = None
    """Directory with the offsets of broadcasting groups; ``~/.rocketmq_offsets`` if not given."""

    pending_index: Path | None = None
    """File with an index of the pending messages of a RocketMQ cluster, which is built at its first use; without it
    each query reads all of them, up to ``pending-read-limit``. The command line and the dashboard have one by default;
    see [delay console](delay-console.md)."""

    auto_batch: bool = same_as(RemoteSettings, "auto_batch")

    tls_trust_cert_path: OptionalText = None
    """PEM file with the issuers of the servers' certificates; by default the issuers that this machine trusts."""

    tls_cert_path: OptionalText = None
    """PEM file with the client's own certificate, if servers require one. Together with ``tls-key-path``."""

    tls_key_path: OptionalText = None
    """PEM file with the private key of the certificate."""

    tls_key_password: OptionalSecret = None
    """Password of the private key."""

    tls_check_host_name: bool = True
    """True: the certificate must be for the host name of the address."""

    tls_insecure: bool = False
    """True: accept any certificate, for trials. RocketMQ calls this test mode, and it is RocketMQ's default."""

    _milliseconds = field_validator(*(field.name for field in fields(ClientIntervals)), mode="before")(duration_in(1))

    @field_validator("address_map")
    @classmethod
    def _check_address_map(cls, value: dict[str, str]) -> dict[str, str]:
        from mqtemplate.remoting.sockets import AddressMap  # an embedded broker does without sockets

        with as_value_error():
            AddressMap(value)
        return value

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        check_both_or_none(self, "tls_cert_path", "tls_key_path")
        return self
