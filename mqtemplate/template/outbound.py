"""Messages from payloads, destinations, options and headers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import ConversionError, DestinationError, MessageError, reworded
from mqtemplate.message import (
    DELAY_PROPERTIES,
    RESERVED_PROPERTIES,
    Message,
    MessageExt,
    Property,
    joined_keys,
    storable,
)
from mqtemplate.numbers import INT_MAX, parse_number
from mqtemplate.pending import pending_key_properties
from mqtemplate.selectors.tags import tag_problem
from mqtemplate.template.delays import check_one_delay, delay_header, delay_properties
from mqtemplate.template.options import PENDING_KEY_OPTIONS, Destination, SendOptions, parse_destination
from mqtemplate.user_code import shown

HEADER_PREFIX = "rocketmq_"
"""Prefix of rocketmq-spring for names that have a meaning in RocketMQ. Source: ``RocketMQHeaders``."""

FLAG = "FLAG"
"""Name of the header that sets the message's flag. It is a field of the record, not a property."""

_WAIT_STORE_MSG_OK = "WAIT_STORE_MSG_OK"

# With the prefix, rocketmq-spring sets these on received messages only.
_RECEIVED_HEADERS = frozenset(
    {"TOPIC", "MESSAGE_ID", "BORN_TIMESTAMP", "BORN_HOST", "QUEUE_ID", "SYS_FLAG", "TRANSACTION_ID"}
)
_INSTEAD_OF: dict[str, str] = {
    # reserved name -> the option that has the effect
    Property.UNIQ_KEY: "the client creates message ids; for an id of your own pass keys=",
    Property.SHARDING_KEY: "to order messages pass hash_key=",
    Property.REAL_TOPIC: "the destination names the topic",
    Property.REAL_QID: "to choose a queue pass hash_key= or queue=",
    Property.RETRY_TOPIC: "the destination names the topic",
    **dict.fromkeys(
        (
            Property.TIMER_OUT_MS,
            Property.TIMER_ENQUEUE_MS,
            Property.TIMER_DEQUEUE_MS,
            Property.TIMER_ROLL_TIMES,
            Property.TIMER_DEL_UNIQKEY,
        ),
        "to delay a message pass delay_level=, delay= or deliver_at=",
    ),
}


def header_property(given: str, name: str, value: object) -> dict[str, str]:
    """Return the property that a header sets; empty for a header without a value.

    Args:
        given: The header's name as the caller wrote it.
        name: The name without the prefix ``rocketmq_``.

    Raises:
        MessageError: The name is reserved or illegal, or the value has the wrong type.
    """
    if name == Property.KEYS:
        return {name: keys} if (keys := joined_keys(value)) else {}
    if name == Property.TAGS:
        tag = _checked_text(name, value)
        if (problem := tag_problem(tag)) is not None:
            raise MessageError(f"header {shown(given)}, {shown(tag)}: {problem}")
        return {name: tag}
    if name in (_WAIT_STORE_MSG_OK, Property.WAIT):
        return {Property.WAIT: _checked_bool(given, value)}
    if name in RESERVED_PROPERTIES:
        advice = _INSTEAD_OF.get(name, "choose another name")
        raise MessageError(f"header {shown(given)} is reserved: {name} belongs to the broker and its clients; {advice}")
    if given != name and name in _RECEIVED_HEADERS:
        raise MessageError(f"header {shown(given)} describes a received message and cannot be sent; leave it out")
    if not given:
        raise MessageError("the name of a header is empty; give it a name")
    storable("the name of a header", given)
    return {given: _checked_text(given, value)}


def checked_flag(value: object) -> int:
    """Return the value of the header ``FLAG``; raise `MessageError` if it is not a number of 32 bits."""
    number = None if isinstance(value, bool) else parse_number(storable(f"header {FLAG}", value))
    if number is None or abs(number) > INT_MAX:
        raise MessageError(f"header {FLAG} must be a whole number of 32 bits, got {shown(value)}")
    return number


