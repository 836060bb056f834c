"""One request or one response, independent of its encoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqtemplate.remoting.protocol.codes import (
    CURRENT_VERSION,
    FLAG_ONE_WAY,
    FLAG_RESPONSE,
    LanguageCode,
    RequestCode,
    ResponseCode,
    SerializeType,
)
from mqtemplate.remoting.protocol.headers.fields import CommandHeader, HeaderT

_MAX_REMARK = 200


@dataclass(slots=True)
class RemotingCommand:
    """A request or a response. Both ends of a connection count opaques on their own: check `is_response` first.

    Attributes:
        code: A `RequestCode`, a `ResponseCode`, or a number that has no name here.
        opaque: Number of the request, or of the request that this responds to; a signed 32-bit count of the requester.
        flag: Bits ``FLAG_RESPONSE`` and ``FLAG_ONE_WAY``.
        version: The sender's `Version`, as a number.
        remark: Reason of a response, for people.
        ext_fields: Fields of the header as text; `header` reads them. Possibly empty.
        serialize_type: Encoding of the header, as received or as to be sent.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    language: LanguageCode = LanguageCode.PYTHON
    version: int = CURRENT_VERSION
    remark: str | None = None
    ext_fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    serialize_type: SerializeType = SerializeType.JSON

    @classmethod
    def request(
        cls,
        code: int,
        header: CommandHeader | None = None,
        body: bytes = b"",
        *,
        opaque: int = 0,
        one_way: bool = False,
    ) -> RemotingCommand:
        """Return a request. A `Connection` sets the opaque when it sends it."""
        flag = FLAG_ONE_WAY if one_way else 0
        return cls(code, opaque, flag, ext_fields={} if header is None else header.to_ext_fields(), body=body)

    def response(
        self,
        code: int = ResponseCode.SUCCESS,
        header: CommandHeader | None = None,
        body: bytes = b"",
        *,
        remark: str | None = None,
    ) -> RemotingCommand:
        """Return our response to this request: with its opaque, the encoding of its header, and our own version.

        A client may read the encoding only in which it writes: the Rust client ``rocketmq-client-v4`` does.
        """
        fields = {} if header is None else header.to_ext_fields()
        return RemotingCommand(
            code,
            self.opaque,
            FLAG_RESPONSE,
            remark=remark,
            ext_fields=fields,
            body=body,
            serialize_type=self.serialize_type,
        )

    @property
    def is_response(self) -> bool:
        """True for a response, False for a request."""
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        """True for a request that must not be answered."""
        return self.flag & FLAG_ONE_WAY != 0

    def header(self, kind: type[HeaderT]) -> HeaderT:
        """Return the fields of this command as an object of *kind*.

        Raises:
            RemoteProtocolError: A required field is missing, or a field cannot be read.
        """
        return kind.from_ext_fields(self.ext_fields)

    def __str__(self) -> str:
        """Return a description for logs, without the body and without fields that may be secret."""
        code = ResponseCode.of(self.code) if self.is_response else RequestCode.of(self.code)
        name = code.name if isinstance(code, ResponseCode | RequestCode) else "unknown"
        kind = "response" if self.is_response else "one-way request" if self.is_one_way else "request"
        remark = f", {self.remark[:_MAX_REMARK]!r}" if self.remark else ""
        return f"{kind} {self.code} {name}, opaque {self.opaque}, body of {len(self.body)} bytes{remark}"


def not_supported(request: RemotingCommand, reason: str | None = None) -> RemotingCommand:
    """Return the response to a request whose code has no processor."""
    remark = f"request code {RequestCode.text(request.code)} is not supported here{f': {reason}' if reason else ''}"
    return request.response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


def system_error(request: RemotingCommand, exc: Exception) -> RemotingCommand:
    """Return the response to a request whose processor raised an unexpected exception."""
    return request.response(ResponseCode.SYSTEM_ERROR, remark=f"{type(exc).__name__}: {exc}")
