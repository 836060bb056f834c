"""Attributes that the broker behind the port cannot honour: refused with a reason, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mqtemplate.errors import UnsupportedError


class _Refusal(NamedTuple):
    attribute: str
    harmless: frozenset[object]
    reason: str


_NO_USERS = "the embedded broker lives inside this process and knows no users"
_NO_NAMESPACE = "the embedded broker serves one application and has no namespaces; put the prefix into topic and group"
_NO_TRACE = "the embedded broker writes no trace topic; its log events carry msg_id, topic and group"
_NO_TRACE_HERE = "this client writes no trace topic; its log events carry msg_id, topic and group"

_TRACE = ("enable_msg_trace", frozenset[object]({False}))
_TRACE_TOPIC = ("customized_trace_topic", frozenset[object]({"", "RMQ_SYS_TRACE_TOPIC"}))
_CHANNEL = _Refusal("access_channel", frozenset({"", "LOCAL"}), "there is no cloud broker behind this application")

_BY_THE_EMBEDDED = (
    _Refusal("access_key", frozenset({""}), _NO_USERS),
    _Refusal("secret_key", frozenset({""}), _NO_USERS),
    _Refusal("tls_enable", frozenset({False}), "nothing travels over a network here"),
    _Refusal("namespace", frozenset({""}), _NO_NAMESPACE),
    _Refusal("namespace_v2", frozenset({""}), _NO_NAMESPACE),
    _Refusal(*_TRACE, _NO_TRACE),
    _Refusal(*_TRACE_TOPIC, _NO_TRACE),
    _CHANNEL,
)
_BY_A_CLUSTER = (_Refusal(*_TRACE, _NO_TRACE_HERE), _Refusal(*_TRACE_TOPIC, _NO_TRACE_HERE), _CHANNEL)
_OF_THE_APPLICATION = ("access_key", "secret_key", "tls_enable", "namespace", "namespace_v2")
"""What a cluster honours, for the whole application alike: it has one connection to each broker."""

_SECRET = frozenset({"access_key", "secret_key"})
_EMBEDDED = "embedded"


def check_supported(
    listener: str, values: dict[str, object], own_name_server: str, own: Callable[[str], frozenset[str]]
) -> None:
    """Refuse the first attribute that asks for what cannot be done.

    Args:
        values: Attribute -> resolved value.
        own_name_server: ``rocketmq.name-server`` of the application; a listener may name no other cluster.
        own: Key -> what the application's sections say about it.

    Raises:
        UnsupportedError: With the reason and a way out.
    """
    is_embedded = (own_name_server or _EMBEDDED).lower().startswith(_EMBEDDED)
    for refusal in _BY_THE_EMBEDDED if is_embedded else _BY_A_CLUSTER:
        value = values[refusal.attribute]
        if value not in refusal.harmless:
            raise _refused(listener, refusal.attribute, value, f"{refusal.reason}; remove it")
    if not is_embedded:
        _check_as_the_application(listener, values, own)
    name_server = values["name_server"]
    if (name_server or _EMBEDDED) != (own_name_server or _EMBEDDED):
        raise UnsupportedError(
            f"listener {listener}: name_server is {name_server!r}, but this application is connected to "
            f"{own_name_server or _EMBEDDED!r}; a listener of another cluster needs an application of its own"
        )


def _check_as_the_application(listener: str, values: dict[str, object], own: Callable[[str], frozenset[str]]) -> None:
    for attribute in _OF_THE_APPLICATION:
        value = values[attribute]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        key = attribute.replace("_", "-")
        if value and text not in own(key):
            reason = (
                f"the application talks to its cluster as one client; set rocketmq.consumer.{key} for all of it, or "
                "give the listener an application of its own"
            )
            raise _refused(listener, attribute, value, reason)


def _refused(listener: str, attribute: str, value: object, reason: str) -> UnsupportedError:
    shown = "a value" if attribute in _SECRET else repr(value)
    return UnsupportedError(f"listener {listener}: {attribute} is set to {shown}, which cannot be honoured: {reason}")
