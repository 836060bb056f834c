"""Requests with random fields and bodies: each gets a response, and the server continues to run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.server.requests.response import problem_response
from tests.remoting.protocol.code_tables import wire_names
from tests.server.serving import RecordingConnection, Serving
from tests.thirds import examples

RUN_TOPICS = {"orders": "orders", "%RETRY%billing": "%RETRY%billing"}
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**63]),
).map(str)
TEXTS = st.one_of(
    NUMBERS,
    st.sampled_from(["", "orders", "nowhere", "%RETRY%billing", "billing", "true", "TAG", "SQL92", "a || b", "TBW102"]),
    st.sampled_from(["DELAY\x013", "TIMER_DELIVER_MS\x0199", "TRAN_MSG\x01true\x02PGROUP\x01p", "\x01\x02", "a\x01b"]),
    st.text(max_size=8),
)
BODIES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b"{}", b"[]", b'{"clientID":"c"}', b'{"consumerGroup":"g","clientId":"c","mqSet":[{}]}']),
    st.just(encode_queue_batches([(Message("orders", b"x"), 0), (Message("%RETRY%billing", b"y"), 0)], RUN_TOPICS)),
    st.just(b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"topic":"orders"}]}]}'),
)


with Serving() as _any_server:
    CODES = sorted(_any_server.server.all_processors)


@pytest.fixture(scope="module")
def serving():
    with Serving() as serving:
        serving.send("orders", b"first")
        serving.heartbeat("billing", "orders")
        yield serving


@st.composite
def requests(draw: st.DrawFn) -> RemotingCommand:
    code = draw(st.sampled_from(CODES))
    ext_fields = {name: draw(TEXTS) for name in wire_names(code) if draw(st.integers(0, 9))}
    request = RemotingCommand.request(code, body=draw(BODIES), one_way=draw(st.booleans()))
    request.ext_fields = ext_fields
    return request


@settings(max_examples=examples(1_500), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_every_request_gets_a_response_or_is_held_or_is_one_way(serving: Serving, request: RemotingCommand) -> None:
    connection = RecordingConnection()
    held, relayed = len(serving.server.hold), len(serving.connection.pushed)

    with capture_logs() as logged:
        response = process(serving, connection, request)

    assert [event for event in logged if "exc_info" in event] == []
    waits = len(serving.server.hold) > held or len(serving.connection.pushed) > relayed
    responses = [each for each in (response, *connection.replies) if each is not None]
    assert responses or waits or request.is_one_way
    assert all(each.code == ResponseCode.SUCCESS or each.remark for each in responses)
    serving.server.core.forget(connection.id)


@pytest.mark.parametrize("code", CODES)
def test_a_request_without_fields_and_body_gets_a_response(serving: Serving, code: int) -> None:
    response = process(serving, RecordingConnection(), RemotingCommand.request(code))

    assert response is not None
    assert response.code == ResponseCode.SUCCESS or response.remark


def process(serving: Serving, connection: RecordingConnection, request: RemotingCommand) -> RemotingCommand | None:
    """Return the response. An unexpected exception is raised: `problem_response` has no response to it."""
    try:
        return serving.server.all_processors[request.code](connection, request)  # type: ignore[arg-type]
    except Exception as exc:
        response = problem_response(request, exc)
        if response is None:
            raise
        return response


def test_the_server_still_works_after_garbled_requests(serving: Serving) -> None:
    serving.engine.create_topic("afterwards", 1)

    assert serving.send("afterwards", b"last").code == ResponseCode.SUCCESS
    assert serving.engine.store.read_at(0) is not None
