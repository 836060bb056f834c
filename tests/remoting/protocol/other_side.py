"""Parts of the protocol that only the other side of a connection uses: RocketMQ's broker and its consumers.

Tests play that side; the library never writes these bytes.
"""

from __future__ import annotations

from mqtemplate.message import MessageExt
from mqtemplate.record.codec import RecordDraft, pack_host
from mqtemplate.record.properties import encode_properties
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.headers.pop import PopMessageResponseHeader, PoppedQueue


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


# --- texts of a response to a pop -------------------------------------------------------------------


def parse_queues(header: PopMessageResponseHeader) -> list[PoppedQueue]:
    """Return the queues that a response describes, as Java's ``ExtraInfoUtil`` reads them."""
    starts = {(part[0], part[1]): int(part[2]) for part in _parts(header.start_offset_info)}
    offsets = {(part[0], part[1]): [int(one) for one in part[2].split(",")] for part in _parts(header.msg_offset_info)}
    counts = {(part[0], part[1]): int(part[2]) for part in _parts(header.order_count_info)}
    assert starts.keys() == offsets.keys()
    queues = []
    for (kind, queue_id), start in starts.items():
        of_queue = counts.get((kind, queue_id))
        each = {at: counts.get((kind, f"qo{queue_id}%{at}"), of_queue) for at in offsets[kind, queue_id]}
        known = {at: count for at, count in each.items() if count is not None}
        queues.append(PoppedQueue(int(kind), int(queue_id), start, offsets[kind, queue_id], known))
    return queues


def _parts(text: str | None) -> list[tuple[str, str, str]]:
    parts = [tuple(part.split(" ")) for part in text.split(";")] if text else []
    assert all(len(part) == 3 for part in parts), text
    return parts  # type: ignore[return-value]
