"""Receipt handles, and the retry topics of POP.

Source: ``common: ReceiptHandle``, ``KeyBuilder``; ``remoting: ExtraInfoUtil``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mqtemplate.errors import MessageError
from mqtemplate.numbers import parse_number
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from mqtemplate.user_code import shown

NORMAL_TOPIC, RETRY_V1, RETRY_V2 = 0, 1, 2
"""Kinds of the topic in a handle."""
ORDERED_REVIVE_QUEUE = 999
"""Revive queue in the handle of an ordered delivery. Source: ``KeyBuilder.POP_ORDER_REVIVE_QUEUE``."""

_FEWEST_PARTS = 8
_NUMBER = "([0-9]{1,18})"
_PLAIN = re.compile(f"{_NUMBER} {_NUMBER} {_NUMBER} {_NUMBER} ([012]) ([^ ]+) {_NUMBER} {_NUMBER} {_NUMBER}")
"""Handle as `ReceiptHandle.text` writes it. Most are, and all others take twice as long to read."""


def retry_topic_v1(topic: str, group: str) -> str:
    """Return the retry topic of a group for one topic; brokers write to this one by default."""
    return f"{RETRY_TOPIC_PREFIX}{group}_{topic}"


def retry_topic_v2(topic: str, group: str) -> str:
    """Return the retry topic of brokers with ``enableRetryTopicV2``."""
    return f"{RETRY_TOPIC_PREFIX}{group}+{topic}"


class ReceiptHandle(NamedTuple):
    """Identity of one delivery of one message.

    Attributes:
        start_offset: First queue offset that the pop read in this queue.
        pop_ms: Time of the delivery. A later delivery of the same message has another one.
        invisible_ms: Time after which the message is delivered again.
        revive_queue_id: `ORDERED_REVIVE_QUEUE` for an ordered delivery.
        topic_type: `NORMAL_TOPIC`, `RETRY_V1` or `RETRY_V2`.
        physical_offset: Position of the record; None in a handle of RocketMQ's remoting protocol.
    """

    start_offset: int
    pop_ms: int
    invisible_ms: int
    revive_queue_id: int
    topic_type: int
    broker_name: str
    queue_id: int
    queue_offset: int
    physical_offset: int | None

    @property
    def extra_info(self) -> str:
        """The eight parts that the remoting protocol uses, in the property ``POP_CK`` and in requests."""
        return " ".join(map(str, self[:8]))

    @property
    def text(self) -> str:
        """The nine parts that the gRPC protocol uses; eight without a physical offset."""
        text = _HandleText(" ".join(map(str, self[: 8 if self.physical_offset is None else 9])))
        text.handle = self
        return text

    @property
    def is_ordered(self) -> bool:
        """True for an ordered delivery."""
        return self.revive_queue_id == ORDERED_REVIVE_QUEUE

    @property
    def expires_ms(self) -> int:
        """Time after which the message is delivered again, unless a session renews it."""
        return self.pop_ms + self.invisible_ms

    def real_topic(self, topic: str, group: str) -> str:
        """Return the topic of the record: *topic*, or a retry topic of it."""
        if self.topic_type == RETRY_V1:
            return retry_topic_v1(topic, group)
        return retry_topic_v2(topic, group) if self.topic_type == RETRY_V2 else topic

    @classmethod
    def parse(cls, text: str) -> ReceiptHandle:
        """Return the handle that a client sent.

        As by RocketMQ, parts after the ninth are ignored, and any other topic type than 1 and 2 means the topic itself.
        A physical offset below 0 means that there is none.

        Raises:
            MessageError: It is not a handle.
        """
        if type(text) is _HandleText:
            return text.handle
        plain = _PLAIN.fullmatch(text)
        if plain is not None:
            return _plain_handle(plain)
        parts = text.rstrip(" ").split(" ")  # Java ignores blanks at the end
        numbers = [parse_number(part) for part in (*parts[:4], *parts[6:9])]
        if len(parts) < _FEWEST_PARTS or None in numbers or not parts[5]:
            raise MessageError(
                f"receipt handle {shown(text)} is not valid; a handle has at least 8 parts with a blank between them, "
                "and is passed as it was received"
            )
        start, pop_ms, invisible_ms, revive, queue_id, queue_offset, *rest = [number or 0 for number in numbers]
        topic_type = {"1": RETRY_V1, "2": RETRY_V2}.get(parts[4], NORMAL_TOPIC)
        physical_offset = rest[0] if rest and rest[0] >= 0 else None
        return cls(start, pop_ms, invisible_ms, revive, topic_type, parts[5], queue_id, queue_offset, physical_offset)


def _plain_handle(found: re.Match[str]) -> ReceiptHandle:
    start, pop_ms, invisible_ms, revive, kind, queue_id, queue_offset, physical_offset = map(
        int, found.group(1, 2, 3, 4, 5, 7, 8, 9)
    )
    return ReceiptHandle(start, pop_ms, invisible_ms, revive, kind, found[6], queue_id, queue_offset, physical_offset)


class _HandleText(str):
    """Text of a handle, which it keeps: in one process a handle need not be parsed, which costs more than its use."""

    __slots__ = ("handle",)
    handle: ReceiptHandle

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
