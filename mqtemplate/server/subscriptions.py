"""What a pull selects by: the group's subscription, or the one that the request itself brings."""

from __future__ import annotations

from functools import lru_cache

from mqtemplate.errors import ListenerError
from mqtemplate.remoting.protocol import ResponseCode
from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings


@lru_cache(maxsize=4_096)
def selector_of(expression_type: str | None, expression: str) -> Selector | None:
    """The selector of a subscription, made once; None for all messages.

    Raises:
        RefusedError: The expression cannot be read, or is of a kind that there is not.
    """
    try:
        if expression_type in (None, "", SelectorType.TAG.value):
            # as `FilterAPI` reads them: an empty tag is none
            tags = [tag.strip() for tag in expression.split("||") if tag.strip()]
            selector: Selector = TagSelector(" || ".join(tags) or "*")
        elif expression_type == SelectorType.SQL92.value:
            selector = Sql92Selector(expression)
        else:
            raise ListenerError(f"expression type {expression_type!r} is unknown; there are TAG and SQL92")
    except ListenerError as exc:
        raise RefusedError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(exc)) from exc
    return None if selector.selects_all else selector


class Subscriptions:
    """Finds the selector of a pull. Source: ``PullMessageProcessor.processRequest``."""

    def __init__(self, clients: ClientRegistry, settings: BrokerServerSettings) -> None:
        self._clients = clients
        self._sql92 = settings.enable_property_filter

    def selector(self, asked: PullMessageRequestHeader) -> Selector | None:
        """What the pull selects by; None for all messages.

        Raises:
            RefusedError: The group did not subscribe to the topic, or not yet to what the client has subscribed since;
                or the expression will not do.
        """
        if asked.sys_flag & PullSysFlag.SUBSCRIPTION:
            kind, expression = asked.expression_type, asked.subscription or "*"
        else:
            kind, expression = self._registered(asked)
        self.check_kind(kind)
        return selector_of(kind, expression)

    def check_kind(self, expression_type: str | None) -> None:
        """See that this kind of expression may be used here.

        Raises:
            RefusedError: It may not.
        """
        if expression_type == SelectorType.SQL92.value and not self._sql92:
            raise RefusedError(
                ResponseCode.SYSTEM_ERROR,
                "this broker does not select by SQL92; subscribe by tags, or set enable-property-filter to true",
            )

    def _registered(self, asked: PullMessageRequestHeader) -> tuple[str, str]:
        found = self._clients.subscription(asked.consumer_group, asked.topic)
        if found is None:
            is_known = self._clients.consumer_group(asked.consumer_group) is not None
            what = f"no subscription to {asked.topic!r}" if is_known else "no member that sent a heartbeat"
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {asked.consumer_group!r} has {what}; all members of a group must subscribe to the same",
            )
        if found.sub_version < asked.sub_version:
            raise RefusedError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the subscription of group {asked.consumer_group!r} to {asked.topic!r} is of {found.sub_version}, the "
                f"request has a newer one of {asked.sub_version}; the next heartbeat brings it",
            )
        return found.expression_type, found.sub_string
