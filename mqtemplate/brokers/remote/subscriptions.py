"""Subscriptions as pulls and heartbeats contain them, and the responses to pulls.

Source: RocketMQ ``client: PullAPIWrapper``.
"""

from __future__ import annotations

from typing import NamedTuple

from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol.bodies.route import SubscriptionData
from mqtemplate.remoting.protocol.codes import ResponseCode
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


def matching_messages(messages: list[MessageExt], selector: Selector) -> list[MessageExt]:
    """Return the messages that match *selector*: a broker compares only the hashes of tags."""
    if isinstance(selector, TagSelector) and not selector.selects_all:
        return [message for message in messages if selector.matches(message.properties)]
    return messages
