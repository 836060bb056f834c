"""The settings of a remote broker, from the settings of an application."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import SecretStr

from mqtemplate.brokers.remote.cluster.settings import ClientIntervals, RemoteSettings
from mqtemplate.context.config.masking import masked
from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.broker_support import check_cluster_support
from mqtemplate.context.settings.name_server import RemoteCluster
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.settings import ClientTls, Credentials

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
    if not isinstance(cluster, RemoteCluster):
        raise ConfigurationError(
            f"rocketmq.name-server is {masked(settings.rocketmq.name_server)!r}, which is no cluster"
        )
    check_cluster_support(settings)
    producer, own = settings.rocketmq.producer, settings.mqtemplate.cluster
    defaults = RemoteSettings(name_servers=cluster.addresses)
    return RemoteSettings(
        name_servers=cluster.addresses,
        producer_group=producer.group or defaults.producer_group,
        namespace=_shared(settings, "namespace") or "",
        namespace_v2=_shared(settings, "namespace_v2") or "",
        credentials=_credentials(settings),
        tls=_tls(settings),
        retry_times_when_send_failed=producer.retry_times_when_send_failed,
        retry_times_when_send_async_failed=producer.retry_times_when_send_async_failed,
        auto_create_topic_enable=settings.mqtemplate.broker.auto_create_topic_enable,
        topics=settings.mqtemplate.broker.topics,
        retry_next_server=producer.retry_next_server,
        auto_batch=own.auto_batch,
        max_message_size=producer.max_message_size or defaults.max_message_size,
        compress_threshold=producer.compress_message_body_threshold,
        offset_path=settings.absolute(own.offset_path, "mqtemplate.cluster.offset-path") if own.offset_path else None,
        **{field.name: getattr(own, field.name) for field in fields(ClientIntervals)},
    )


def _shared(settings: AppSettings, field: str) -> str | None:
    """Return the value of a key that several sections may set, but only to one value; None if no section does."""
    values: dict[str, str] = {}
    for section in _SECTIONS:
        value = getattr(getattr(settings.rocketmq, section), field)
        if value:
            values[section] = str(_plain(value))
    if len(set(values.values())) > 1:
        keys = [f"rocketmq.{kebab(section)}.{kebab(field)}" for section in values]
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
    if not any(getattr(settings.rocketmq, section).tls_enable for section in _SECTIONS):
        return None
    values = {field.name: getattr(settings.mqtemplate.cluster, f"tls_{field.name}") for field in fields(ClientTls)}
    return ClientTls(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value