def _checked_text(name: str, value: object) -> str:
    if type(value) is str and value.isalnum():  # what many are
        return value
    if value is None or isinstance(value, bytes | bytearray | memoryview):
        raise MessageError(f"header {shown(name)} must be text, a number or a boolean, got {type(value).__name__}")
    text = storable(f"header {shown(name)}", value)
    if not text:
        raise MessageError(f"header {shown(name)} is empty, and RocketMQ drops empty properties; leave it out")
    return text.lower() if isinstance(value, bool) else text


def _checked_bool(name: str, value: object) -> str:
    text = storable(f"header {name!r}", value).lower()
    if text not in ("true", "false"):
        raise MessageError(f"header {name!r} must be true or false, got {shown(value)}")
    return text


class Extras(NamedTuple):
    """Properties and flag of a message beside payload and tag. Messages share them: copy before a change."""

    properties: dict[str, str]
    flag: int | None


NO_EXTRAS = Extras({}, None)
"""The extras of a plain send. They are this very object, so that a plain send builds nothing."""


def read_options(delay_level: int, options: SendOptions, now_ms: Callable[[], int]) -> Extras:
    """Return the options of one call as properties and flag.

    Raises:
        MessageError: A header is reserved, given twice, or has an invalid value.
        DelayError: Two delays are given, or one has an invalid value.
    """
    delay, deliver_at = options.get("delay"), options.get("deliver_at")
    keys, headers = options.get("keys"), options.get("headers")
    has_key = not PENDING_KEY_OPTIONS.isdisjoint(options)
    if not (delay_level or delay is not None or deliver_at is not None or keys is not None or headers or has_key):
        return NO_EXTRAS
    properties = delay_properties(delay_level, delay, deliver_at, now_ms())
    if has_key:
        properties = _read_pending_key(options) | properties
    if keys is not None and (joined := joined_keys(keys)):
        properties[Property.KEYS] = joined
    if not properties and not headers:
        return NO_EXTRAS
    own = Extras(properties, None)
    return _merged(own, _read_headers(headers, now_ms())) if headers else own


def _read_pending_key(options: SendOptions) -> dict[str, str]:
    properties = pending_key_properties(
        options.get("pending_key"),
        options.get("on_pending"),
        options.get("no_later_than"),
        is_strict=options.get("on_pending_strict", False),
    )
    if properties and options.get("delay") is not None:
        # A delay of 0 is a delay here: the message is delivered now, and still decides about the pending one.
        return {Property.TIMER_DELAY_MS: "0"} | properties
    return properties


def _read_headers(headers: Mapping[str, object], now_ms: int) -> Extras:
    """Read headers as rocketmq-spring does, with or without its prefix. What it drops silently is refused here."""
    if not isinstance(headers, Mapping):
        raise MessageError(f"headers must be a mapping of names to values, got {type(headers).__name__}")
    properties: dict[str, str] = {}
    flag: int | None = None
    for given, value in headers.items():
        if not isinstance(given, str):
            raise MessageError(f"header names must be text, got {type(given).__name__} {shown(given)}")
        name = given.removeprefix(HEADER_PREFIX)
        if name == FLAG:
            if flag is not None:
                raise _given_twice(name)
            flag = checked_flag(value)
            continue
        is_delay = name in DELAY_PROPERTIES
        entry = delay_header(name, value, now_ms) if is_delay else header_property(given, name, value)
        for twice in entry.keys() & properties.keys():
            raise _given_twice(twice)
        properties |= entry
    return Extras(properties, flag)


def _given_twice(name: str) -> MessageError:
    return MessageError(f"header {name} is given twice, plain and as {HEADER_PREFIX}{name}; give it once")


def _merged(first: Extras, second: Extras) -> Extras:
    """Return both together; raise `MessageError` if they contradict each other."""
    check_one_delay(dict.fromkeys((*first.properties, *second.properties)))
    for name, value in second.properties.items():
        if first.properties.get(name, value) != value:
            raise MessageError(
                f"{name} is given twice: {shown(first.properties[name])} and {shown(value)}; give it once"
            )
    if first.flag is not None and second.flag is not None and first.flag != second.flag:
        raise MessageError(f"{FLAG} is given twice: {first.flag} and {second.flag}; give it once")
    return Extras({**first.properties, **second.properties}, second.flag if first.flag is None else first.flag)


