"""What a broker's answer code means here: which error, what was asked, what was said, what to do.

Source: RocketMQ ``remoting: ResponseCode``; section 5.2 of the specification.
"""

from __future__ import annotations

from mqtemplate.errors import (
    BrokerError,
    DelayError,
    MessageError,
    MQTemplateError,
    SendError,
    SendTimeoutError,
    UnsupportedError,
)
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode

RETRY_ELSEWHERE = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.NO_PERMISSION,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)
"""Answers to a send after which another queue or broker may take the message. Source: ``DefaultMQProducer``."""

_ADVICE = {
    ResponseCode.SYSTEM_BUSY: "it is overloaded; try again later, or give it more send threads",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "its version does not know this; use a newer broker",
    ResponseCode.SERVICE_NOT_AVAILABLE: "it takes nothing now: its disk is full, it is a replica, or it ends",
    ResponseCode.NO_PERMISSION: "the topic's permission, or access control, forbids it; look at the topic's perm, at "
    "access-key and secret-key, and at what the account may do",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic (mqadmin updateTopic, or Broker.create_topic), or set "
    "autoCreateTopicEnable=true on the broker",
    ResponseCode.SUBSCRIPTION_NOT_EXIST: "the broker does not know the subscription yet; a heartbeat tells it",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group (mqadmin updateSubGroup), or set "
    "autoCreateSubscriptionGroup=true on the broker",
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: "write the selector as the broker's version understands it",
    ResponseCode.FLOW_CONTROL: "it is overloaded; try again later",
}
_WHEEL_IS_OFF = "timerWheelEnable"
_BAD_MESSAGE = frozenset({ResponseCode.MESSAGE_ILLEGAL, ResponseCode.INVALID_PARAMETER})


def check_answer(answer: RemotingCommand, asked: str, address: str) -> RemotingCommand:
    """Return *answer* if it says success.

    Raises:
        BrokerError: It does not; `UnsupportedError` where the broker never can.
    """
    if answer.code != ResponseCode.SUCCESS:
        raise answer_problem(answer, asked, address)
    return answer


def answer_problem(answer: RemotingCommand, asked: str, address: str) -> BrokerError:
    """The error for an answer that is not the one hoped for.

    Args:
        asked: What it was to do, as in "read queue 1 of orders".
    """
    kind = UnsupportedError if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else BrokerError
    return kind(_text(answer, asked, address))


def send_problem(answer: RemotingCommand, asked: str, address: str, *, has_timer: bool) -> MQTemplateError:
    """The error for a message that the broker did not take: the message's fault, a lacking ability, or neither.

    Args:
        has_timer: It asked for a delay by a time.
    """
    text = _text(answer, asked, address)
    if has_timer and answer.code == ResponseCode.SYSTEM_ERROR and _WHEEL_IS_OFF in (answer.remark or ""):
        return UnsupportedError(f"{text}; set timerWheelEnable=true on the broker, or use a delay level")
    if has_timer and answer.code == ResponseCode.MESSAGE_ILLEGAL:
        return DelayError(f"{text}; the limit is the broker's timerMaxDelaySec (3 days unless it was raised)")
    if answer.code in _BAD_MESSAGE:
        return MessageError(text)
    return SendError(text)


def send_failure(asked: str, cause: BrokerError, tried: int, timeout_ms: int) -> SendError:
    """The error of a send that no broker answered."""
    kind = SendTimeoutError if isinstance(cause, TimeoutError) else SendError
    times = "once" if tried == 1 else f"{tried} times"
    return kind(f"{asked}: tried {times} within {timeout_ms} ms, the last time: {cause}")


def _text(answer: RemotingCommand, asked: str, address: str) -> str:
    code = ResponseCode.of(answer.code)
    name = f"{answer.code} {code.name}" if isinstance(code, ResponseCode) else str(answer.code)
    remark = f": {answer.remark}" if answer.remark else ""
    advice = f"; {_ADVICE[code]}" if isinstance(code, ResponseCode) and code in _ADVICE else ""
    return f"{asked}: {address} answered {name}{remark}{advice}"
