"""Checks of pulls against the topic, the group and its subscription, and the selectors of pulls."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.engine.clients import ClientRegistry, TopicSubscription
from mqtemplate.engine.engine import Engine
from mqtemplate.errors import ListenerError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.server.pulls.raw_reader import RawQuery
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable, mixed_group_error, pull_beside_pop_error
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.topics import TopicConfigs

_MAX_LENGTH = 8_192
"""Longest expression in characters, of tags as of SQL92."""
LONG_EXPRESSION = 128
"""Longest expression that is compiled in the I/O thread: about a millisecond."""
_CACHED_CHARACTERS = 1 << 20
_COST_OF_AN_ENTRY = 256


class _Compiled(NamedTuple):
    """A compiled expression. No selector: it selects all messages."""

    selector: Selector | None


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


@dataclass(slots=True)  # frozen it would take three times as long to make (measured)
class ClientPull:
    """The messages that a client requests of one queue, in any protocol.

    Attributes:
        max_count, max_bytes: The server has limits of its own; without *max_bytes* only those.
        expression: Type and text of the expression, if the request has one. None: the subscription of the group.
        sub_version: Version of the subscription that the client knows; without an expression in the request.
    """

    group: str
    topic: str
    queue_id: int
    max_count: int
    max_bytes: int | None = None
    expression: tuple[str | None, str] | None = None
    sub_version: int = 0


class Subscriptions:
    """Finds the selector of a pull, and keeps the selectors of the latest expressions. Thread-safe.

    Source: ``PullMessageProcessor.processRequest``.

    Args:
        max_characters: Limit of the text of the expressions that are kept.

    Raises:
        RefusedError: The expression is invalid, of an unknown type, or of a type that is disabled.
    """

    def __init__(
        self, clients: ClientRegistry, settings: BrokerServerSettings, max_characters: int = _CACHED_CHARACTERS
    ) -> None:
        self.clients = clients
        self._settings = settings
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._compiled: dict[tuple[str | None, str], _Compiled] = {}  # the oldest first
        self._characters = 0

    def __len__(self) -> int:
        """Return the number of expressions that are kept."""
        return len(self._compiled)

    def find(self, expression: tuple[str | None, str]) -> _Compiled | None:
        """Return a compiled expression, by its type and its text; None if it is not kept."""
        return self._compiled.get(expression)

    def compile(self, expression_type: str | None, expression: str) -> _Compiled:
        """Return a compiled expression, and keep it."""
        if expression_type == SelectorType.SQL92.value and not self._settings.enable_property_filter:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                "SQL92 is disabled on this broker; subscribe by tags, or set enable-property-filter to true",
            )
        key = (expression_type, expression)
        if (known := self.find(key)) is not None:
            return known
        compiled = _Compiled(_selector_of(expression_type, expression))
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = compiled
                self._characters += len(expression) + _COST_OF_AN_ENTRY
            while self._characters > self._max_characters:
                oldest = next(iter(self._compiled))
                del self._compiled[oldest]
                self._characters -= len(oldest[1]) + _COST_OF_AN_ENTRY
        return compiled

    def expression_of_pull(self, pull: ClientPull) -> tuple[str | None, str]:
        """Return the type and the text of the expression of a pull.

        Raises:
            RefusedError: The group does not subscribe to the topic, or the broker has an older subscription than the
                client.
        """
        if pull.expression is not None:
            return pull.expression
        found = self.clients.subscription(pull.group, pull.topic)
        if found is None:
            has_members = self.clients.consumers.get(pull.group) is not None
            reason = f"does not subscribe to {pull.topic!r}" if has_members else "has no member that sent a heartbeat"
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {pull.group!r} {reason}; all members of a group must have the same subscriptions",
            )
        if found.sub_version < pull.sub_version:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of group {pull.group!r} to {pull.topic!r} has version {found.sub_version}, "
                f"the request has the newer version {pull.sub_version}; the next heartbeat updates it",
            )
        return found.expression_type, found.sub_string


class CheckedPull(NamedTuple):
    """The messages that a checked pull requests. Valid while the last three attributes are the same objects.

    Attributes:
        topics: `TopicTable.state`.
        subscription: TopicSubscription of the group; None for pulls that have a subscription of their own.
    """

    pull: ClientPull
    query: RawQuery
    topics: object
    group: SubscriptionGroupConfig | None
    subscription: TopicSubscription | None


@dataclass(frozen=True, slots=True)
class PullChecks:
    """Checks of pulls, and the messages that a pull which passed them requests."""

    engine: Engine
    topics: TopicConfigs
    groups: SubscriptionGroupTable
    subscriptions: Subscriptions
    settings: BrokerServerSettings

    def check(self, topic: str, queue_id: int, group: SubscriptionGroupConfig) -> None:
        """Check that *group* may read a queue.

        Raises:
            RefusedError: It may not, or the queue does not exist.
        """
        self.topics.check_readable(topic, queue_id)
        name = group.group_name
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume (consumeEnable)")
        if not group.consume_broadcast_enable:
            info = self.subscriptions.clients.consumers.get(name)
            if info is not None and info.is_broadcasting:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"group {name!r} may not use the model BROADCASTING (consumeBroadcastEnable)",
                )
        if self.engine.groups.local.has_members(name):
            raise mixed_group_error(name)

    def check_pull(self, topic: str, queue_id: int, group: SubscriptionGroupConfig) -> None:
        """Check that a member of *group* may pull from a queue.

        Raises:
            RefusedError: See `check`; or the group has members in this process that receive by POP.
        """
        self.check(topic, queue_id, group)
        if self.engine.groups.local.has_pop_members(group.group_name):
            raise pull_beside_pop_error(group.group_name)

    def query(self, pull: ClientPull, selector: Selector | None) -> RawQuery:
        """Return the messages that a pull requests, with the limits of the server."""
        max_bytes = self.settings.max_pull_bytes
        if pull.max_bytes is not None:
            max_bytes = min(max_bytes, max(1, pull.max_bytes))
        queue = MessageQueue(pull.topic, self.engine.name, pull.queue_id)
        return RawQuery(queue, max(1, min(pull.max_count, self.settings.max_pull_count)), max_bytes, selector)

    # --- for pulls that differ in queue and offsets only ----------------------------------------

    def check_once(self, pull: ClientPull) -> CheckedPull | None:
        """Return the result of all checks, which holds while `is_valid`; None if each pull has to be checked.

        That is where a group has to be created, an expression compiled, or the members of the group checked.

        Raises:
            RefusedError: The pull will be refused.
        """
        # The states are read before the checks: a change in between then makes the result invalid.
        topics, group, subscription = (
            self.topics.table.state,
            self.groups.find(pull.group),
            self._subscription(pull),
        )
        if group is None or not group.consume_broadcast_enable:
            return None
        self.check_pull(pull.topic, pull.queue_id, group)
        compiled = self.subscriptions.find(self.subscriptions.expression_of_pull(pull))
        if compiled is None:
            return None
        return CheckedPull(pull, self.query(pull, compiled.selector), topics, group, subscription)

    def is_valid(self, checked: CheckedPull) -> bool:
        """Return True if nothing changed that could change the result of the checks."""
        pull = checked.pull
        return (
            checked.topics is self.topics.table.state
            and checked.group is self.groups.find(pull.group)
            and checked.subscription is self._subscription(pull)
            and not self.engine.groups.local.has_members(pull.group)
            and not self.engine.groups.local.has_pop_members(pull.group)
        )

    def _subscription(self, pull: ClientPull) -> TopicSubscription | None:
        if pull.expression is not None:
            return None
        return self.subscriptions.clients.subscription(pull.group, pull.topic)
