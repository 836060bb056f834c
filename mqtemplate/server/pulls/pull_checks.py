"""Checks of pulls against the topic, the group and its subscription."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mqtemplate.engine.clients import GroupSubscription
from mqtemplate.engine.engine import Engine
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import PullSysFlag, ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.tags import Selector
from mqtemplate.server.pulls.raw_reader import RawQuery
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.groups import SubscriptionGroupTable, mixed_group_error
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.subscriptions import Subscriptions
from mqtemplate.server.state.topics import TopicConfigs


class CheckedPull(NamedTuple):
    """The messages that a checked pull requests. Valid while the other attributes are the same objects.

    Attributes:
        topics: `TopicConfigs.state`.
        subscription: GroupSubscription of the group; None for pulls that have a subscription of their own.
    """

    query: RawQuery
    topics: object
    group: SubscriptionGroupConfig | None
    subscription: GroupSubscription | None


@dataclass(frozen=True, slots=True)
class PullChecks:
    """Checks of pulls, and the messages that a pull which passed them requests."""

    engine: Engine
    topics: TopicConfigs
    groups: SubscriptionGroupTable
    subscriptions: Subscriptions
    settings: BrokerServerSettings

    def check(self, pull: PullMessageRequestHeader, group: SubscriptionGroupConfig) -> None:
        """Check that *group* may read the queue.

        Raises:
            RefusedError: It may not, or the queue does not exist.
        """
        self.topics.check_readable(pull.topic, pull.queue_id)
        name = group.group_name
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume (consumeEnable)")
        if not group.consume_broadcast_enable:
            info = self.subscriptions.clients.consumer_group(name)
            if info is not None and info.is_broadcasting:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"group {name!r} may not use the model BROADCASTING (consumeBroadcastEnable)",
                )
        if self.engine.groups.local.has_members(name):
            raise mixed_group_error(name)

    def query(self, pull: PullMessageRequestHeader, selector: Selector | None) -> RawQuery:
        """Return the messages that a pull requests, with the limits of the server."""
        max_bytes = self.settings.max_pull_bytes
        if pull.max_msg_bytes is not None:
            max_bytes = min(max_bytes, max(1, pull.max_msg_bytes))
        queue = MessageQueue(pull.topic, self.engine.name, pull.queue_id)
        return RawQuery(queue, max(1, min(pull.max_msg_nums, self.settings.max_pull_count)), max_bytes, selector)

    # --- for pulls that differ in queue and offsets only ----------------------------------------

    def check_once(self, pull: PullMessageRequestHeader) -> CheckedPull | None:
        """Return the result of all checks, which holds while `is_valid`; None if each pull has to be checked.

        That is where a group has to be created, an expression compiled, or the members of the group checked.

        Raises:
            RefusedError: The pull will be refused.
        """
        # The states are read before the checks: a change in between then makes the result invalid.
        topics, group, subscription = self.topics.state, self.groups.find(pull.consumer_group), self._subscription(pull)
        if group is None or not group.consume_broadcast_enable:
            return None
        self.check(pull, group)
        compiled = self.subscriptions.cache.find(self.subscriptions.expression_of_pull(pull))
        if compiled is None:
            return None
        return CheckedPull(self.query(pull, compiled.selector), topics, group, subscription)

    def is_valid(self, pull: PullMessageRequestHeader, checked: CheckedPull) -> bool:
        """Return True if nothing changed that could change the result of the checks."""
        return (
            checked.topics is self.topics.state
            and checked.group is self.groups.find(pull.consumer_group)
            and checked.subscription is self._subscription(pull)
            and not self.engine.groups.local.has_members(pull.consumer_group)
        )

    def _subscription(self, pull: PullMessageRequestHeader) -> GroupSubscription | None:
        if pull.sys_flag & PullSysFlag.SUBSCRIPTION:
            return None
        return self.subscriptions.clients.subscription(pull.consumer_group, pull.topic)
