"""Response codes as errors: the failed operation, the response, and advice.

Source: RocketMQ ``remoting: ResponseCode``.
"""

from __future__ import annotations

from collections.abc import Collection

from mqtemplate.errors import BrokerError, DelayError, MessageError, MQTemplateError, SendError, UnsupportedError
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand

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
"""Responses to a send after which another queue or broker may accept the message. Source: ``DefaultMQProducer``."""

_ADVICE = {
    ResponseCode.SYSTEM_BUSY: "it is overloaded; try again later, or give it more send threads",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "its version does not support this request; use a newer broker",
    ResponseCode.SERVICE_NOT_AVAILABLE: "it accepts nothing now: its disk is full, it is a replica, or it shuts down",
    ResponseCode.NO_PERMISSION: "the topic's permission or access control forbids it; check the topic's perm, "
    "access-key and secret-key, and the rights of the account",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic (mqadmin updateTopic, or Broker.create_topic), or set "
    "autoCreateTopicEnable=true on the broker",
    ResponseCode.SUBSCRIPTION_NOT_EXIST: "the broker has no such subscription yet; the next heartbeat registers it",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group (mqadmin updateSubGroup), or set "
    "autoCreateSubscriptionGroup=true on the broker",
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: "write the selector in the syntax of the broker's version",
    ResponseCode.FLOW_CONTROL: "it is overloaded; try again later",
}
_INVALID_MESSAGE = frozenset({ResponseCode.MESSAGE_ILLEGAL, ResponseCode.INVALID_PARAMETER})


def check_response(
    response: RemotingCommand, operation: str, address: str, accept: Collection[int] = (ResponseCode.SUCCESS,)
) -> RemotingCommand:
    """Return *response* if its code is SUCCESS, or another one of *accept*.

    Raises:
        BrokerError: The code is another one; `UnsupportedError` if this broker can never execute the request.
    """
    if response.code not in accept:
        raise response_error(response, operation, address)
    return response


def response_error(response: RemotingCommand, operation: str, address: str) -> BrokerError:
    """Return the error for a response that is not a success.

    Args:
        operation: What the request was for, such as "read queue 1 of orders".
    """
    kind = UnsupportedError if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else BrokerError
    return kind(f"{operation}: {refusal_text(response, address)}")


def send_error(response: RemotingCommand, operation: str, address: str, *, has_timer: bool) -> MQTemplateError:
    """Return the error for a message that the broker refused.

    Its class tells an invalid message (`MessageError`), a missing feature of the broker (`UnsupportedError`), and a
    failure that may pass (`SendError`) apart.

    Args:
        has_timer: The message has a delay that is not a level.
    """
    kind: type[MQTemplateError] = SendError
    reason = refusal_text(response, address)
    # RocketMQ has no code of its own for this. Source: SendMessageProcessor, WHEEL_TIMER_NOT_ENABLE.
    if has_timer and response.code == ResponseCode.SYSTEM_ERROR and "timerWheelEnable" in (response.remark or ""):
        kind, reason = UnsupportedError, f"{reason}; set timerWheelEnable=true on the broker, or use a delay level"
    elif has_timer and response.code == ResponseCode.MESSAGE_ILLEGAL:
        kind, reason = DelayError, f"{reason}; the limit is the broker's timerMaxDelaySec (3 days by default)"
    elif response.code in _INVALID_MESSAGE:
        kind = MessageError
    elif response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        kind = UnsupportedError
    return kind.during(operation, reason)


def refusal_text(response: RemotingCommand, address: str) -> str:
    """Return the address that answered, the response, and advice."""
    code = ResponseCode.of(response.code)
    name = f"{response.code} {code.name}" if isinstance(code, ResponseCode) else str(response.code)
    remark = f": {response.remark}" if response.remark else ""
    advice = f"; {_ADVICE[code]}" if isinstance(code, ResponseCode) and code in _ADVICE else ""
    return f"{address} answered {name}{remark}{advice}"
