"""Responses of the actuator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_BODY_BYTES = 64 * 1_024
JSON = "application/json"

HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


@dataclass(frozen=True, slots=True)
class Response:
    """Response to a request over HTTP.

    Attributes:
        status: Status code, such as 200.
    """

    status: int
    body: bytes
    content_type: str = JSON


class Responder(Protocol):
    """Interface of the `Actuator` to its servers."""

    endpoints: Sequence[str]

    def respond(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        authorization: str = "",
        body: bytes = b"",
        remote: str = "",
        host: str | None = None,
    ) -> Response:
        """See `Actuator.respond`."""


def error_response(status: int, text: str) -> Response:
    """Return the response to a request that is refused."""
    return Response(status, json.dumps({"status": status, "error": text}, ensure_ascii=False).encode())


def below_actuator(path: str) -> str:
    """Return the part of a path below ``/actuator``; the same path if it is mounted there."""
    return path.removeprefix("/actuator") if path == "/actuator" or path.startswith("/actuator/") else path
