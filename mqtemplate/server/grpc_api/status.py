"""Statuses of answers: the code of each error, and the code of several results.

An error of a method is an answer with a ``status``, and not an error of gRPC.

Source: RocketMQ ``proxy: ResponseBuilder``, ``GrpcProxyException``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mqtemplate.errors import BrokerError, DelayError, DestinationError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.refusal import code_of_error

_MAX_TEXT = 1_024


class GrpcRefusedError(BrokerError):
    """A request that the server refuses. The status of the answer has this code and this text."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


_CODES: Mapping[ResponseCode, Code] = {
    ResponseCode.SUCCESS: Code.OK,
    # RocketMQ's proxy answers INTERNAL_SERVER_ERROR to a send. With this code a client retries after 20 ms; with the
    # other one it avoids the endpoint until a heartbeat succeeds.
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.FLOW_CONTROL: Code.TOO_MANY_REQUESTS,
    ResponseCode.POLLING_FULL: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    ResponseCode.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
    ResponseCode.LMQ_QUOTA_EXCEEDED: Code.LITE_TOPIC_QUOTA_EXCEEDED,
    ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
}


def code_of_response(code: int) -> Code:
    """Return the code for an answer of a broker in RocketMQ's other protocol."""
    return _CODES.get(code, Code.INTERNAL_SERVER_ERROR)  # type: ignore[call-overload, no-any-return]


def code_of(error: BaseException) -> Code:
    """Return the code of the answer to a request that raised *error*."""
    if isinstance(error, GrpcRefusedError):
        return error.code
    if isinstance(error, DelayError):
        return Code.ILLEGAL_DELIVERY_TIME
    if isinstance(error, DestinationError):
        return Code.ILLEGAL_TOPIC
    if isinstance(error, TimeoutError):
        return Code.PROXY_TIMEOUT
    code = code_of_error(error) if isinstance(error, Exception) else None
    return Code.INTERNAL_SERVER_ERROR if code is None else code_of_response(code)


def is_expected(error: BaseException) -> bool:
    """Return False for an error that the log of the server must have, with its traceback."""
    return isinstance(error, GrpcRefusedError | TimeoutError) or (
        isinstance(error, Exception) and code_of_error(error) is not None
    )


def status(code: Code, text: str | None = None) -> Any:
    """Return a status. Without a text it is the name of the code, as RocketMQ's proxy writes it."""
    return protos.Status(code=code, message=code.name if text is None else text[:_MAX_TEXT])


def error_status(error: BaseException) -> Any:
    """Return the status for an error. An unexpected one names its type, since its text alone may say nothing."""
    text = str(error) if is_expected(error) else f"{type(error).__name__}: {error}"
    return status(code_of(error), text)


def overall(codes: Collection[Code]) -> Code:
    """Return the code of an answer with several entries: theirs if they have one, else `Code.MULTIPLE_RESULTS`."""
    distinct = set(codes)
    if len(distinct) == 1:
        return distinct.pop()
    return Code.MULTIPLE_RESULTS if distinct else Code.INTERNAL_SERVER_ERROR
