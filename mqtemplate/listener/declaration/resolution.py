"""Resolution of listener specs: placeholders replaced, values read, ranges checked, the cluster chosen."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mqtemplate.broker import ConsumeFromWhere, MessageModel
from mqtemplate.errors import DestinationError, ListenerError, UnsupportedError
from mqtemplate.listener.declaration.attributes import ListenerSpec, Resolve
from mqtemplate.listener.declaration.decorator import MESSAGE_LISTENER
from mqtemplate.listener.declaration.hooks import Prepare, PreparedConsumer
from mqtemplate.listener.declaration.settings import (
    Backoff,
    ClusterChoice,
    ConsumeMode,
    ListenerSettings,
    MessageRequestMode,
    PayloadSettings,
)
from mqtemplate.selectors.sql92 import make_selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.topics import check_topic
from mqtemplate.user_code import shown

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

_PLACEHOLDER = re.compile(r"\$\{([^${}:]+)(?::([^${}]*))?\}")
_SETTINGS = frozenset(field.name for field in dataclasses.fields(ListenerSettings))


def default_resolve(text: str) -> str:
    """Replace placeholders by their defaults, where there is no configuration.

    Raises:
        ListenerError: A placeholder has no default.
    """

    def default_of(found: re.Match[str]) -> str:
        if found[2] is None:
            raise ListenerError(
                f"{found[0]} has no value: there is no configuration here; write ${{{found[1]}:default}}, "
                "or start the listener through an application with an application.yml"
            )
        return found[2]

    while (replaced := _PLACEHOLDER.sub(default_of, text)) != text:  # a default may hold placeholders: inner ones first
        text = replaced
    return text


def resolve_spec(
    spec: ListenerSpec, resolve: Resolve = default_resolve, name: str = "", prepare: Prepare | None = None
) -> ListenerSettings:
    """Return the resolved settings of a spec.

    Args:
        name: Name of the listener where its spec gives no id.
        prepare: Hook of the listener, which may change values.

    Raises:
        ListenerError: A value has the wrong type, is out of its range, or contradicts another one.
        UnsupportedError: The broker cannot honour an attribute.
    """
    for attribute, value in (("id", spec.attributes.get("id", "")), ("consumer_group", spec.consumer_group)):
        if not isinstance(value, str):
            raise ListenerError(f"{MESSAGE_LISTENER.name}: {attribute} must be a text, got {shown(value)}")
    listener_id = resolve(spec.attributes.get("id", "")) or name or spec.consumer_group
    listener = f"listener {listener_id[:200]}"  # the name of a group may be wrong, and of any length
    values = MESSAGE_LISTENER.read(listener, spec, resolve)
    topics, group = resolve_topics(listener, spec, resolve), resolve_group(listener, spec, resolve)
    if prepare is not None:
        prepare(PreparedConsumer(listener, topics, group, values, MESSAGE_LISTENER))
    if values["consume_mode"] is ConsumeMode.ORDERLY and values["message_model"] is MessageModel.BROADCASTING:
        raise ListenerError(
            f"{listener}: BROADCASTING and ORDERLY exclude each other: a queue can be locked for order by one member "
            "only; use CLUSTERING with ORDERLY, or BROADCASTING with CONCURRENTLY"
        )
    _check_retry(listener, values)
    _check_request_mode(listener, values, spec.attributes)
    key_limits = _key_limits(listener, values)
    cluster = read_choice(listener, values, spec.attributes, own_name_server(resolve))
    if cluster is None:
        check_supported(listener_id, values, resolve)
    settings: dict[str, Any] = {attribute: value for attribute, value in values.items() if attribute in _SETTINGS} | {
        "id": listener_id,
        "topics": tuple(topic for topic in topics if not is_pattern(topic)),
        "topic_patterns": tuple(filter(is_pattern, topics)),
        "group": group,
        "selector": _selector(listener, values["selector_type"], values["selector_expression"]),
        "instance_name": values["instance_name"] or "DEFAULT",
        "cluster": cluster,
        "key_limits": key_limits,
        "payloads": PayloadSettings(values["converter"], values["content_type"], values["charset"]),
    }
    return ListenerSettings(**settings)


def _check_retry(listener: str, values: Mapping[str, Any]) -> None:
    """Refuse a retry schedule beside attributes that say otherwise."""
    schedule, limit = values["retry"], values["max_reconsume_times"]
    if schedule is None:
        return
    if level := values["delay_level_when_next_consume"]:
        reason = f"delay_level_when_next_consume={level} gives each retry another delay"
    elif values["message_model"] is MessageModel.BROADCASTING:
        reason = "messages of a BROADCASTING group are not retried"
    elif limit >= 0 and (isinstance(schedule, Backoff) or limit < schedule.retries):
        reason = f"max_reconsume_times={limit} gives another number of retries than {schedule.retries}"
    else:
        return
    raise ListenerError(f"{listener}: retry is given ({schedule}), but {reason}; keep one of the two")


def _check_request_mode(listener: str, values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse attributes that contradict the request mode."""
    if values["request_mode"] is MessageRequestMode.PULL:
        if "invisible_duration" in given:
            raise ListenerError(
                f"{listener}: invisible_duration has no effect on a listener that pulls; add "
                "request_mode=MessageRequestMode.POP, or remove it"
            )
    elif values["message_model"] is MessageModel.BROADCASTING:
        raise ListenerError(
            f"{listener}: BROADCASTING and POP exclude each other: by POP one member of the group gets a message; "
            "remove request_mode, or use CLUSTERING"
        )
    elif values["consume_from_where"] is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        raise ListenerError(
            f"{listener}: CONSUME_FROM_TIMESTAMP and POP exclude each other: a group starts at the first or the last "
            "message; start it at one of them, then move it: mqtemplate offsets reset GROUP TOPIC --to TIME"
        )


