"""From the message a client sends to the record the store keeps: the embedded broker's front door."""

from __future__ import annotations

from collections.abc import Mapping

from mqtemplate.brokers.embedded.transactions.records import committed_properties
from mqtemplate.delay import DelayLevels, TimerLimits, divert, strip_broker_properties
from mqtemplate.errors import MessageError
from mqtemplate.java_hash import tags_code
from mqtemplate.message import (
    BROKER_PROPERTIES,
    DELAY_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    Property,
    copy_properties,
    create_unique_id,
)
from mqtemplate.record.codec import RecordDraft, StoredRecord, pack_host
from mqtemplate.record.layout import SysFlag
from mqtemplate.record.properties import UNIQ_KEY, decode_properties, encode_properties, property_format

_UNIQ_KEY_FORMAT = property_format(UNIQ_KEY, b"%b")

_Encoded = tuple[bytes, int, str | None, bool]
"""Properties as bytes, the tags code, the id if they name one, whether one of `_LOOK_TWICE` is among them."""

_LOOK_TWICE = BROKER_PROPERTIES.union(DELAY_PROPERTIES)
"""Properties that ask for a delay, or that only a broker may write. Most messages have none of them."""


class DraftMaker:
    """Checks a message, gives it an id where it has none, and sets it on its way: at once, or to wait."""

    def __init__(self, levels: DelayLevels, limits: TimerLimits, max_message_size: int, host: HostAddress) -> None:
        self._levels = levels
        self._limits = limits
        self._max_message_size = max_message_size
        self._born_host = pack_host(HostAddress(host.ip, 0))
        self._last: tuple[dict[str, str], _Encoded] = ({}, (b"", 0, None, False))

    def change_levels(self, levels: DelayLevels) -> None:
        """Use another level table from now on."""
        self._levels = levels

    def make(self, message: Message, queue_id: int, now_ms: int) -> tuple[RecordDraft, str]:
        """The record of a new message, and the message's id.

        Args:
            now_ms: When it came: a delay counts from here.

        Raises:
            MessageError: It is too large.
            DelayError: The delay it asks for cannot be kept.
        """
        body, properties = message.body, message.properties
        if len(body) > self._max_message_size:
            raise self._too_large(message)
        encoded, code, unique_id, may_wait = self._encode(properties)
        if unique_id is None:
            unique_id = create_unique_id()
            encoded += _UNIQ_KEY_FORMAT % unique_id.encode()
        topic, delay_ms = message.topic, -1
        if may_wait:
            named = message.properties | {Property.UNIQ_KEY: unique_id}
            topic, queue_id, encoded, delay_ms = self._set_waiting(named, topic, queue_id, now_ms)
        draft = RecordDraft(topic, queue_id, body, encoded, code, delay_ms, message.flag, 0, now_ms, self._born_host)
        return draft, unique_id

    def _encode(self, properties: dict[str, str]) -> _Encoded:
        """Most senders send the same properties again and again, so the last answer is kept."""
        last, answer = self._last
        if properties != last:
            answer = (
                encode_properties(properties),
                tags_code(properties.get(Property.TAGS)),
                properties.get(Property.UNIQ_KEY),
                not _LOOK_TWICE.isdisjoint(properties),
            )
            self._last = (properties.copy(), answer)
        return answer

    def _too_large(self, message: Message) -> MessageError:
        return MessageError(
            f"the body for {message.topic!r} has {len(message.body)} bytes, allowed are {self._max_message_size}; "
            "send less, keep the data elsewhere and send where it is, or raise max-message-size"
        )

    def make_send_back(self, message: Message, original: MessageExt, queue_id: int, now_ms: int) -> RecordDraft:
        """The record of a message that a consumer gave back: it keeps when and where it was born, and counts on."""
        draft, _ = self.make(message, queue_id, now_ms)
        draft.born_timestamp = original.born_timestamp
        draft.born_host = pack_host(original.born_host)
        draft.reconsume_times = original.reconsume_times + 1
        return draft

    def make_half(self, message: Message, group: str, queue_id: int, now_ms: int) -> tuple[RecordDraft, str]:
        """The record of a message in a transaction of *group*, before it becomes a half message; and its id.

        Raises:
            MessageError: It is too large.
            DelayError: The delay it asks for could not be kept if it were committed now.
        """
        draft, unique_id = self.make(message, queue_id, now_ms)
        properties = copy_properties(message.properties) | {
            Property.UNIQ_KEY: unique_id,
            Property.TRANSACTION_PREPARED: "true",
            Property.PRODUCER_GROUP: group,
        }
        draft.topic, draft.queue_id, draft.delay_ms = message.topic, queue_id, -1
        draft.properties = encode_properties(properties)
        return draft, unique_id

    def make_committed(self, half: StoredRecord, now_ms: int) -> RecordDraft:
        """The record of a half message that is committed: its delay counts from *now_ms*.

        Raises:
            DelayError: The delay it asks for cannot be kept.
        """
        properties = committed_properties(half)
        stored = decode_properties(half.properties_bytes)
        topic, queue_id = stored[Property.REAL_TOPIC], int(stored[Property.REAL_QID])
        topic, queue_id, encoded, delay_ms = self._set_waiting(properties, topic, queue_id, now_ms)
        return RecordDraft(
            topic,
            queue_id,
            half.body,
            encoded,
            tags_code(properties.get(Property.TAGS)),
            delay_ms,
            half.flag,
            half.sys_flag & ~SysFlag.TRANSACTION_MASK | SysFlag.TRANSACTION_COMMIT,
            half.born_timestamp,
            half.born_host,
            half.reconsume_times,
            half.physical_offset,
            half.body_crc,
        )

    def _set_waiting(
        self, properties: Mapping[str, str], topic: str, queue_id: int, now_ms: int
    ) -> tuple[str, int, bytes, int]:
        """Topic, queue id, properties and level's delay of a message that may ask for a delay."""
        properties = strip_broker_properties(properties)
        diverted = divert(properties, topic, queue_id, now_ms, self._levels, self._limits)
        if diverted is None:
            return topic, queue_id, encode_properties(properties), -1
        return diverted.topic, diverted.queue_id, encode_properties(diverted.properties), diverted.delay_ms
