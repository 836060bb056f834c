"""What a RocketMQ cluster makes of each key: the remote broker's settings, or a refusal with the reason."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from mqtemplate.brokers import RemoteSettings
from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.name_server import RemoteCluster
from mqtemplate.context.settings.rocketmq import AccessChannel
from mqtemplate.errors import ConfigurationError, UnsupportedError
from mqtemplate.remoting.settings import Credentials
from mqtemplate.remoting.tls import ClientTls

_SECTIONS = ("producer", "consumer", "pull_consumer")
_NO_TRACE = "this client writes no trace topic; its log events carry msg_id, topic and group"


def remote_settings(settings: AppSettings) -> RemoteSettings:
    """The remote broker that the settings describe.

    One client does everything for the application, so what says who it is (keys, namespace, TLS) may stand in one of
    the sections producer, consumer and pull-consumer, or in several, but then alike.

    Raises:
        UnsupportedError: A key asks for what a cluster, or this client of it, cannot do.
        ConfigurationError: Two sections contradict each other.
    """
    cluster = settings.broker_choice
    if not isinstance(cluster, RemoteCluster):
        raise ConfigurationError(f"rocketmq.name-server is {settings.rocketmq.name_server!r}, which is no cluster")
    _refuse(settings)
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
        retry_next_server=producer.retry_next_server,
        max_message_size=producer.max_message_size or defaults.max_message_size,
        compress_threshold=producer.compress_message_body_threshold,
        poll_name_server_interval_ms=own.poll_name_server_interval_ms,
        heartbeat_broker_interval_ms=own.heartbeat_broker_interval_ms,
        persist_consumer_offset_interval_ms=own.persist_consumer_offset_interval_ms,
        offset_path=own.offset_path.expanduser() if own.offset_path else defaults.offset_path,
    )


def _refuse(settings: AppSettings) -> None:
    if settings.rocketmq.access_channel not in (None, AccessChannel.LOCAL):
        raise _refused(settings, "rocketmq.access-channel", "this client knows no provider's clusters")
    for section, model in _sections(settings):
        if model.enable_msg_trace:
            raise _refused(settings, f"rocketmq.{section}.enable-msg-trace", _NO_TRACE)
        if model.customized_trace_topic != "RMQ_SYS_TRACE_TOPIC":
            raise _refused(settings, f"rocketmq.{section}.customized-trace-topic", _NO_TRACE)


def _sections(settings: AppSettings) -> list[tuple[str, Any]]:
    return [(kebab(name), getattr(settings.rocketmq, name)) for name in _SECTIONS]


def _shared(settings: AppSettings, field: str) -> str | None:
    """What the sections say of a key; None if none of them does."""
    said: dict[str, str] = {}
    for section, model in _sections(settings):
        value = getattr(model, field)
        if value:
            said[section] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    if len(set(said.values())) > 1:
        keys = ", ".join(f"rocketmq.{section}.{kebab(field)}" for section in said)
        raise ConfigurationError(
            f"{settings.origins.of(keys.partition(',')[0])}: {keys} differ, but one client does everything for the "
            "application; give them one value, or make two applications"
        )
    return next(iter(said.values()), None)


def _credentials(settings: AppSettings) -> Credentials | None:
    access_key, secret_key = _shared(settings, "access_key"), _shared(settings, "secret_key")
    if access_key is None or secret_key is None:
        return None
    return Credentials(access_key=access_key, secret_key=secret_key)


def _tls(settings: AppSettings) -> ClientTls | None:
    if not any(model.tls_enable for _, model in _sections(settings)):
        return None
    own = settings.mqtemplate.cluster
    password = own.tls_key_password
    return ClientTls(
        trust_cert_path=own.tls_trust_cert_path,
        cert_path=own.tls_cert_path,
        key_path=own.tls_key_path,
        key_password=None if password is None else password.get_secret_value(),
        check_host_name=own.tls_check_host_name,
        insecure=own.tls_insecure,
    )


def _refused(settings: AppSettings, key: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{settings.origins.of(key)}: {key} cannot be honoured: {reason}; remove the key")
