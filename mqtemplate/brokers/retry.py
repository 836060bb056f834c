"""What becomes of a message that a consumer gives back."""

from __future__ import annotations

from mqtemplate.message import DELAY_PROPERTIES, Message, MessageExt, Property, copy_properties
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

FIRST_RETRY_LEVEL = 3
"""The level of the first retry where the broker chooses; each further one is a level higher."""


def is_exhausted(message: MessageExt, delay_level: int, max_reconsume_times: int) -> bool:
    """Whether *message* may not come again: the consumer says so, or it came too often."""
    return delay_level < 0 or message.reconsume_times >= max_reconsume_times


def retry(message: MessageExt, group: str, delay_level: int) -> Message:
    """The message that goes to the group's retry topic, through the levels.

    Source: ``AbstractSendMessageProcessor``.
    """
    level = delay_level or FIRST_RETRY_LEVEL + message.reconsume_times
    again = _copy(message, RETRY_TOPIC_PREFIX + group)
    again.properties[Property.DELAY] = str(level)
    return again


def dead_letter(message: MessageExt, group: str) -> Message:
    """The message that goes to the group's dead letters, now."""
    dead = _copy(message, DLQ_TOPIC_PREFIX + group)
    dead.properties[Property.DLQ_ORIGIN_TOPIC] = dead.properties[Property.RETRY_TOPIC]
    dead.properties[Property.DLQ_ORIGIN_MESSAGE_ID] = dead.properties[Property.ORIGIN_MESSAGE_ID]
    return dead


def _copy(message: MessageExt, topic: str) -> Message:
    properties = copy_properties(message.properties, *DELAY_PROPERTIES)
    properties.setdefault(Property.RETRY_TOPIC, message.topic)
    properties.setdefault(Property.ORIGIN_MESSAGE_ID, message.offset_msg_id)
    return Message(topic, message.body, properties, message.flag)
