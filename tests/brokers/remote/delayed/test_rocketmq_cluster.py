"""Changes of pending messages on a RocketMQ cluster, with responses that a real broker gives at rare moments only."""

from __future__ import annotations

import time

import pytest

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle, encode_handle
from mqtemplate.errors import BrokerError
from mqtemplate.message import MessageExt, Property
from mqtemplate.pending import ScheduleChange, ScheduleChangeStatus
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.message import (
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from mqtemplate.remoting.protocol.messages import decode_properties_text
from mqtemplate.topics import TIMER_TOPIC
from tests.brokers.remote.clients import message_ext, remote
from tests.brokers.remote.scripted_cluster import ScriptedBroker
from tests.remoting.protocol.other_side import encode_message

CONFIG = "messageDelayLevel=1s 5s\ntimerPrecisionMs=1000\ntimerRollWindowSlot=172800\ntimerMaxDelaySec=259200\n"
MSG_ID = "7F000001"
DELAY_S = 86_400  # longer than any run of the tests: the timer is pending until the end
SLOT_MS = (time.time_ns() // 1_000_000_000 + DELAY_S) * 1_000
LATER_MS = SLOT_MS + 60_001
HANDLE = encode_handle(RecallHandle("orders", "broker-a", SLOT_MS + 1, MSG_ID))


class TimerBroker(ScriptedBroker):
    """A broker with one timer. It answers recalls with the codes in *recalls*, the oldest first.

    Attributes:
        sent: The properties of the messages that it was sent.
        recalled: The deliver times of the recalls that it was sent.
    """

    def __init__(self, *recalls: int) -> None:
        super().__init__()
        self.sent: list[dict[str, str]] = []
        self.recalled: list[int] = []
        self._recalls = list(recalls)
        self.topic("orders")
        self.topic(TIMER_TOPIC, queues=1)
        self.script(RequestCode.GET_BROKER_CONFIG, lambda request: request.response(body=CONFIG.encode()))
        self.script(RequestCode.QUERY_MESSAGE, self._query)
        self.script(RequestCode.RECALL_MESSAGE, self._recall)
        self.script(RequestCode.SEND_MESSAGE_V2, self._send)

    def _query(self, request: RemotingCommand) -> RemotingCommand:
        if request.header(QueryMessageRequestHeader).topic != TIMER_TOPIC:
            return request.response(ResponseCode.QUERY_NOT_FOUND)
        header = QueryMessageResponseHeader(index_last_update_timestamp=0, index_last_update_phyoffset=1 << 40)
        return request.response(header=header, body=encode_message(_timer()))

    def _recall(self, request: RemotingCommand) -> RemotingCommand:
        handle = decode_handle(request.header(RecallMessageRequestHeader).recall_handle)
        if handle.deliver_ms < SLOT_MS - DELAY_S * 1_000:  # the question whether recalls are enabled
            return request.response(ResponseCode.ILLEGAL_OPERATION, remark="recall failed, timestamp invalid")
        self.recalled.append(handle.deliver_ms)
        code = self._recalls.pop(0)
        if code != ResponseCode.SUCCESS:
            return request.response(code, remark="not now")
        return request.response(header=RecallMessageResponseHeader(msg_id=handle.msg_id))

    def _send(self, request: RemotingCommand) -> RemotingCommand:
        properties = decode_properties_text(request.header(SendMessageRequestHeaderV2).properties)
        self.sent.append(properties)
        due_ms = int(properties[Property.TIMER_DELIVER_MS])
        handle = encode_handle(RecallHandle("orders", "broker-a", due_ms, MSG_ID))
        header = SendMessageResponseHeader(
            msg_id="7F00000100002A9F0000000000000001", queue_id=0, queue_offset=1, recall_handle=handle
        )
        return request.response(header=header)


def _timer() -> MessageExt:
    properties = {
        Property.UNIQ_KEY: MSG_ID,
        Property.KEYS: "4466",
        Property.TAGS: "paid",
        Property.TIMER_DELAY_SEC: str(DELAY_S),
        Property.TIMER_OUT_MS: str(SLOT_MS),
        Property.REAL_TOPIC: "orders",
        Property.REAL_QID: "2",
        "color": "red",
    }
    stored_ms = SLOT_MS - DELAY_S * 1_000
    return message_ext(TIMER_TOPIC, properties=properties, store_timestamp=stored_ms, store_size=0)


def test_the_message_is_sent_again_before_the_old_one_is_recalled() -> None:
    with TimerBroker(ResponseCode.SUCCESS) as cluster, remote(cluster) as broker:
        result = broker.delayed.reschedule(HANDLE, LATER_MS)

        codes = [request.code for request in cluster.seen]
        assert codes.index(RequestCode.SEND_MESSAGE_V2) < len(codes) - 1 - codes[::-1].index(RequestCode.RECALL_MESSAGE)
        assert (result.status, result.count) == (ScheduleChangeStatus.RESCHEDULED, 1)
        assert [decode_handle(handle).deliver_ms for handle in result.handles] == [LATER_MS]
        assert cluster.recalled == [SLOT_MS + 1]
        [properties] = cluster.sent
        kept = {Property.UNIQ_KEY: MSG_ID, Property.KEYS: "4466", Property.TAGS: "paid", "color": "red"}
        assert kept.items() <= properties.items()
        assert not {Property.TIMER_OUT_MS, Property.REAL_TOPIC, Property.TIMER_DELAY_SEC} & properties.keys()


def test_a_failed_recall_is_an_error_that_says_what_is_pending_now() -> None:
    with (
        TimerBroker(ResponseCode.SYSTEM_ERROR) as cluster,
        remote(cluster) as broker,
        pytest.raises(BrokerError, match=r"sent again with its new time, but the old one .* once more"),
    ):
        broker.delayed.reschedule(HANDLE, LATER_MS)


def test_a_recall_is_remembered_until_its_mark_can_be_read() -> None:
    """The broker stores the mark a moment after its response. The scripted broker never does."""
    with TimerBroker(ResponseCode.SUCCESS, ResponseCode.SUCCESS) as cluster, remote(cluster) as broker:
        first = broker.delayed.cancel(HANDLE)
        second = broker.delayed.cancel(key="4466")
        moved = broker.delayed.reschedule(HANDLE, LATER_MS)

    assert first == ScheduleChange(ScheduleChangeStatus.CANCELLED, 1)
    assert second == moved == ScheduleChange(ScheduleChangeStatus.CANCELLED)
    assert cluster.sent == []
