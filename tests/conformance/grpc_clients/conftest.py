"""Servers for RocketMQ's gRPC clients, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.grpc_clients.servers import GrpcServer, guarded_proxy, local_proxy
from tests.conformance.servers import server_names


@pytest.fixture(scope="session", params=server_names())
def server_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def open_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server without access control. It accepts TLS, too."""
    with local_proxy(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server with access control."""
    with guarded_proxy(tmp_path_factory.mktemp("guarded")) as server:
        yield server
