"""Requests to an actuator."""

from __future__ import annotations

from mqtemplate.console import Actuator
from mqtemplate.http import HttpRequest, HttpResponse

TOKEN = "open-sesame-0123456789"
BEARER = f"Bearer {TOKEN}"
KEYS = {
    "rocketmq.name-server": "embedded:memory",
    "mqtemplate.management.enabled": True,
    "mqtemplate.management.token": TOKEN,
    "mqtemplate.management.name": "shop",
}


def respond(
    actuator: Actuator,
    method: str,
    path: str,
    authorization: str = "",
    body: bytes = b"",
    query: list[tuple[str, str]] | None = None,
    *,
    host: str | None = None,
    remote: str = "10.0.0.7",
    scrape_timeout: str | None = None,
) -> HttpResponse:
    """Return the response to a request of another program."""
    timeout = "x-prometheus-scrape-timeout-seconds"
    given = {"authorization": authorization or None, "host": host, timeout: scrape_timeout}
    headers = {name: value for name, value in given.items() if value is not None}
    request = HttpRequest(method=method, path=path, query=query or [], headers=headers, body=body, remote=remote)
    return actuator.handle(request)
