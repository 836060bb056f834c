"""Responses of processors: an exception becomes a response code and a remark; a stored message waits for its flush."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.engine.delayed import NotRecallableError
from mqtemplate.errors import (
    BrokerClosedError,
    BrokerError,
    DelayError,
    DestinationError,
    MessageError,
    RemoteProtocolError,
    SelectorError,
    StoreError,
    StoreFullError,
)
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.own_requests import MAX_HANDLES
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.store.flush import WhenFlushed
from mqtemplate.store.message_store import MessageStore

_log = get_logger("mqtemplate.server")


class RefusedError(BrokerError):
    """A valid request that the broker refuses. The response has this code and this text.

    Attributes:
        code: Decides what the client does next: retry at once, retry with another broker, or fail.
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
        return request.response(error.code, error.header, remark=str(error))
    code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    return None if code is None else request.response(code, remark=str(error))


def reply_when_durable(
    store: MessageStore,
    connection: Connection,
    request: RemotingCommand,
    end: int,
    topics: Sequence[str],
    header: CommandHeader | None = None,
    failure: ResponseCode = ResponseCode.SYSTEM_ERROR,
) -> None:
    """Reply to *request* when everything before *end* is durable, or with *failure* if the flush fails.

    The reply is sent in the thread that flushes, or in this thread if nothing has to be flushed. Then the readers of
    *topics* are notified.
    """

    def reply(error: StoreError | None) -> None:
        if error is None:
            connection.reply(request.response(ResponseCode.SUCCESS, header))
        else:  # The message is stored, but not durable.
            connection.reply(request.response(failure, header, remark=str(error)))

    call_when_durable(store, end, topics, reply)


def call_when_durable(store: MessageStore, end: int, topics: Collection[str], reply: WhenFlushed) -> None:
    """Call *reply* when everything before *end* is durable, or with the error of the flush. Its exception is logged."""

    def call(error: StoreError | None) -> None:
        try:
            reply(error)
        except Exception as exc:
            # The flush thread replies to other producers next: they must not notice.
            _log.error("server.response_failed", exc_info=exc)

    store.confirm_async(end, topics, call)


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


@contextmanager
def refusing_invalid() -> Iterator[None]:
    """Refuse an invalid request. Only a deliver time that is too far away has a code of its own."""
    try:
        yield
    except DelayError as exc:
        raise RefusedError(ResponseCode.MESSAGE_ILLEGAL, str(exc)) from exc
    except MessageError as exc:
        raise RefusedError(ResponseCode.INVALID_PARAMETER, str(exc)) from exc
