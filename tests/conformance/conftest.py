"""A real Apache RocketMQ beside the tests, and its clients; where there is none, they are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.peer.java_client import JavaClient
from bench.peer.jvm import why_not
from bench.peer.rocketmq import NameServer, free_port
from tests.conformance.java_clients import Case
from tests.conformance.servers import OurServer, Server, real_server, servers


@pytest.fixture(scope="session")
def name_server() -> Iterator[NameServer]:
    _skip_if(why_not())
    with NameServer() as server:
        yield server


def _skip_if(reason: str | None) -> None:
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def java(name_server: NameServer) -> Iterator[JavaClient]:
    """RocketMQ's client and tools; a test connects it to the broker it started."""
    with JavaClient(name_server) as client:
        yield client


@pytest.fixture(scope="session")
def port(name_server: NameServer) -> int:
    """Where the brokers listen, theirs and (in ids) ours: an offset message id names the broker's address."""
    return free_port()


# --- RocketMQ's clients, at our server and at RocketMQ's own -----------------------------------------


@pytest.fixture(scope="session", params=servers())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    _skip_if(why_not())
    folder = tmp_path_factory.mktemp("store")
    if request.param == "ours":
        with OurServer(folder) as ours:
            yield ours
    else:
        with real_server(folder) as real:
            yield real


@pytest.fixture(scope="session")
def tools(server: Server) -> Iterator[JavaClient]:
    """The client 5.5.0 with RocketMQ's tools."""
    with JavaClient(server) as client:
        client.connect()
        yield client


@pytest.fixture(scope="session")
def newest(server: Server, tools: JavaClient) -> Case:
    """The client 5.5.0, which can more than 4.9.8."""
    return Case(server=server, version="5.5.0", client=tools, tools=tools, early_ms=_early_ms(server))


def _early_ms(server: Server) -> int:
    """RocketMQ's timers work in slots of a second, and may come that much early."""
    return 1_000 if isinstance(server, NameServer) else 0


@pytest.fixture(scope="session")
def older(server: Server, tools: JavaClient) -> Iterator[Case]:
    with JavaClient(server, "4.9.8") as client:
        client.connect()
        yield Case(server=server, version="4.9.8", client=client, tools=tools, early_ms=_early_ms(server))


@pytest.fixture(params=["5.5.0", "4.9.8"])
def case(request: pytest.FixtureRequest, newest: Case, older: Case) -> Case:
    """Each version of the client."""
    return newest if request.param == newest.version else older


@pytest.fixture(scope="session")
def early_ms(newest: Case) -> int:
    """How much too early a timer may come at this server."""
    return newest.early_ms
