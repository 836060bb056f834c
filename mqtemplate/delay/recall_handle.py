"""The handle of a waiting message: what a sender keeps to cancel or reschedule it."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from mqtemplate.errors import MessageError

_VERSION = "v1"


class RecallHandle(NamedTuple):
    """What a handle says.

    Attributes:
        topic: The real topic.
        deliver_ms: For a timer one more than its slot, as upstream has it; for a level when it was due first.
        physical_offset: Where the message waited first; -1 in a handle that RocketMQ made.
    """

    topic: str
    broker_name: str
    deliver_ms: int
    msg_id: str
    physical_offset: int = -1


def encode_handle(handle: RecallHandle) -> str:
    """URL-safe Base64 of ``v1 topic broker time id``, and, as a sixth word that upstream passes over, the offset.

    Source: ``RecallMessageHandle.HandleV1``.
    """
    return base64.urlsafe_b64encode(" ".join((_VERSION, *map(str, handle))).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Read a handle, ours or RocketMQ's.

    Raises:
        MessageError: It is none.
    """
    try:
        words = base64.urlsafe_b64decode(text.encode()).decode().split(" ")
        version, topic, broker_name, deliver_ms, msg_id, *rest = words
        if version != _VERSION:
            raise ValueError(f"its version is {version!r}")
        return RecallHandle(topic, broker_name, int(deliver_ms), msg_id, int(rest[0]) if rest else -1)
    except (binascii.Error, ValueError) as exc:
        raise MessageError(
            f"{text!r} is no handle of a waiting message ({exc}); pass SendResult.handle as it came, or key=..."
        ) from exc
