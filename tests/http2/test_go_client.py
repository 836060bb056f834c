"""Go's gRPC client with our server: another implementation of HTTP/2 than grpcio's."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.conformance.client_programs import ClientUnavailableError, go_program
from tests.http2.grpc_kit import GrpcEcho
from tests.waiting import PATIENCE_S

RESULTS = {
    "big": "20971520 <nil>",
    "empty": "0 <nil>",
    "concurrent": "2000",
    "server stream": "0,1,2,3,4",
    "chat": "a,b,c",
    "ended chat": "a,end Aborted: the client said so: 100 % ä\n",
    "failure": "NotFound: 100 % ä",
    "unknown": "Unimplemented: this server has no method /test.Service/Other",
    "gzip": "Unimplemented: messages with the grpc-encoding gzip are not supported; send them with identity",
    "deadline": "DeadlineExceeded",
    "cancelled": "Canceled",
    "after": "still there<nil>",
}


@pytest.mark.conformance
def test_each_kind_of_call_of_gos_client(grpc_server: GrpcEcho) -> None:
    """Unary with up to 20 MiB, 2,000 at once, streams, status, deadline, cancellation, keepalive pings."""
    try:
        command = go_program("go-grpc")
    except ClientUnavailableError as exc:
        pytest.skip(str(exc))

    done = subprocess.run(
        [*command, grpc_server.target], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert json.loads(done.stdout) == RESULTS
    assert {grpc_server.closed_calls.get(timeout=PATIENCE_S).is_open for _ in range(2)} == {False}
