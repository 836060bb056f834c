"""Response codes of errors: the code decides what a client does next."""

from __future__ import annotations

import pytest

from mqtemplate.errors import (
    BrokerClosedError,
    ConfigurationError,
    DelayError,
    DestinationError,
    MessageError,
    RemoteProtocolError,
    SelectorError,
    StoreError,
    StoreFullError,
)
from mqtemplate.message import HostAddress
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.server import BrokerServerSettings
from mqtemplate.server.requests.refusal import RefusedError
from mqtemplate.server.requests.response import problem_response

REQUEST = RemotingCommand.request(RequestCode.SEND_MESSAGE_V2, opaque=9)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedError(ResponseCode.FLOW_CONTROL, "too fast"), ResponseCode.FLOW_CONTROL),
        (DestinationError("no name"), ResponseCode.INVALID_PARAMETER),
        (DelayError("too long"), ResponseCode.MESSAGE_ILLEGAL),
        (MessageError("too large"), ResponseCode.MESSAGE_ILLEGAL),
        (RemoteProtocolError("no header"), ResponseCode.INVALID_PARAMETER),
        (SelectorError("a =", 3, "something is missing"), ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        (BrokerClosedError("closed"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (StoreFullError("full"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (StoreError("broken"), ResponseCode.SYSTEM_ERROR),
    ],
)
def test_the_response_has_the_code_and_the_text_of_the_error(error: Exception, code: ResponseCode) -> None:
    response = problem_response(REQUEST, error)

    assert response is not None
    assert (response.code, response.remark, response.opaque, response.is_response) == (code, str(error), 9, True)


def test_an_unexpected_error_has_no_response() -> None:
    assert problem_response(REQUEST, ZeroDivisionError("division by zero")) is None


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"max_pull_count": 0}, "max-pull-count must be 1 or more, got 0"),
        ({"client_expire_ms": -5}, "client-expire-ms must be 1 or more, got -5"),
        ({"cluster_name": ""}, "cluster-name is empty; give a name such as DefaultCluster"),
    ],
)
def test_an_invalid_setting_is_refused(setting: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        BrokerServerSettings(**setting)  # type: ignore[arg-type]


def test_the_defaults_are_rocketmqs() -> None:
    settings = BrokerServerSettings()

    assert settings.listen == HostAddress("127.0.0.1", 10911)
    assert (settings.cluster_name, settings.default_topic_queue_nums) == ("DefaultCluster", 8)
    assert (settings.client_expire_ms, settings.rebalance_lock_max_live_ms) == (120_000, 60_000)
