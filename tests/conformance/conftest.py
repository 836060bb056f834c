"""Fixtures with Apache RocketMQ and its clients. Without RocketMQ the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import unavailable_reason
from bench.peer.rocketmq import NameServer, free_port
from tests.conformance.java_clients import Case
from tests.conformance.servers import BrokerProcess, Server, rocketmq_server, server_names


@pytest.fixture(scope="package")
def rocketmq() -> None:
    """Skip the test if RocketMQ cannot run here."""
    if reason := unavailable_reason():
        pytest.skip(reason)


@pytest.fixture(scope="package")
def name_server(rocketmq: None) -> Iterator[NameServer]:
    with NameServer() as server:
        yield server


@pytest.fixture(scope="package")
def java(name_server: NameServer) -> Iterator[JavaClient]:
    """RocketMQ's client and tools. A test connects it to the broker that it started."""
    with JavaClient(name_server) as client:
        yield client


@pytest.fixture(scope="package")
def port(rocketmq: None) -> int:
    """Port of RocketMQ's broker. The embedded broker uses it in IDs: an offset message ID has the broker's address."""
    return free_port()


# --- RocketMQ's clients with both servers --------------------------------------------------------------


@pytest.fixture(scope="package", params=server_names())
def server(
    request: pytest.FixtureRequest, rocketmq: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    start = BrokerProcess if request.param == "mqtemplate" else rocketmq_server
    with start(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="package")
def tools(server: Server) -> Iterator[JavaClient]:
    """The client 5.5.0 with RocketMQ's tools."""
    with JavaClient(server) as client:
        client.connect()
        yield client


@pytest.fixture(scope="package")
def newest(server: Server, tools: JavaClient) -> Case:
    """The client 5.5.0, which has more features than 4.9.8."""
    return Case(server=server, version="5.5.0", client=tools, tools=tools)


@pytest.fixture(scope="package")
def older(server: Server, tools: JavaClient) -> Iterator[Case]:
    with JavaClient(server, "4.9.8") as client:
        client.connect()
        yield Case(server=server, version="4.9.8", client=client, tools=tools)


@pytest.fixture(params=["newest", pytest.param("older", marks=pytest.mark.thorough)])
def case(request: pytest.FixtureRequest, newest: Case) -> Case:
    """Each version of the client."""
    case: Case = newest if request.param == "newest" else request.getfixturevalue("older")
    return case
