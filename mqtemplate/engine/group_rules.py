"""Rules that all members of a group follow: they subscribe to the same, share the queues in the same way, and send
messages back in the same way, for a retry or as dead letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mqtemplate.broker import ConsumerSpec, MessageModel
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.message import DELAY_PROPERTIES, Message, MessageExt, MessageQueue, Property, copy_properties
from mqtemplate.topics import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX


def sort_client_ids(client_ids: Iterable[str]) -> list[str]:
    """Return client ids in the order of Java, by UTF-16 code units. All members of a group must use the same order."""
    return sorted(client_ids, key=lambda client_id: client_id.encode("utf-16-be", "surrogatepass"))


def allocate_averagely(member: str, members: Sequence[str], queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return the queues of *member*: a contiguous range of *queues*, one queue longer for the first members.

    Each member computes the assignment by itself, so all members must sort both sequences in the same way.
    Source: ``AllocateMessageQueueAveragely``.
    """
    if member not in members:
        return []
    index, count = members.index(member), len(members)
    share, rest = divmod(len(queues), count)
    start = index * share + min(index, rest)
    return list(queues[start : start + share + (index < rest)])


def check_same_group(one: ConsumerSpec, other: ConsumerSpec) -> None:
    """Check that two members may share a group.

    Raises:
        ListenerError: Their subscriptions or message models differ. In RocketMQ the last member would win, and the
            others would lose messages.
    """
    if one.subscriptions != other.subscriptions:
        raise ListenerError(
            f"group {one.group!r} subscribes to {_describe(one)} and to {_describe(other)}; the members of a group "
            "share one subscription, since each gets a part of the queues. Give the second listener a group of its own"
        )
    if one.key_limits != other.key_limits:
        raise ListenerError(
            f"group {one.group!r} has members with {one.key_limits} and with {other.key_limits}; the broker counts for "
            "all members together: give all listeners of the group the same fair_by, max_in_flight_per_key and "
            "max_rate_per_key"
        )
    if one.message_model is not other.message_model:
        raise ListenerError(
            f"group {one.group!r} has members with {one.message_model.value} and with {other.message_model.value}; "
            "choose one, or give the second listener a group of its own"
        )


def _describe(spec: ConsumerSpec) -> str:
    return ", ".join(f"{topic}:{selector.expression}" for topic, selector in sorted(spec.subscriptions.items()))


FIRST_RETRY_LEVEL = 3
"""Delay level of the first retry if the broker chooses it; each further retry has the next level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBack:
    """A message that a member of a group sends back; see `Consumer.send_back` for the last three attributes."""

    message: MessageExt
    spec: ConsumerSpec
    delay_level: int
    delay_ms: int | None
    properties: Mapping[str, str]

    @property
    def is_dead(self) -> bool:
        """True if there is no further retry: the message goes to the dead-letter topic."""
        return is_exhausted(self.message, self.delay_level, self.spec.max_reconsume_times)

    def dead_letter(self) -> Message:
        """Return the message for the dead-letter topic of the group."""
        copy = dead_letter(self.message, self.spec.group)
        copy.properties |= self.properties
        return copy

    def retry(self) -> Message:
        """Return the message for the retry topic of the group, without a delay."""
        copy = _copy(self.message, RETRY_TOPIC_PREFIX + self.spec.group)
        copy.properties |= self.properties
        return copy


def sent_back_message(
    spec: ConsumerSpec,
    message: MessageExt,
    delay_level: int = 0,
    delay_ms: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> SentBack:
    """Return the arguments of `Consumer.send_back` as one value.

    Raises:
        UnsupportedError: The group is a broadcasting group.
    """
    if spec.message_model is MessageModel.BROADCASTING:
        raise UnsupportedError(
            f"group {spec.group!r} broadcasts, and a message that all members get has no common retry topic; handle "
            "the failure in the listener, or use CLUSTERING"
        )
    return SentBack(message=message, spec=spec, delay_level=delay_level, delay_ms=delay_ms, properties=properties or {})


def is_exhausted(message: MessageExt, delay_level: int, max_reconsume_times: int) -> bool:
    """Return True if there is no further retry: the consumer refuses it, or the number of retries is reached."""
    return delay_level < 0 or message.reconsume_times >= max_reconsume_times


def retry_level(message: MessageExt, delay_level: int) -> int:
    """Return the delay level of a retry. Source: ``AbstractSendMessageProcessor``."""
    return delay_level or FIRST_RETRY_LEVEL + message.reconsume_times


def retry(message: MessageExt, group: str, delay_level: int) -> Message:
    """Return the message for the retry topic of *group*, delayed by level."""
    copy = _copy(message, RETRY_TOPIC_PREFIX + group)
    copy.properties[Property.DELAY] = str(retry_level(message, delay_level))
    return copy


def dead_letter(message: MessageExt, group: str) -> Message:
    """Return the message for the dead-letter topic of *group*, without a delay."""
    copy = _copy(message, DLQ_TOPIC_PREFIX + group)
    if (msg_id := copy.properties.get(Property.ORIGIN_MESSAGE_ID)) is not None:
        copy.properties[Property.DLQ_ORIGIN_TOPIC] = copy.properties[Property.RETRY_TOPIC]
        copy.properties[Property.DLQ_ORIGIN_MESSAGE_ID] = msg_id
    return copy


def _copy(message: MessageExt, topic: str) -> Message:
    properties = copy_properties(
        message.properties, *DELAY_PROPERTIES, Property.DLQ_ORIGIN_TOPIC, Property.DLQ_ORIGIN_MESSAGE_ID
    )
    origin_topic = properties.get(Property.RETRY_TOPIC)
    # Only a message of a retry topic had an origin before. (Consumers give it the origin's topic when they receive it.)
    is_retry = message.topic == origin_topic or message.topic.startswith(RETRY_TOPIC_PREFIX)
    if origin_topic is None or not is_retry:
        properties[Property.RETRY_TOPIC] = message.topic
        properties[Property.ORIGIN_MESSAGE_ID] = message.offset_msg_id
    # Without an id the origin is one that a client named, which may not send to it: see `AccessControl`.
    return Message(topic, message.body, properties, message.flag)
