"""The cases of h2spec with our server: another reading of the RFC than that of our own tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from mqtemplate.http2.grpc_server import GrpcCall, GrpcConnection
from mqtemplate.http2.streams import Http2Stream
from tests.conformance.client_programs import ClientUnavailableError, go_program
from tests.http2.grpc_kit import GrpcEcho
from tests.waiting import PATIENCE_S

OF_AN_OLDER_RFC = ["Sends HEADERS frame that depend on itself", "Sends PRIORITY frame that depend on itself"]
"""RFC 7540, 5.3.1. Priorities are deprecated by RFC 9113, and this server ignores them."""


class WebCall(GrpcCall):
    """Request of any method and content type, which is answered at its end. A call of gRPC may be refused before."""

    def on_data(self, data: bytes, *, is_last: bool) -> None:
        if is_last:
            self._stream.respond(((":status", "200"),), b"x" * 60, (("checksum", "1"),))


class WebServer(GrpcEcho):
    def open_call(self, connection: GrpcConnection, stream: Http2Stream, headers: dict[str, str]) -> GrpcCall:
        return WebCall(headers[":path"], headers, connection, stream, connection.read_ms)


@pytest.fixture
def server() -> Iterator[WebServer]:
    server = WebServer()
    server.start()
    yield server
    server.stop(0)


@pytest.mark.conformance
def test_the_cases_of_h2spec_pass(server: WebServer) -> None:
    try:
        command = go_program("go-h2spec")
    except ClientUnavailableError as exc:
        pytest.skip(str(exc))
    address = server.address

    done = subprocess.run(
        [*command, address.ip, str(address.port)], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    failures = printed.partition("Failures:")[2]
    assert re.findall(r"\u00d7 \d+: (.*)", failures) == OF_AN_OLDER_RFC
    assert "145 tests, 143 passed, 0 skipped, 2 failed" in printed
