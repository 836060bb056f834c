"""A server with both protocols, and a client of the gRPC protocol: in real time, and on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.server import BrokerServer
from tests.server.grpc_api.grpc_tool import GrpcTool, serving


@pytest.fixture
def server() -> Iterator[BrokerServer[EmbeddedBroker]]:
    with serving() as server:
        yield server


@pytest.fixture
def tool(server: BrokerServer[EmbeddedBroker]) -> Iterator[GrpcTool]:
    with GrpcTool(server) as tool:
        yield tool


@pytest.fixture
def stepped() -> Iterator[BrokerServer[EmbeddedBroker]]:
    """A server on a virtual clock: `advance` steps its services."""
    with serving(EmbeddedBroker(None, clock=VirtualClock())) as server:
        yield server


@pytest.fixture
def stepped_tool(stepped: BrokerServer[EmbeddedBroker]) -> Iterator[GrpcTool]:
    with GrpcTool(stepped) as tool:
        yield tool
