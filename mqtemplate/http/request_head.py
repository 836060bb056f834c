"""Strict reading of a request's head: the request line, the headers, and the length of the body.

One parser for every carrier. What two programs could read differently is refused, because a proxy before this one may
have read it the other way (request smuggling, RFC 9112 section 11.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mqtemplate.errors import MQTemplateError

MAX_HEAD_BYTES = 32 * 1024
_MAX_HEADERS = 100
_MAX_LENGTH_DIGITS = 15

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"[\x21-\x7e]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")

_SINGLE = frozenset(
    {
        "host",
        "content-length",
        "transfer-encoding",
        "content-type",
        "authorization",
        "origin",
        "expect",
        "sec-fetch-site",
    }
)
"""Headers that decide about the length of a request or the rights of its client: a second one makes it ambiguous."""


class RefusedRequestError(MQTemplateError):
    """A request that is not valid HTTP, or that two programs could read differently.

    Attributes:
        status: Status code of the response.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request.

    Attributes:
        path: The path as it was sent, percent-encoded.
        keeps_open: The client may send a further request on this connection.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    keeps_open: bool


def parse_head(head: bytes) -> RequestHead:
    """Return the head of a request, given without the empty line at its end.

    Raises:
        RefusedRequestError: It is not valid.
    """
    lines = head.decode("latin-1").split("\r\n")
    if any("\r" in line or "\n" in line for line in lines):
        raise RefusedRequestError(400, "lines of a request end with CR LF, and a single CR or LF is not allowed")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise RefusedRequestError(400, "the request line must be: METHOD /path HTTP/1.1")
    method, target, version = parts
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusedRequestError(505, "allowed are HTTP/1.1 and HTTP/1.0")
    if len(lines) - 1 > _MAX_HEADERS:
        raise RefusedRequestError(431, f"a request may have {_MAX_HEADERS} headers")
    headers = combined_headers(_header(line) for line in lines[1:])
    if "host" not in headers and version == "HTTP/1.1":
        raise RefusedRequestError(400, "the header Host is missing")
    if version == "HTTP/1.0" and "transfer-encoding" in headers:
        raise RefusedRequestError(400, "HTTP/1.0 has no Transfer-Encoding")
    path, _, query = _origin_form(target, headers.get("host", "")).partition("?")
    tokens = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    return RequestHead(method, path, query, headers, version == "HTTP/1.1" and "close" not in tokens)


def _header(line: str) -> tuple[str, str]:
    if line[:1] in (" ", "\t"):
        raise RefusedRequestError(400, "a header must be on one line")
    name, colon, value = line.partition(":")
    if not colon or not _TOKEN.fullmatch(name):
        raise RefusedRequestError(400, "a header must be: Name: value")
    if not _VALUE.fullmatch(value):
        raise RefusedRequestError(400, f"the header {name} contains a control character")
    return name, value.strip(" \t")


def _origin_form(target: str, host: str) -> str:
    """Return path and query of a target, which a client of a proxy sends with scheme and host."""
    for scheme in ("http://", "https://"):
        if target.lower().startswith(scheme):
            authority, slash, rest = target[len(scheme) :].partition("/")
            if authority.lower() != host.lower():
                raise RefusedRequestError(400, "the address in the request line and the header Host differ")
            target = slash + rest or "/"
            break
    if not target.startswith("/") or "#" in target:
        raise RefusedRequestError(400, "the request line must name a path that starts with /")
    return target


def combined_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name in lower case.

    Raises:
        RefusedRequestError: One that may be there once is there twice.
    """
    found: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        if key not in found:
            found[key] = value
        elif key in _SINGLE:
            raise RefusedRequestError(400, f"the header {name} is given twice, allowed is once")
        else:
            found[key] += f"{'; ' if key == 'cookie' else ', '}{value}"
    return found


def body_length(length: str | None, transfer_encoding: str | None, max_bytes: int, *, is_framed: bool = False) -> int:
    """Return the length of the body of a request.

    Args:
        length: The header ``Content-Length``; None without it.
        transfer_encoding: The header ``Transfer-Encoding``; None without it.
        is_framed: The carrier reports the end of a body itself, so that chunks are allowed; then the length is an upper
            limit if none is given.

    Raises:
        RefusedRequestError: It is ambiguous, invalid or too large.
    """
    if transfer_encoding is not None:
        if length is not None:
            raise RefusedRequestError(400, "a request has Content-Length or Transfer-Encoding, and not both")
        if not is_framed:
            raise RefusedRequestError(411, "send the body with Content-Length; Transfer-Encoding is not supported here")
    if length is None:
        return max_bytes if is_framed else 0
    is_number = length.isascii() and length.isdecimal() and len(length) <= _MAX_LENGTH_DIGITS
    if not is_number:
        raise RefusedRequestError(400, f"Content-Length must be a whole number of bytes, got {length[:40]!r}")
    if int(length) > max_bytes:
        raise RefusedRequestError(413, f"the body is too large, allowed are {max_bytes} bytes")
    return int(length)


def short_body(received: int, announced: int) -> RefusedRequestError:
    """Return the error of a body that ended too early: what is missing could change its meaning."""
    return RefusedRequestError(
        400, f"the request ended after {received} of {announced} bytes of its body; nothing was changed, send it again"
    )
