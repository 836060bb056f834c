"""Runtime information, statistics and settings of the broker, as administration tools read them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import Message, MessageQueue
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import KVTable
from mqtemplate.remoting.protocol.headers.admin import GetBrokerConfigResponseHeader
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.tool import ANY_PORT, Tool, make_engine

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


class Served:
    """A server on a virtual clock that the test advances."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = make_engine(self.clock)
        self.server = BrokerServer(self.engine, BrokerServerSettings(listen=ANY_PORT))

    def advance(self, milliseconds: int) -> None:
        self.clock.move_ms(milliseconds)
        for service in self.server.services():
            service.step()

    def send(self, count: int) -> None:
        for _ in range(count):
            self.engine.sends.send(Message("orders", b"x"), MessageQueue("orders", "broker-a", 0))


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    with served.server:
        served.engine.create_topic("orders", 1)
        served.advance(0)
        yield served
    served.engine.close()


@pytest.fixture
def tool(served: Served) -> Iterator[Tool]:
    with Tool(served.server.address) as tool:
        yield tool


def runtime_info(tool: Tool) -> dict[str, str]:
    return KVTable.decode(tool.request_ok(RequestCode.GET_BROKER_RUNTIME_INFO).body).table


def test_the_runtime_information_has_every_value_that_tools_read(served: Served, tool: Tool) -> None:
    served.send(1)

    table = runtime_info(tool)

    assert [name for name in READ_BY_TOOLS if name not in table] == []
    assert len([float(rate) for rate in table["putTps"].split()]) == 3
    assert int(table["earliestMessageTimeStamp"]) == served.clock.now_ms()
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1
    assert table["brokerVersionDesc"] == "V5_3_3"


def test_rates_are_those_of_the_last_period(served: Served, tool: Tool) -> None:
    """30 messages in 10 seconds are 3 per second. Half a minute later the rate is 0."""
    served.send(30)
    served.advance(10_000)
    busy = runtime_info(tool)["putTps"].split()
    for _ in range(3):
        served.advance(10_000)

    quiet = runtime_info(tool)["putTps"].split()

    assert float(busy[0]) == 3.0
    assert float(quiet[0]) == 0.0
    assert float(quiet[1]) == 0.75  # 30 in 40 seconds: the server has not run longer


def test_totals_are_counted_by_day(served: Served, tool: Tool) -> None:
    served.send(5)
    served.advance(86_400_000)
    served.send(2)

    table = runtime_info(tool)

    assert [table[f"msgPutTotal{day}"] for day in ("YesterdayMorning", "TodayMorning", "TodayNow")] == ["0", "5", "7"]


def test_an_empty_log_has_no_first_message(tool: Tool) -> None:
    assert runtime_info(tool)["earliestMessageTimeStamp"] == "-1"


def test_settings_have_rocketmqs_names(served: Served, tool: Tool) -> None:
    response = tool.request_ok(RequestCode.GET_BROKER_CONFIG)

    lines = dict(line.split("=", 1) for line in response.body.decode().splitlines())
    assert (lines["brokerName"], lines["brokerClusterName"]) == ("broker-a", "DefaultCluster")
    assert lines["listenPort"] == str(served.server.address.port)
    assert (lines["autoCreateTopicEnable"], lines["flushDiskType"]) == ("true", "SYNC_FLUSH")
    assert json.loads(response.header(GetBrokerConfigResponseHeader).version)["counter"] == 0
