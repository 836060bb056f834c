"""The section ``rocketmq.*``: the key that chooses the broker, and the keys of rocketmq-spring, with its defaults."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from mqtemplate.broker import MessageModel
from mqtemplate.brokers.remote.cluster.settings import RemoteSettings
from mqtemplate.context.config.binding import ContradictionError, check_both_or_none
from mqtemplate.context.settings.properties import (
    Milliseconds,
    OptionalSecret,
    OptionalText,
    Properties,
    Seconds,
    UpperCase,
    same_as,
    section,
)
from mqtemplate.selectors.tags import SelectorType

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:;/]+):(\d{1,5})")
_ALLOWED = "'embedded', 'embedded:memory', 'embedded:<folder>', 'host:port;host:port', or 'grpc://host:port'"
_GRPC_SCHEME = "grpc://"
_NO_FOLDER = {
    # text after 'embedded:' that does not name a folder -> the problem
    r"^:": "a folder does not begin with a colon ('embedded:memory' is the store without a folder)",
    r"^[A-Za-z][A-Za-z0-9+.-]*:": "a folder has no scheme, drive or port before it",
    r"%[0-9A-Fa-f]{2}": "percent escapes are not decoded",
    r"\\": "the separator of folders is '/', not a backslash",
    r"[;?]": "one folder has no list after it, and no parameters",
    r"[\x00-\x1f]": "a folder has no control characters",
}


@dataclass(frozen=True, slots=True)
class EmbeddedStore:
    """Choice of the embedded broker, and its store.

    Attributes:
        path: Store directory as the key has it, see `AppSettings.absolute`; None for the directory in
            ``mqtemplate.broker.store-path``.
        in_memory: True: the store has no directory.
    """

    path: Path | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class ClusterAddresses:
    """Choice of a RocketMQ cluster: its name servers as ``host:port``."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """Choice of RocketMQ 5's proxy, over gRPC.

    Attributes:
        endpoints: Its address as ``host:port``; several are separated by semicolons.
    """

    endpoints: str

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses, as `ClusterAddresses` has them, and different from those of name servers."""
        return tuple(f"{_GRPC_SCHEME}{part.strip()}" for part in self.endpoints.split(";"))


def parse_name_server(text: str) -> EmbeddedStore | ClusterAddresses | ProxyAddress:
    """Return the broker that the value of the key chooses.

    Raises:
        ValueError: The form of the value is not allowed.
    """
    if text.strip().lower().startswith(_GRPC_SCHEME):
        return ProxyAddress(_checked_endpoints(text.strip()[len(_GRPC_SCHEME) :]))
    kind, colon, rest = text.strip().partition(":")
    if kind.lower() == "embedded":
        rest = rest.strip()
        if colon and not rest:
            raise ValueError(f"'embedded:' has nothing after the colon; allowed are {_ALLOWED}")
        if rest.lower() == "memory":
            return EmbeddedStore(in_memory=True)
        return EmbeddedStore(path=_folder(rest) if rest else None)
    addresses = tuple(part.strip() for part in re.split("[;,]", text) if part.strip())
    if not addresses or not all(_is_address(address) for address in addresses):
        raise ValueError(f"allowed are {_ALLOWED}")
    return ClusterAddresses(addresses)


def _checked_endpoints(text: str) -> str:
    """Return the address of a proxy.

    Raises:
        ValueError: The form of the text is not allowed.
    """
    from mqtemplate.brokers.grpc.settings import Endpoints  # most applications have no proxy

    return str(Endpoints.parse(text))


