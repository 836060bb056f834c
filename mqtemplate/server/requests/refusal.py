"""Refused requests in any protocol: the error, and the code of every other error of the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.engine.delayed import NotRecallableError
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DelayError,
    DestinationError,
    MessageError,
    PendingKeyError,
    PendingKeyUnknownError,
    RemoteProtocolError,
    SelectorError,
    StoreError,
    StoreFullError,
)
from mqtemplate.remoting.protocol.bodies.own_requests import MAX_HANDLES
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.headers.fields import CommandHeader


class RefusedError(BrokerError):
    """A valid request that the broker refuses. The response has this code and this text.

    Attributes:
        code: Decides what the client does next: retry at once, retry with another broker, or fail. A server of another
            protocol maps it to a code of its own.
        header: Header of the response, for a client that needs more than the code.
    """

    def __init__(self, code: ResponseCode, remark: str, header: CommandHeader | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.header = header


_CODES: tuple[tuple[type[Exception], ResponseCode], ...] = (
    # The first match counts, so a subclass stands before its base class.
    (DestinationError, ResponseCode.INVALID_PARAMETER),
    (NotRecallableError, ResponseCode.ILLEGAL_OPERATION),
    (PendingKeyError, ResponseCode.ILLEGAL_OPERATION),
    (PendingKeyUnknownError, ResponseCode.ILLEGAL_OPERATION),
    (MessageError, ResponseCode.MESSAGE_ILLEGAL),
    (RemoteProtocolError, ResponseCode.INVALID_PARAMETER),
    (SelectorError, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
    (BrokerClosedError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreFullError, ResponseCode.SERVICE_NOT_AVAILABLE),
    (StoreError, ResponseCode.SYSTEM_ERROR),
)


def code_of_error(error: Exception) -> ResponseCode | None:
    """Return the code of the response to a request that raised *error*; None for an unexpected error."""
    if isinstance(error, RefusedError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), None)


@contextmanager
def refusing_invalid() -> Iterator[None]:
    """Refuse an invalid request. Only a deliver time that is too far away has a code of its own."""
    try:
        yield
    except DelayError as exc:
        raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
    except MessageError as exc:
        raise RefusedError(ResponseCode.INVALID_PARAMETER, str(exc)) from exc


def decode_handles(text: str | None) -> list[RecallHandle]:
    """Return the handles of a request.

    Raises:
        RefusedError: One of them is invalid, or there are more than `MAX_HANDLES`.
    """
    parts = [] if text is None else text.split(",", MAX_HANDLES)
    if len(parts) > MAX_HANDLES:
        raise RefusedError(
            ResponseCode.INVALID_PARAMETER, f"one request has at most {MAX_HANDLES} handles; send several requests"
        )
    with refusing_invalid():
        return [decode_handle(part) for part in parts]