def _key_limits(listener: str, values: Mapping[str, Any]) -> KeyLimits | None:
    """Return the limits for each key; None without ``fair_by``."""
    fair_by, limits = values["fair_by"], (values["max_in_flight_per_key"], values["max_rate_per_key"])
    if not fair_by:
        if limits != (None, None):
            name = "max_rate_per_key" if limits[0] is None else "max_in_flight_per_key"
            raise ListenerError(
                f"{listener}: {name} is a limit for each key, but there is no key; add fair_by with the name of a "
                "property, such as fair_by='tenant', or fair_by='hash_key'"
            )
        return None
    if values["consume_mode"] is ConsumeMode.ORDERLY:
        raise ListenerError(
            f"{listener}: fair_by={fair_by!r} and ORDERLY exclude each other: keys that take turns would break the "
            "order of a queue; use CONCURRENTLY, or remove fair_by"
        )
    from mqtemplate.key_limits import KeyLimits

    return KeyLimits(fair_by, *limits)


def resolve_topics(listener: str, spec: ListenerSpec, resolve: Resolve) -> tuple[str, ...]:
    """Return the topics of a spec, and its patterns. A placeholder may stand for several, joined by commas.

    Raises:
        ListenerError: A name is not allowed, or is used twice.
    """
    names = [name.strip() for topic in spec.topics for name in resolve(topic).split(",")]
    for name in names:
        topic, colon, tag = name.partition(":")
        if colon:
            raise ListenerError(
                f"{listener}: topic {name!r} has a tag, which a listener selects apart from its topic; write "
                f"topic={topic!r}, selector_expression={tag!r}"
            )
        try:
            if not is_pattern(name):
                check_topic(name)
        except DestinationError as error:
            raise ListenerError(f"{listener}: topic: {error}") from error
    if len(set(names)) < len(names):
        raise ListenerError(f"{listener}: topic names one topic twice: {', '.join(names)}; name each once")
    return tuple(names)


def resolve_group(listener: str, spec: ListenerSpec, resolve: Resolve) -> str:
    """Return the consumer group of a spec.

    Raises:
        ListenerError: The name is empty or not allowed.
    """
    group = resolve(spec.consumer_group).strip()
    if not group:
        raise ListenerError(
            f"{listener}: consumer_group is empty; name the group whose members share work and progress, "
            "such as 'billing'"
        )
    try:
        return check_topic(group)  # the names of its retry and dead letter topics contain it
    except DestinationError as error:
        raise ListenerError(f"{listener}: consumer_group: {error}") from error


def _selector(listener: str, selector_type: SelectorType, expression: str) -> Selector:
    """Return the selector; its tags are sorted, since the members of a group may write them in different orders."""
    try:
        selector = make_selector(selector_type, expression)
        return TagSelector(" || ".join(sorted(selector.tags)) or "*") if isinstance(selector, TagSelector) else selector
    except ListenerError as error:
        raise ListenerError(f"{listener}: {error}") from error


def is_pattern(topic: str) -> bool:
    """Return True for the name of several topics, such as ``orders-*``: no topic has these characters."""
    return any(character in topic for character in "*?[")


def matching(patterns: Sequence[str], topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics whose names match one of the patterns, sorted."""
    return tuple(sorted(topic for topic in topics if any(fnmatchcase(topic, pattern) for pattern in patterns)))


EMBEDDED = "embedded"
_NAMES = tuple(field.name for field in fields(ClusterChoice))


def read_choice(
    listener: str, values: Mapping[str, Any], given: Mapping[str, Any], own_name_server: str
) -> ClusterChoice | None:
    """Return the cluster that a listener chooses; None for the cluster of the application.

    Args:
        values: Attribute -> resolved value.
        given: Attributes that the decorator names. An account of the application is not used for another cluster.
        own_name_server: The name server of the application.

    Raises:
        ListenerError: *broker* and *name_server* are given.
    """
    broker, name_server = values["broker"], values["name_server"]
    if broker and "name_server" in given and name_server:
        raise ListenerError(
            f"{listener}: broker={broker!r} and name_server={name_server!r} both choose a cluster; keep one of the two"
        )
    if not broker and name_server in ("", own_name_server):
        return None
    chosen = {name: values[name] for name in _NAMES if name in given} | {"broker": broker}
    return ClusterChoice(**chosen | ({} if broker else {"name_server": name_server}))


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
