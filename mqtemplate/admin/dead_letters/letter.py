"""One dead letter: the message, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mqtemplate.message import BROKER_PROPERTIES, DELAY_PROPERTIES, Message, MessageExt, Property
from mqtemplate.numbers import parse_number
from mqtemplate.record import dead_letter as cause
from mqtemplate.topics import RETRY_TOPIC_PREFIX

RESENT_FROM = "dead_letter_resent_from"
"""Property of a message that was sent again: the offset message id of the dead letter."""

_CAUSE = (
    cause.EXCEPTION,
    cause.MESSAGE,
    cause.LISTENER,
    cause.ATTEMPTS,
    cause.FAILED_AT,
    cause.STACK,
    cause.FIRST_FAILED_AT,
)
_NOT_SENT_AGAIN = BROKER_PROPERTIES.union(
    DELAY_PROPERTIES,
    _CAUSE,
    {
        RESENT_FROM,
        Property.RETRY_TOPIC,
        Property.ORIGIN_MESSAGE_ID,
        Property.ORIGIN_GROUP,
        Property.RECONSUME_TIME,
        Property.MAX_RECONSUME_TIMES,
        Property.CONSUME_START_TIME,
        Property.DLQ_ORIGIN_TOPIC,
        Property.DLQ_ORIGIN_MESSAGE_ID,
        Property.TRANSACTION_PREPARED,
        Property.PRODUCER_GROUP,
        Property.MSG_REGION,
        Property.TRACE_ON,
        Property.MIN_OFFSET,
        Property.MAX_OFFSET,
        Property.CLUSTER,
        Property.CRC32,
        Property.CHECKSUM,
        Property.POP_CK,
        Property.INNER_NUM,
    },
)
"""Properties of the failed delivery, or that the broker sets again."""


class LetterState(Enum):
    """State of a dead letter: the last action of an administrator."""

    OPEN = "open"
    RESENT = "resent"
    PURGED = "purged"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message in the dead-letter topic of a group.

    The cause is known for listeners of this library; other clients write none.

    Attributes:
        message: The message as it is stored; its topic is ``%DLQ%group``.
        state_ms: Time (epoch ms) of the last resend or purge; None for an open one.
    """

    group: str
    message: MessageExt
    state: LetterState = LetterState.OPEN
    state_ms: int | None = None

    @property
    def id(self) -> str:
        """Id of the dead letter: its offset message id."""
        return self.message.offset_msg_id

    @property
    def origin_topic(self) -> str | None:
        """Topic that the message was sent to."""
        properties = self.message.properties
        return properties.get(Property.DLQ_ORIGIN_TOPIC) or properties.get(Property.RETRY_TOPIC)

    @property
    def origin_msg_id(self) -> str | None:
        """Offset message id of the message that was sent to it."""
        properties = self.message.properties
        return properties.get(Property.DLQ_ORIGIN_MESSAGE_ID) or properties.get(Property.ORIGIN_MESSAGE_ID)

    @property
    def exception(self) -> str | None:
        """Class of the exception, with its module."""
        return self.message.properties.get(cause.EXCEPTION)

    @property
    def reason(self) -> str | None:
        """Text of the exception."""
        return self.message.properties.get(cause.MESSAGE)

    @property
    def listener(self) -> str | None:
        """Id of the listener."""
        return self.message.properties.get(cause.LISTENER)

    @property
    def attempts(self) -> int:
        """Number of deliveries."""
        number = parse_number(self.message.properties.get(cause.ATTEMPTS))
        return self.message.reconsume_times + 1 if number is None else number

    @property
    def failed_at(self) -> str | None:
        """Time of the last failure, ISO 8601 in UTC."""
        return self.message.properties.get(cause.FAILED_AT)

    @property
    def stack(self) -> str | None:
        """The last frames of the stack."""
        return self.message.properties.get(cause.STACK)

    @property
    def cause(self) -> str:
        """Exception and text in one line; empty if unknown."""
        return ": ".join(part for part in (self.exception, self.reason) if part)


@dataclass(frozen=True, slots=True)
class LetterEdit:
    """Changes of a message before it is sent again.

    Attributes:
        body: New body; None leaves it.
        properties: Properties to set, such as ``KEYS`` or those of the application; None removes one.
    """

    body: bytes | None = None
    properties: Mapping[str, str | None] | None = None


def resent_message(letter: DeadLetter, edit: LetterEdit | None = None, *, only_group: bool = False) -> Message:
    """Return the message to send again: id, keys, tags and the properties of the application are kept.

    Args:
        only_group: Send it to the retry topic of the group, so that other groups of the topic do not get it again.
    """
    edit = edit or LetterEdit()
    properties = {name: value for name, value in letter.message.properties.items() if name not in _NOT_SENT_AGAIN}
    for name, value in (edit.properties or {}).items():
        if value is None:
            properties.pop(name, None)
        else:
            properties[name] = value
    properties[RESENT_FROM] = letter.id
    topic = letter.origin_topic or letter.message.topic
    if only_group:
        properties[Property.RETRY_TOPIC] = topic
        topic = RETRY_TOPIC_PREFIX + letter.group
    body = letter.message.body if edit.body is None else edit.body
    return Message(topic, body, properties, letter.message.flag)
