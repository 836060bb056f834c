"""Our own requests: capabilities, and bounds of pages. `tests/server/scripts/delayed.script` has the rest."""

from __future__ import annotations

import pytest

from mqtemplate.broker import Capability
from mqtemplate.brokers import EmbeddedSettings
from mqtemplate.message import Message, Property
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.group import HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.bodies.own_requests import (
    CountPendingMessagesRequestHeader,
    GetPendingMessagesRequestHeader,
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
    PendingMessagesData,
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
    handle = serving.engine.sends.send(message).handle
    assert handle is not None
    return handle


def request(serving: Serving, code: int, header: CommandHeader) -> RemotingCommand:
    response = serving.request(code, header)
    assert response is not None
    return response


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


# --- queries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "key", "of_page"), [(1_001, "k", 1_000), (50, "k" * 30_000, 34)])
def test_a_page_is_bounded_by_count_and_by_bytes(serving: Serving, count: int, key: str, of_page: int) -> None:
    """Whatever a client requests: at most 1,000 messages, and about a MiB."""
    for number in range(count):
        send_delayed(serving, HOUR_MS + number, key)

    first = page_of(serving, 1_000_000)
    second = page_of(serving, 1_000_000, first.messages[-1].cursor)

    assert (len(first.messages), first.has_more) == (of_page, True)
    assert (len(second.messages), second.has_more) == (count - of_page, False)


def test_a_count_by_too_many_spans_is_refused(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.server.processors.client._MAX_BUCKETS", 2)
    for delay_ms in (1_000, 2_000, 3_000):
        send_delayed(serving, delay_ms)

    response = request(serving, RequestCode.COUNT_PENDING_MESSAGES, CountPendingMessagesRequestHeader(bucket_millis=1))

    assert response.code == ResponseCode.INVALID_PARAMETER
    assert response.remark == ("the counts have more than 2 spans of 1ms; count by a longer span, or between two times")
