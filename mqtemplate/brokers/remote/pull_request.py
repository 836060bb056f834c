"""Pull requests, and the subscriptions that they and heartbeats contain.

Source: RocketMQ ``client: PullAPIWrapper``.
"""

from __future__ import annotations

from typing import NamedTuple

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.selectors.tags import Selector, TagSelector


class Subscription(NamedTuple):
    """A selector, and the same as heartbeats contain it."""

    selector: Selector
    data: SubscriptionData


PULL_RESPONSES = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
"""Responses to a pull that have a `PullMessageResponseHeader`."""


def subscription_data(wire_topic: str, selector: Selector, version: int) -> SubscriptionData:
    """Return a subscription as heartbeats contain it.

    Args:
        version: Time of the subscription in ms; a broker keeps the latest one of a group.
    """
    if isinstance(selector, TagSelector):
        tags = sorted(selector.tags)
        expression = " || ".join(tags) or "*"
        return SubscriptionData(
            topic=wire_topic, sub_string=expression, tags_set=tags, code_set=sorted(selector.codes), sub_version=version
        )
    return SubscriptionData(
        topic=wire_topic, sub_string=selector.expression, sub_version=version, expression_type="SQL92"
    )


def pull_request(
    wire_group: str,
    wire_queue: MessageQueue,
    queue_offset: int,
    subscription: SubscriptionData,
    *,
    max_count: int,
    max_bytes: int,
    suspend_ms: int,
    is_member: bool,
) -> RemotingCommand:
    """Return the request for messages of one queue.

    Args:
        suspend_ms: Time for which the broker may hold the request until a message arrives.
        is_member: The broker has the subscription from a heartbeat, so the request does not repeat it.
    """
    sys_flag = (0 if is_member else PullSysFlag.SUBSCRIPTION) | (PullSysFlag.SUSPEND if suspend_ms else 0)
    header = PullMessageRequestHeader(
        consumer_group=wire_group,
        topic=wire_queue.topic,
        queue_id=wire_queue.queue_id,
        queue_offset=queue_offset,
        max_msg_nums=max_count,
        sys_flag=sys_flag,
        commit_offset=0,
        suspend_timeout_millis=suspend_ms,
        subscription=None if is_member else subscription.sub_string,
        sub_version=subscription.sub_version,
        expression_type=subscription.expression_type,
        max_msg_bytes=max_bytes,
        broker_name=wire_queue.broker_name,
    )
    return RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
