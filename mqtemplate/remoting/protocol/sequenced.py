"""Body of a sequenced send: batches of messages, each with its topic and queue (big-endian)::

i2, T  topic
i4     queue ID
i4, B  messages     a batch as in `mqtemplate.remoting.protocol.messages`
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import (
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    ORIGIN_PROPERTIES,
    Message,
    MessageQueue,
    Property,
)
from mqtemplate.record.codec import EncodedMessage
from mqtemplate.remoting.protocol.messages import EncodedBatch, decode_batch, encode_batch, split_batch

_SPECIAL_NAMES = tuple(
    f"{name}\x01".encode()
    for name in sorted(
        INTERNAL_PROPERTIES.union(DELAY_PROPERTIES, ORIGIN_PROPERTIES, (Property.UNIQ_KEY, Property.RECONSUME_TIME))
    )
)
_I2 = struct.Struct(">H")
_QUEUE_AND_SIZE = struct.Struct(">iI")
_MAX_PART_BYTES = (1 << 20) - 1_024
"""Most bytes of messages in one request; their topics come in addition."""

NumberedMessages = Sequence[tuple[Message, MessageQueue]]
"""Messages whose numbers follow each other, each with its queue."""


class QueueBatch(NamedTuple):
    """Adjacent messages for one queue, encoded."""

    topic: str
    queue_id: int
    batch: memoryview


def encode_queue_batches(messages: Iterable[tuple[Message, int]], topics: dict[str, str]) -> bytes:
    """Return the body of a send.

    Args:
        messages: Each with its queue ID.
        topics: Topic -> its name on the wire.

    Raises:
        MessageError: The properties of a message are too long.
    """
    parts: list[bytes] = []
    by_queue = groupby(((message.topic, queue_id, message) for message, queue_id in messages), itemgetter(0, 1))
    for (topic, queue_id), adjacent in by_queue:
        parts.append(encode_queue_batch(topics[topic], queue_id, encode_batch(message for _, _, message in adjacent)))
    return b"".join(parts)


def encode_queue_batch(topic: str, queue_id: int, batch: bytes | memoryview) -> bytes:
    """Return one batch of encoded messages.

    Args:
        topic: Its name on the wire.
    """
    name = topic.encode()
    return b"".join((_I2.pack(len(name)), name, _QUEUE_AND_SIZE.pack(queue_id, len(batch)), batch))


def parts_of_messages(messages: NumberedMessages) -> Iterator[NumberedMessages]:
    """Yield the messages in parts that fit into a request."""
    start = size = 0
    for index, (message, _) in enumerate(messages):
        size += len(message.body) + 64 + sum(len(name) + len(value) for name, value in message.properties.items())
        if size > _MAX_PART_BYTES and index > start:
            yield messages[start:index]
            start, size = index, len(message.body)
    if start < len(messages):
        yield messages[start:]


def parts_of_batch(batch: EncodedBatch) -> Iterator[tuple[memoryview, int]]:
    """Yield encoded messages in parts that fit into a request, with their number."""
    first = at = 0
    while first < len(batch.ends):
        last = max(bisect_right(batch.ends, at + _MAX_PART_BYTES), first + 1)
        yield batch.data[at : batch.ends[last - 1]], last - first
        first, at = last, batch.ends[last - 1]


def read_queue_batches(body: bytes) -> Iterator[QueueBatch]:
    """Yield the batches of a body. Their messages are not decoded.

    Raises:
        RemoteProtocolError: The bytes are not a sequenced send.
    """
    view, at = memoryview(body), 0
    while at < len(view):
        try:
            (length,) = _I2.unpack_from(view, at)
            topic_end = at + _I2.size + length
            queue_id, size = _QUEUE_AND_SIZE.unpack_from(view, topic_end)
            topic = str(view[at + _I2.size : topic_end], "utf-8")
        except (struct.error, UnicodeDecodeError):
            raise RemoteProtocolError("a batch of the sequenced send has no valid topic, queue ID and size") from None
        start = topic_end + _QUEUE_AND_SIZE.size
        at = start + size
        if at > len(view):
            raise RemoteProtocolError(f"the batch for {topic!r} is cut off: {size} bytes announced")
        yield QueueBatch(topic, queue_id, view[start:at])


def decode_queue_batches(batches: Sequence[QueueBatch]) -> list[tuple[Message | EncodedMessage, int]]:
    """Return the messages of the batches, each with its queue ID.

    Most batches have only properties of an application. They stay encoded: decoding takes half of the time of a send.

    Raises:
        RemoteProtocolError: The bytes of a batch are not messages.
    """
    messages: list[tuple[Message | EncodedMessage, int]] = []
    for topic, queue_id, view in batches:
        batch = bytes(view)
        if any(name in batch for name in _SPECIAL_NAMES):  # possibly in a body: then decoding is slower, but correct
            messages += [(message, queue_id) for message in decode_batch(batch, topic)]
        else:
            messages += [(EncodedMessage(topic, *message), queue_id) for message in split_batch(batch)]
    return messages
