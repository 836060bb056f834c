"""Servers for RocketMQ's gRPC clients, each started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.grpc_clients.servers import (
    GrpcServer,
    guarded_proxy,
    local_proxy,
    own_guarded_server,
    own_server,
)
from tests.conformance.servers import server_names


@pytest.fixture(scope="session", params=server_names())
def server_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def open_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server without access control. It accepts TLS, too."""
    start = own_server if server_name == "mqtemplate" else local_proxy
    with start(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_server(server_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    """Server with access control."""
    start = own_guarded_server if server_name == "mqtemplate" else guarded_proxy
    with start(tmp_path_factory.mktemp("guarded")) as server:
        yield server
