"""From what a sender passes to the messages that a broker takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mqtemplate.clock import Clock
from mqtemplate.converter import CONTENT_TYPE, MessageConverter
from mqtemplate.errors import ConversionError, DestinationError, MessageError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.template.destination import Destination, parse_destination
from mqtemplate.template.headers import NO_EXTRAS, Extras, header_extras, merge_extras


class MessageFactory:
    """Makes messages of payloads.

    A payload may be a `Message` already: then its properties are read as headers are, and it must name the topic
    that it is sent to.
    """

    def __init__(self, converter: MessageConverter, clock: Clock, max_body_bytes: int | None = None) -> None:
        self._to_body = converter.to_body
        self._clock = clock
        self._max_body_bytes = sys.maxsize if max_body_bytes is None else max_body_bytes

    def one(self, destination: str, payload: object, extras: Extras) -> Message:
        return self._make(parse_destination(destination), payload, extras)

    def batch(self, destination: str, payloads: Sequence[object], extras: Extras) -> list[Message]:
        """One message an item. What is wrong with an item is told with its place in the list."""
        target = parse_destination(destination)
        if not payloads:
            raise MessageError(f"the list for {destination!r} is empty; a batch has at least one message")
        messages = []
        for payload in payloads:
            try:
                messages.append(self._make(target, payload, extras))
            except MessageError as exc:
                raise type(exc)(f"item {len(messages)} of the list: {exc}") from exc
        return messages

    def _make(self, target: Destination, payload: object, extras: Extras) -> Message:
        if isinstance(payload, Message):
            return self._from_message(target, payload, extras)
        body, content_type = self._to_body(payload)
        if len(body) > self._max_body_bytes:
            raise self._too_large(body, target.topic)
        properties = target.properties.copy() if extras is NO_EXTRAS else _with_tag(target, extras)
        if content_type is not None:
            properties.setdefault(CONTENT_TYPE, content_type)
        return Message(target.topic, body, properties, extras.flag or 0)

    def _from_message(self, target: Destination, message: Message, extras: Extras) -> Message:
        if isinstance(message, MessageExt):
            raise MessageError(
                "a received message cannot be sent as it is, since much of it is the broker's; "
                "send message.body with headers=message.user_properties"
            )
        if message.topic != target.topic:
            raise DestinationError(
                f"the message names the topic {message.topic!r} and the destination {target.topic!r}; they must be one"
            )
        if not message.body:
            raise ConversionError("the message has an empty body; it needs at least one byte")
        if len(message.body) > self._max_body_bytes:
            raise self._too_large(message.body, target.topic)
        own = header_extras(message.properties, self._clock.now_ms())
        merged = merge_extras(extras, own._replace(flag=message.flag or own.flag))
        return Message(target.topic, message.body, _with_tag(target, merged), merged.flag or 0)

    def _too_large(self, body: bytes, topic: str) -> MessageError:
        return MessageError(
            f"the body for {topic!r} has {len(body)} bytes, allowed are {self._max_body_bytes}; send less, "
            "keep the data elsewhere and send where it is, or raise rocketmq.producer.max-message-size"
        )


def _with_tag(target: Destination, extras: Extras) -> dict[str, str]:
    tag = extras.properties.get(Property.TAGS, target.tag)
    if target.tag is not None and tag != target.tag:
        raise MessageError(
            f"the tag is given twice: {target.tag!r} in the destination and {tag!r} as a header; give it once"
        )
    return {**target.properties, **extras.properties}
