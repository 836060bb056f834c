"""Methods as processors: the types of a method's parameters select the parts of the request that it receives."""

from __future__ import annotations

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.message import HostAddress
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol import RemotingCommand
from mqtemplate.remoting.protocol.bodies.route import KVTable
from mqtemplate.remoting.protocol.headers.admin import KVConfigKeyRequestHeader, KVNamespaceRequestHeader
from mqtemplate.remoting.server import RemotingServer
from mqtemplate.remoting.settings import RemotingServerSettings
from mqtemplate.server.requests.registration import answers, register
from tests.server.serving import RecordingConnection

HEADER = KVConfigKeyRequestHeader(namespace="n", key="k")
TABLE = KVTable(table={"a": "1"})


class Answers:
    """Methods with each kind of result."""

    received: tuple[object, ...] = ()

    @answers(1)
    def _header(self, query: KVConfigKeyRequestHeader) -> KVNamespaceRequestHeader:
        return KVNamespaceRequestHeader(namespace=query.key)

    @answers(2)
    def _body(self, body: KVTable) -> KVTable:
        return KVTable(table=body.table | {"b": "2"})

    @answers(3)
    def _both(self) -> tuple[KVConfigKeyRequestHeader, bytes]:
        return HEADER, b"text"

    @answers(4)
    def _nothing(self, request: RemotingCommand, connection: Connection, body: KVTable) -> None:
        self.received = (request, connection, body)


@pytest.mark.parametrize(
    ("code", "ext_fields", "body"),
    [
        (1, {"namespace": "k"}, b""),
        (2, {}, b'{"table":{"a":"1","b":"2"}}'),
        (3, {"namespace": "n", "key": "k"}, b"text"),
        (4, {}, b""),
    ],
)
def test_the_result_of_a_method_is_the_content_of_the_response(
    code: int, ext_fields: dict[str, str], body: bytes
) -> None:
    server = RemotingServer(HostAddress("127.0.0.1", 0), RemotingServerSettings(), VirtualClock())
    methods, connection = Answers(), RecordingConnection()
    request = RemotingCommand.request(code, HEADER, TABLE.encode(), opaque=7)

    response = register(server, methods)[code](connection, request)  # type: ignore[arg-type]

    assert response is not None
    assert (response.code, response.opaque, response.ext_fields, response.body) == (0, 7, ext_fields, body)
    assert methods.received == ((request, connection, TABLE) if code == 4 else ())
