"""Requests that administration tools send to members through brokers: reset of offsets, offsets, and state.

Source: RocketMQ ``client: ClientRemotingProcessor``.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from mqtemplate.brokers.remote.client_instance import GroupMember, Handler
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ProcessQueueInfo,
    ResetOffsetBody,
)
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)

_log = get_logger("mqtemplate.remote")


@dataclass(frozen=True, slots=True)
class AdminRequests:
    """Handlers of the requests for the members of one client id.

    Args:
        members: Group as named on the wire -> member.
    """

    members: Mapping[str, GroupMember]
    namespace: Namespace
    name_servers: tuple[str, ...]

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
        }

    def _reset_offsets(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ResetOffsetRequestHeader)
        member = self._member(header.group)
        if member is not None:
            table = ResetOffsetBody.decode(request.body).offset_table
            offsets = {self.namespace.unwrap_queue(queue): offset for queue, offset in table.items()}
            _log.info("remote.offsets_reset", group=member.spec.group, topic=header.topic, queues=len(offsets))
            member.reset(offsets)
        return None if request.is_one_way else request.response()

    def _status(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerStatusRequestHeader)
        member = self._member(header.group)
        if member is None:
            return _no_member(request, header.group)
        topic = self.namespace.unwrap(header.topic)
        table = {
            self.namespace.wrap_queue(queue): member.offsets.read(queue) or 0
            for queue in member.assignment()
            if queue.topic == topic
        }
        return request.response(body=GetConsumerStatusBody(message_queue_table=table).encode())

    def _running_info(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerRunningInfoRequestHeader)
        member = self._member(header.consumer_group)
        if member is None:
            return _no_member(request, header.consumer_group)
        info = ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CLIENT_VERSION": str(int(CURRENT_VERSION)),
                "PROP_CONSUMEORDERLY": "false",
                "PROP_NAMESERVER_ADDR": ";".join(self.name_servers),
            },
            subscription_set=member.consumer_data().subscription_data_set,
            mq_table={
                self.namespace.wrap_queue(queue): ProcessQueueInfo(
                    commit_offset=member.position(queue),
                    cached_msg_count=member.pulls.prefetched(queue),
                    locked=member.locks.holds(queue),
                )
                for queue in member.assignment()
            },
            jstack=_stacks() if header.jstack_enable else None,
        )
        return request.response(body=info.encode())

    def _member(self, wire_group: str) -> RemoteConsumer | None:
        member = self.members.get(wire_group)
        return member if isinstance(member, RemoteConsumer) else None


def _no_member(request: RemotingCommand, group: str) -> RemotingCommand:
    return request.response(ResponseCode.SYSTEM_ERROR, remark=f"group {group} has no member in this client")


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
