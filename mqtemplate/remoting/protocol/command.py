"""One request or one response, whatever bytes it travels in."""

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


@dataclass(slots=True)
class RemotingCommand:
    """A request or a response. The two ends of a connection count their opaques apart: look at `is_response` first.

    Attributes:
        code: A `RequestCode` or a `ResponseCode`, or a number that we have no name for.
        opaque: Which request it is, or answers; signed 32 bits, the sender's own count.
        flag: Bits ``FLAG_RESPONSE`` and ``FLAG_ONE_WAY``.
        version: The sender's `Version`, as a number.
        remark: Of a response: the reason, in words.
        ext_fields: The header proper, as text; see `header`. Empty for none.
        serialize_type: How its header came, or is to be written.
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
        """A request of ours; who sends it gives it its opaque."""
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
        """Our answer to this request: its opaque, our own version, a JSON header."""
        ext_fields = {} if header is None else header.to_ext_fields()
        return RemotingCommand(code, self.opaque, FLAG_RESPONSE, remark=remark, ext_fields=ext_fields, body=body)

    @property
    def is_response(self) -> bool:
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        """True for a request that must not be answered."""
        return self.flag & FLAG_ONE_WAY != 0

    def header(self, kind: type[HeaderT]) -> HeaderT:
        """The fields of this command as *kind*.

        Raises:
            RemoteProtocolError: One that must be there is not, or cannot be read.
        """
        return kind.from_ext_fields(self.ext_fields)

    def __str__(self) -> str:
        """For logs: what it is, without the body and without what may be secret."""
        code = ResponseCode.of(self.code) if self.is_response else RequestCode.of(self.code)
        name = code.name if isinstance(code, ResponseCode | RequestCode) else "unknown"
        kind = "response" if self.is_response else "one-way request" if self.is_one_way else "request"
        remark = f", {self.remark!r}" if self.remark else ""
        return f"{kind} {self.code} {name}, opaque {self.opaque}, body of {len(self.body)} bytes{remark}"