def _folder(text: str, *, is_windows: bool = os.name == "nt") -> Path:
    """Return the folder that follows ``embedded:``.

    It is a path of this system as it stands. Texts that are more likely a URL, or a path of another system, are
    refused: they would name another folder than the one that was meant, and its messages would seem to be lost.

    Args:
        is_windows: True: ``C:\\data``, ``C:/data`` and ``\\\\host\\share\\data`` are paths.

    Raises:
        ValueError: The text is not a path in an allowed form.
    """
    if is_windows and (drive := PureWindowsPath(text).drive):
        rest = text[len(drive) :].replace("\\", "/")
        if not rest.startswith("/"):
            raise ValueError(
                f"{text!r} is relative to the working directory of drive {drive}, which differs by process; write "
                f"'embedded:{drive}\\{rest}'"
            )
        _check_folder(rest)
        return Path(text)
    if is_windows:
        text = text.replace("\\", "/")
    if text.startswith("//") and not text.startswith("///"):
        name = text.strip("/") or "data"
        if name.lower() == "memory":
            raise ValueError(
                "'embedded:' is not the start of a URL; write 'embedded:./memory' for a folder of that name, "
                "or 'embedded:memory' for the store without a folder"
            )
        raise ValueError(
            f"'embedded:' is not the start of a URL with a host; write 'embedded:{name}' for a folder in the working "
            f"directory, or 'embedded:/{name.removeprefix('./')}' for one from the root"
        )
    _check_folder(text)
    return Path(f"/{text.lstrip('/')}") if text.startswith("/") else Path(text)


def _check_folder(text: str) -> None:
    for pattern, problem in _NO_FOLDER.items():
        if re.search(pattern, text):
            raise ValueError(
                f"{problem}; write the folder as 'embedded:./data' or 'embedded:/var/data', or give its exact name in "
                "mqtemplate.broker.store-path"
            )


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 65_536


class ClientSettings(Properties):
    """Keys that producers and consumers share: their identity, and the connection to a cluster."""

    namespace: OptionalText = None
    """Prefix that separates the topics and groups of several users of one cluster, the older form."""
    namespace_v2: OptionalText = None
    """The newer form of a namespace, which the cluster resolves. Not together with ``namespace``."""
    access_key: OptionalSecret = None
    """Access key of the account on a cluster with access control."""
    secret_key: OptionalSecret = None
    """Secret key of the account."""
    enable_msg_trace: bool = False
    """True: write a trace of each message into the trace topic."""
    customized_trace_topic: str = "RMQ_SYS_TRACE_TOPIC"
    """Topic of traces."""
    tls_enable: bool = False
    """True: connect to the cluster over TLS."""
    instance_name: str = "DEFAULT"
    """Distinguishes two clients of one process. In a broadcasting group, the client continues from its offsets."""

    @model_validator(mode="after")
    def _check_client(self) -> Self:
        if self.namespace and self.namespace_v2:
            raise ContradictionError(
                "says the same as 'namespace' in a newer form; keep one of the two", "namespace_v2", "namespace"
            )
        check_both_or_none(self, "access_key", "secret_key")
        return self


class ProducerSettings(ClientSettings):
    """The producer of the template."""

    endpoints: OptionalText = None
    """Address of RocketMQ 5's proxy, the same as ``rocketmq.endpoints``: the name of the 5.x starter."""
    topic: OptionalText = None
    """With ``endpoints``: topics of transactions, separated by commas. Open transactions of these topics are checked
    after a restart too."""
    request_timeout: Seconds = Field(3, gt=0)
    """With ``endpoints``: seconds for a request without a timeout of its own."""
    max_attempts: int | None = Field(None, gt=0)
    """With ``endpoints``: attempts of a send, in place of ``retry-times-when-send-failed``, which does not count the
    first one."""
    ssl_enabled: bool = False
    """With ``endpoints``: True: connect over TLS, as ``tls-enable``."""
    group: OptionalText = None
    """Producer group. A cluster checks transactions with the members of the group."""
    send_message_timeout: Milliseconds = Field(3_000, gt=0)
    """Milliseconds for a send without a timeout of its own, retries included."""
    compress_message_body_threshold: int = same_as(RemoteSettings, "compress_threshold", ge=0)
    retry_times_when_send_failed: int = same_as(RemoteSettings, "retry_times_when_send_failed", ge=0)
    retry_times_when_send_async_failed: int = same_as(RemoteSettings, "retry_times_when_send_async_failed", ge=0)
    retry_next_server: bool = same_as(RemoteSettings, "retry_next_server")
    max_message_size: int | None = Field(None, gt=0)
    """Largest body in bytes, if it is to be smaller than the broker's limit."""


