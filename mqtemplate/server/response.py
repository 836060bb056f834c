"""From an error to the answer that says it on the wire."""

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
from mqtemplate.remoting.protocol import RemotingCommand, ResponseCode


class RefusedError(BrokerError):
    """A request that is understood and not served; the answer has this code and this text.

    Attributes:
        code: What clients go by: some they try again at once, some with another broker, some they give up on.
    """

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code


_CODES: tuple[tuple[type[Exception], ResponseCode], ...] = (
    # the first that fits; what is a kind of another stands before it
    (DestinationError, ResponseCode.INVALID_PARAMETER),
    (MessageError, ResponseCode.MESSAGE_ILLEGAL),
    (RemoteProtocolError, ResponseCode.INVALID_PARAMETER),
    (SelectorError, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
    (BrokerClosedError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreFullError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreError, ResponseCode.SYSTEM_ERROR),
)


def problem_response(request: RemotingCommand, error: Exception) -> RemotingCommand | None:
    """The answer to *request*, whose processor raised *error*; None where nothing better can be said than
    ``SYSTEM_ERROR``, and the log should have it.
    """
    if isinstance(error, RefusedError):
        return request.response(error.code, remark=str(error))
    for kind, code in _CODES:
        if isinstance(error, kind):
            return request.response(code, remark=str(error))
    return None
