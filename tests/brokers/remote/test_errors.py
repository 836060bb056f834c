"""What brokers answer, as errors: what was asked, what was said, what to do."""

from __future__ import annotations

import pytest

from mqtemplate.brokers.remote.errors import check_response, response_error, send_error, unanswered_send_error
from mqtemplate.errors import (
    BrokerError,
    DelayError,
    MessageError,
    RemoteConnectError,
    RemoteTimeoutError,
    SendError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode


def answer(code: int, remark: str | None = "because") -> RemotingCommand:
    return RemotingCommand(code, remark=remark)


def test_success_is_handed_on() -> None:
    good = answer(ResponseCode.SUCCESS)

    assert check_response(good, "ask", "here:1") is good


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (ResponseCode.TOPIC_NOT_EXIST, BrokerError, "autoCreateTopicEnable=true"),
        (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, BrokerError, "autoCreateSubscriptionGroup=true"),
        (ResponseCode.NO_PERMISSION, BrokerError, "check the topic's perm, access-key and secret-key"),
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, UnsupportedError, "use a newer broker"),
        (ResponseCode.SYSTEM_BUSY, BrokerError, "overloaded; try again later"),
        (4_711, BrokerError, "answered 4711: because"),
    ],
)
def test_an_answer_that_refuses_says_what_to_do(code: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        check_response(answer(code), "read queue 1", "10.0.0.1:10911")

    assert str(raised.value).startswith("read queue 1: 10.0.0.1:10911 answered ")
    assert text in str(raised.value)


def test_an_answer_without_a_remark_is_told_by_its_name() -> None:
    assert (
        str(response_error(answer(ResponseCode.SYSTEM_ERROR, None), "ask", "a:1")) == "ask: a:1 answered 1 SYSTEM_ERROR"
    )


@pytest.mark.parametrize(
    ("code", "remark", "has_timer", "error", "text"),
    [
        (ResponseCode.MESSAGE_ILLEGAL, "timer message illegal", True, DelayError, "timerMaxDelaySec"),
        (ResponseCode.MESSAGE_ILLEGAL, "too large", False, MessageError, "too large"),
        (ResponseCode.INVALID_PARAMETER, "queue", False, MessageError, "queue"),
        (ResponseCode.SYSTEM_ERROR, "timerWheelEnable is false", True, UnsupportedError, "set timerWheelEnable=true"),
        (ResponseCode.SYSTEM_ERROR, "flow control", True, SendError, "flow control"),
        (ResponseCode.SERVICE_NOT_AVAILABLE, "disk full", False, SendError, "its disk is full"),
    ],
)
def test_a_message_that_was_not_taken_is_told_apart(
    code: int, remark: str, has_timer: bool, error: type[Exception], text: str
) -> None:
    """The message's own fault, an ability that lacks, or something that may pass."""
    problem = send_error(answer(code, remark), "send", "a:1", has_timer=has_timer)

    assert type(problem) is error
    assert text in str(problem)


def test_a_send_that_nobody_answered_tells_how_often_it_was_tried() -> None:
    late = unanswered_send_error("send", RemoteTimeoutError("no answer"), 3, 500)
    lost = unanswered_send_error("send", RemoteConnectError("refused"), 1, 500)

    assert isinstance(late, SendTimeoutError)
    assert str(late) == "send: tried 3 times within 500 ms, the last time: no answer"
    assert (type(lost), str(lost)) == (SendError, "send: tried once within 500 ms, the last time: refused")
