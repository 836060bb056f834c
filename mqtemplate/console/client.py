"""Client of an actuator: of another process over HTTP, or of this one; and either of them for one account."""

from __future__ import annotations

import http.client
import ipaddress
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from mqtemplate.context.config.masking import masked_text
from mqtemplate.errors import BrokerError, ConfigurationError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import ACCOUNT, HttpRequest
from mqtemplate.server.acl.settings import AccountRole, group_need
from mqtemplate.topics import schedule_group

if TYPE_CHECKING:
    from mqtemplate.console.actuator import Actuator
    from mqtemplate.console.site import ApplicationDocuments
    from mqtemplate.operations.account import AccountRights

_log = get_logger("mqtemplate.actuator")

_TIMEOUT_S = 30.0
_MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
_DOWN = 503
"""Status of a health document of an application that is not well; it is a document all the same."""


class ActuatorClient:
    """Client of the actuator of another process.

    The token goes to this address only: redirects are refused, and loopback is reached without the proxies of the
    environment.

    Args:
        url: ``http://host:port``, with or without ``/actuator``.
        token: Token of reads and changes.

    Raises:
        ConfigurationError: The URL is not the address of an actuator.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = _parts_of(url)
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._base = base if parts.path.rstrip("/").endswith("/actuator") else f"{base}/actuator"
        self._token = token
        self._headers: dict[str, str] = {}
        is_loopback = _is_loopback(parts.hostname or "")
        direct = (urllib.request.ProxyHandler({}),) if is_loopback else ()
        self._opener = urllib.request.build_opener(_NoRedirect, *direct)
        if token is not None and parts.scheme == "http" and not is_loopback:
            _log.warning("actuator.token_unencrypted", address=self._base, advice="use https, or a tunnel")

    @property
    def address(self) -> str:
        """The URL of the actuator."""
        return self._base

    def get(self, path: str) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        return self._call("GET", path)

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        headers = {"Content-Type": "application/json", **self._headers}
        return self._call("POST", path, json.dumps(change).encode(), headers)

    def of(self, account: str) -> ActuatorClient:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        found = copy(self)
        found._headers = {ACCOUNT: quote(account)}
        return found

    def _call(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(f"{self._base}/{path}", body, headers or {}, method=method)
        if self._token is not None:
            # Unlike other headers it is not copied into a further request.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return _document(_limited_body(answer, self._base))
        except urllib.error.HTTPError as exc:
            with exc:
                return self._document_or_error(exc)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            reason = getattr(exc, "reason", exc)
            raise BrokerError(f"no actuator answers at {self._base}: {reason}") from exc

    def _document_or_error(self, exc: urllib.error.HTTPError) -> Any:
        if 300 <= exc.code < 400:
            target = str(exc.headers.get("Location", "nowhere"))[:200]
            raise BrokerError(
                f"{self._base} redirects to {masked_text(target)!r}, which is not followed, since the token would be "
                "sent there; give the address of the actuator itself"
            )
        try:
            document = _document(_limited_body(exc, self._base))
        except (OSError, ValueError, http.client.HTTPException):
            document = None
        return _checked(
            exc.code, document, f"{self._base} answers {exc.code} {exc.reason}; is it the actuator of an application?"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that lets a redirect be an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        if is_address and parts.username is None and not parts.query and not parts.fragment:
            return parts
    except ValueError:
        pass  # such as a port above 65535
    raise ConfigurationError(f"the actuator must be http://host:port, without a user, got {masked_text(url)!r}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _limited_body(answer: Any, address: str) -> bytes:
    """Return the body of a response.

    Raises:
        BrokerError: It is too large, or takes too long.
    """
    parts: list[bytes] = []
    left, deadline = _MAX_DOCUMENT_BYTES, time.monotonic() + _TIMEOUT_S
    while part := answer.read1(65_536):
        parts.append(part)
        left -= len(part)
        if left < 0 or time.monotonic() > deadline:
            raise BrokerError(
                f"the document of {address} has more than {_MAX_DOCUMENT_BYTES >> 20} MiB, or takes longer than "
                f"{_TIMEOUT_S:.0f} s; is it the actuator of an application?"
            )
    return b"".join(parts)


def _document(body: bytes) -> Any:
    try:
        return json.loads(body)
    except RecursionError as exc:
        raise ValueError("the document is nested too deeply") from exc


class LocalActuator:
    """The actuator of this process.

    Args:
        token: Token for changes, as the actuator has it.
    """

    def __init__(self, actuator: Actuator, token: str | None = None) -> None:
        self._actuator = actuator
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    @property
    def address(self) -> str:
        """This process."""
        return "this process"

    def get(self, path: str) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        return self._call("GET", path)

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        return self._call("POST", path, json.dumps(change).encode())

    def of(self, account: str) -> LocalActuator:
        """See `mqtemplate.console.site.ApplicationDocuments`."""
        found = copy(self)
        found._headers = {**self._headers, ACCOUNT: quote(account)}
        return found

    def _call(self, method: str, path: str, body: bytes = b"") -> Any:
        request = HttpRequest(
            method=method, path=f"/{unquote(path)}", headers=self._headers, body=body, remote=self.address
        )
        response = self._actuator.handle(request)
        assert isinstance(response.body, bytes), "a document is not a stream"
        return _checked(response.status, json.loads(response.body), f"status {response.status}")


class AccountActuator:
    """An actuator as one account may use it: listeners and schedules of its groups, late deliveries of its topics.

    The group of a schedule is ``mqtemplate-schedules-`` and its name.
    """

    def __init__(self, actuator: ApplicationDocuments, rights: AccountRights) -> None:
        self._actuator = actuator.of(rights.access_key)
        self._rights = rights

    def of(self, account: str) -> AccountActuator:
        """Return this object: it has its account."""
        return self

    @property
    def address(self) -> str:
        """The address of the actuator."""
        return self._actuator.address

    def get(self, path: str) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`.

        Raises:
            NoRightError: Only administrators may read the document.
        """
        kept: dict[str, Callable[[dict[str, Any]], bool]] = {
            "listeners": lambda each: self._rights.may_use(each["group"]),
            "schedules": lambda each: self._rights.may_use(schedule_group(each["name"])),
            "deliveries": lambda each: self._rights.may_read(each["topic"]),
        }
        name = "deliveries" if path == "lateness" else path
        if name not in (*kept, "health"):
            self._rights.check_role(AccountRole.ADMIN, f"the document {path} of the application")
        document = self._actuator.get(path)
        if name in kept and document is not None:
            document = {**document, name: [each for each in document[name] if kept[name](each)]}
        return document

    def post(self, path: str, change: dict[str, Any]) -> Any:
        """See `mqtemplate.console.site.ApplicationDocuments`.

        Raises:
            NoRightError: The account may not change it.
        """
        self._rights.check_role(AccountRole.OPERATOR, "a change")
        kind, _, name = path.partition("/")
        if kind == "listeners":
            found = next((each for each in self._actuator.get("listeners")[kind] if each["id"] == unquote(name)), None)
            if found is not None:  # else the application says so
                self._rights.check(group_need(found["group"]))
        elif kind == "schedules":
            self._rights.check(group_need(schedule_group(unquote(name))))
        return self._actuator.post(path, change)


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
