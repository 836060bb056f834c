"""Rows of the outbox: messages, as they are stored in the user's database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mqtemplate.errors import MessageError
from mqtemplate.message import Message, Property, create_unique_id
from mqtemplate.template.options import SendOptions, hash_key_text
from mqtemplate.template.outbound import MessageFactory, read_options
from mqtemplate.template.rocketmq_template import RocketMQTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """One message that is to be sent.

    Attributes:
        id: Position in the order of the table; 0 for a row that is not stored yet.
        msg_id: Message id; the same each time that the row is sent.
        hash_key: Messages with equal keys go to one queue; None for any queue.
        properties: Properties of the message as JSON.
    """

    id: int
    msg_id: str
    topic: str
    hash_key: str | None
    properties: str
    body: bytes

    def to_message(self) -> Message:
        """Return the message to send."""
        return Message(self.topic, self.body, json.loads(self.properties))


class RowFactory:
    """Factory of rows from payloads: destinations, converter and options are those of a template."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._now_ms = template.broker.clock.now_ms
        self._messages = MessageFactory(template.converter, self._now_ms)

    def rows(self, destination: str, payload: object, delay_level: int, options: SendOptions) -> list[OutboxRow]:
        """Return one row for a payload, or one for each item of a list.

        Raises:
            MessageError: The message cannot be sent, or the option ``queue`` is given.
        """
        if options.get("queue") is not None:
            raise MessageError(
                "a message of an outbox has no option 'queue'; a hash_key selects the queue when it is sent"
            )
        hash_key = options.get("hash_key")
        extras = read_options(delay_level, options, self._now_ms)
        messages: Sequence[Message] = (
            self._messages.batch(destination, payload, extras)
            if isinstance(payload, list)
            else [self._messages.one(destination, payload, extras)]
        )
        key = None if hash_key is None else hash_key_text(hash_key)
        return [self._row(message, key) for message in messages]

    def _row(self, message: Message, hash_key: str | None) -> OutboxRow:
        msg_id = create_unique_id()
        properties = {**message.properties, Property.UNIQ_KEY: msg_id}
        # A delay counts from the call, not from the time at which the row is relayed.
        for name, unit_ms in ((Property.TIMER_DELAY_MS, 1), (Property.TIMER_DELAY_SEC, 1_000)):
            if (delay := properties.pop(name, None)) is not None:
                properties[Property.TIMER_DELIVER_MS] = str(self._now_ms() + int(delay) * unit_ms)
        return OutboxRow(
            id=0,
            msg_id=msg_id,
            topic=message.topic,
            hash_key=hash_key,
            properties=json.dumps(properties, separators=(",", ":")),
            body=message.body,
        )
