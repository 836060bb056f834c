"""Attributes that nothing behind the port can honour today: refused with a reason, never ignored."""

from __future__ import annotations

from typing import NamedTuple

from mqtemplate.errors import UnsupportedError

__all__ = ["check_supported"]


class _Refusal(NamedTuple):
    attribute: str
    harmless: frozenset[object]
    reason: str


_NO_USERS = "the embedded broker lives inside this process and knows no users"
_NO_NAMESPACE = "the embedded broker serves one application and has no namespaces; put the prefix into topic and group"
_NO_TRACE = "the embedded broker writes no trace topic; its log events carry msg_id, topic and group"

_REFUSALS = (
    _Refusal("selector_type", frozenset({"TAG"}), "only TAG is there; select by tags, or filter in the handler"),
    _Refusal("access_key", frozenset({""}), _NO_USERS),
    _Refusal("secret_key", frozenset({""}), _NO_USERS),
    _Refusal("tls_enable", frozenset({False}), "nothing travels over a network here"),
    _Refusal("namespace", frozenset({""}), _NO_NAMESPACE),
    _Refusal("namespace_v2", frozenset({""}), _NO_NAMESPACE),
    _Refusal("enable_msg_trace", frozenset({False}), _NO_TRACE),
    _Refusal("customized_trace_topic", frozenset({"", "RMQ_SYS_TRACE_TOPIC"}), _NO_TRACE),
    _Refusal("access_channel", frozenset({"", "LOCAL"}), "there is no cloud broker behind this application"),
    _Refusal("reply_timeout", frozenset({3_000}), "listeners that reply are not there yet; send the answer to a topic"),
)

_SECRET = frozenset({"access_key", "secret_key"})
_EMBEDDED = "embedded"


def check_supported(listener: str, values: dict[str, object], own_name_server: str) -> None:
    """Refuse the first attribute that asks for what cannot be done.

    Args:
        values: Attribute -> resolved value.
        own_name_server: ``rocketmq.name-server`` of the application; a listener may name no other cluster.

    Raises:
        UnsupportedError: With the reason and a way out.
    """
    for refusal in _REFUSALS:
        value = values[refusal.attribute]
        if value not in refusal.harmless:
            shown = "a value" if refusal.attribute in _SECRET else repr(value)
            raise UnsupportedError(
                f"listener {listener}: {refusal.attribute} is set to {shown}, which cannot be honoured: "
                f"{refusal.reason}; remove it"
            )
    name_server = values["name_server"]
    if (name_server or _EMBEDDED) != (own_name_server or _EMBEDDED):
        raise UnsupportedError(
            f"listener {listener}: name_server is {name_server!r}, but this application is connected to "
            f"{own_name_server or _EMBEDDED!r}; a listener of another cluster needs an application of its own"
        )
