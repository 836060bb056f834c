"""A remote client that pops, over a server without sockets: it makes receipt handles as Java's client does."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mqtemplate.message import MessageExt
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import BatchAck, BatchAckMessageRequestBody
from mqtemplate.remoting.protocol.headers.pop import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    ChangeInvisibleTimeResponseHeader,
    NotificationRequestHeader,
    NotificationResponseHeader,
    PeekMessageRequestHeader,
    PollingInfoRequestHeader,
    PollingInfoResponseHeader,
    PopMessageRequestHeader,
    PopMessageResponseHeader,
    parse_queues,
)
from mqtemplate.remoting.protocol.messages import decode_messages
from tests.server.serving import RecordingConnection, Serving

TOPIC, GROUP = "orders", "billing"


@dataclass(frozen=True, slots=True)
class Popped:
    """A message with its receipt handle.

    Attributes:
        extra_info: The receipt handle.
        count: How often it was consumed before: the number in the record, or of an ordered pop the one in the header.
    """

    message: MessageExt
    extra_info: str
    count: int

    @property
    def body(self) -> bytes:
        return self.message.body

    @property
    def stored_topic(self) -> str:
        """Topic of the record, as ``ExtraInfoUtil.getRealTopic`` finds it."""
        kind = self.extra_info.split(" ")[4]
        return {"1": f"%RETRY%{GROUP}_{TOPIC}", "2": f"%RETRY%{GROUP}+{TOPIC}"}.get(kind, TOPIC)


class PopClient:
    """One client. A pop that is held has no response until the connection gets it.

    Args:
        connection: By default a new one.
    """

    def __init__(self, serving: Serving, connection: RecordingConnection | None = None) -> None:
        self.serving = serving
        self.connection = connection or RecordingConnection()

    def request(self, code: int, header: Any = None, body: bytes = b"") -> RemotingCommand | None:
        return self.serving.request(code, header, body, over=self.connection)

    def answer(self, code: int, header: Any = None, body: bytes = b"") -> RemotingCommand:
        response = self.request(code, header, body)
        assert response is not None
        return response

    # --- requests ------------------------------------------------------------------------------

    def send_pop(self, **fields: Any) -> RemotingCommand | None:
        """Send a pop that may be held for ten seconds, and return the response, if it is there."""
        given = {
            "consumer_group": GROUP,
            "topic": TOPIC,
            "queue_id": -1,
            "max_msg_nums": 32,
            "invisible_time": 60_000,
            "poll_time": 10_000,
            "born_time": self.serving.clock.now_ms(),
            "init_mode": 0,
        }
        return self.request(RequestCode.POP_MESSAGE, PopMessageRequestHeader(**given | fields))

    def pop(self, **fields: Any) -> list[Popped]:
        """Return the messages that are there."""
        response = self.send_pop(**{"poll_time": 0, **fields})
        assert response is not None
        if response.code == ResponseCode.POLLING_TIMEOUT:
            return []
        assert response.code == ResponseCode.SUCCESS, response
        return read(response)

    def received(self) -> list[Popped]:
        """Return the messages of the last response that the connection got."""
        return read(self.connection.replies[-1])

    def send_ack(self, popped: Popped, **fields: Any) -> RemotingCommand:
        given = _fields(popped) | fields
        return self.answer(RequestCode.ACK_MESSAGE, AckMessageRequestHeader(**given))

    def ack(self, *popped: Popped) -> None:
        for each in popped:
            response = self.send_ack(each)
            assert response.code == ResponseCode.SUCCESS, response

    def ack_all(self, popped: Iterable[Popped], **fields: Any) -> RemotingCommand:
        """Acknowledge messages with one request, as ``batchAckMessageAsync`` does."""
        acks: dict[tuple[str, ...], tuple[list[str], bytearray]] = {}
        for each in popped:
            parts = each.extra_info.split(" ")
            bits = acks.setdefault((parts[0], parts[1], parts[4], parts[6]), (parts, bytearray(64)))[1]
            distance = int(parts[7]) - int(parts[0])
            bits[distance // 8] |= 1 << distance % 8
        body = BatchAckMessageRequestBody(
            broker_name="broker-a", acks=[_batch_ack(parts, bits, fields) for parts, bits in acks.values()]
        )
        return self.answer(RequestCode.BATCH_ACK_MESSAGE, body=body.encode())

    def send_change(self, popped: Popped, invisible_ms: int, **fields: Any) -> RemotingCommand:
        given = _fields(popped) | {"invisible_time": invisible_ms} | fields
        return self.answer(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ChangeInvisibleTimeRequestHeader(**given))

    def change(self, popped: Popped, invisible_ms: int, **fields: Any) -> Popped:
        """Return the message with its new handle."""
        return changed(popped, self.send_change(popped, invisible_ms, **fields))

    def peek(self, **fields: Any) -> RemotingCommand:
        given = {"consumer_group": GROUP, "topic": TOPIC, "queue_id": -1, "max_msg_nums": 32} | fields
        return self.answer(RequestCode.PEEK_MESSAGE, PeekMessageRequestHeader(**given))

    def notification(self, **fields: Any) -> NotificationResponseHeader | None:
        """Return the header of the response; None while the broker holds the request."""
        given = {
            "consumer_group": GROUP,
            "topic": TOPIC,
            "queue_id": -1,
            "poll_time": 10_000,
            "born_time": self.serving.clock.now_ms(),
        } | fields
        response = self.request(RequestCode.NOTIFICATION, NotificationRequestHeader(**given))
        return None if response is None else response.header(NotificationResponseHeader)

    def held(self, queue_id: int = -1, group: str = GROUP) -> int:
        """Return the number of pops that the broker holds."""
        header = PollingInfoRequestHeader(consumer_group=group, topic=TOPIC, queue_id=queue_id)
        return self.answer(RequestCode.POLLING_INFO, header).header(PollingInfoResponseHeader).polling_num


def changed(popped: Popped, response: RemotingCommand) -> Popped:
    """Return a message with the handle that its change has, as ``changeInvisibleTimeAsync`` makes it."""
    assert response.code == ResponseCode.SUCCESS, response
    new = response.header(ChangeInvisibleTimeResponseHeader)
    parts = popped.extra_info.split(" ")
    parts[:4] = [parts[7], str(new.pop_time), str(new.invisible_time), str(new.revive_qid)]
    return Popped(popped.message, " ".join(parts), popped.count)


def _fields(popped: Popped) -> dict[str, Any]:
    parts = popped.extra_info.split(" ")
    return {
        "consumer_group": GROUP,
        "topic": popped.stored_topic,
        "queue_id": int(parts[6]),
        "extra_info": popped.extra_info,
        "offset": int(parts[7]),
    }


def _batch_ack(parts: list[str], bits: bytes, fields: dict[str, Any]) -> BatchAck:
    given = {
        "consumer_group": GROUP,
        "topic": TOPIC,
        "retry": parts[4],
        "start_offset": int(parts[0]),
        "queue_id": int(parts[6]),
        "revive_queue_id": int(parts[3]),
        "pop_time": int(parts[1]),
        "invisible_time": int(parts[2]),
        "bit_set": base64.b64encode(bytes(bits)).decode(),
    }
    return BatchAck(**given | fields)


def read(response: RemotingCommand) -> list[Popped]:
    """Return the messages of a response, as ``MQClientAPIImpl.processPopResponse`` does."""
    header = response.header(PopMessageResponseHeader)
    queues = {(each.topic_type, each.queue_id): each for each in parse_queues(header)}
    popped = []
    for message in decode_messages(response.body, "broker-a"):
        known = message.properties.get("POP_CK")
        kind = int(known.split(" ")[4]) if known else int(message.topic.startswith("%RETRY%"))
        queue, at = queues[kind, message.queue_id], message.queue_offset
        assert at in queue.offsets
        parts = (queue.start_offset, header.pop_time, header.invisible_time, header.revive_qid, kind)
        extra_info = known or " ".join(map(str, (*parts, "broker-a", message.queue_id, at)))
        count = queue.counts.get(at, 0) or message.reconsume_times
        popped.append(Popped(message, extra_info, count))
    return popped


def bodies(popped: Iterable[Popped]) -> list[bytes]:
    return sorted(each.body for each in popped)
