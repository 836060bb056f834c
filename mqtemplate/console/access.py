"""Access to the dashboard: allowed hosts, the token and the accounts, sessions, and tokens against forged requests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.http.exchange import HttpRequest, host_name
from mqtemplate.http.tokens import SecretCheck, TokenAnswer, TokenCheck, checked_token, monotonic_ms
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.settings import Account, AccountRole

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

_MAX_SESSIONS = 100
_IDLE_MS = 4 * 60 * 60_000
_LONGEST_MS = 12 * 60 * 60_000


@dataclass(slots=True)
class Session:
    """A user who has signed in.

    Attributes:
        form_token: Token of each form. Only pages of this session contain it.
        created_ms: Time of the sign-in.
        used_ms: Time of the last request.
        user: User id of the browser's process; None if it is not on this machine.
        account: The account that signed in, as it was; None for the token, which has all rights.
    """

    form_token: str
    created_ms: int
    used_ms: int
    user: int | None
    account: Account | None = None


class Access:
    """Rules of who may read and change.

    - The header ``Host`` must name an allowed host. Otherwise a page of another site could point its own name to this
      address (DNS rebinding) and read the answers.
    - Reading needs a session. A change needs *allow_changes* too, a token in the form, and an ``Origin`` of this site.
    - A browser sends its cookies to all ports of a host, so also to a server of another user of this machine. A session
      is only valid for the user whose process signed in, where the server knows it.
    - The cookie of a session is random, ``HttpOnly`` and ``SameSite=Strict``. Only its hash is stored. A session ends
      with the sign-out, after four hours without a request, and after twelve hours; and if its account was removed or
      has another secret key.
    - With the token all is allowed; an account has the rights of access control, and its role.

    Attributes:
        accounts: The accounts that may sign in beside the token; None: only the token.

    Args:
        token: Token of the link to sign in; by default a new random one.
        reads_need_token: Reading needs a session. False if something else protects the pages, such as a proxy.
        allowed_hosts: Names or addresses without port, beside the names of loopback.
        accounts: The accounts that may sign in beside the token; they may change. None: only the token.
        metrics_token: Token with which Prometheus reads the metrics; None refuses it.

    Raises:
        ConfigurationError: The token can be guessed.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        allow_changes: bool = False,
        reads_need_token: bool = True,
        allowed_hosts: Sequence[str] = (),
        accounts: AccessControl | None = None,
        metrics_token: str | None = None,
        clock: Clock = SystemClock(),
    ) -> None:
        self.token = secrets.token_urlsafe(32) if token is None else checked_token(token, "the token of the dashboard")
        self.allow_changes = allow_changes
        self.reads_need_token = reads_need_token
        self.allowed_hosts = tuple(name.lower() for name in (*LOOPBACK_HOSTS, *allowed_hosts))
        self.accounts = accounts
        self._check = TokenCheck(self.token, clock)
        self._secrets = SecretCheck(clock)
        self._metrics_check = None
        if metrics_token is not None:
            self._metrics_check = TokenCheck(checked_token(metrics_token, "the token of the metrics"), clock)
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    # --- hosts ---------------------------------------------------------------------------------

    def is_host_allowed(self, request: HttpRequest) -> bool:
        """Return True if the request names an allowed host."""
        name = host_name(request.headers.get("host", ""))
        # RFC 6761: a name below localhost always means this machine. With a name of its own, a dashboard has its own
        # cookies.
        return name is not None and (name in self.allowed_hosts or name.endswith(".localhost"))

    # --- the session ---------------------------------------------------------------------------

    def session_of(self, request: HttpRequest) -> Session | None:
        """Return the session of a request; None if the user is not signed in."""
        now_ms = monotonic_ms(self._clock)
        with self._lock:
            key = self._key_of(request)
            session = self._sessions.get(key)
            if session is None:
                return None
            if session.user is not None and request.user not in (None, session.user):
                return None
            if now_ms - session.used_ms > _IDLE_MS or now_ms - session.created_ms > _LONGEST_MS:
                del self._sessions[key]
                return None
            if session.account is not None and not self._is_valid(session.account):
                del self._sessions[key]
                return None
            session.used_ms = now_ms
            self._sessions.move_to_end(key)
            return session

    def is_signed_in(self, request: HttpRequest) -> bool:
        """Return True if the request has the cookie of a session."""
        return self.session_of(request) is not None

    def may_read(self, request: HttpRequest) -> bool:
        """Return True if the request may read."""
        return not self.reads_need_token or self.is_signed_in(request)

    def sign_in(self, token: str, request: HttpRequest) -> str | TokenAnswer:
        """Return the header ``Set-Cookie`` of a new session, or the answer to a token that is wrong."""
        answer = self._check.check(token, request.remote)
        return self._new_session(request, None) if answer is TokenAnswer.RIGHT else answer

    def sign_in_account(self, access_key: str, secret_key: str, request: HttpRequest) -> str | TokenAnswer:
        """Return the header ``Set-Cookie`` of a new session of an account, or the answer to keys that are wrong."""
        account = self._account(access_key)
        known = None if account is None else account.secret_key
        answer = self._secrets.check(access_key, secret_key, known, request.remote)
        return self._new_session(request, account) if answer is TokenAnswer.RIGHT else answer

    def _new_session(self, request: HttpRequest, account: Account | None) -> str:
        value, now_ms = secrets.token_urlsafe(32), monotonic_ms(self._clock)
        with self._lock:
            self._sessions.pop(self._key_of(request), None)
            self._sessions[_hash(value)] = Session(secrets.token_hex(32), now_ms, now_ms, request.user, account)
            while len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)  # the one that was used longest ago
        return self._cookie(value, request)

    def sign_out(self, request: HttpRequest) -> str:
        """End the session, and return the header ``Set-Cookie`` that removes the cookie."""
        with self._lock:
            self._sessions.pop(self._key_of(request), None)
        return f"{self._cookie('', request)}; Max-Age=0"

    def _key_of(self, request: HttpRequest) -> str:
        cookie: SimpleCookie = SimpleCookie()
        try:
            cookie.load(request.headers.get("cookie", ""))
        except CookieError:
            return ""
        found = cookie.get(_cookie_name(request))
        return "" if found is None else _hash(found.value)

    def _cookie(self, value: str, request: HttpRequest) -> str:
        secure = "; Secure" if request.is_secure else ""
        path = f"Path={request.mount or '/'}"
        return f"{_cookie_name(request)}={value}; {path}; HttpOnly; SameSite=Strict{secure}"

    # --- accounts ------------------------------------------------------------------------------

    @property
    def has_accounts(self) -> bool:
        """True if accounts may sign in."""
        return self.accounts is not None and any(not each.is_owner for each in self.accounts.accounts.values())

    def account_of(self, session: Session | None) -> Account | None:
        """Return the account of a session as it is now; None for the token, and without a session."""
        return None if session is None or session.account is None else self._account(session.account.access_key)

    def role_of(self, session: Session | None) -> AccountRole:
        """Return the role in a session."""
        if session is not None and session.account is None:
            return AccountRole.ADMIN
        account = self.account_of(session)
        return AccountRole.VIEWER if account is None else account.role

    def is_account(self, access_key: str) -> bool:
        """Return True if there is an account with this access key, which may sign in."""
        return self._account(access_key) is not None

    def _account(self, access_key: str) -> Account | None:
        found = None if self.accounts is None else self.accounts.accounts.get(access_key)
        return None if found is None or found.is_owner else found

    def _is_valid(self, account: Account) -> bool:
        now = self._account(account.access_key)
        return now is not None and hmac.compare_digest(now.secret_key.encode(), account.secret_key.encode())

    # --- metrics -------------------------------------------------------------------------------

    def refusal_of_metrics(self, request: HttpRequest) -> tuple[int, str] | None:
        """Return status and reason if a request may not read the metrics; None if it may.

        It has the token of the metrics, or is of a user who has signed in with all rights.
        """
        session = self.session_of(request)
        if session is not None and self.role_of(session) is AccountRole.ADMIN:
            return None
        if self._metrics_check is None:
            return 403, (
                "the metrics are off; start the dashboard with --metrics-token-file FILE, or set "
                "mqtemplate.management.token, and let Prometheus send the token as authorization credentials"
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            answer = self._metrics_check.check(given.strip(), request.remote)
            if answer is TokenAnswer.RIGHT:
                return None
            if answer is TokenAnswer.TOO_MANY:
                return 429, "the token is wrong, as many before it; the right one works"
        return 401, "the metrics need the header 'Authorization: Bearer TOKEN' with the token of --metrics-token-file"

    # --- changes -------------------------------------------------------------------------------

    def is_form_token(self, given: str, request: HttpRequest) -> bool:
        """Return True if *given* is the token of the forms of this session."""
        session = self.session_of(request)
        return session is not None and hmac.compare_digest(given.encode(), session.form_token.encode())

    def foreign_origin(self, request: HttpRequest) -> str | None:
        """Return the site that sent a form, if it is another one."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
        if origin is not None and not _is_of(origin, request.headers.get("host", "")):
            return origin
        # Another port of this host is another origin, although its pages are on the same site.
        return f"a page that is {site}" if site is not None and site not in ("same-origin", "none") else None

    def refusal_of_change(self, request: HttpRequest, form_token: str) -> str | None:
        """Return the reason why a change is refused; None if it is allowed."""
        if not self.allow_changes:
            return "this dashboard only reads; start it with --allow-changes"
        if not self.is_signed_in(request):
            return "a change needs the token; open the link that was printed at the start" + (
                ", or sign in with an account" if self.has_accounts else ""
            )
        foreign = self.foreign_origin(request)
        if foreign is not None:
            return f"the form was sent by another site, {foreign}"
        if not self.is_form_token(form_token, request):
            return "the form is not from this dashboard, or the dashboard was restarted; reload the page"
        return None


def _cookie_name(request: HttpRequest) -> str:
    """Return the name of the cookie. Browsers send cookies to all ports of a host, so the name contains the port.

    With TLS a browser accepts the prefix from this host only.
    """
    port = urlsplit(f"//{request.headers.get('host', '')}").port or (443 if request.is_secure else 80)
    prefix = "" if not request.is_secure else "__Secure-" if request.mount else "__Host-"
    return f"{prefix}mqtemplate_dashboard_{port}"


def _is_of(origin: str, host: str) -> bool:
    """Return True if an origin has the name and port of a header ``Host``. The scheme may differ: a proxy adds TLS."""
    try:
        own, named = urlsplit(origin), urlsplit(f"//{host}")
        usual = {"http": 80, "https": 443}.get(own.scheme)
        return (own.hostname, own.port or usual) == (named.hostname, named.port or usual) and usual is not None
    except ValueError:
        return False


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()
