"""Answers that say no."""

from __future__ import annotations

from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode


def not_supported(request: RemotingCommand) -> RemotingCommand:
    """The answer to a request whose code nobody takes."""
    code = RequestCode.of(request.code)
    name = f" {code.name}" if isinstance(code, RequestCode) else ""
    remark = f"request code {request.code}{name} is not supported here"
    return request.response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


def system_error(request: RemotingCommand, exc: Exception) -> RemotingCommand:
    """The answer to a request that raised what nobody foresaw."""
    return request.response(ResponseCode.SYSTEM_ERROR, remark=f"{type(exc).__name__}: {exc}")
