"""Parts of the protocol that only the other side of a connection uses: RocketMQ's broker and its consumers.

Tests play that side; the library never writes these bytes.
"""

from __future__ import annotations

from mqtemplate.message import MessageExt
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.properties import encode_properties
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody


class ConsumeMessageDirectlyResult(JsonBody):
    """Result of a consumer that handled a message on request."""

    order: bool = False
    auto_commit: bool = True
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: int = 0


def encode_message(message: MessageExt) -> bytes:
    """Return a message's record, as a broker sends it. With `SysFlag.COMPRESSED` the body must be compressed."""
    draft = RecordDraft(
        message.topic,
        message.queue_id,
        message.body,
        encode_properties(message.properties),
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_timestamp=message.born_timestamp,
        born_host=pack_host(message.born_host),
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
    store_host = pack_host(message.store_host)
    return draft.encode(message.queue_offset, message.physical_offset, message.store_timestamp, store_host)
