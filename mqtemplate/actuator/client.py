"""Client of an actuator: of another process over HTTP, or of this one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Protocol
from urllib.parse import urlsplit

from mqtemplate.actuator.response import Responder
from mqtemplate.errors import BrokerError, UnknownNameError

_TIMEOUT_S = 30.0
_DOWN = 503
"""Status of a health document of an application that is not well; it is a document all the same."""


class ApplicationDocuments(Protocol):
    """Documents of a running application, and changes of its listeners."""

    @property
    def address(self) -> str:
        """Address of the actuator, for a reader."""

    def get(self, path: str) -> Any:
        """Return a document, such as ``listeners``.

        Raises:
            UnknownNameError: There is no such document.
            BrokerError: The application does not answer, or refuses.
        """

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """Send a change, and return the document after it. Raises as `get`."""


class ActuatorClient:
    """Client of the actuator of another process.

    Args:
        url: ``http://host:port``, with or without ``/actuator``.
        token: Token for changes.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        base = url.rstrip("/")
        self._base = base if urlsplit(base).path.endswith("/actuator") else f"{base}/actuator"
        self._token = token

    @property
    def address(self) -> str:
        """The URL of the actuator."""
        return self._base

    def get(self, path: str) -> Any:
        """See `ApplicationDocuments`."""
        return self._call(urllib.request.Request(f"{self._base}/{path}"))

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """See `ApplicationDocuments`."""
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        body = json.dumps(change).encode()
        return self._call(urllib.request.Request(f"{self._base}/{path}", body, headers, method="POST"))

    def _call(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            return self._document_or_error(exc)
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "reason", exc)
            raise BrokerError(f"no actuator answers at {self._base}: {reason}") from exc

    def _document_or_error(self, exc: urllib.error.HTTPError) -> Any:
        try:
            document = json.load(exc)
        except ValueError:
            document = None
        return _checked(
            exc.code, document, f"{exc.url} answers {exc.code} {exc.reason}; is it the actuator of an application?"
        )


class LocalActuator:
    """The actuator of this process.

    Args:
        token: Token for changes, as the actuator has it.
    """

    def __init__(self, actuator: Responder, token: str | None = None) -> None:
        self._actuator = actuator
        self._token = token

    @property
    def address(self) -> str:
        """This process."""
        return "this process"

    def get(self, path: str) -> Any:
        """See `ApplicationDocuments`."""
        return self._call("GET", path)

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """See `ApplicationDocuments`."""
        return self._call("POST", path, json.dumps(change).encode())

    def _call(self, method: str, path: str, body: bytes = b"") -> Any:
        authorization = "" if self._token is None else f"Bearer {self._token}"
        response = self._actuator.respond(method, f"/{path}", (), authorization, body, self.address)
        return _checked(response.status, json.loads(response.body), f"status {response.status}")


def _checked(status: int, document: Any, without: str) -> Any:
    """Return the document of a response.

    Args:
        without: Text of the error if the response has none.

    Raises:
        UnknownNameError: The status is 404.
        BrokerError: It is another one of an error.
    """
    error = document.get("error") if isinstance(document, dict) else None
    if status < 400 or (status == _DOWN and document is not None and error is None):
        return document
    raise (UnknownNameError if status == 404 else BrokerError)(without if error is None else str(error))
