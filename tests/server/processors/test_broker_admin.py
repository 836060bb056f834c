"""Runtime information, statistics and settings of the broker, as administration tools read them."""

from __future__ import annotations

import json

import pytest

from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import KVTable
from mqtemplate.remoting.protocol.headers.admin import GetBrokerConfigResponseHeader
from tests.server.serving import Serving

READ_BY_TOOLS = [
    "brokerVersionDesc",
    "brokerActive",
    "putTps",
    "getTransferredTps",
    "sendThreadPoolQueueSize",
    "pullThreadPoolQueueSize",
    "ackThreadPoolQueueSize",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "ackThreadPoolQueueHeadWaitTimeMills",
    "pageCacheLockTimeMills",
    "earliestMessageTimeStamp",
    "commitLogDiskRatio",
    "timerReadBehind",
    "timerOffsetBehind",
    "timerCongestNum",
    "timerEnqueueTps",
    "timerDequeueTps",
    "msgPutTotalTodayNow",
    "msgPutTotalTodayMorning",
    "msgPutTotalYesterdayMorning",
    "msgGetTotalTodayNow",
    "msgGetTotalTodayMorning",
    "msgGetTotalYesterdayMorning",
    "bootTimestamp",
    "startAcceptSendRequestTimeStamp",
]


@pytest.fixture
def serving(serving: Serving) -> Serving:
    serving.engine.create_topic("orders", 1)
    serving.step()
    return serving


def advance(serving: Serving, milliseconds: int) -> None:
    """Advance the clock at once, and step the services."""
    serving.clock.move_ms(milliseconds)
    serving.step()


def send(serving: Serving, count: int) -> None:
    for _ in range(count):
        serving.engine.sends.send(Message("orders", b"x"), MessageQueue("orders", "broker-a", 0))


def runtime_info(serving: Serving) -> dict[str, str]:
    response = serving.request(RequestCode.GET_BROKER_RUNTIME_INFO)
    assert response is not None
    return KVTable.decode(response.body).table


def test_the_runtime_information_has_every_value_that_tools_read(serving: Serving) -> None:
    send(serving, 1)

    table = runtime_info(serving)

    assert [name for name in READ_BY_TOOLS if name not in table] == []
    assert len([float(rate) for rate in table["putTps"].split()]) == 3
    assert int(table["earliestMessageTimeStamp"]) == serving.clock.now_ms()
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
    assert table["brokerVersionDesc"] == "V5_3_3"


def test_rates_are_of_the_last_period(serving: Serving) -> None:
    """30 messages in 10 seconds are 3 per second. Half a minute later the rate is 0."""
    send(serving, 30)
    advance(serving, 10_000)
    busy = runtime_info(serving)["putTps"].split()
    for _ in range(3):
        advance(serving, 10_000)

    quiet = runtime_info(serving)["putTps"].split()

    assert float(busy[0]) == 3.0
    assert float(quiet[0]) == 0.0
    assert float(quiet[1]) == 0.75  # 30 in 40 seconds: the server has not run longer


def test_totals_are_counted_by_day(serving: Serving) -> None:
    send(serving, 5)
    advance(serving, 86_400_000)
    send(serving, 2)

    table = runtime_info(serving)

    assert [table[f"msgPutTotal{day}"] for day in ("YesterdayMorning", "TodayMorning", "TodayNow")] == ["0", "5", "7"]


def test_an_empty_log_has_no_first_message(serving: Serving) -> None:
    assert runtime_info(serving)["earliestMessageTimeStamp"] == "-1"


def test_settings_have_rocketmqs_names(serving: Serving) -> None:
    response = serving.request(RequestCode.GET_BROKER_CONFIG)

    lines = dict(line.split("=", 1) for line in response.body.decode().splitlines())
    assert (lines["brokerName"], lines["brokerClusterName"]) == ("broker-a", "DefaultCluster")
    assert lines["listenPort"] == "10911"
    assert (lines["autoCreateTopicEnable"], lines["flushDiskType"]) == ("true", "SYNC_FLUSH")
    assert json.loads(response.header(GetBrokerConfigResponseHeader).version)["counter"] == 0