class _SubscriptionKeys(Properties):
    group: OptionalText = None
    """Consumer group."""
    topic: OptionalText = None
    """Topic to read."""
    message_model: Annotated[MessageModel, UpperCase] = MessageModel.CLUSTERING
    """CLUSTERING: each message goes to one member of the group. BROADCASTING: to all members."""
    selector_type: Annotated[SelectorType, UpperCase] = SelectorType.TAG
    """Language of ``selector-expression``."""
    selector_expression: str = "*"
    """Messages to select: tags joined by two bars, or ``*`` for all."""
    pull_batch_size: int = Field(10, gt=0, le=1_024)
    """Messages that one call requests."""


class ReceiveSettings(_SubscriptionKeys):
    """Subscription of the template's ``receive``. It needs ``group`` and ``topic``."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        check_both_or_none(self, "group", "topic", ": receive() reads one topic for one group")
        return self


class PullConsumerSettings(ReceiveSettings, ClientSettings):
    """Subscription of ``template.receive``. It needs ``group`` and ``topic``."""


class ProxyConsumerSettings(Properties):
    """Keys of a consumer in the 5.x starter: the connection to the proxy."""

    endpoints: OptionalText = None
    """Address of RocketMQ 5's proxy, the same as ``rocketmq.endpoints``."""
    access_key: OptionalSecret = None
    """Access key of the account."""
    secret_key: OptionalSecret = None
    """Secret key of the account."""
    namespace: OptionalText = None
    """Namespace of topics and groups."""
    ssl_enabled: bool = False
    """True: connect over TLS."""

    @model_validator(mode="after")
    def _check_account(self) -> Self:
        check_both_or_none(self, "access_key", "secret_key")
        return self


