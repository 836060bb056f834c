"""Headers of our own request for a block of stored records; see `headers.delayed` for such requests."""

from __future__ import annotations

from mqtemplate.remoting.protocol.headers.fields import CommandHeader, Long
from mqtemplate.remoting.protocol.headers.message import RpcRequestHeader

MAX_BLOCK_BYTES = 4 << 20
"""Most bytes of records in one block, unless a single record has more."""


class GetRecordBlockRequestHeader(RpcRequestHeader):
    """Request for the records of one queue from *queue_offset* on, below *end_offset*.

    Attributes:
        max_bytes: Most bytes of records; at most `MAX_BLOCK_BYTES`. The first record is returned whatever its size.
    """

    topic: str
    queue_id: int
    queue_offset: Long
    end_offset: Long
    max_bytes: int = MAX_BLOCK_BYTES


class GetRecordBlockResponseHeader(CommandHeader):
    """Header of a block. The body is the number of records (i4), the size of each (i4), and the records.

    Attributes:
        next_offset: Queue offset for the next request.
    """

    next_offset: Long
    min_offset: Long
    max_offset: Long
