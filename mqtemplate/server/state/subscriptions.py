"""Selectors of pulls: from the subscription of the group, or from the subscription in the request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from mqtemplate.engine.clients import ClientRegistry
from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol.codes import PullSysFlag, ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.settings import BrokerServerSettings

_MAX_LENGTH = 8_192
"""Longest expression in characters, of tags as of SQL92."""
LONG_EXPRESSION = 128
"""Longest expression that is compiled in the I/O thread: about a millisecond."""
_CACHED_CHARACTERS = 1 << 20
_COST_OF_AN_ENTRY = 256


class _Compiled(NamedTuple):
    """A compiled expression. No selector: it selects all messages."""

    selector: Selector | None


class SelectorCache:
    """The selectors of the latest expressions, with a limit of their text. Thread-safe."""

    def __init__(self, max_characters: int = _CACHED_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str | None, str], _Compiled] = {}  # the oldest first
        self._characters = 0

    def __len__(self) -> int:
        """Return the number of cached expressions."""
        return len(self._compiled)

    def find(self, expression: tuple[str | None, str]) -> _Compiled | None:
        """Return a compiled expression, by its type and its text; None if it is not cached."""
        return self._compiled.get(expression)

    def compile(self, expression_type: str | None, expression: str) -> _Compiled:
        """Compile an expression.

        Raises:
            RefusedError: The expression is invalid or too long, or its type is unknown.
        """
        compiled = _Compiled(_selector_of(expression_type, expression))
        key = (expression_type, expression)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = compiled
                self._characters += len(expression) + _COST_OF_AN_ENTRY
            while self._characters > self._max_characters:
                oldest = next(iter(self._compiled))
                del self._compiled[oldest]
                self._characters -= len(oldest[1]) + _COST_OF_AN_ENTRY
        return compiled


def _selector_of(expression_type: str | None, expression: str) -> Selector | None:
    if len(expression) > _MAX_LENGTH:
        raise RefusedError(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"the expression has {len(expression)} characters, allowed are {_MAX_LENGTH}; use several groups",
        )
    try:
        if expression_type in (None, "", SelectorType.TAG.value):
            # RocketMQ's `FilterAPI` ignores empty tags.
            tags = [tag.strip() for tag in expression.split("||") if tag.strip()]
            selector: Selector = TagSelector(" || ".join(tags) or "*")
        elif expression_type == SelectorType.SQL92.value:
            selector = Sql92Selector(expression)
        else:
            raise ListenerError(f"the expression type must be TAG or SQL92, got {expression_type!r}")
    except ListenerError as exc:
        raise RefusedError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(exc)) from exc
    return None if selector.selects_all else selector


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """Finds the selector of a pull. Source: ``PullMessageProcessor.processRequest``.

    Raises:
        RefusedError: The expression is invalid, of an unknown type, or of a type that is disabled.
    """

    clients: ClientRegistry
    settings: BrokerServerSettings
    cache: SelectorCache = field(default_factory=SelectorCache)

    def compile(self, expression_type: str | None, expression: str) -> _Compiled:
        """Return a compiled expression, and cache it."""
        if expression_type == SelectorType.SQL92.value and not self.settings.enable_property_filter:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                "SQL92 is disabled on this broker; subscribe by tags, or set enable-property-filter to true",
            )
        return self.cache.find((expression_type, expression)) or self.cache.compile(expression_type, expression)

    def expression_of_pull(self, pull: PullMessageRequestHeader) -> tuple[str | None, str]:
        """Return the type and the text of the expression of a pull.

        Raises:
            RefusedError: The group does not subscribe to the topic, or the broker has an older subscription than the
                client.
        """
        if pull.sys_flag & PullSysFlag.SUBSCRIPTION:
            return pull.expression_type, pull.subscription or "*"
        return self._registered(pull)

    def _registered(self, pull: PullMessageRequestHeader) -> tuple[str, str]:
        found = self.clients.subscription(pull.consumer_group, pull.topic)
        if found is None:
            has_members = self.clients.consumer_group(pull.consumer_group) is not None
            reason = f"does not subscribe to {pull.topic!r}" if has_members else "has no member that sent a heartbeat"
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {pull.consumer_group!r} {reason}; all members of a group must have the same subscriptions",
            )
        if found.sub_version < pull.sub_version:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of group {pull.consumer_group!r} to {pull.topic!r} has version {found.sub_version}, "
                f"the request has the newer version {pull.sub_version}; the next heartbeat updates it",
            )
        return found.expression_type, found.sub_string
