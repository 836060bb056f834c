"""What the embedded broker makes of each key: it honours it, has no need of it, or refuses it with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.rocketmq import AccessChannel
from mqtemplate.errors import UnsupportedError


class _Refusal(NamedTuple):
    field: str
    harmless: tuple[object, ...]
    reason: str


class UnneededKey(NamedTuple):
    """A key that is set, and whose promise is kept without doing anything."""

    key: str
    reason: str


_NO_USERS = "the embedded broker lives inside this process and knows no users"
_NO_NAMESPACE = "the embedded broker serves one application and has no namespaces; put the prefix into topic and group"
_NO_TRACE = "the embedded broker writes no trace topic; log events carry msg_id, topic and group"

_CLIENT_REFUSALS = (
    _Refusal("namespace", (None,), _NO_NAMESPACE),
    _Refusal("namespace_v2", (None,), _NO_NAMESPACE),
    _Refusal("access_key", (None,), _NO_USERS),
    _Refusal("secret_key", (None,), _NO_USERS),
    _Refusal("enable_msg_trace", (False,), _NO_TRACE),
    _Refusal("customized_trace_topic", ("RMQ_SYS_TRACE_TOPIC",), _NO_TRACE),
    _Refusal("tls_enable", (False,), "nothing travels over a network here"),
)
_PULL_REFUSALS = (_Refusal("instance_name", ("DEFAULT",), "template.receive is one reader, and always called DEFAULT"),)

_NOT_RESENT = "a send to this process is answered for certain, so there is nothing to try again"
_IN_THE_DECORATOR = "listeners say it themselves; write ${{{key}}} in @message_listener to take it from here"

_UNNEEDED = {
    ("producer", "compress_message_body_threshold"): "bodies do not travel, so they are kept as they are",
    ("producer", "retry_times_when_send_failed"): _NOT_RESENT,
    ("producer", "retry_times_when_send_async_failed"): _NOT_RESENT,
    ("producer", "retry_next_server"): "there is one broker only",
    ("producer", "instance_name"): "it tells clients of one cluster apart; here is one client",
    ("pull_consumer", "pull_batch_size"): "template.receive(max_count=...) says it for each call",
    ("consumer", "group"): _IN_THE_DECORATOR,
    ("consumer", "topic"): _IN_THE_DECORATOR,
    ("consumer", "message_model"): _IN_THE_DECORATOR,
    ("consumer", "selector_type"): _IN_THE_DECORATOR,
    ("consumer", "selector_expression"): _IN_THE_DECORATOR,
    ("consumer", "pull_batch_size"): _IN_THE_DECORATOR,
    ("consumer", "instance_name"): _IN_THE_DECORATOR,
}


def embedded_note(key: str) -> str:
    """What the embedded broker makes of a key, for the reference; empty if it honours it."""
    if key == "rocketmq.access-channel":
        return "refused, unless LOCAL"
    root, _, rest = key.partition(".")
    section, _, field = rest.partition(".")
    field = field.replace("-", "_")
    if root != "rocketmq" or not field:
        return ""
    if (reason := _UNNEEDED.get((section.replace("-", "_"), field))) is not None:
        return f"not needed: {reason.format(key=key)}"
    refusal = next((each for each in _refusals_of(section.replace("-", "_")) if each.field == field), None)
    return f"refused: {refusal.reason}" if refusal is not None else ""


def check_embedded_support(settings: AppSettings) -> None:
    """Refuse what the embedded broker cannot do, before anything is opened.

    Raises:
        UnsupportedError: The first such key, where it was written, why, and what to do.
    """
    if settings.rocketmq.access_channel not in (None, AccessChannel.LOCAL):
        raise _refused(settings, "rocketmq.access-channel", "there is no cloud provider behind the embedded broker")
    for section, model in _sections(settings):
        for refusal in _refusals_of(section):
            if getattr(model, refusal.field, refusal.harmless[0]) not in refusal.harmless:
                raise _refused(settings, f"rocketmq.{kebab(section)}.{kebab(refusal.field)}", refusal.reason)


def unneeded_keys(settings: AppSettings) -> list[UnneededKey]:
    """The keys that are set and that the embedded broker has no need of."""
    found = []
    for section, model in _sections(settings):
        for field in sorted(model.model_fields_set):
            key = f"rocketmq.{kebab(section)}.{kebab(field)}"
            if (reason := _UNNEEDED.get((section, field))) is not None:
                found.append(UnneededKey(key, reason.format(key=key)))
    return found


def _refusals_of(section: str) -> tuple[_Refusal, ...]:
    return _CLIENT_REFUSALS + (_PULL_REFUSALS if section == "pull_consumer" else ())


def _sections(settings: AppSettings) -> Iterator[tuple[str, BaseModel]]:
    for name in ("producer", "consumer", "pull_consumer"):
        section: Any = getattr(settings.rocketmq, name)
        yield name, section


def _refused(settings: AppSettings, key: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{_at(settings, key)}: {key} cannot be honoured: {reason}; remove the key")


def _at(settings: AppSettings, key: str) -> str:
    return settings.origins.of(key)