class SimpleConsumerSettings(ProxyConsumerSettings):
    """Subscription of ``template.receive``, by the names of the 5.x starter."""

    consumer_group: OptionalText = None
    """Consumer group, as ``rocketmq.pull-consumer.group``."""
    topic: OptionalText = None
    """Topic to read."""
    tag: str = "*"
    """Messages to select, as ``selector-expression``."""
    filter_expression_type: Annotated[SelectorType, UpperCase] = SelectorType.TAG
    """Language of ``tag``."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        check_both_or_none(self, "consumer_group", "topic", ": receive() reads one topic for one group")
        return self


class ConsumerSettings(_SubscriptionKeys, ClientSettings):
    """Keys for the listeners."""

    await_termination_millis_when_shutdown: Milliseconds = Field(30_000, ge=0, le=3_600_000)
    """Milliseconds for which a stop waits for the running handlers of all listeners together,
    for listeners that do not set it."""
    listeners: dict[str, dict[str, bool]] = Field(default_factory=dict)
    """False: the listener of that group for that topic is not started."""

    def is_listener_enabled(self, group: str, topic: str) -> bool:
        """Return True unless the configuration switches the listener off."""
        return self.listeners.get(group, {}).get(topic, True)


class TemplateSettings(ProducerSettings):
    """A further template: ``<name>`` is chosen by you, and ``Named("<name>")`` injects the template.

    Timeouts, retries and sizes that are not given are taken from ``rocketmq.producer``. So are account, namespace and
    TLS if the template uses the cluster of the application; for another cluster they have to be given here.
    """

    name_server: OptionalText = None
    """The broker of the template, in the forms of ``rocketmq.name-server``; the application's broker if not given.
    Listeners use it by ``broker="<name>"``. Templates that name one folder share its broker."""
    access_channel: Annotated[Literal["LOCAL", "CLOUD"] | None, UpperCase] = None
    """Operator of the cluster, as ``rocketmq.access-channel``."""
    pull_consumer: ReceiveSettings = section()

    @model_validator(mode="after")
    def _choose_proxy(self) -> Self:
        if self.endpoints is not None:
            if self.name_server is not None:
                raise ContradictionError("chooses a proxy, and 'name-server' another broker; keep one", "endpoints")
            object.__setattr__(self, "name_server", f"{_GRPC_SCHEME}{self.endpoints}")
            parse_name_server(f"{_GRPC_SCHEME}{self.endpoints}")
        return self

    @field_validator("name_server")
    @classmethod
    def _check_name_server(cls, value: str | None) -> str | None:
        if value is not None:
            parse_name_server(value)
        return value


class RocketMQSettings(Properties):
    """The broker, and its clients."""

    name_server: str = Field("embedded", min_length=1)
    """The broker. ``embedded``: an embedded broker over ``mqtemplate.broker.store-path``; ``embedded:./data``: over
    that directory; ``embedded:memory``: without files. ``host:port;host:port``: a RocketMQ cluster.
    ``grpc://host:port``: RocketMQ 5's proxy."""
    endpoints: OptionalText = None
    """Address of RocketMQ 5's proxy as ``host:port``, in place of ``name-server``: the application speaks gRPC."""
    access_channel: Annotated[Literal["LOCAL", "CLOUD"] | None, UpperCase] = None
    """Operator of the cluster: the user (LOCAL) or a cloud provider (CLOUD)."""
    producer: ProducerSettings = section()
    consumer: ConsumerSettings = section()
    pull_consumer: PullConsumerSettings = section()
    simple_consumer: SimpleConsumerSettings = section()
    push_consumer: ProxyConsumerSettings = section()
    templates: dict[str, TemplateSettings] = Field(default_factory=dict)
    """Further templates, each with a name; see [clusters](clusters.md)."""

    @property
    def receiving(self) -> PullConsumerSettings:
        """Subscription of ``template.receive``, whichever of its two sections has it."""
        simple = self.simple_consumer
        if simple.consumer_group is None:
            return self.pull_consumer
        return PullConsumerSettings(
            group=simple.consumer_group,
            topic=simple.topic,
            selector_expression=simple.tag,
            selector_type=simple.filter_expression_type,
        )

    @model_validator(mode="after")
    def _choose_proxy(self) -> Self:
        """Let ``endpoints`` choose the broker, and refuse keys that need it."""
        given = {
            f"{name}.endpoints": client.endpoints
            for name, client in (
                ("producer", self.producer),
                ("simple_consumer", self.simple_consumer),
                ("push_consumer", self.push_consumer),
            )
            if client.endpoints is not None
        }
        if self.endpoints is not None:
            given = {"endpoints": self.endpoints} | given
        if not given:
            self._check_needs()
            return self
        key, endpoints = next(iter(given.items()))
        if any(other != endpoints for other in given.values()):
            raise ContradictionError("all 'endpoints' name one proxy: give them one value", *given)
        if "name_server" in self.model_fields_set and self.name_server != f"{_GRPC_SCHEME}{endpoints}":
            raise ContradictionError(
                "chooses a proxy, and 'rocketmq.name-server' another broker; keep one of the two", key
            )
        try:
            _checked_endpoints(endpoints)
        except ValueError as exc:
            raise ContradictionError(f"{exc}, got {endpoints!r}", key) from exc
        if self.simple_consumer.consumer_group is not None and self.pull_consumer.group is not None:
            raise ContradictionError(
                "says the same as 'rocketmq.pull-consumer.group'; keep one of the two", "simple_consumer.consumer_group"
            )
        object.__setattr__(self, "name_server", f"{_GRPC_SCHEME}{endpoints}")
        return self

    def _check_needs(self) -> None:
        if self.name_server.startswith(_GRPC_SCHEME):
            return
        of_producer = ("topic", "request_timeout", "max_attempts", "ssl_enabled")
        found = [f"producer.{name}" for name in of_producer if name in self.producer.model_fields_set]
        for name, consumer in (("simple_consumer", self.simple_consumer), ("push_consumer", self.push_consumer)):
            found += [f"{name}.{field}" for field in sorted(consumer.model_fields_set)]
        if found:
            raise ContradictionError(
                "is a key of the 5.x starter, for a proxy: it needs 'rocketmq.endpoints: host:port'", found[0]
            )
