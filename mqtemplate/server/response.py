"""Responses to requests that cannot be served: an exception becomes a response code and a remark."""

from __future__ import annotations

from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DestinationError,
    MessageError,
    RemoteProtocolError,
    SelectorError,
    StoreError,
    StoreFullError,
)
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand


class RefusedError(BrokerError):
    """A valid request that the broker refuses. The response has this code and this text.

    Attributes:
        code: Decides what the client does next: retry at once, retry with another broker, or fail.
    """

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code


_CODES: tuple[tuple[type[Exception], ResponseCode], ...] = (
    # The first match counts, so a subclass stands before its base class.
    (DestinationError, ResponseCode.INVALID_PARAMETER),
    (MessageError, ResponseCode.MESSAGE_ILLEGAL),
    (RemoteProtocolError, ResponseCode.INVALID_PARAMETER),
    (SelectorError, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
    (BrokerClosedError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreFullError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreError, ResponseCode.SYSTEM_ERROR),
)


def problem_response(request: RemotingCommand, error: Exception) -> RemotingCommand | None:
    """Return the response to *request*, whose processor raised *error*.

    None for an unexpected error: the caller logs it and responds with ``SYSTEM_ERROR``.
    """
    if isinstance(error, RefusedError):
        return request.response(error.code, remark=str(error))
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    return None if code is None else request.response(code, remark=str(error))
