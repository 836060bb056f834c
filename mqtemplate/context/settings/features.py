"""Sections of what an application has beside a broker: listeners, starters, schedules, management."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic.dataclasses import dataclass

from mqtemplate.context.config.binding import ContradictionError, check_both_or_none
from mqtemplate.context.settings.properties import (
    SECTION_CONFIG,
    CommaList,
    Milliseconds,
    OptionalSecret,
    OptionalText,
    Properties,
    UpperCase,
    duration_in,
    section,
)
from mqtemplate.context.settings.rocketmq import parse_name_server
from mqtemplate.durations import is_bare_number
from mqtemplate.errors import ListenerError
from mqtemplate.listener.declaration.attributes import read_exceptions
from mqtemplate.listener.declaration.settings import (
    Backoff,
    RetryDefaults,
    RetrySchedule,
    read_schedule,
    retry_delay_ms,
)
from mqtemplate.observability.settings import (
    ENDPOINTS,
    OPEN_ENDPOINTS,
    HealthSettings,
    LatenessSettings,
    MetricsSettings,
    ObservabilitySettings,
    TracingSettings,
)
from mqtemplate.topics import SCHEDULES_TOPIC, check_topic


def _delay_text(value: Any) -> Any:
    """Return a number of seconds, which may be text, with its unit; anything else unchanged."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value}s" if is_number or is_bare_number(value) else value


def _delay_texts(value: Any) -> Any:
    return [*map(_delay_text, value)] if isinstance(value, list) else _delay_text(value)


def _check(read: Callable[[Any], object], value: object) -> None:
    """Read a value; the error is a whole sentence."""
    try:
        read(value)
    except ValueError as exc:
        raise ValueError(f"must be {exc}") from None


class BackoffSettings(Properties):
    """Exponential delays of retries, instead of ``mqtemplate.listener.retry``."""

    first: Annotated[OptionalText, BeforeValidator(_delay_text)] = None
    """Delay before the first retry, such as ``1s``; without it there is no exponential schedule."""
    factor: float = Field(2, ge=1, le=1_000)
    """Each delay is this many times the one before."""
    maximum: Annotated[str, BeforeValidator(_delay_text)] = "1h"
    """Longest delay."""
    jitter: float = Field(0.1, ge=0, le=1)
    """Random share of each delay: with 0.1 it is 90 to 110 percent of the computed one."""
    attempts: int = Field(10, ge=1, le=10_001)
    """Calls of the handler in total, the first one included."""

    @field_validator("first", "maximum")
    @classmethod
    def _check_delay(cls, value: str | None) -> str | None:
        if value is not None:
            _check(retry_delay_ms, value)
        return value


class ListenerDefaultSettings(Properties):
    """Defaults of all listeners; a value in ``@message_listener`` wins. And the listeners of this process."""

    enabled: bool = True
    """False: this process runs no listeners and schedules. ``mqtemplate run`` runs them all the same."""
    only: CommaList = ()
    """Ids, or last parts of ids, of the listeners and schedules that run in this process. Not given: all."""
    retry: Annotated[CommaList, BeforeValidator(_delay_texts)] = ()
    """Delays before the retries, such as ``[5s, 1m, 1h]``; then the message is a dead letter. Not given: 10s, 30s, 1m,
    … 2h, as in RocketMQ; an ORDERLY queue is retried each second."""
    backoff: BackoffSettings = section()
    retry_for: CommaList = ()
    """Exceptions that are retried, such as ``[OSError, shop.errors.BankError]``; others are dead letters at once. Not
    given: all are retried."""
    not_retry_for: CommaList = ()
    """Exceptions that are not retried; their messages are dead letters at once."""
    invisible_duration: Milliseconds = Field(60_000, ge=1_000, le=12 * 3_600_000)
    """For listeners that receive by POP: the time for which other members do not see a message. It is renewed."""

    @field_validator("retry")
    @classmethod
    def _check_retry(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            _check(read_schedule, value)
        return value

    @field_validator("retry_for", "not_retry_for")
    @classmethod
    def _check_exceptions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            read_exceptions(value)
        except (ValueError, AttributeError):
            raise ValueError(
                f"must be names of exceptions, such as ValueError or shop.errors.OrderError, got {', '.join(value)}"
            ) from None
        return value

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.retry and self.backoff.first is not None:
            raise ContradictionError("and 'backoff.first' are two schedules of retries; keep one", "retry", "backoff")
        try:
            self._schedule()
        except ListenerError as exc:
            raise ContradictionError(exc.problem or str(exc), "backoff") from exc
        return self

    def _schedule(self) -> RetrySchedule | None:
        backoff = self.backoff
        if backoff.first is None:
            return read_schedule(self.retry) if self.retry else None
        return Backoff(
            backoff.first,
            factor=backoff.factor,
            maximum=backoff.maximum,
            jitter=backoff.jitter,
            attempts=backoff.attempts,
        )

    @property
    def retry_defaults(self) -> RetryDefaults:
        """The section as one value for the listeners."""
        return RetryDefaults(
            retry=self._schedule(),
            retry_for=read_exceptions(self.retry_for),
            not_retry_for=read_exceptions(self.not_retry_for),
        )


class LoggingSettings(Properties):
    """The logging starter: the library's events on standard error, for ``run()`` and the command line. It does
    nothing in a program that has configured `logging`; see [logging](logging.md)."""

    enabled: bool = True
    """True: the starter may show events."""
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], UpperCase] = "INFO"
    """Least severe level of events to show."""
    format: Annotated[Literal["CONSOLE", "JSON"], UpperCase] = "CONSOLE"
    """``console`` for people, ``json`` for machines; one line per event."""


