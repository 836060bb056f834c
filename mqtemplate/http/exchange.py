"""A request and its response, independent of the server that carries them; strict reading of a request's head."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from mqtemplate.errors import MQTemplateError

ACCOUNT = "x-mqtemplate-account"
"""Header with the account for which a program changes something, percent-encoded. Who has the token may name any."""
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


TEXT = "text/plain; charset=utf-8"

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+)(:[0-9]{1,5})?")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc")
"""RFC 6761, RFC 6762, ICANN's decision of 2024, and the short name of a Kubernetes service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request.

    Attributes:
        path: The path below `mount`, percent-decoded.
        mount: Prefix of the path under which the application is mounted, such as ``/dashboard``; empty at the root.
        query: Names and values of the query.
        headers: Names in lower case -> values.
        remote: Address of the client.
        is_secure: The client uses HTTPS, as far as the server knows.
        user: User id of the client's process; None if it is on another machine, or unknown.
    """

    method: str
    path: str
    mount: str = ""
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remote: str = ""
    is_secure: bool = False
    user: int | None = None


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response.

    Attributes:
        status: Status code, such as 200.
        body: All bytes, or an iterator of parts that are sent as they come. A server closes the iterator.
        headers: Further headers.
    """

    status: int
    body: bytes | Iterator[bytes]
    content_type: str = TEXT
    headers: Sequence[tuple[str, str]] = ()

    @property
    def all_headers(self) -> list[tuple[str, str]]:
        """Headers with type and, if it is known, length."""
        length = [("Content-Length", str(len(self.body)))] if isinstance(self.body, bytes) else []
        return [("Content-Type", self.content_type), *length, *self.headers]

    def close(self) -> None:
        """Close the iterator of a body, also one that was not begun. Other bodies need nothing."""
        close = getattr(self.body, "close", None)
        if close is not None:
            close()


HttpHandler: TypeAlias = Callable[[HttpRequest], HttpResponse]
"""Function that answers a request. Calls come from several threads."""


def below(path: str, mount: str) -> str | None:
    """Return the part of *path* below *mount*, ``/…`` or empty; None if it is elsewhere."""
    if path == mount or path.startswith(f"{mount}/"):
        return path[len(mount) :]
    return None


def refused(error: RefusedRequestError) -> HttpResponse:
    """Return the response to a request that was refused before its handler."""
    return HttpResponse(error.status, f"{error}\n".encode())


# --- hosts --------------------------------------------------------------------------------------


def host_name(host: str) -> str | None:
    """Return the name or address in a header ``Host``, in lower case and without the port; None if it is not valid."""
    if not _HOST.fullmatch(host):
        return None
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname if parts.port is None or parts.port else None
    except ValueError:  # such as a port above 65535
        return None


def is_private_name(name: str) -> bool:
    """Return True for an address, and for a name that no public name server has.

    Only a public name can lead the page of another site to this address (DNS rebinding).
    """
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name.rstrip(".") or name.endswith(_PRIVATE_SUFFIXES)
    return True
