"""Recorded requests: RocketMQ's signature covers neither the code of a request nor a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import ConfigurationError
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.acl import sign_command
from mqtemplate.remoting.protocol.headers.admin import GetRouteInfoRequestHeader
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.settings import RemotingServerSettings, ServerTls, TlsMode
from mqtemplate.server import Account, AclSettings, BrokerServer, BrokerServerSettings
from mqtemplate.server.acl.guard import RepeatedSignatures
from tests.remoting.certificates import Certificates, has_openssl
from tests.server.serving import SECRET, RecordingConnection, Serving
from tests.server.tool import ANY_PORT, make_engine

WINDOW_MS = 60_000
ACCOUNTS = (Account(access_key="administrator", secret_key=SECRET, admin=True),)
ROUTE = GetRouteInfoRequestHeader(topic="orders")


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(acl=AclSettings(accounts=ACCOUNTS, replay_window_ms=WINDOW_MS)) as serving:
        serving.engine.create_topic("orders", 1)
        yield serving


def signed(code: int, header: CommandHeader) -> RemotingCommand:
    request = RemotingCommand.request(code, header)
    sign_command(request, "administrator", SECRET)
    return request


def code_of(serving: Serving, request: RemotingCommand) -> int:
    """Return the code of the response to a request that arrives on a connection of its own."""
    response = serving.process(RecordingConnection(), request)
    assert response is not None
    return response.code


def test_a_recorded_query_is_not_accepted_as_a_deletion(serving: Serving) -> None:
    """The fields of both are the same, and so are their signatures."""
    query = signed(RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE)
    first = code_of(serving, query)

    response = serving.process(RecordingConnection(), replace(query, code=RequestCode.DELETE_TOPIC_IN_BROKER))

    assert first == ResponseCode.SUCCESS
    assert response is not None
    assert response.remark == (
        "this signature of access key 'administrator' was used before, so the request may be a recorded one; sign the "
        "request again with other contents, or set mqtemplate.server.acl.replay-window-ms to 0"
    )
    assert "orders" in serving.engine.topics.names()


def test_requests_that_clients_repeat_unchanged_are_accepted(serving: Serving) -> None:
    query = signed(RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE)

    assert [code_of(serving, query) for _ in range(3)] == [ResponseCode.SUCCESS] * 3


def test_a_signature_is_accepted_again_after_the_window(serving: Serving) -> None:
    deletion = signed(RequestCode.DELETE_TOPIC_IN_BROKER, ROUTE)
    codes = [code_of(serving, deletion)]
    for wait_ms in (WINDOW_MS - 1, WINDOW_MS):
        serving.clock.move_ms(wait_ms)
        codes.append(code_of(serving, deletion))

    assert codes == [ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION, ResponseCode.SUCCESS]


def test_by_default_signatures_are_not_remembered() -> None:
    with Serving(acl=AclSettings(accounts=ACCOUNTS)) as serving:
        deletion = signed(RequestCode.DELETE_TOPIC_IN_BROKER, ROUTE)

        assert [code_of(serving, deletion), code_of(serving, deletion)] == [ResponseCode.SUCCESS] * 2


def test_the_memory_of_the_window_is_bounded() -> None:
    """The oldest signatures are forgotten, and that is logged once."""
    signatures = RepeatedSignatures(VirtualClock(), WINDOW_MS, max_signatures=10)
    requests = [signed(RequestCode.DELETE_TOPIC_IN_BROKER, GetRouteInfoRequestHeader(topic=f"t{n}")) for n in range(13)]

    with capture_logs() as logs:
        first_time = [signatures.refuses(request) for request in requests]

    assert (first_time, signatures.refuses(requests[-1]), signatures.refuses(requests[0])) == (
        [False] * 13,
        True,
        False,
    )
    assert [entry["event"] for entry in logs] == ["acl.replay_window_shortened"]


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="replay-window-ms must be 0 or more, got -1; 0 permits repeated"):
        AclSettings(replay_window_ms=-1)


# --- the warning at the start ---------------------------------------------------------------------------


@pytest.mark.skipif(not has_openssl(), reason="the openssl command, which makes certificates, is missing")
@pytest.mark.parametrize(("mode", "is_warned"), [(None, True), (TlsMode.PERMISSIVE, True), (TlsMode.ENFORCING, False)])
def test_access_control_without_enforced_tls_is_logged_at_the_start(
    mode: TlsMode | None, is_warned: bool, tmp_path: Path
) -> None:
    cert, key = map(str, Certificates(tmp_path).issue("server", "IP:127.0.0.1"))
    tls = None if mode is None else ServerTls(cert_path=cert, key_path=key, mode=mode)
    engine = make_engine(VirtualClock())
    settings = BrokerServerSettings(listen=ANY_PORT)
    server = BrokerServer(
        engine, settings, remoting=RemotingServerSettings(tls=tls), acl=AclSettings(accounts=ACCOUNTS)
    )

    with capture_logs() as logs, server:
        pass
    engine.close()

    warnings = [entry for entry in logs if entry["event"] == "acl.tls_not_enforced"]
    assert [entry["hint"] for entry in warnings] == is_warned * [
        "a recorded request stays valid, and with another request code too: set mqtemplate.server.tls.mode to enforcing"
    ]