class EmbeddedStarterSettings(Properties):
    """The starter that creates the embedded broker."""

    enabled: bool = True
    """True: the starter may create one."""


class SparkSettings(Properties):
    """The Spark starter, which runs the functions marked ``@spark_listener``."""

    enabled: bool = True
    """True: the starter may start a session. It does so only if there is a Spark listener."""
    master: str = Field("local[2]", min_length=1)
    """Spark master; by default this machine with two threads."""
    checkpoint_path: Path = Path("./mqtemplate-checkpoints")
    """Directory with the progress of the queries; after a restart they continue from there."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Any of Spark's own keys, such as ``spark.sql.shuffle.partitions``."""
    java_home: OptionalText = None
    """Java installation to use; searched for if not given."""

    @field_validator("conf", mode="before")
    @classmethod
    def _as_spark_writes_it(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()}


class HandOverSettings(Properties):
    """A hand-over of the application from the broker that it has used to the one of ``rocketmq.*``, without a stop; see
    [growing](growing.md)."""

    from_: OptionalText = None
    """The broker that the application leaves: ``embedded:<folder>``, or ``host:port`` of a server of this library.
    ``embedded`` is the folder of ``mqtemplate.broker.store-path``."""
    rate: int = Field(1_000, ge=1, le=100_000)
    """Most pending messages that move to the new broker in a second."""
    max_early_ms: Milliseconds = Field(0, ge=0)
    """A new broker without timers, as RocketMQ 4, has delay levels only: it may deliver a pending message early by this
    much. ``0``: it gets none, and the old broker releases them when due."""
    orderly_waits_for: Annotated[Literal["READY", "PENDING"], UpperCase] = "READY"
    """When ``ORDERLY`` listeners read a topic of the new broker. ``ready``: they have consumed what the old one has
    delivered. ``pending``: and it has no pending message of the topic."""
    allow_other_queue_count: bool = False
    """True: ``ORDERLY`` listeners start although a topic has another number of queues at the new broker, and pending
    messages in the old one. The order of these messages is then lost."""
    namespace: OptionalText = None
    """Namespace of the application at the old server."""
    access_key: OptionalSecret = None
    """Access key of the account at the old server. The account of ``rocketmq.*`` is not sent to it."""
    secret_key: OptionalSecret = None
    """Secret key of that account."""
    tls_enable: bool = False
    """True: connect to the old server over TLS, with the keys ``mqtemplate.cluster.tls-*``."""

    @model_validator(mode="after")
    def _check_account(self) -> Self:
        check_both_or_none(self, "access_key", "secret_key")
        return self


