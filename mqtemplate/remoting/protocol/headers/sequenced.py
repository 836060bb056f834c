"""Headers of sequenced sends, a request of our own; see `mqtemplate.message.SendSequence`."""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader


class SendSequencedRequestHeader(RpcRequestHeader):
    """Request to store numbered messages, except those that are stored. The body has their topics and queues.

    Attributes:
        first: Number of the first message.
    """

    producer_group: str
    app_id: str
    version: Long
    partition: int
    first: Long
    born_timestamp: Long


class SendSequencedResponseHeader(CommandHeader):
    """Response to a sequenced send: number of messages that it stored, and of those that were stored before."""

    stored: int
    repeated: int
