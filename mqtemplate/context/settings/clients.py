"""Settings of an application as its brokers and templates need them, and keys that a broker does not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import SecretStr

from mqtemplate.brokers.remote.cluster.settings import ClientIntervals, RemoteSettings
from mqtemplate.context.config.masking import masked
from mqtemplate.context.config.tree import kebab
from mqtemplate.context.settings.app import HAND_OVER, AppSettings
from mqtemplate.context.settings.rocketmq import (
    ClientSettings,
    ClusterAddresses,
    ProducerSettings,
    ProxyAddress,
    PullConsumerSettings,
    RocketMQSettings,
    TemplateSettings,
)
from mqtemplate.errors import ConfigurationError, UnsupportedError
from mqtemplate.listener.declaration.resolution import NO_NAMESPACE, NO_USERS
from mqtemplate.remoting.identity import ClientTls, Credentials

if TYPE_CHECKING:
    from mqtemplate.brokers.grpc.settings import GrpcSettings


class UnneededKey(NamedTuple):
    """A key that is set and that the broker does not need."""

    key: str
    reason: str


_NO_TRACE = "template.receive writes no traces; senders and listeners do: rocketmq.producer, rocketmq.consumer"
_NO_RETRY = "a send inside this process has a definite result, so there is nothing to retry"
_IN_THE_DECORATOR = "each listener sets it; write ${{{key}}} in @message_listener to take it from here"

REFUSED_BY_EMBEDDED: dict[str, dict[str, str]] = {
    section: {
        "namespace": NO_NAMESPACE,
        "namespace_v2": NO_NAMESPACE,
        "access_key": NO_USERS,
        "secret_key": NO_USERS,
        "tls_enable": "the embedded broker uses no network connection",
    }
    for section in ("producer", "consumer", "pull_consumer")
}
REFUSED_BY_EMBEDDED["pull_consumer"]["instance_name"] = "template.receive is one reader, and is always called DEFAULT"
REFUSED_BY_EMBEDDED["pull_consumer"] |= dict.fromkeys(("enable_msg_trace", "customized_trace_topic"), _NO_TRACE)
"""Section -> field -> reason. A field with its default value is allowed."""

_REFUSED_BY_CLUSTER = {"pull_consumer": dict.fromkeys(("enable_msg_trace", "customized_trace_topic"), _NO_TRACE)}

_REFUSED_BY_PROXY: dict[str, dict[str, str]] = {
    section: dict.fromkeys(
        ("enable_msg_trace", "customized_trace_topic"),
        "RocketMQ's gRPC protocol sends nothing to the topic of traces; use OpenTelemetry, or rocketmq.name-server",
    )
    for section in ("producer", "consumer", "pull_consumer")
}

UNNEEDED_BY_EMBEDDED = {
    "producer": {
        "compress_message_body_threshold": "bodies are not sent over a network, so they are not compressed",
        "retry_times_when_send_failed": _NO_RETRY,
        "retry_times_when_send_async_failed": _NO_RETRY,
        "retry_next_server": "there is one broker only",
        "instance_name": "it distinguishes the clients of a cluster; here is one client",
    },
    "pull_consumer": {"pull_batch_size": "template.receive(max_count=...) sets it for each call"},
    "consumer": dict.fromkeys(
        ("group", "topic", "message_model", "selector_type", "selector_expression", "pull_batch_size", "instance_name"),
        _IN_THE_DECORATOR,
    ),
}
"""Section -> field -> reason, with ``{key}`` for the key."""


def check_embedded_support(settings: AppSettings) -> None:
    """Refuse keys that the embedded broker does not support, before it opens anything.

    Raises:
        UnsupportedError: The first such key, with its origin, the reason, and what to do.
    """
    if settings.rocketmq.access_channel == "CLOUD":
        raise _unsupported(settings, "rocketmq.access-channel", "the embedded broker has no cloud provider")
    _check(settings, REFUSED_BY_EMBEDDED)


def check_cluster_support(settings: AppSettings) -> None:
    """Refuse keys that the client of a cluster does not support.

    Raises:
        UnsupportedError: The first such key, with its origin, the reason, and what to do.
    """
    _check(settings, _REFUSED_BY_CLUSTER)


def unneeded_keys(settings: AppSettings) -> list[UnneededKey]:
    """Return the keys that are set and that the embedded broker does not need."""
    found = []
    for section, reasons in UNNEEDED_BY_EMBEDDED.items():
        given: ClientSettings = getattr(settings.rocketmq, section)
        for field in sorted(given.model_fields_set & reasons.keys()):
            key = _key(section, field)
            found.append(UnneededKey(key, reasons[field].format(key=key)))
    return found


def _key(section: str, field: str) -> str:
    return f"rocketmq.{kebab(section)}.{kebab(field)}"


def _check(settings: AppSettings, refused: Mapping[str, Mapping[str, str]]) -> None:
    for section, reasons in refused.items():
        keys: ClientSettings = getattr(settings.rocketmq, section)
        for field, reason in reasons.items():
            if getattr(keys, field) != type(keys).model_fields[field].default:
                raise _unsupported(settings, _key(section, field), reason)


def _unsupported(settings: AppSettings, key: str, reason: str) -> UnsupportedError:
    shown = settings.as_written(key)
    return UnsupportedError(f"{settings.origins.of(shown)}: {shown} cannot be honoured: {reason}; remove the key")


_SECTIONS = ("producer", "consumer", "pull_consumer")


def remote_settings(settings: AppSettings) -> RemoteSettings:
    """Return the settings of the remote broker.

    One client serves the whole application. Its access key, namespace and TLS may therefore be set in any of the
    sections producer, consumer and pull-consumer, or in several with equal values.

    Raises:
        UnsupportedError: A key is set that a cluster, or this client, does not support.
        ConfigurationError: Two sections contradict each other.
    """
    cluster = settings.broker_choice
    if not isinstance(cluster, ClusterAddresses):
        raise ConfigurationError(
            f"rocketmq.name-server is {masked(settings.rocketmq.name_server)!r}, which is not a cluster"
        )
    check_cluster_support(settings)
    producer, own = settings.rocketmq.producer, settings.mqtemplate.cluster
    defaults = RemoteSettings(name_servers=cluster.addresses)
    return RemoteSettings(
        name_servers=cluster.addresses,
        address_map=own.address_map,
        producer_group=producer.group or defaults.producer_group,
        namespace=_shared(settings, "namespace") or "",
        namespace_v2=_shared(settings, "namespace_v2") or "",
        credentials=_credentials(settings),
        tls=_tls(settings),
        retry_times_when_send_failed=producer.retry_times_when_send_failed,
        retry_times_when_send_async_failed=producer.retry_times_when_send_async_failed,
        auto_create_topic_enable=settings.mqtemplate.broker.auto_create_topic_enable,
        topics=settings.mqtemplate.broker.topics,
        message_delay_level=settings.mqtemplate.broker.message_delay_level,
        clamp_delay_level=settings.mqtemplate.broker.clamp_delay_level,
        retry_next_server=producer.retry_next_server,
        auto_batch=own.auto_batch,
        max_message_size=producer.max_message_size or defaults.max_message_size,
        compress_threshold=producer.compress_message_body_threshold,
        offset_path=settings.absolute(own.offset_path, "mqtemplate.cluster.offset-path") if own.offset_path else None,
        pending_index=(
            settings.absolute(own.pending_index, "mqtemplate.cluster.pending-index") if own.pending_index else None
        ),
        **{field.name: getattr(own, field.name) for field in fields(ClientIntervals)},
    )


def grpc_settings(settings: AppSettings) -> GrpcSettings:
    """Return the settings of the broker over gRPC. Access key, namespace and TLS as for `remote_settings`.

    Raises:
        UnsupportedError: A key is set that the protocol does not support.
        ConfigurationError: Two sections contradict each other.
    """
    from mqtemplate.brokers.grpc.settings import GrpcSettings  # most applications have no proxy

    proxy = settings.broker_choice
    if not isinstance(proxy, ProxyAddress):
        raise ConfigurationError(
            f"rocketmq.name-server is {masked(settings.rocketmq.name_server)!r}, which is not a proxy; set "
            "rocketmq.endpoints"
        )
    _check(settings, _REFUSED_BY_PROXY)
    producer, own = settings.rocketmq.producer, settings.mqtemplate.cluster
    defaults = GrpcSettings(endpoints=proxy.endpoints)
    sent_topics = [topic.strip() for topic in (producer.topic or "").split(",") if topic.strip()]
    retries = producer.retry_times_when_send_failed if producer.max_attempts is None else producer.max_attempts - 1
    async_retries = producer.retry_times_when_send_async_failed if producer.max_attempts is None else retries
    return GrpcSettings(
        endpoints=proxy.endpoints,
        address_map=own.address_map,
        namespace=_shared(settings, "namespace") or _shared(settings, "namespace_v2") or "",
        credentials=_credentials(settings),
        tls=_tls(settings),
        request_timeout_ms=producer.request_timeout * 1_000,
        retry_times_when_send_failed=retries,
        retry_times_when_send_async_failed=async_retries,
        max_message_size=producer.max_message_size or defaults.max_message_size,
        max_decompressed_size=own.max_decompressed_size,
        message_delay_level=settings.mqtemplate.broker.message_delay_level,
        clamp_delay_level=settings.mqtemplate.broker.clamp_delay_level,
        topics=tuple(dict.fromkeys(sent_topics)),
    )


_PROXY_SECTIONS = ("simple_consumer", "push_consumer")


def _shared(settings: AppSettings, field: str) -> str | None:
    """Return the value of a key that several sections may set, but only to one value; None if no section does."""
    values: dict[str, str] = {}
    for section in (*_SECTIONS, *_PROXY_SECTIONS):
        value = getattr(getattr(settings.rocketmq, section), field, None)
        if value:
            values[section] = str(_plain(value))
    if len(set(values.values())) > 1:
        keys = [_key(section, field) for section in values]
        raise ConfigurationError(
            f"{settings.origins.of(keys[0])}: {', '.join(keys)} differ, but one client serves the whole application; "
            "give them one value, or create two applications"
        )
    return next(iter(values.values()), None)


def _credentials(settings: AppSettings) -> Credentials | None:
    access_key, secret_key = _shared(settings, "access_key"), _shared(settings, "secret_key")
    if access_key is None or secret_key is None:
        return None
    return Credentials(access_key=access_key, secret_key=secret_key)


def _tls(settings: AppSettings) -> ClientTls | None:
    rocketmq = settings.rocketmq
    of_proxy = (rocketmq.producer, rocketmq.simple_consumer, rocketmq.push_consumer)
    is_secure = any(getattr(rocketmq, section).tls_enable for section in _SECTIONS)
    if not is_secure and not any(section.ssl_enabled for section in of_proxy):
        return None
    values = {field.name: getattr(settings.mqtemplate.cluster, f"tls_{field.name}") for field in fields(ClientTls)}
    return ClientTls(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


_IDENTITY = frozenset(ClientSettings.model_fields)
"""Keys of the connection to a cluster. They hold for the cluster of the application only: secrets for it do not go to
another one."""
_OF_PROXY = frozenset({"topic", "request_timeout", "max_attempts", "ssl_enabled"})
_LIMITS = frozenset(ProducerSettings.model_fields) - _IDENTITY - _OF_PROXY - {"group", "endpoints"}


def settings_of_template(application: AppSettings, given: TemplateSettings, name: str) -> AppSettings:
    """Return the settings of the application with the section ``rocketmq`` of one further template.

    Args:
        given: The keys of the template.
        name: Name of the template, for errors.
    """
    own = application.rocketmq
    is_same_cluster = given.name_server in (None, own.name_server)
    values = _set(own.producer, _LIMITS)
    if is_same_cluster:
        for section in (own.pull_consumer, own.consumer, own.producer):
            values |= _set(section, _IDENTITY - {"instance_name"})
        values |= _set(own.producer, _OF_PROXY)
    values |= _set(given, frozenset(ProducerSettings.model_fields) - {"endpoints"})
    rocketmq = RocketMQSettings(
        name_server=given.name_server or own.name_server,
        access_channel=given.access_channel or (own.access_channel if is_same_cluster else None),
        producer=ProducerSettings(**values),
        pull_consumer=PullConsumerSettings(**_set(given.pull_consumer, frozenset(PullConsumerSettings.model_fields))),
    )
    return application.with_rocketmq(rocketmq, f"rocketmq.templates.{name}")


def settings_of_old_broker(application: AppSettings) -> AppSettings:
    """Return the settings of the application with the old broker of its hand-over in the section ``rocketmq``."""
    given = application.mqtemplate.hand_over
    keys = {"namespace", "access_key", "secret_key", "tls_enable"} & given.model_fields_set
    template = TemplateSettings(name_server=given.from_, **{name: getattr(given, name) for name in keys})
    rocketmq = settings_of_template(application, template, "hand-over").rocketmq
    return application.with_rocketmq(rocketmq, HAND_OVER)


def _set(section: Any, names: frozenset[str]) -> dict[str, Any]:
    """Return those fields of a section that were given."""
    return {name: getattr(section, name) for name in section.model_fields_set & names}