class MessageFactory:
    """Factory of messages from payloads.

    A payload may be a `Message` already. Its properties are then read like headers, and its topic must be the topic of
    the destination.

    Args:
        max_body_bytes: Largest body; None for no limit but the broker's.
    """

    def __init__(
        self, converter: MessageConverter, now_ms: Callable[[], int], max_body_bytes: int | None = None
    ) -> None:
        self.converter = converter
        self._to_body = converter.to_body
        self._properties_of: Callable[[object], Mapping[str, str]] | None = getattr(converter, "properties_of", None)
        self._now_ms = now_ms
        self._max_body_bytes = sys.maxsize if max_body_bytes is None else max_body_bytes

    def one(self, destination: str, payload: object, extras: Extras) -> Message:
        """Return the message for one payload."""
        return self._create(parse_destination(destination), payload, extras)

    def batch(self, destination: str, payloads: Sequence[object], extras: Extras) -> list[Message]:
        """Return one message for each item. An error names the position of the item in the list."""
        target = parse_destination(destination)
        if not payloads:
            raise MessageError(f"the list for {destination!r} is empty; a batch has at least one message")
        messages = []
        for payload in payloads:
            try:
                messages.append(self._create(target, payload, extras))
            except MessageError as exc:
                raise reworded(exc, f"item {len(messages)} of the list: {exc}") from exc
        return messages

    def _create(self, target: Destination, payload: object, extras: Extras) -> Message:
        if isinstance(payload, Message):
            return self._from_message(target, payload, extras)
        body, content_type = self._to_body(payload)
        if len(body) > self._max_body_bytes:
            raise self._too_large(body, target.topic)
        properties = target.properties.copy() if extras is NO_EXTRAS else _with_tag(target, extras)
        if content_type is not None:
            properties.setdefault(CONTENT_TYPE, content_type)
        if self._properties_of is not None:
            properties = {**self._properties_of(payload), **properties}
        return Message(target.topic, body, properties, extras.flag or 0)

    def _from_message(self, target: Destination, message: Message, extras: Extras) -> Message:
        if isinstance(message, MessageExt):
            raise MessageError(
                "a received message cannot be sent as it is, since the broker has set much of it; "
                "send message.body with headers=message.user_properties"
            )
        if message.topic != target.topic:
            raise DestinationError(
                f"the message names the topic {shown(message.topic)} and the destination {target.topic!r}; "
                "they must be the same"
            )
        if not isinstance(message.body, bytes):
            raise ConversionError(f"the body of a Message must be bytes, got {type(message.body).__name__}")
        if not message.body:
            raise ConversionError("the message has an empty body; it needs at least one byte")
        if len(message.body) > self._max_body_bytes:
            raise self._too_large(message.body, target.topic)
        own = _read_headers(message.properties, self._now_ms())
        merged = _merged(extras, own._replace(flag=checked_flag(message.flag) or own.flag))
        return Message(target.topic, message.body, _with_tag(target, merged), merged.flag or 0)

    def _too_large(self, body: bytes, topic: str) -> MessageError:
        return MessageError(
            f"the body for {topic!r} has {len(body)} bytes, allowed are {self._max_body_bytes}; send less, "
            "store the data elsewhere and send a reference, or raise rocketmq.producer.max-message-size"
        )


def _with_tag(target: Destination, extras: Extras) -> dict[str, str]:
    tag = extras.properties.get(Property.TAGS, target.tag)
    if target.tag is not None and tag != target.tag:
        raise MessageError(
            f"the tag is given twice: {shown(target.tag)} in the destination and {shown(tag)} as a header; give it once"
        )
    properties = {**target.properties, **extras.properties}
    if Property.PENDING_KEY in properties and properties.keys().isdisjoint(DELAY_PROPERTIES):
        raise MessageError(
            f"pending_key={shown(properties[Property.PENDING_KEY])} needs a delay: only a delayed message is pending; "
            "pass delay=, deliver_at= or delay_level=, or leave the key out"
        )
    return properties
