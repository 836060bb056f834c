"""From what a decorator says to what a listener does: placeholders filled in, numbers read, ranges checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TypeVar

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.errors import DestinationError, ListenerError
from mqtemplate.listener.decorator import ListenerSpec
from mqtemplate.listener.modes import ConsumeMode
from mqtemplate.listener.unsupported import check_supported
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector, make_selector
from mqtemplate.topics import check_topic

Resolve = Callable[[str], str]
"""Fills the placeholders of a text in."""

_DEFAULT_RETRIES = 16
_UNBOUNDED = 2**31 - 1
_HALF_AN_HOUR_MS = 30 * 60 * 1_000
_UNSUPPORTED_TEXTS = (
    "access_key",
    "secret_key",
    "namespace",
    "namespace_v2",
    "customized_trace_topic",
    "access_channel",
    "name_server",
)
_SECTIONS = ("producer", "consumer", "pull-consumer")
_PLACEHOLDER = re.compile(r"\$\{([^${}:]+)(?::([^${}]*))?\}")
_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """A `ListenerSpec` with nothing left open; the names are its names, the units stand in them."""

    id: str
    topics: tuple[str, ...]
    group: str
    selector: Selector
    consume_mode: ConsumeMode
    message_model: MessageModel
    thread_number: int
    thread_max: int
    max_reconsume_times: int
    consume_timeout_ms: int
    delay_level_when_next_consume: int
    suspend_ms: int
    await_termination_ms: int
    reply_timeout_ms: int
    instance_name: str
    pull_interval_ms: int
    pull_batch_size: int
    batch_max_size: int
    consume_from_where: ConsumeFromWhere
    consume_timestamp: int | None
    enabled: bool
    auto_startup: bool

    @property
    def is_orderly(self) -> bool:
        return self.consume_mode is ConsumeMode.ORDERLY

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model is MessageModel.BROADCASTING

    @property
    def retry_limit(self) -> int:
        """Retries before a message is a dead letter."""
        if self.max_reconsume_times >= 0:
            return self.max_reconsume_times
        return _UNBOUNDED if self.is_orderly else _DEFAULT_RETRIES

    def consumer_spec(self, now_ms: int) -> ConsumerSpec:
        """How a container joins its group. *now_ms* dates a ``CONSUME_FROM_TIMESTAMP`` without a timestamp."""
        timestamp = self.consume_timestamp
        if timestamp is None and self.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            timestamp = now_ms - _HALF_AN_HOUR_MS
        return ConsumerSpec(
            group=self.group,
            subscriptions=dict.fromkeys(self.topics, self.selector),
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
            consume_timestamp=timestamp,
            max_reconsume_times=self.retry_limit,
            instance_name=self.instance_name,
        )


def default_resolve(text: str) -> str:
    """Fill placeholders in without any configuration: each takes its default.

    Raises:
        ListenerError: One has no default.
    """

    def default_of(found: re.Match[str]) -> str:
        if found[2] is None:
            raise ListenerError(
                f"{found[0]} has no value: there is no configuration here; write ${{{found[1]}:default}}, "
                "or start the listener through an application with an application.yml"
            )
        return found[2]

    while (filled := _PLACEHOLDER.sub(default_of, text)) != text:  # from the innermost out
        text = filled
    return text


def resolve_spec(spec: ListenerSpec, resolve: Resolve = default_resolve, name: str = "") -> ListenerSettings:
    """Read a spec.

    Args:
        name: What the listener is called where its spec gives no id.

    Raises:
        ListenerError: A value is not of its kind, out of its range, or contradicts another.
        UnsupportedError: Something is asked for that cannot be honoured.
    """
    read = _Reader(resolve(spec.id) or name or spec.consumer_group, resolve)
    mode, model = read.choice(spec, "consume_mode", ConsumeMode), read.choice(spec, "message_model", MessageModel)
    if mode is ConsumeMode.ORDERLY and model is MessageModel.BROADCASTING:
        raise read.error(
            "BROADCASTING and ORDERLY exclude each other: a queue can be locked for order by one member only; "
            "use CLUSTERING with ORDERLY, or BROADCASTING with CONCURRENTLY"
        )
    check_supported(
        read.listener,
        _unsupported_values(spec, read),
        resolve("${rocketmq.name-server:}").strip(),
        lambda key: frozenset(resolve(f"${{rocketmq.{section}.{key}:}}").strip() for section in _SECTIONS),
    )
    thread_max = read.number(spec, "consume_thread_max", 1, 1_000)
    pull_batch_size = read.number(spec, "pull_batch_size", 1, 1_024)
    return ListenerSettings(
        id=read.listener,
        topics=read.topics(spec),
        group=read.group(spec),
        selector=read.selector(spec),
        consume_mode=mode,
        message_model=model,
        thread_number=min(read.number(spec, "consume_thread_number", 1, 1_000), thread_max),
        thread_max=thread_max,
        max_reconsume_times=read.number(spec, "max_reconsume_times", -1, 10_000),
        consume_timeout_ms=read.number(spec, "consume_timeout", 1, 60 * 24 * 7) * 60_000,
        delay_level_when_next_consume=read.number(spec, "delay_level_when_next_consume", -1, 1_000),
        suspend_ms=read.number(spec, "suspend_current_queue_time_millis", 10, 30_000),
        await_termination_ms=read.number(spec, "await_termination_millis_when_shutdown", 0, 3_600_000),
        reply_timeout_ms=read.number(spec, "reply_timeout", 1, _UNBOUNDED),
        instance_name=read.text(spec, "instance_name") or "DEFAULT",
        pull_interval_ms=read.number(spec, "pull_interval", 0, 65_535),
        pull_batch_size=pull_batch_size,
        batch_max_size=read.number(spec, "consume_message_batch_max_size", 1, 1_024),
        consume_from_where=read.choice(spec, "consume_from_where", ConsumeFromWhere),
        consume_timestamp=read.timestamp(spec),
        enabled=read.flag(spec, "enabled"),
        auto_startup=read.flag(spec, "auto_startup"),
    )


def _unsupported_values(spec: ListenerSpec, read: _Reader) -> dict[str, object]:
    return {name: read.text(spec, name) for name in _UNSUPPORTED_TEXTS} | {
        "tls_enable": read.flag(spec, "tls_enable"),
        "enable_msg_trace": read.flag(spec, "enable_msg_trace"),
    }


class _Reader:
    """Reads single attributes and names listener, attribute, value and what is allowed when one is wrong."""

    def __init__(self, listener: str, resolve: Resolve) -> None:
        self.listener = listener
        self._resolve = resolve

    def error(self, problem: str) -> ListenerError:
        return ListenerError(f"listener {self.listener}: {problem}")

    def text(self, spec: ListenerSpec, attribute: str) -> str:
        value = getattr(spec, attribute)
        if not isinstance(value, str):
            raise self.error(f"{attribute} must be a text, got {value!r}")
        return self._resolve(value).strip()

    def number(self, spec: ListenerSpec, attribute: str, low: int, high: int) -> int:
        given = getattr(spec, attribute)
        value = self._resolve(given).strip() if isinstance(given, str) else given
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise self.error(f"{attribute} must be a whole number, got {_shown(given, value)}") from None
        if isinstance(value, bool | float) or not low <= number <= high:
            raise self.error(f"{attribute} must be a whole number from {low} to {high}, got {_shown(given, value)}")
        return number

    def flag(self, spec: ListenerSpec, attribute: str) -> bool:
        given = getattr(spec, attribute)
        if isinstance(given, bool):
            return given
        value = self._resolve(given).strip().lower() if isinstance(given, str) else given
        if value not in {"true", "false"}:
            raise self.error(f"{attribute} must be true or false, got {_shown(given, value)}")
        return bool(value == "true")

    def choice(self, spec: ListenerSpec, attribute: str, kind: type[_Choice]) -> _Choice:
        given = getattr(spec, attribute)
        if isinstance(given, kind):
            return given
        value = self._resolve(given).strip().upper() if isinstance(given, str) else given
        if value not in kind.__members__:
            allowed = ", ".join(kind.__members__)
            raise self.error(f"{attribute} must be one of {allowed}, got {_shown(given, value)}")
        return kind[value]

    def topics(self, spec: ListenerSpec) -> tuple[str, ...]:
        """The topics' names; a placeholder may stand for several, joined by commas."""
        names = [name.strip() for topic in spec.topics for name in self._resolve(topic).split(",")]
        for name in names:
            try:
                check_topic(name)
            except DestinationError as error:
                raise self.error(f"topic: {error}") from error
        if len(set(names)) < len(names):
            raise self.error(f"topic names one topic twice: {', '.join(names)}; name each once")
        return tuple(names)

    def group(self, spec: ListenerSpec) -> str:
        group = self.text(spec, "consumer_group")
        if not group:
            raise self.error("consumer_group is empty; name who shares the work and the progress, such as 'billing'")
        try:
            return check_topic(group)  # it becomes part of the names of its retry and dead letter topics
        except DestinationError as error:
            raise self.error(f"consumer_group: {error}") from error

    def selector(self, spec: ListenerSpec) -> Selector:
        """The selector, its tags in one order: members of a group may write them in different ones."""
        try:
            selector = make_selector(
                self.choice(spec, "selector_type", SelectorType), self.text(spec, "selector_expression")
            )
            if not isinstance(selector, TagSelector):
                return selector
            return TagSelector(" || ".join(sorted(selector.tags)) or "*")
        except ListenerError as error:
            raise self.error(str(error)) from error

    def timestamp(self, spec: ListenerSpec) -> int | None:
        given = spec.consume_timestamp
        value = self._resolve(given).strip() if isinstance(given, str) else str(given)
        if not value:
            return None
        try:
            if len(value) == len("yyyyMMddHHmmss"):
                return int(datetime.strptime(value, "%Y%m%d%H%M%S").astimezone().timestamp()) * 1_000
            return int(value)
        except ValueError:
            raise self.error(
                "consume_timestamp must be epoch milliseconds or yyyyMMddHHmmss (local time), "
                f"got {_shown(given, value)}"
            ) from None


def _shown(given: object, value: object) -> str:
    """A value and, where it came out of a placeholder, that too."""
    return (
        repr(value)
        if given == value or not isinstance(given, str) or "${" not in given
        else f"{value!r} from {given!r}"
    )
