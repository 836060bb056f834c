"""Handles of pending messages in requests, and the refusal of invalid ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.headers.delayed import MAX_HANDLES
from mqtemplate.server.requests.response import RefusedError


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
