"""A server on a virtual clock: without sockets (`serving`), or with sockets and a client of it (`server`, `tool`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.server.serving import Serving
from tests.server.tool import ANY_PORT, Tool, make_engine


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    engine = make_engine(VirtualClock())
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server:
        yield server
    engine.close()


@pytest.fixture
def tool(server: BrokerServer) -> Iterator[Tool]:
    with Tool(server.address) as tool:
        yield tool
