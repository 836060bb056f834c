"""Our own requests: cancel, reschedule, list and count pending messages."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.delay.recall_handle import RecallHandle, encode_handle
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_HANDLES,
    CancelDelayedMessageRequestHeader,
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
    PendingCountsData,
    PendingMessagesData,
    RescheduleDelayedMessageRequestHeader,
    ScheduleChangeData,
)
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.server import BrokerServerSettings
from tests.server.serving import Serving

HOUR_MS = 3_600_000


@pytest.fixture
def serving(serving: Serving) -> Serving:
    serving.engine.create_topic("orders", 1)
    return serving


def send_delayed(serving: Serving, delay_ms: int = HOUR_MS, key: str = "4466", body: bytes = b"x") -> str:
    """Send a message and return its handle."""
    message = Message("orders", body, {Property.TIMER_DELAY_MS: str(delay_ms), Property.KEYS: key})
    handle = serving.engine.send(message).handle
    assert handle is not None
    return handle


def request(serving: Serving, code: int, header: CommandHeader) -> RemotingCommand:
    response = serving.request(code, header)
    assert response is not None
    return response


def cancel(serving: Serving, **fields: str) -> RemotingCommand:
    return request(serving, RequestCode.CANCEL_DELAYED_MESSAGE, CancelDelayedMessageRequestHeader(**fields))


def page_of(serving: Serving, max_count: int, cursor: str | None = None) -> PendingMessagesData:
    header = GetPendingMessagesRequestHeader(topic="orders", max_count=max_count, cursor=cursor)
    response = request(serving, RequestCode.GET_PENDING_MESSAGES, header)
    assert response.code == ResponseCode.SUCCESS
    return PendingMessagesData.decode(response.body)


def announced(serving: Serving, header: CommandHeader | None) -> str | None:
    """Return the capabilities in the response to a heartbeat."""
    body = HeartbeatData(client_id="c1", producer_data_set=[ProducerData(group_name="shop")]).encode()
    response = serving.request(RequestCode.HEART_BEAT, header, body)
    assert response is not None
    return response.header(HeartbeatResponseHeader).capabilities


# --- capabilities -----------------------------------------------------------------------------------


def test_the_capabilities_are_announced_to_a_client_that_requests_them(serving: Serving) -> None:
    names = announced(serving, HeartbeatRequestHeader(requests_capabilities=True))

    assert names == ",".join(sorted(each.name for each in Capability if each is not Capability.LOCAL_FILES))
    assert announced(serving, None) is None, "a client of RocketMQ"


def test_what_the_settings_disable_is_not_announced() -> None:
    settings = BrokerServerSettings(recall_message_enable=False, enable_property_filter=False)
    with Serving(settings, engine_settings=EmbeddedSettings(timer_wheel_enable=False)) as serving:
        names = announced(serving, HeartbeatRequestHeader(requests_capabilities=True))

    assert names is not None
    assert {"TIMER", "SCHEDULE_CHANGE", "SQL92"}.isdisjoint(names.split(","))
    assert "PENDING" in names.split(",")


# --- changes ----------------------------------------------------------------------------------------


def test_messages_are_cancelled_by_handles_and_by_key(serving: Serving) -> None:
    handles = ",".join(send_delayed(serving, key="first") for _ in range(2))
    send_delayed(serving, key="second")

    by_handle = ScheduleChangeData.decode(cancel(serving, handle=handles).body)
    by_key = ScheduleChangeData.decode(cancel(serving, key="second", topic="orders").body)
    again = ScheduleChangeData.decode(cancel(serving, handle=handles).body)

    assert (by_handle.status, by_handle.count) == ("CANCELLED", 2)
    assert (by_key.status, by_key.count) == ("CANCELLED", 1)
    assert (again.status, again.count) == ("CANCELLED", 0)
    assert serving.engine.count_pending(PendingQuery()).total == 0


def test_a_rescheduled_message_has_its_new_time_and_a_handle(serving: Serving) -> None:
    handle, new_ms = send_delayed(serving), serving.clock.now_ms() + 5_000

    header = RescheduleDelayedMessageRequestHeader(handle=handle, deliver_time=new_ms)
    change = ScheduleChangeData.decode(request(serving, RequestCode.RESCHEDULE_DELAYED_MESSAGE, header).body)
    [moved] = serving.engine.pending(PendingQuery(topic="orders")).messages

    assert (change.status, change.count, change.handles) == ("RESCHEDULED", 1, [moved.handle])
    assert moved.deliver_ms == new_ms


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({}, ResponseCode.INVALID_PARAMETER, "name the pending message by its handle or by key"),
        ({"key": "two words"}, ResponseCode.INVALID_PARAMETER, "key must be one word, got 'two words'"),
        ({"handle": "4466"}, ResponseCode.INVALID_PARAMETER, "'4466' is not a handle of a pending message"),
        ({"handle": ",".join("a" * (MAX_HANDLES + 1))}, ResponseCode.INVALID_PARAMETER, "at most 256 handles"),
        (
            {"handle": encode_handle(RecallHandle("orders", "broker-b", 1, "7F", 0))},
            ResponseCode.ILLEGAL_OPERATION,
            "the handle is for a message of broker 'broker-b', not of 'broker-a'; send it there",
        ),
    ],
    ids=["nothing", "two words", "no handle", "too many handles", "another broker"],
)
def test_an_invalid_change_is_refused(serving: Serving, fields: dict[str, str], code: ResponseCode, text: str) -> None:
    response = cancel(serving, **fields)

    assert response.code == code
    assert text in (response.remark or "")


def test_a_new_time_that_is_too_far_away_is_refused(serving: Serving) -> None:
    far_ms = serving.clock.now_ms() + 10_000 * HOUR_MS
    header = RescheduleDelayedMessageRequestHeader(handle=send_delayed(serving), deliver_time=far_ms)

    response = request(serving, RequestCode.RESCHEDULE_DELAYED_MESSAGE, header)

    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert "allowed are" in (response.remark or "")


def test_without_recalls_no_message_is_changed() -> None:
    with Serving(BrokerServerSettings(recall_message_enable=False)) as serving:
        serving.engine.create_topic("orders", 1)

        response = cancel(serving, handle=send_delayed(serving))

        assert response.code == ResponseCode.NO_PERMISSION
        assert response.remark == "recall is disabled; set recall-message-enable to true"


# --- queries ----------------------------------------------------------------------------------------


def test_pages_continue_after_the_cursor_of_any_message(serving: Serving) -> None:
    for number in range(5):
        send_delayed(serving, HOUR_MS + number, key=str(number))

    first = page_of(serving, 3)
    rest = page_of(serving, 3, first.messages[1].cursor)

    assert [message.keys for message in first.messages] == ["0", "1", "2"]
    assert [message.keys for message in rest.messages] == ["2", "3", "4"]
    assert (first.has_more, rest.has_more) == (True, False)


@pytest.mark.parametrize(("count", "key", "of_page"), [(1_001, "k", 1_000), (50, "k" * 30_000, 34)])
def test_a_page_is_bounded_by_count_and_by_bytes(serving: Serving, count: int, key: str, of_page: int) -> None:
    """Whatever a client requests: at most 1,000 messages, and about a MiB."""
    for number in range(count):
        send_delayed(serving, HOUR_MS + number, key)

    first = page_of(serving, 1_000_000)
    second = page_of(serving, 1_000_000, first.messages[-1].cursor)

    assert (len(first.messages), first.has_more) == (of_page, True)
    assert (len(second.messages), second.has_more) == (count - of_page, False)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (GetPendingMessagesRequestHeader(max_count=0), "max_count must be 1 or more, got 0"),
        (GetPendingMessagesRequestHeader(max_count=1, cursor="now"), "'now' is not a cursor"),
        (CountPendingMessagesRequestHeader(bucket_millis=0), "must be 1 ms or more, got 0"),
    ],
)
def test_an_invalid_query_is_refused(serving: Serving, header: CommandHeader, text: str) -> None:
    is_page = isinstance(header, GetPendingMessagesRequestHeader)
    code = RequestCode.GET_PENDING_MESSAGES if is_page else RequestCode.COUNT_PENDING_MESSAGES

    response = request(serving, code, header)

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert text in (response.remark or "")


def test_messages_are_counted_by_spans(serving: Serving) -> None:
    for delay_ms in (1, HOUR_MS, HOUR_MS):
        send_delayed(serving, delay_ms)

    header = CountPendingMessagesRequestHeader(topic="orders", bucket_millis=HOUR_MS)
    counts = PendingCountsData.decode(request(serving, RequestCode.COUNT_PENDING_MESSAGES, header).body)

    start_ms = serving.clock.now_ms() // HOUR_MS * HOUR_MS
    assert (counts.total, counts.buckets) == (3, {start_ms: 1, start_ms + HOUR_MS: 2})


def test_a_count_by_too_many_spans_is_refused(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.server.processors.delayed._MAX_BUCKETS", 2)
    for delay_ms in (1_000, 2_000, 3_000):
        send_delayed(serving, delay_ms)

    response = request(serving, RequestCode.COUNT_PENDING_MESSAGES, CountPendingMessagesRequestHeader(bucket_millis=1))

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark == ("the counts have more than 2 spans of 1ms; count by a longer span, or between two times")
