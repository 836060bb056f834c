"""Body of a sequenced send: runs of messages, each run with its topic and queue (big-endian)::

i2, T  topic
i4     queue ID
i4, B  messages     a batch as in `mqtemplate.remoting.protocol.messages`
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import Message
from mqtemplate.remoting.protocol.messages import decode_batch, encode_batch

_I2 = struct.Struct(">H")
_QUEUE_AND_SIZE = struct.Struct(">iI")


class Run(NamedTuple):
    """Adjacent messages for one queue, encoded."""

    topic: str
    queue_id: int
    batch: memoryview


def encode_runs(messages: Iterable[tuple[Message, int]], topics: dict[str, str]) -> bytes:
    """Return the body of a send.

    Args:
        messages: Each with its queue ID.
        topics: Topic -> its name on the wire.

    Raises:
        MessageError: The properties of a message are too long.
    """
    parts: list[bytes] = []
    by_queue = groupby(((message.topic, queue_id, message) for message, queue_id in messages), itemgetter(0, 1))
    for (topic, queue_id), run in by_queue:
        name, batch = topics[topic].encode(), encode_batch(message for _, _, message in run)
        parts += (_I2.pack(len(name)), name, _QUEUE_AND_SIZE.pack(queue_id, len(batch)), batch)
    return b"".join(parts)


def read_runs(body: bytes) -> Iterator[Run]:
    """Yield the runs of a body. Their messages are not decoded.

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
            raise RemoteProtocolError("a run of the sequenced send has no valid topic, queue ID and size") from None
        start = topic_end + _QUEUE_AND_SIZE.size
        at = start + size
        if at > len(view):
            raise RemoteProtocolError(f"the run for {topic!r} is cut off: {size} bytes announced")
        yield Run(topic, queue_id, view[start:at])


def decode_runs(runs: Sequence[Run]) -> list[tuple[Message, int]]:
    """Return the messages of the runs, each with its queue ID.

    Raises:
        RemoteProtocolError: The bytes of a run are not messages.
    """
    return [(message, run.queue_id) for run in runs for message in decode_batch(bytes(run.batch), run.topic)]
