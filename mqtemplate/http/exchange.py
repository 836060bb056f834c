"""A request and its response, independent of the server that carries them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

from mqtemplate.http.request_head import RefusedRequestError

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
