"""Messages that consumers send back: their retries and their dead letters."""

from __future__ import annotations

from mqtemplate.broker import ConsumerSpec, MessageModel
from mqtemplate.errors import UnsupportedError
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageExt, Property, copy_properties
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

FIRST_RETRY_LEVEL = 3
"""Delay level of the first retry if the broker chooses it; each further retry has the next level."""


def check_can_send_back(spec: ConsumerSpec) -> None:
    """Check that a member of a group may send messages back.

    Raises:
        UnsupportedError: The group is a broadcasting group.
    """
    if spec.message_model is MessageModel.BROADCASTING:
        raise UnsupportedError(
            f"group {spec.group!r} broadcasts, and a message that all members get has no common retry topic; handle "
            "the failure in the listener, or use CLUSTERING"
        )


def is_exhausted(message: MessageExt, delay_level: int, max_reconsume_times: int) -> bool:
    """Return True if there is no further retry: the consumer refuses it, or the number of retries is reached."""
    return delay_level < 0 or message.reconsume_times >= max_reconsume_times


def retry(message: MessageExt, group: str, delay_level: int) -> Message:
    """Return the message for the retry topic of *group*, delayed by level.

    Source: ``AbstractSendMessageProcessor``.
    """
    level = delay_level or FIRST_RETRY_LEVEL + message.reconsume_times
    copy = _copy(message, RETRY_TOPIC_PREFIX + group)
    copy.properties[Property.DELAY] = str(level)
    return copy


def dead_letter(message: MessageExt, group: str) -> Message:
    """Return the message for the dead-letter topic of *group*, without a delay."""
    copy = _copy(message, DLQ_TOPIC_PREFIX + group)
    copy.properties[Property.DLQ_ORIGIN_TOPIC] = copy.properties[Property.RETRY_TOPIC]
    copy.properties[Property.DLQ_ORIGIN_MESSAGE_ID] = copy.properties[Property.ORIGIN_MESSAGE_ID]
    return copy


def _copy(message: MessageExt, topic: str) -> Message:
    properties = copy_properties(message.properties, *DELAY_PROPERTIES)
    properties.setdefault(Property.RETRY_TOPIC, message.topic)
    properties.setdefault(Property.ORIGIN_MESSAGE_ID, message.offset_msg_id)
    return Message(topic, message.body, properties, message.flag)
