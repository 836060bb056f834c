"""Selectors of pulls: from the subscription of the group, or from the subscription in the request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol.codes import PullSysFlag, ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings


@lru_cache(maxsize=4_096)
def _selector_of(expression_type: str | None, expression: str) -> Selector | None:
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

    def selector(self, expression_type: str | None, expression: str) -> Selector | None:
        """Return the selector of an expression, or None if it selects all messages."""
        if expression_type == SelectorType.SQL92.value and not self.settings.enable_property_filter:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                "SQL92 is disabled on this broker; subscribe by tags, or set enable-property-filter to true",
            )
        return _selector_of(expression_type, expression)

    def selector_of_pull(self, pull: PullMessageRequestHeader) -> Selector | None:
        """Return the selector of a pull, or None if it selects all messages.

        Raises:
            RefusedError: The group does not subscribe to the topic, or the broker has an older subscription than the
                client.
        """
        if pull.sys_flag & PullSysFlag.SUBSCRIPTION:
            return self.selector(pull.expression_type, pull.subscription or "*")
        return self.selector(*self._registered(pull))

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
