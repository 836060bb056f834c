"""Codes 11 and 361: consumers read.

Source: RocketMQ ``broker: PullMessageProcessor``, ``DefaultPullMessageResultHandler``; section 10 of the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import SubscriptionGroupConfig
from mqtemplate.remoting.protocol.codes import Perm, PullSysFlag
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.remoting.server import Processor
from mqtemplate.server.clients import ClientRegistry
from mqtemplate.server.deferred_work import DeferredWork
from mqtemplate.server.group_creation import ensure_group
from mqtemplate.server.group_table import SubscriptionGroupTable
from mqtemplate.server.pull_hold import HeldPull, PullHold
from mqtemplate.server.raw_reader import RawPull, RawReader, RawStatus
from mqtemplate.server.response import RefusedError
from mqtemplate.server.settings import BrokerServerSettings
from mqtemplate.server.subscriptions import Subscriptions

_CODES: Mapping[RawStatus, ResponseCode] = {
    RawStatus.FOUND: ResponseCode.SUCCESS,
    RawStatus.NO_MATCHED_MSG: ResponseCode.PULL_RETRY_IMMEDIATELY,
    RawStatus.NO_NEW_MSG: ResponseCode.PULL_NOT_FOUND,
    RawStatus.OFFSET_MOVED: ResponseCode.PULL_OFFSET_MOVED,
}
_MASTER = 0


class PullProcessor:
    """Answers pulls at once where there is something to tell, and hands the others to `PullHold`."""

    def __init__(
        self,
        engine: EmbeddedBroker,
        settings: BrokerServerSettings,
        clients: ClientRegistry,
        groups: SubscriptionGroupTable,
        subscriptions: Subscriptions,
        raw: RawReader,
        hold: PullHold,
        later: DeferredWork,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._clients = clients
        self._groups = groups
        self._subscriptions = subscriptions
        self._raw = raw
        self._hold = hold
        self._deferred_work = later

    def processors(self) -> dict[int, Processor]:
        """Request code -> what answers it."""
        return {RequestCode.PULL_MESSAGE: self._pull, RequestCode.LITE_PULL_MESSAGE: self._pull}

    def _pull(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        asked = request.header(PullMessageRequestHeader)
        group = self._groups.find(asked.consumer_group)
        if group is None:
            return self._deferred_work.answer(
                connection, request, partial(self._make_and_pull, connection, request, asked)
            )
        return self._pull_for(connection, request, asked, group)

    def _make_and_pull(
        self, connection: Connection, request: RemotingCommand, asked: PullMessageRequestHeader
    ) -> RemotingCommand | None:
        group = ensure_group(self._groups, asked.consumer_group)
        return self._pull_for(connection, request, asked, group)

    def _pull_for(
        self,
        connection: Connection,
        request: RemotingCommand,
        asked: PullMessageRequestHeader,
        group: SubscriptionGroupConfig,
    ) -> RemotingCommand | None:
        self._check_queue(asked)
        self._check_group(asked, group)
        selector = self._subscriptions.selector(asked)
        if asked.sys_flag & PullSysFlag.COMMIT_OFFSET:
            self._engine.offsets.commit(asked.consumer_group, asked.topic, asked.queue_id, max(0, asked.commit_offset))
        settings = self._settings
        queue = MessageQueue(asked.topic, self._engine.name, asked.queue_id)
        max_count = max(1, min(asked.max_msg_nums, settings.max_pull_count))
        max_bytes = settings.max_pull_bytes
        if asked.max_msg_bytes is not None:
            max_bytes = min(max_bytes, max(1, asked.max_msg_bytes))
        found = self._raw.pull(queue, asked.queue_offset, max_count, max_bytes, selector)
        may_wait = asked.sys_flag & PullSysFlag.SUSPEND and asked.suspend_timeout_millis > 0
        if found.status is RawStatus.NO_NEW_MSG and may_wait:
            deadline_ms = self._engine.clock.now_ms() + asked.suspend_timeout_millis
            at = asked.queue_offset
            self._hold.hold(HeldPull(connection, request, queue, at, at, max_count, max_bytes, selector, deadline_ms))
            return None
        return pull_response(request, found)

    def _check_queue(self, asked: PullMessageRequestHeader) -> None:
        config = self._engine.topics.config(asked.topic)
        if config is None:
            raise RefusedError(
                ResponseCode.TOPIC_NOT_EXIST, f"there is no topic {asked.topic!r}; its first message makes it"
            )
        if not config["perm"] & Perm.READ:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"topic {asked.topic!r} is closed to reading")
        count = config.get("readQueueNums", 0)
        if not 0 <= asked.queue_id < count:
            raise RefusedError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {asked.topic!r} has queues 0..{count - 1} to read, asked was queue {asked.queue_id}",
            )

    def _check_group(self, asked: PullMessageRequestHeader, group: SubscriptionGroupConfig) -> None:
        name = group.group_name
        if not group.consume_enable:
            raise RefusedError(ResponseCode.NO_PERMISSION, f"group {name!r} may not consume; see consumeEnable")
        if not group.consume_broadcast_enable:
            info = self._clients.consumer_group(name)
            if info is not None and info.is_broadcasting:
                raise RefusedError(
                    ResponseCode.NO_PERMISSION, f"group {name!r} may not broadcast; see consumeBroadcastEnable"
                )
        if self._engine.has_members(name):
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"group {name!r} is read by listeners in the broker's own process, which share no queues with remote "
                "members; give the remote consumer a group of its own",
            )


def pull_response(request: RemotingCommand, found: RawPull) -> RemotingCommand:
    """The answer that tells what a pull came to. Java's consumers fail if one of its four numbers is missing."""
    header = PullMessageResponseHeader(
        suggest_which_broker_id=_MASTER,
        next_begin_offset=found.next_begin_offset,
        min_offset=found.min_offset,
        max_offset=found.max_offset,
    )
    return request.response(_CODES[found.status], header, b"".join(found.records), remark=found.status.value)
