"""Access to the dashboard: allowed hosts, the token, its cookie, and tokens against forged requests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.http.exchange import HttpRequest

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

_MAX_FAILURES = 10
"""Most wrong tokens in a minute; then no token is checked until the minute is over."""
_MINUTE_MS = 60_000


class Access:
    """Rules of who may read and change.

    - The header ``Host`` must name an allowed host. Otherwise a page of another site could point its own name to this
      address (DNS rebinding) and read the answers.
    - A change needs *allow_changes*, the cookie, a token in the form, and an ``Origin`` of this site.
    - The cookie is ``HttpOnly`` and ``SameSite=Strict``. It contains a code derived from the token, not the token.

    Args:
        token: Token of the link to sign in; by default a new random one.
        reads_need_token: Reading needs the cookie too.
        allowed_hosts: Names or addresses without port, beside those of loopback.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        allow_changes: bool = False,
        reads_need_token: bool = False,
        allowed_hosts: Sequence[str] = (),
        clock: Clock = SystemClock(),
    ) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self.allow_changes = allow_changes
        self.reads_need_token = reads_need_token
        self.allowed_hosts = tuple(name.lower() for name in (*LOOPBACK_HOSTS, *allowed_hosts))
        self._clock = clock
        self._failures: deque[int] = deque(maxlen=_MAX_FAILURES)
        self._lock = threading.Lock()
        # Cookies do not know ports: two dashboards of one machine need two names.
        self._cookie_name = f"mqtemplate_dashboard_{self._code('name')[:8]}"

    def _code(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    # --- hosts ---------------------------------------------------------------------------------

    def is_host_allowed(self, request: HttpRequest) -> bool:
        """Return True if the request names an allowed host."""
        return _host_name(f"//{request.headers.get('host', '')}") in self.allowed_hosts

    # --- the session ---------------------------------------------------------------------------

    def is_signed_in(self, request: HttpRequest) -> bool:
        """Return True if the request has the cookie."""
        cookie: SimpleCookie = SimpleCookie()
        try:
            cookie.load(request.headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookie.get(self._cookie_name)
        return found is not None and _equal(found.value, self._code("session"))

    def may_read(self, request: HttpRequest) -> bool:
        """Return True if the request may read."""
        return not self.reads_need_token or self.is_signed_in(request)

    def sign_in(self, token: str, request: HttpRequest) -> str | None:
        """Return the header ``Set-Cookie`` for a token; None if it is wrong, or too many were."""
        now_ms = self._clock.now_ms()
        with self._lock:
            is_blocked = len(self._failures) == _MAX_FAILURES and self._failures[0] > now_ms - _MINUTE_MS
            if is_blocked or not _equal(token, self.token):
                if not is_blocked:
                    self._failures.append(now_ms)
                return None
        return self._cookie(self._code("session"), request)

    def sign_out(self, request: HttpRequest) -> str:
        """Return the header ``Set-Cookie`` that removes the cookie."""
        return f"{self._cookie('', request)}; Max-Age=0"

    def _cookie(self, value: str, request: HttpRequest) -> str:
        secure = "; Secure" if request.is_secure else ""
        return f"{self._cookie_name}={value}; Path={request.mount or '/'}; HttpOnly; SameSite=Strict{secure}"

    # --- changes -------------------------------------------------------------------------------

    @property
    def form_token(self) -> str:
        """Token of each form. Only a signed-in page contains it."""
        return self._code("form")

    def is_form_token(self, given: str) -> bool:
        """Return True if *given* is the token of the forms."""
        return _equal(given, self.form_token)

    def refusal_of_change(self, request: HttpRequest, form_token: str) -> str | None:
        """Return the reason why a change is refused; None if it is allowed."""
        if not self.allow_changes:
            return "this dashboard only reads; start it with --allow-changes"
        if not self.is_signed_in(request):
            return "a change needs the token; open the link that was printed at the start"
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return f"the form was sent by another site, {origin}"
        if not self.is_form_token(form_token):
            return "the form is not from this dashboard, or the dashboard was restarted; reload the page"
        return None


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
