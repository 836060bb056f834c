"""Errors for response codes: the operation, the response, and advice."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.cluster.failures import check_response, response_error, send_error
from mqtemplate.errors import (
    BrokerBusyError,
    BrokerError,
    DelayError,
    MessageError,
    SendError,
    UnsupportedError,
)
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode

OTHER_TYPE = "TopicMessageType validate failed, the expected type is NORMAL, but actual type is DELAY"


def response(code: int, remark: str | None = "because") -> RemotingCommand:
    return RemotingCommand(code, remark=remark)


def test_a_successful_response_is_returned() -> None:
    good = response(ResponseCode.SUCCESS)

    assert check_response(good, "ask", "here:1") is good


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (ResponseCode.TOPIC_NOT_EXIST, BrokerError, "autoCreateTopicEnable=true"),
        (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, BrokerError, "autoCreateSubscriptionGroup=true"),
        (ResponseCode.NO_PERMISSION, BrokerError, "check the topic's perm, access-key and secret-key"),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, UnsupportedError, "if it is an old broker, use a newer broker"),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, UnsupportedError, "if it is a proxy, set rocketmq.name-server to"),
        (ResponseCode.SYSTEM_BUSY, BrokerBusyError, "overloaded; try again later"),
        (ResponseCode.FLOW_CONTROL, BrokerBusyError, "overloaded; try again later"),
        (4_711, BrokerError, "answered 4711: because"),
    ],
)
def test_the_error_for_a_refusal_has_advice(code: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        check_response(response(code), "read queue 1", "10.0.0.1:10911")

    assert str(raised.value).startswith("read queue 1: 10.0.0.1:10911 answered ")
    assert text in str(raised.value)


def test_a_response_without_a_remark_is_described_by_its_code() -> None:
    problem = response_error(response(ResponseCode.SYSTEM_ERROR, None), "ask", "a:1")

    assert str(problem) == "ask: a:1 answered 1 SYSTEM_ERROR"


@pytest.mark.parametrize(
    ("code", "remark", "has_timer", "error", "text"),
    [
        (ResponseCode.MESSAGE_ILLEGAL, "timer message illegal", True, DelayError, "timerMaxDelaySec"),
        (ResponseCode.MESSAGE_ILLEGAL, OTHER_TYPE, True, MessageError, "(mqadmin updateTopic -a +message.type=MIXED)"),
        (ResponseCode.MESSAGE_ILLEGAL, OTHER_TYPE, False, MessageError, "a topic of the type of the message"),
        (ResponseCode.MESSAGE_ILLEGAL, "too large", False, MessageError, "too large"),
        (ResponseCode.INVALID_PARAMETER, "queue", False, MessageError, "queue"),
        (ResponseCode.SYSTEM_ERROR, "timerWheelEnable is false", True, UnsupportedError, "set timerWheelEnable=true"),
        (ResponseCode.SYSTEM_ERROR, "flow control", True, SendError, "flow control"),
        (ResponseCode.SERVICE_NOT_AVAILABLE, "disk full", False, SendError, "its disk is full"),
    ],
)
def test_the_error_for_a_refused_message_depends_on_the_reason(
    code: int, remark: str, has_timer: bool, error: type[Exception], text: str
) -> None:
    """The message is invalid, the broker lacks a feature, or the failure may pass."""
    problem = send_error(response(code, remark), "send", "a:1", has_timer=has_timer)

    assert type(problem) is error
    assert text in str(problem)


def test_the_advice_for_a_refused_delay_fits_the_reason() -> None:
    """The limit of RocketMQ's timers is not the reason of a refusal that says something else."""
    for remark in (OTHER_TYPE, "the deliver time is 9d from now, allowed are 3d"):
        problem = send_error(response(ResponseCode.MESSAGE_ILLEGAL, remark), "send", "a:1", has_timer=True)

        assert "timerMaxDelaySec" not in str(problem)
