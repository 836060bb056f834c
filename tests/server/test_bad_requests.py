"""Requests with wrong fields and bodies over real sockets: each response has a reason, and no error is unexpected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtemplate.clock import VirtualClock
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.server import BrokerServer, BrokerServerSettings
from tests.remoting.protocol.code_tables import wire_names
from tests.server.tool import ANY_PORT, Tool, make_engine

MAY_BE_HELD = {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE}
CODES = sorted(set(map(int, RequestCode)) - MAY_BE_HELD)
TEXTS = [
    "",
    "x",
    "orders",
    "billing",
    "-1",
    "0",
    "1",
    "2147483648",
    "9223372036854775808",
    "true",
    "%RETRY%",
    "\x01\x02",
]
BODIES = [b"", b"x", b"{}", b"[]", b"null", b'{"groupName":1}', b'{"mqSet":{}}', b"\x00" * 40, b"[" * 300, b"a=b"]


@st.composite
def requests(draw: st.DrawFn) -> RemotingCommand:
    code = draw(st.sampled_from(CODES))
    request = RemotingCommand.request(code, body=draw(st.sampled_from(BODIES)))
    values = {name: draw(st.none() | st.sampled_from(TEXTS)) for name in wire_names(code)}
    request.ext_fields = {name: value for name, value in values.items() if value is not None}
    return request


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    engine = make_engine(VirtualClock())
    with BrokerServer(engine, BrokerServerSettings(listen=ANY_PORT)) as server, Tool(server.address) as tool:
        engine.create_topic("orders", 2)
        tool.consume("billing", "orders")
        yield tool
    engine.close()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_no_request_causes_an_unexpected_error(tool: Tool, request: RemotingCommand) -> None:
    """An unexpected exception would be in the log, with a traceback."""
    with structlog.testing.capture_logs() as logged:
        response = tool.send_request(request)

    assert [event for event in logged if "exc_info" in event] == []
    assert response.code == ResponseCode.SUCCESS or response.remark


@pytest.mark.parametrize("code", CODES)
def test_a_request_without_fields_and_body_gets_a_response(tool: Tool, code: int) -> None:
    with structlog.testing.capture_logs() as logged:
        response = tool.request(code)

    assert [event for event in logged if "exc_info" in event] == []
    assert response.code == ResponseCode.SUCCESS or response.remark
