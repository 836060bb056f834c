"""Checks of a pull against the topic and the group."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.tags import Selector
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.group_table import mixed_group_error
from mqtemplate.server.pulls.raw_reader import RawQuery
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.topic_configs import TopicConfigs


@dataclass(frozen=True, slots=True)
class PullChecks:
    """Checks of pulls, and the messages that a pull which passed them requests."""

    engine: EmbeddedBroker
    topics: TopicConfigs
    clients: ClientRegistry
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
            info = self.clients.consumer_group(name)
            if info is not None and info.is_broadcasting:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"group {name!r} may not use the model BROADCASTING (consumeBroadcastEnable)",
                )
        if self.engine.has_members(name):
            raise mixed_group_error(name)

    def query(self, pull: PullMessageRequestHeader, selector: Selector | None) -> RawQuery:
        """Return the messages that a pull requests, with the limits of the server."""
        max_bytes = self.settings.max_pull_bytes
        if pull.max_msg_bytes is not None:
            max_bytes = min(max_bytes, max(1, pull.max_msg_bytes))
        queue = MessageQueue(pull.topic, self.engine.name, pull.queue_id)
        return RawQuery(queue, max(1, min(pull.max_msg_nums, self.settings.max_pull_count)), max_bytes, selector)
