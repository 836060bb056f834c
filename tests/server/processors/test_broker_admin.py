"""Runtime information, statistics and settings of the broker, as administration tools read them."""

from __future__ import annotations

import json
import re

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
NUMBERS_OF_THE_EXPORTER = [
    # rocketmq-exporter: BrokerRuntimeStats parses each of them, and fails as a whole if one is missing.
    "bootTimestamp",
    "brokerVersion",
    "commitLogDiskRatio",
    "commitLogMaxOffset",
    "commitLogMinOffset",
    "consumeQueueDiskRatio",
    "dispatchBehindBytes",
    "dispatchMaxBuffer",
    "earliestMessageTimeStamp",
    "getMessageEntireTimeMax",
    "msgGetTotalTodayMorning",
    "msgGetTotalTodayNow",
    "msgGetTotalYesterdayMorning",
    "msgPutTotalTodayMorning",
    "msgPutTotalTodayNow",
    "msgPutTotalYesterdayMorning",
    "pageCacheLockTimeMills",
    "pullThreadPoolQueueCapacity",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueSize",
    "putLatency99",
    "putLatency999",
    "putMessageAverageSize",
    "putMessageEntireTimeMax",
    "putMessageSizeTotal",
    "putMessageTimesTotal",
    "queryThreadPoolQueueCapacity",
    "queryThreadPoolQueueHeadWaitTimeMills",
    "queryThreadPoolQueueSize",
    "remainTransientStoreBufferNumbs",
    "sendThreadPoolQueueCapacity",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "sendThreadPoolQueueSize",
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


def test_the_exporter_for_prometheus_can_parse_the_runtime_information(serving: Serving) -> None:
    """Also of a store in memory, which has no disk."""
    send(serving, 3)

    table = runtime_info(serving)

    assert [name for name in NUMBERS_OF_THE_EXPORTER if name not in table or not float(table[name]) >= -1] == []
    assert float(table["remainHowManyDataToFlush"].split(" ")[0]) >= 0
    assert re.fullmatch(r"Total : [\d.]+ [KMGT]?i?B, Free : [\d.]+ [KMGT]?i?B\.", table["commitLogDirCapacity"])
    times = dict(each.split(":") for each in table["putMessageDistributeTime"].split(" "))
    assert list(times)[:3] == ["[<=0ms]", "[0~10ms]", "[10~50ms]"]
    assert sum(map(int, times.values())) == int(table["putMessageTimesTotal"]) == 3
    assert float(table["putMessageAverageSize"]) == int(table["putMessageSizeTotal"]) / 3 > 0


def test_each_used_delay_level_has_its_progress(serving: Serving) -> None:
    for _ in range(2):
        serving.engine.sends.send(Message("orders", b"x", {"DELAY": "3"}))
    serving.step()

    table = runtime_info(serving)

    assert {name: value for name, value in table.items() if name.startswith("scheduleMessageOffset")} == {
        "scheduleMessageOffset_3": "0,2"
    }


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
