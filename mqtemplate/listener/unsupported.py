"""Listener attributes that the broker of the application cannot honour. They are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mqtemplate.errors import UnsupportedError
from mqtemplate.listener.registration.cluster_choice import EMBEDDED
from mqtemplate.user_code import shown

_NO_EFFECT: dict[str, set[object]] = {"access_channel": {"", "LOCAL"}}
"""Attribute -> values that are allowed everywhere; of the other attributes, an empty text and False."""

NO_USERS = "the embedded broker runs inside this process and has no users"
NO_NAMESPACE = "the embedded broker serves one application and has no namespaces; put the prefix into topic and group"

_BY_EMBEDDED = {
    "access_key": NO_USERS,
    "secret_key": NO_USERS,
    "tls_enable": "nothing travels over a network here",
    "namespace": NO_NAMESPACE,
    "namespace_v2": NO_NAMESPACE,
    "access_channel": "there is no cloud broker behind this application",
}
_OF_APPLICATION = ("access_key", "secret_key", "tls_enable", "namespace", "namespace_v2")
"""Attributes that hold for the whole application on a cluster: it has one connection to each broker."""

_SECRET = frozenset({"access_key", "secret_key"})
_SECTIONS = ("producer", "consumer", "pull-consumer")


def own_name_server(resolve: Callable[[str], str]) -> str:
    """Return the name server of the application."""
    return resolve("${rocketmq.name-server:}").strip() or EMBEDDED


def check_supported(listener: str, values: Mapping[str, object], resolve: Callable[[str], str]) -> None:
    """Refuse the first attribute that the broker of the application cannot honour.

    Args:
        values: Attribute -> resolved value.
        resolve: Function that replaces placeholders by the settings of the application.

    Raises:
        UnsupportedError: It says why, and what to do instead.
    """
    is_embedded = own_name_server(resolve).lower().startswith(EMBEDDED)
    for attribute, reason in (_BY_EMBEDDED if is_embedded else {}).items():
        if values[attribute] not in _NO_EFFECT.get(attribute, {"", False}):
            raise _refused(listener, attribute, values[attribute], f"{reason}; remove it")
    if not is_embedded:
        _check_like_application(listener, values, resolve)


def _check_like_application(listener: str, values: Mapping[str, object], resolve: Callable[[str], str]) -> None:
    for attribute in _OF_APPLICATION:
        value = values[attribute]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        key = attribute.replace("_", "-")
        if value and text not in {resolve(f"${{rocketmq.{section}.{key}:}}").strip() for section in _SECTIONS}:
            reason = (
                f"the application talks to its cluster as one client; set rocketmq.consumer.{key} for all of it, or "
                "give the listener an application of its own"
            )
            raise _refused(listener, attribute, value, reason)


def _refused(listener: str, attribute: str, value: object, reason: str) -> UnsupportedError:
    given = "a value" if attribute in _SECRET else shown(value)
    return UnsupportedError(f"listener {listener}: {attribute} is set to {given}, which cannot be honoured: {reason}")
