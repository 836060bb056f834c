"""Requests with random fields and bodies: each gets a response, and the server continues to run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtemplate.message import Message
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.sequenced import encode_queue_batches
from mqtemplate.server.requests.response import problem_response
from tests.remoting.protocol.code_tables import wire_names
from tests.server.serving import RecordingConnection, Serving

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


@pytest.fixture(scope="module")
def serving():
    with Serving() as serving:
        serving.send("orders", b"first")
        serving.heartbeat("billing", "orders")
        yield serving


@st.composite
def requests(draw: st.DrawFn) -> RemotingCommand:
    code = draw(st.sampled_from(sorted(CODES)))
    ext_fields = {name: draw(TEXTS) for name in wire_names(code) if draw(st.integers(0, 9))}
    request = RemotingCommand.request(code, body=draw(BODIES), one_way=draw(st.booleans()))
    request.ext_fields = ext_fields
    return request


CODES = [
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
    RequestCode.HEART_BEAT,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.CANCEL_DELAYED_MESSAGE,
    RequestCode.RESCHEDULE_DELAYED_MESSAGE,
    RequestCode.GET_PENDING_MESSAGES,
    RequestCode.COUNT_PENDING_MESSAGES,
    RequestCode.GET_RECORD_BLOCK,
    RequestCode.SEND_SEQUENCED_MESSAGES,
]


def test_all_codes_of_producers_and_consumers_are_tested(serving: Serving) -> None:
    """Transactions and replies have other tests."""
    others = {RequestCode.END_TRANSACTION, RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2}

    assert set(CODES) == serving.server.processors.keys() - others


@settings(max_examples=1_500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_every_request_gets_a_response_or_is_held_or_is_one_way(serving: Serving, request: RemotingCommand) -> None:
    connection = RecordingConnection()
    held = len(serving.server.hold)

    response, problem = process(serving, connection, request)

    assert problem is None, f"{request.ext_fields} {request.body!r}: {problem!r}"
    is_held = len(serving.server.hold) > held
    assert response is not None or connection.replies or is_held or request.is_one_way
    serving.server.hold.forget(connection)  # type: ignore[arg-type]
    serving.server.clients.forget(connection)  # type: ignore[arg-type]


def process(
    serving: Serving, connection: RecordingConnection, request: RemotingCommand
) -> tuple[RemotingCommand | None, Exception | None]:
    """Return the response, and the exception if it is unexpected."""
    try:
        return serving.server.processors[request.code](connection, request), None  # type: ignore[arg-type]
    except Exception as exc:
        response = problem_response(request, exc)
        return response, exc if response is None else None


def test_the_server_still_works_after_garbled_requests(serving: Serving) -> None:
    assert serving.send("orders", b"last").code == ResponseCode.SUCCESS
    assert serving.engine.store.read_at(0) is not None
