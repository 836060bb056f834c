"""RocketMQ's gRPC client for Java sends to this project's server and receives. The other cases take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.client_programs import ClientUnavailableError
from tests.conformance.grpc_clients.programs import CLIENTS, create_topics, run_cases
from tests.conformance.grpc_clients.servers import own_server

pytestmark = pytest.mark.conformance


def test_the_java_client_sends_and_receives(tmp_path: Path) -> None:
    try:
        CLIENTS["java"].command()
    except ClientUnavailableError as error:
        pytest.skip(str(error))
    with own_server(tmp_path) as server:
        create_topics(server, "smoke-", ["normal"])
        found = run_cases("java", server, "smoke-", ["normal"])["normal"]

    assert "error" not in found, found["error"]
    assert found["received"]["body"] == "hello"
    assert found["received"]["id"] == found["sent"]
