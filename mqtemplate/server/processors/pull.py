"""Codes 11 and 361: consumers pull messages.

Source: RocketMQ ``broker: PullMessageProcessor``, ``DefaultPullMessageResultHandler``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import Perm, PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.server.group_table import mixed_group_error
from mqtemplate.server.parts import ServerParts
from mqtemplate.server.pulls.pull_hold import HeldPull
from mqtemplate.server.pulls.raw_reader import RawQuery, RawStatus
from mqtemplate.server.registration import handles
from mqtemplate.server.response import RefusedError
from mqtemplate.server.subscriptions import LONG_EXPRESSION
from mqtemplate.server.topic_configs import queue_id_error


def check_readable(server: ServerParts, topic: str, queue_id: int) -> None:
    """Check that a queue exists and can be read.

    Raises:
        RefusedError: The topic is missing or not readable, or it has no such queue.
    """
    config = server.engine.topics.config(topic)
    if config is None:
        raise RefusedError(
            ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; its first message creates it"
        )
    if not config["perm"] & Perm.READ:
        raise RefusedError(ResponseCode.NO_PERMISSION, f"topic {topic!r} is not readable (perm)")
    count = config.get("readQueueNums", 0)
    if not 0 <= queue_id < count:
        raise queue_id_error(topic, queue_id, count)


@dataclass(frozen=True, slots=True)
class PullProcessor:
    """Answers a pull at once if it found a message or may not wait. `PullHold` holds the others."""

    server: ServerParts

    @handles(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PullMessageRequestHeader)
        if self.server.groups.find(header.consumer_group) is not None:
            return self._pull(connection, request, header, may_compile=False)
        return self.server.deferred_work.run(connection, request, partial(self._pull, connection, request, header))

    def _pull(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: PullMessageRequestHeader,
        *,
        may_compile: bool = True,
    ) -> RemotingCommand | None:
        group = self.server.group_for(connection, request, header.consumer_group)
        check_readable(self.server, header.topic, header.queue_id)
        self._check_group(group)
        subscriptions = self.server.subscriptions
        expression = subscriptions.expression_of_pull(header)
        compiled = subscriptions.cache.find(expression)
        if compiled is None:
            if not may_compile and len(expression[1]) > LONG_EXPRESSION:
                again = partial(self._pull, connection, request, header)
                return self.server.deferred_work.run(connection, request, again)
            compiled = subscriptions.compile(*expression)
        if header.sys_flag & PullSysFlag.COMMIT_OFFSET:
            offset = max(0, header.commit_offset)
            self.server.engine.offsets.commit(header.consumer_group, header.topic, header.queue_id, offset)
        queue = MessageQueue(header.topic, self.server.engine.name, header.queue_id)
        max_count = max(1, min(header.max_msg_nums, self.server.settings.max_pull_count))
        max_bytes = self.server.settings.max_pull_bytes
        if header.max_msg_bytes is not None:
            max_bytes = min(max_bytes, max(1, header.max_msg_bytes))
        query, at = RawQuery(queue, max_count, max_bytes, compiled.selector), header.queue_offset
        found = self.server.raw.pull(query, at)
        may_wait = header.sys_flag & PullSysFlag.SUSPEND and header.suspend_timeout_millis > 0
        if found.status is RawStatus.NO_NEW_MSG and may_wait:
            suspend_ms = min(header.suspend_timeout_millis, self.server.settings.max_suspend_ms)
            deadline_ms = self.server.engine.clock.now_ms() + suspend_ms
            owner = self.server.limits.owner(connection, request)
            self.server.hold.hold(HeldPull(connection, request, query, at, at, deadline_ms, owner))
            return None
        return found.response_to(request)

    def _check_group(self, group: SubscriptionGroupConfig) -> None:
        name = group.group_name
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume (consumeEnable)")
        if not group.consume_broadcast_enable:
            info = self.server.clients.consumer_group(name)
            if info is not None and info.is_broadcasting:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION,
                    f"group {name!r} may not use the model BROADCASTING (consumeBroadcastEnable)",
                )
        if self.server.engine.has_members(name):
            raise mixed_group_error(name)
