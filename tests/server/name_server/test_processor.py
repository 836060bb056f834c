"""The name server: routes, lists, the key-value table and write permissions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RequestCode
from mqtemplate.remoting.protocol.bodies.route import TopicRouteData
from mqtemplate.remoting.protocol.headers.admin import (
    GetRouteInfoRequestHeader,
)
from mqtemplate.server import BrokerServerSettings, LocalCluster
from tests.server.tool import ANY_PORT, Tool, make_engine


def make_cluster(path: Path | None = None, **settings: bool) -> LocalCluster:
    engine = make_engine(VirtualClock(), path)
    return LocalCluster(engine, BrokerServerSettings(listen=ANY_PORT, **settings), ANY_PORT)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with make_cluster() as cluster:
        yield cluster


@pytest.fixture
def tool(cluster: LocalCluster) -> Iterator[Tool]:
    with Tool(cluster.name_server_address) as tool:
        yield tool


def route_of(tool: Tool, topic: str) -> TopicRouteData:
    response = tool.request_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))
    return TopicRouteData.decode(response.body)


def test_the_broker_answers_requests_to_a_name_server_too(cluster: LocalCluster) -> None:
    """A client may know one address only."""
    cluster.engine.create_topic("orders", 1)

    with Tool(cluster.address) as at_the_broker:
        route = route_of(at_the_broker, "orders")

    assert route.broker_datas[0].broker_addrs == {0: str(cluster.address)}
