"""Keys of ``rocketmq.*`` that a broker does not support, and keys that it does not need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.rocketmq import ClientSettings
from mqtemplate.errors import UnsupportedError


class UnneededKey(NamedTuple):
    """A key that is set and that the broker does not need."""

    key: str
    reason: str


_NO_NAMESPACE = "the embedded broker serves one application and has no namespaces; put the prefix into topic and group"
_NO_USERS = "the embedded broker runs inside this process and has no users"
_NO_TRACE = "template.receive writes no traces; senders and listeners do: rocketmq.producer, rocketmq.consumer"
_NO_RETRY = "a send inside this process has a definite result, so there is nothing to retry"
_IN_THE_DECORATOR = "each listener sets it; write ${{{key}}} in @message_listener to take it from here"

REFUSED_BY_EMBEDDED: dict[str, dict[str, str]] = {
    section: {
        "namespace": _NO_NAMESPACE,
        "namespace_v2": _NO_NAMESPACE,
        "access_key": _NO_USERS,
        "secret_key": _NO_USERS,
        "tls_enable": "the embedded broker uses no network connection",
    }
    for section in ("producer", "consumer", "pull_consumer")
}
REFUSED_BY_EMBEDDED["pull_consumer"]["instance_name"] = "template.receive is one reader, and is always called DEFAULT"
REFUSED_BY_EMBEDDED["pull_consumer"] |= dict.fromkeys(("enable_msg_trace", "customized_trace_topic"), _NO_TRACE)
"""Section -> field -> reason. A field with its default value is allowed."""

_REFUSED_BY_CLUSTER = {"pull_consumer": dict.fromkeys(("enable_msg_trace", "customized_trace_topic"), _NO_TRACE)}

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
            key = f"rocketmq.{kebab(section)}.{kebab(field)}"
            found.append(UnneededKey(key, reasons[field].format(key=key)))
    return found


def _check(settings: AppSettings, refused: Mapping[str, Mapping[str, str]]) -> None:
    for section, reasons in refused.items():
        keys: ClientSettings = getattr(settings.rocketmq, section)
        for field, reason in reasons.items():
            if getattr(keys, field) != type(keys).model_fields[field].default:
                raise _unsupported(settings, f"rocketmq.{kebab(section)}.{kebab(field)}", reason)


def _unsupported(settings: AppSettings, key: str, reason: str) -> UnsupportedError:
    shown = settings.as_written(key)
    return UnsupportedError(f"{settings.origins.of(shown)}: {shown} cannot be honoured: {reason}; remove the key")
