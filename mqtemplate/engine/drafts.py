"""Records of the messages that producers send: checks, message ids and delays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from mqtemplate.delay.divert import TimerLimits, delivered_at_once, divert, divert_to_timer, strip_broker_properties
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.delay.settings import DelayLevels
from mqtemplate.engine.group_rules import FIRST_RETRY_LEVEL, SentBack
from mqtemplate.engine.half_messages import committed_properties, copy_half, half_properties
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.hashes import tags_code
from mqtemplate.message import (
    DELAY_PROPERTIES,
    PENDING_KEY_PROPERTIES,
    SPECIAL_PROPERTIES,
    HostAddress,
    Message,
    MessageExt,
    Property,
    copy_properties,
    create_unique_id,
)
from mqtemplate.numbers import parse_number
from mqtemplate.pending import OnPending
from mqtemplate.record.codec import EncodedMessage, PendingRequest, RecordDraft, StoredRecord, pack_host
from mqtemplate.record.columns import to_rows
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES, SysFlag
from mqtemplate.record.properties import (
    PROPERTY_SEPARATOR,
    TAGS,
    client_properties,
    decode_properties,
    encode_properties,
    find_property,
)
from mqtemplate.record.properties_template import PropertiesTemplate
from mqtemplate.record.record_arrays import UniformBatch
from mqtemplate.topics import DLQ_TOPIC_PREFIX, HALF_TOPIC, RETRY_TOPIC_PREFIX

_Encoded = tuple[bytes, int, str | None, bool]
"""Encoded properties (without a message id: up to the place of one), tags code, the message id or None, and True if one
of `SPECIAL_PROPERTIES` is among them: then they are not encoded."""

_ROOM_FOR_CHECKS = 100
"""Bytes that transaction checks add to the properties. Without room for them a transaction would stay open for ever."""
_MAX_RECONSUME_TIMES = 2**31 - 1
_DEFAULT_LEVELS = DelayLevels.parse()
_FEWEST_UNIFORM = 16
"""Fewer records are as fast one by one."""

_RULES = frozenset(each.value for each in OnPending)
_REPLACE = OnPending.REPLACE.value

_tags_code = lru_cache(maxsize=1_024)(tags_code)
_APPENDED_ID = PropertiesTemplate.appending(b"")
_ID_NAME = _APPENDED_ID.front


class SendOrigin(NamedTuple):
    """Fields of a record that come from the header of a request and from its connection, not from the message.

    Attributes:
        born_host: Address bytes, then the port as i4.
    """

    sys_flag: int
    born_timestamp: int
    born_host: bytes
    reconsume_times: int


class DraftMaker:
    """Creates the record of a message: it checks the message, adds a message id and applies the delay."""

    def __init__(self, levels: DelayLevels, limits: TimerLimits, max_message_size: int, host: HostAddress) -> None:
        self._levels = levels
        self._limits = limits
        self._max_message_size = max_message_size
        self._born_host = pack_host(HostAddress(host.ip, 0))
        self._last: tuple[dict[str, str], _Encoded] = ({}, (_ID_NAME, 0, None, False))

    def change_levels(self, levels: DelayLevels) -> None:
        """Use another level table from now on."""
        self._levels = levels

    def make(
        self, message: Message, queue_id: int, now_ms: int, origin: SendOrigin | None = None
    ) -> tuple[RecordDraft, str]:
        """Return the record of a new message, and its message id.

        Each message of a client or an application passes here, or has no property of `SPECIAL_PROPERTIES`.

        Args:
            now_ms: Time of the send; a delay counts from it.
            origin: None for a message of this process.

        Raises:
            MessageError: The message is too large, or is a delete marker for a timer.
            DelayError: The delay is invalid or not supported.
        """
        body, properties = message.body, message.properties
        if len(body) > self._max_message_size:
            raise self._too_large(message)
        # Most producers send the same properties again and again, so the last result is kept.
        last, (encoded, code, unique_id, is_special) = self._last
        if properties != last:
            encoded, code, unique_id, is_special = self._encode(properties)
        if unique_id is None:
            unique_id = create_unique_id()
            encoded = encoded + unique_id.encode() + PROPERTY_SEPARATOR
        topic, delay_ms, pending = message.topic, -1, None
        if is_special:
            with_id = {**client_properties(properties, topic), Property.UNIQ_KEY: unique_id}
            with_id.pop(Property.CANCELS, None)  # only a commit cancels
            if Property.PENDING_KEY in with_id:
                since = properties.get(Property.PENDING_SINCE)
                pending, with_id = _read_pending_key(with_id, topic, now_ms, since)
            topic, queue_id, encoded, delay_ms = self._apply_delay(
                with_id, topic, queue_id, now_ms, self._levels, pending
            )
        draft = RecordDraft(topic, queue_id, body, encoded, code, message.flag, delay_ms=delay_ms, pending=pending)
        if origin is None:
            draft.born_timestamp, draft.born_host = now_ms, self._born_host
        else:
            draft.sys_flag, draft.born_timestamp, draft.born_host, draft.reconsume_times = origin
        return draft, unique_id

    def make_complete(self, message: EncodedMessage, queue_id: int, tags_code: int, origin: SendOrigin) -> RecordDraft:
        """Return the record of a message that is not delayed, with its encoded properties as they are.

        Raises:
            MessageError: The message is too large.
        """
        topic, body, properties, flag = message
        if len(body) > self._max_message_size:
            raise self._too_large(Message(topic, body))
        return RecordDraft(topic, queue_id, body, properties, tags_code, flag, *origin)

    def make_encoded(self, message: EncodedMessage, queue_id: int, now_ms: int, added: bytes) -> RecordDraft:
        """Return the record of a message that is not delayed, with *added* after its properties and its new id.

        Raises:
            MessageError: The message is too large.
        """
        topic, body, properties, flag = message
        if len(body) > self._max_message_size:
            raise self._too_large(Message(topic, body))
        if properties and not properties.endswith(PROPERTY_SEPARATOR):
            properties += PROPERTY_SEPARATOR
        properties = b"".join((properties, _APPENDED_ID.fill(create_unique_id().encode()), added))
        return RecordDraft(
            topic,
            queue_id,
            body,
            properties,
            _tags_code(find_property(properties, TAGS)),
            flag=flag,
            born_timestamp=now_ms,
            born_host=self._born_host,
        )

    def _encode(self, properties: dict[str, str]) -> _Encoded:
        unique_id, is_special = properties.get(Property.UNIQ_KEY), not SPECIAL_PROPERTIES.isdisjoint(properties)
        encoded = b"" if is_special else encode_properties(properties)  # special ones are changed first
        result = (
            encoded + _ID_NAME if unique_id is None else encoded,
            _tags_code(properties.get(Property.TAGS)),
            unique_id,
            is_special,
        )
        self._last = (properties.copy(), result)
        return result

    def _too_large(self, message: Message) -> MessageError:
        return MessageError(
            f"the body for {message.topic!r} has {len(message.body)} bytes, allowed are {self._max_message_size}; "
            "send less, store the data elsewhere and send its address, or raise max-message-size"
        )

    def make_uniform(self, messages: Sequence[Message], queue_id: int, now_ms: int) -> UniformBatch | None:
        """Return the records of messages that differ in their bodies only, as the items of one list mostly do.

        Returns:
            None if they are few, differ in more, have bodies of several lengths, are delayed, or have ids.
        """
        first = messages[0]
        properties, flag, size = first.properties, first.flag, len(first.body)
        is_ordinary = Property.UNIQ_KEY not in properties and SPECIAL_PROPERTIES.isdisjoint(properties)
        if len(messages) < _FEWEST_UNIFORM or not is_ordinary:
            return None
        for each in messages:
            if len(each.body) != size or each.properties != properties or each.flag != flag:
                return None
        draft, unique_id = self.make(first, queue_id, now_ms)
        ids = [unique_id.encode(), *(create_unique_id().encode() for _ in messages[1:])]
        id_at = PropertiesTemplate.appending(encode_properties(properties)).id_at
        return UniformBatch(draft, to_rows([message.body for message in messages]), to_rows(ids), id_at)

    @property
    def retry_delays_ms(self) -> tuple[int, ...]:
        """Delays of the retries whose delay the broker chooses; see `Broker.retry_delays_ms`.

        With timers they do not depend on the level table: a table for other delays does not change the retries.
        """
        levels = _DEFAULT_LEVELS if self._limits.enabled else self._levels
        return levels.delays_ms[FIRST_RETRY_LEVEL - 1 :] or levels.delays_ms[-1:]

    def delayed_retry(self, sent_back: SentBack) -> Message:
        """Return the message for the retry topic with its delay: by level if one is exact, else by a timer.

        Raises:
            UnsupportedError: An exact delay was requested, and this broker has no timers.
        """
        message, delay_ms = sent_back.retry(), sent_back.delay_ms
        if delay_ms is None and sent_back.delay_level > 0:
            message.properties[Property.DELAY] = str(sent_back.delay_level)
            return message
        if delay_ms is None:
            delays_ms = self.retry_delays_ms
            delay_ms = delays_ms[min(sent_back.message.reconsume_times, len(delays_ms) - 1)]
        elif not self._limits.enabled:
            raise UnsupportedError(
                "this broker has no timers, and so no exact retry delays; set mqtemplate.broker.timer-wheel-enable "
                "to true, or use a delay level"
            )
        if delay_ms in self._levels.delays_ms:
            message.properties[Property.DELAY] = str(self._levels.delays_ms.index(delay_ms) + 1)
        else:
            message.properties[Property.TIMER_DELAY_MS] = str(min(delay_ms, self._limits.max_delay_ms))
        return message

    def make_send_back(self, message: Message, original: MessageExt, queue_id: int, now_ms: int) -> RecordDraft:
        """Return the record of a message that a consumer sends back: born as *original*, with one more retry."""
        # A record that another broker stored may be a delete marker; its copy is an ordinary message.
        properties = copy_properties(message.properties, Property.TIMER_DEL_UNIQKEY)
        draft, _ = self.make(Message(message.topic, message.body, properties, message.flag), queue_id, now_ms)
        draft.born_timestamp = original.born_timestamp
        draft.born_host = pack_host(original.born_host)
        draft.reconsume_times = min(original.reconsume_times + 1, _MAX_RECONSUME_TIMES)
        return draft

    def make_half(
        self, message: Message, group: str, queue_id: int, now_ms: int, origin: SendOrigin | None = None
    ) -> tuple[RecordDraft, str]:
        """Return the half message for a message in a transaction of *group*, and its message id.

        Raises:
            MessageError: The message is too large, there is no producer group, or what the commit shall cancel is not
                a handle, or is given together with a pending key.
            DelayError: The delay could not be applied if the transaction were committed now.
        """
        if not group:
            raise MessageError(
                f"a message in a transaction has no producer group (property {Property.PRODUCER_GROUP}); "
                "the broker needs it for transaction checks"
            )
        draft, unique_id = self.make(message, queue_id, now_ms, origin)
        if (cancels := message.properties.get(Property.CANCELS)) is not None:
            for handle in cancels.split(","):
                decode_handle(handle)
            if draft.pending is not None:
                raise MessageError(
                    f"a message in a transaction has cancels= and the pending key {draft.pending.key!r}, and only one "
                    "of them can decide what the commit replaces; leave one out"
                )
        properties = half_properties(client_properties(message.properties, message.topic), unique_id, group)
        properties |= {Property.REAL_TOPIC: message.topic, Property.REAL_QID: str(queue_id)}
        draft.topic, draft.queue_id, draft.delay_ms, draft.pending = HALF_TOPIC, 0, -1, None  # the commit decides
        draft.properties = encode_properties(properties)
        if len(draft.properties) > MAX_PROPERTIES_BYTES - _ROOM_FOR_CHECKS:
            raise MessageError(
                f"keys, tags and properties take {len(draft.properties)} bytes, allowed are "
                f"{MAX_PROPERTIES_BYTES - _ROOM_FOR_CHECKS} in a transaction; move data into the body"
            )
        return draft, unique_id

    def make_committed(self, half: StoredRecord, now_ms: int) -> RecordDraft:
        """Return the record of a half message that is committed. Its delay counts from *now_ms*.

        Raises:
            DelayError: The delay is not supported.
        """
        properties = committed_properties(half)
        stored = decode_properties(half.properties_bytes)
        topic, queue_id = stored[Property.REAL_TOPIC], int(stored[Property.REAL_QID])
        # The half message was accepted by another table, perhaps: it must not be stranded by its level.
        levels = replace(self._levels, is_clamping=True)
        properties.pop(Property.CANCELS, None)
        pending, properties = _read_pending_key(properties, topic, now_ms)
        topic, queue_id, encoded, delay_ms = self._apply_delay(properties, topic, queue_id, now_ms, levels, pending)
        draft = copy_half(half, topic, queue_id, encoded, SysFlag.TRANSACTION_COMMIT)
        draft.delay_ms, draft.pending = delay_ms, pending
        return draft

    def _apply_delay(
        self,
        properties: Mapping[str, str],
        topic: str,
        queue_id: int,
        now_ms: int,
        levels: DelayLevels,
        pending: PendingRequest | None = None,
    ) -> tuple[str, int, bytes, int]:
        """Return topic, queue id, properties and level delay of the record; a delayed one is in a system topic."""
        properties = strip_broker_properties(properties)
        diverted = divert(properties, topic, queue_id, now_ms, levels, self._limits)
        if diverted is not None and pending is not None and pending.no_later_ms is not None:
            latest_ms = now_ms + pending.no_later_ms
            deliver = diverted.properties.get(Property.TIMER_DELIVER_MS)
            if (now_ms + diverted.delay_ms if deliver is None else int(deliver)) > latest_ms:
                kept = copy_properties(properties, *DELAY_PROPERTIES)
                diverted = divert_to_timer(kept, topic, queue_id, now_ms, latest_ms, self._limits)
        if diverted is None:
            if Property.PENDING_KEY in properties:
                properties = delivered_at_once(properties, topic, queue_id)
            return topic, queue_id, encode_properties(properties), -1
        return diverted.topic, diverted.queue_id, encode_properties(diverted.properties), diverted.delay_ms


def _read_pending_key(
    properties: dict[str, str], topic: str, now_ms: int, moved_since: str | None = None
) -> tuple[PendingRequest | None, dict[str, str]]:
    """Return the request of a new message, and its properties as they are stored.

    A message without a delay decides nothing. A retry or a dead letter does not either, and has no pending key: it is a
    copy of a message that was delivered, and another one under the key may be pending. A message that a hand-over moves
    has been decided about in the old broker: it decides nothing, and later sends find it under its key.

    Args:
        moved_since: Time of the first send, of a message that a hand-over moves.

    Raises:
        MessageError: A property has an invalid value.
    """
    key = properties.get(Property.PENDING_KEY)
    if key is None:
        return None, properties
    kept = copy_properties(properties, *PENDING_KEY_PROPERTIES, Property.PENDING_SINCE)
    if topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)) or properties.keys().isdisjoint(DELAY_PROPERTIES):
        return None, kept
    if Property.HAND_OVER in properties:
        since_ms = parse_number(moved_since)
        moved = {Property.PENDING_KEY: key, Property.PENDING_SINCE: str(now_ms if since_ms is None else since_ms)}
        return None, kept | moved
    rule = properties.get(Property.ON_PENDING, _REPLACE)
    if rule not in _RULES:
        known = ", ".join(OnPending)
        raise MessageError(f"property {Property.ON_PENDING} must be one of {known}, got {rule[:40]!r}")
    latest = properties.get(Property.NO_LATER_THAN)
    no_later_ms = parse_number(latest)
    if latest is not None and (no_later_ms is None or no_later_ms < 1 or rule != OnPending.POSTPONE):
        raise MessageError(
            f"property {Property.NO_LATER_THAN} must be a number of milliseconds, with {Property.ON_PENDING} "
            f"postpone, got {latest[:40]!r} with {rule}"
        )
    since = {Property.PENDING_KEY: key, Property.PENDING_SINCE: str(now_ms)}
    return PendingRequest(topic, key, rule, no_later_ms), kept | since
