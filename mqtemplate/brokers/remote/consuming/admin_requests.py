"""What brokers ask a member for in an administrator's name: to begin elsewhere, where it stands, how it is.

Source: RocketMQ ``client: ClientRemotingProcessor``; section 18.4 of the specification.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Protocol

import structlog

from mqtemplate.brokers.remote.client_instance import GroupMember
from mqtemplate.brokers.remote.consuming.consumer import RemoteConsumer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import CURRENT_VERSION, RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import (
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ProcessQueueInfo,
    ResetOffsetBody,
)
from mqtemplate.remoting.protocol.headers.group import (
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    ResetOffsetRequestHeader,
)

_log = structlog.stdlib.get_logger("mqtemplate.remote")


class _Instance(Protocol):
    members: dict[str, GroupMember]


class MemberAdmin:
    """Answers for the members of one client id."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.instance: _Instance

    def reset_offsets(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(ResetOffsetRequestHeader)
        member = self._member(header.group)
        if member is not None:
            table = ResetOffsetBody.decode(request.body).offset_table
            offsets = {self._namespace.unwrap_queue(queue): offset for queue, offset in table.items()}
            _log.info("remote.offsets_reset", group=member.spec.group, topic=header.topic, queues=len(offsets))
            member.reset(offsets)
        return None if request.is_one_way else request.response()

    def status(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerStatusRequestHeader)
        member = self._member(header.group)
        if member is None:
            return _not_here(request, header.group)
        topic = self._namespace.unwrap(header.topic)
        table = {
            self._namespace.wrap_queue(queue): member.offsets.read(queue) or 0
            for queue in member.assignment()
            if queue.topic == topic
        }
        return request.response(body=GetConsumerStatusBody(message_queue_table=table).encode())

    def running_info(self, channel: Connection, request: RemotingCommand) -> RemotingCommand:
        header = request.header(GetConsumerRunningInfoRequestHeader)
        member = self._member(header.consumer_group)
        if member is None:
            return _not_here(request, header.consumer_group)
        info = ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_CLIENT_VERSION": str(int(CURRENT_VERSION)),
                "PROP_CONSUMEORDERLY": "false",
                "PROP_NAMESERVER_ADDR": ";".join(member.name_servers),
            },
            subscription_set=member.subscriptions(),
            mq_table={
                self._namespace.wrap_queue(queue): ProcessQueueInfo(
                    commit_offset=member.position(queue),
                    cached_msg_count=member.pulls.buffered(queue),
                    locked=member.locks.holds(queue),
                )
                for queue in member.assignment()
            },
            jstack=_stacks() if header.jstack_enable else None,
        )
        return request.response(body=info.encode())

    def _member(self, wire_group: str) -> RemoteConsumer | None:
        member = self.instance.members.get(wire_group)
        return member if isinstance(member, RemoteConsumer) else None


def _not_here(request: RemotingCommand, group: str) -> RemotingCommand:
    return request.response(ResponseCode.SYSTEM_ERROR, remark=f"group {group} has no member in this client")


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