_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PlaceSettings(Properties):
    """A broker, an application, or both, that ``mqtemplate dashboard`` shows under ``<name>``, which you choose."""

    name_server: OptionalText = None
    """The broker, in the forms of ``rocketmq.name-server``."""
    access_key: OptionalText = None
    """Account at this broker; by default that of ``rocketmq.producer``."""
    secret_key: OptionalSecret = None
    """Its secret key."""
    application: OptionalText = None
    """Address of the actuator of a running application: ``http://host:port``."""
    token: OptionalSecret = None
    """Token of that application; by default ``mqtemplate.management.token``."""

    @field_validator("name_server")
    @classmethod
    def _check_name_server(cls, value: str | None) -> str | None:
        if value is not None:
            parse_name_server(value)
        return value

    @field_validator("application")
    @classmethod
    def _check_application(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be http://host:port")
        return value

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.name_server is None and self.application is None:
            raise ContradictionError("shows nothing; give 'name-server', 'application', or both")
        check_both_or_none(self, "access_key", "secret_key")
        return self


class DashboardSettings(Properties):
    """Pages of ``mqtemplate dashboard``; those of an application itself: ``mqtemplate.management.dashboard``."""

    places: dict[str, PlaceSettings] = Field(default_factory=dict)
    """Brokers and applications, each with a name, if no option of the command names one; see
    [several](dashboard.md#several-brokers-and-applications)."""

    @field_validator("places")
    @classmethod
    def _check_places(cls, value: dict[str, PlaceSettings]) -> dict[str, PlaceSettings]:
        for name in value:
            if _PLACE.fullmatch(name) is None:
                raise ValueError(f"must have names of letters, digits, '.', '_' and '-', at most 64, got {name[:80]!r}")
        return value


class SchedulesSettings(Properties):
    """Functions and methods marked ``@scheduled``; see [schedules](schedules.md)."""

    enabled: bool = True
    """False: this process runs no schedules; other processes may."""
    topic: Annotated[str, AfterValidator(check_topic)] = SCHEDULES_TOPIC
    """Topic of the runs. Applications that share a broker need one each, or different names of schedules."""


class AutoconfigureSettings(Properties):
    """Starters of the application."""

    exclude: CommaList = ()
    """Names of starters that do not act."""


class ProfilesSettings(Properties):
    """Profiles of the configuration."""

    active: CommaList = ()
    """Names of the active profiles; a later one wins over an earlier one."""


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class MetricsSection(MetricsSettings):
    """Metrics of the application and its broker; see [metrics](metrics.md)."""

    opentelemetry: bool = False
    """True: export them by the meter provider of OpenTelemetry that the program configures."""

    _milliseconds = field_validator("pending_interval_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class TracingSection(TracingSettings):
    """Spans of sends and handlers, with ``mqtemplate[opentelemetry]``."""


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class LatenessSection(LatenessSettings):
    """Lateness of delayed messages; see [observability](observability.md)."""

    _milliseconds = field_validator("threshold_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class HealthSection(HealthSettings):
    """Thresholds of the health. A component beyond its threshold is ``DOWN``."""

    _milliseconds = field_validator("max_lateness_ms", "timeout_ms", mode="before")(duration_in(1))


@dataclass(frozen=True, kw_only=True, config=SECTION_CONFIG)
class DashboardSection:
    """Pages of the application and its broker in a browser; see [dashboard](dashboard.md)."""

    enabled: bool = False
    """True: the management port serves it below ``/dashboard``, and a web framework can mount it. It needs
    ``mqtemplate[dashboard]`` and ``token``: reading needs the token too."""
    allow_changes: bool = False
    """True: changes of messages, dead letters and listeners are allowed to those who have signed in with the token."""
    allowed_hosts: CommaList = ()
    """Host names in addresses of the dashboard, beside the names of loopback, such as ``shop.example.com``."""


class ManagementSettings(Properties):
    """Metrics, traces, lateness and health of the application, and its actuator. Off by default, at no cost."""

    enabled: bool = False
    """True: the application, or the server, is observed."""
    port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Port of the actuator: ``http://address:port/actuator``; 0 for a free one. Without it an application serves the
    actuator through its own web framework, or not at all. Several processes of an application share one address; see
    [several processes](observability.md#several-processes)."""
    address: str = "127.0.0.1"
    """Numeric address of that port. With another than loopback, other machines can read the ``open-endpoints``."""
    token: OptionalSecret = None
    """Token that reads of other than the ``open-endpoints`` and all changes must have, as ``Authorization: Bearer
    <token>``, of at least 16 characters. Without it they are refused."""
    name: OptionalText = None
    """Name of the application in ``/actuator/info``."""
    targets_dir: OptionalText = None
    """Folder into which each process writes the address that it serves, for ``file_sd_configs`` of Prometheus:
    ``<folder>/*.json``. With ``port: 0`` these are all processes that no command of ours has started."""
    endpoints: CommaList = ENDPOINTS
    """Endpoints of the actuator to expose."""
    open_endpoints: CommaList = OPEN_ENDPOINTS
    """Those of them that everyone who can connect reads without the token."""
    allowed_hosts: CommaList = ()
    """Public host names in addresses of the actuator, such as ``shop.example.com``. Addresses, names without a dot, and
    names below ``localhost``, ``local``, ``internal`` and ``svc`` are always allowed, and for ``health`` all are."""
    audit_log: OptionalText = None
    """File of the audit log, from which changes can be undone. By default the dashboard and the command line write
    ``~/.local/state/mqtemplate/audit.jsonl``, and the actuator keeps its last hundred changes in memory."""
    metrics: MetricsSection = section()
    tracing: TracingSection = section()
    lateness: LatenessSection = section()
    health: HealthSection = section()
    dashboard: DashboardSection = section()

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError("must be a numeric address, such as 127.0.0.1 or ::1") from None
        return value

    @field_validator("token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            from mqtemplate.http.tokens import weakness_of  # few applications have the HTTP server

            if (weakness := weakness_of(value.get_secret_value())) is not None:
                raise ValueError(weakness)
        return value

    @field_validator("endpoints", "open_endpoints")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in ENDPOINTS]
        if unknown:
            raise ValueError(f"must be some of {', '.join(ENDPOINTS)}; there is no {', '.join(unknown)}")
        return value

    @model_validator(mode="after")
    def _check_enabled(self) -> Self:
        if self.port is not None and not self.enabled:
            raise ContradictionError("is given, but 'enabled' is not true; set it, or remove the port", "port")
        if self.dashboard.enabled and not (self.enabled and self.token):
            missing = "'enabled' is not true" if not self.enabled else "there is no 'token'"
            raise ContradictionError(f"is on, but {missing}; set it, or turn the dashboard off", "dashboard.enabled")
        return self

    @property
    def observability(self) -> ObservabilitySettings:
        """The section as one value for `Observability`."""
        return ObservabilitySettings(
            metrics=self.metrics, tracing=self.tracing, lateness=self.lateness, health=self.health
        )
