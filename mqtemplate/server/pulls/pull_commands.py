"""Pulls as requests and responses of RocketMQ's protocol."""

from __future__ import annotations

from mqtemplate.remoting.protocol.codes import PullSysFlag
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.server.pulls.pull_checks import ClientPull
from mqtemplate.server.pulls.raw_reader import RawPull

_MASTER_ID = 0


def client_pull(header: PullMessageRequestHeader, queue_id: int) -> ClientPull:
    """Return what a pull requests of one queue.

    Args:
        queue_id: The queue; pulls of one template differ in it.
    """
    has_expression = header.sys_flag & PullSysFlag.SUBSCRIPTION
    return ClientPull(
        header.consumer_group,
        header.topic,
        queue_id,
        header.max_msg_nums,
        header.max_msg_bytes,
        (header.expression_type, header.subscription or "*") if has_expression else None,
        header.sub_version,
    )


def pull_response(request: RemotingCommand, found: RawPull) -> RemotingCommand:
    """Return the response to a pull. Java's consumers fail if one of its four numbers is missing."""
    header = PullMessageResponseHeader(
        suggest_which_broker_id=_MASTER_ID,
        next_begin_offset=found.next_begin_offset,
        min_offset=found.min_offset,
        max_offset=found.max_offset,
    )
    return request.response(found.status.value, header, found.body, remark=found.status.name)
