"""Check of each request before its processor: an account signed it, just now, and has the rights that it needs."""

from __future__ import annotations

import secrets

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY, SIGNATURE, is_signed_with
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.access import AccessControl, refusal_code
from mqtemplate.server.acl.rights import ANY_ACCOUNT, CHANGES, RIGHTS, ROUTES
from mqtemplate.server.acl.settings import Account, AclSettings

_log = get_logger("mqtemplate.acl")

_MAX_SIGNATURES = 200_000


class RepeatedSignatures:
    """Valid signatures of the last *window_ms*, of requests with any code.

    A signature of RocketMQ covers the fields and the body of a request, and neither its code nor a time. So a recorded
    request stays valid, and with another code too: a query for a route has the same fields as a deletion. Requests
    that change something are refused if their signature was used before. Clients repeat the others unchanged.

    Args:
        max_signatures: Bound of the memory, some 200 bytes each. Above it the oldest ones are forgotten.
    """

    def __init__(self, clock: Clock, window_ms: int, max_signatures: int = _MAX_SIGNATURES) -> None:
        self._clock = clock
        self._window_ms = window_ms
        self._max = max_signatures
        self._used: dict[str, int] = {}  # signature -> time of its last use (ms); the oldest first
        self._is_shortened = False

    def refuses(self, request: RemotingCommand) -> bool:
        """Note the signature of a request whose signature is valid. Return True if the request must be refused."""
        signature, now_ms = request.ext_fields[SIGNATURE], self._clock.steady_ms()
        self._forget(now_ms - self._window_ms)
        was_used = self._used.pop(signature, None) is not None
        self._used[signature] = now_ms
        return was_used and request.code in CHANGES

    def _forget(self, limit_ms: int) -> None:
        used = self._used
        while used and used[oldest := next(iter(used))] <= limit_ms:
            del used[oldest]
        if len(used) >= self._max:
            del used[next(iter(used))]
            if not self._is_shortened:
                self._is_shortened = True
                _log.warning("acl.replay_window_shortened", max_signatures=self._max, window_ms=self._window_ms)


_MAX_LOGGED = 1_000
_UNKNOWN_SECRET = secrets.token_hex()


class AclGuard:
    """Checks each request before its processor runs.

    - A request with an unknown access key or a wrong signature is refused. The response does not tell which it was.
    - The check runs in the I/O thread: it computes one signature and does no I/O.
    """

    def __init__(self, access: AccessControl, settings: AclSettings, clock: Clock) -> None:
        self._access = access
        self._repeated = RepeatedSignatures(clock, settings.replay_window_ms) if settings.replay_window_ms > 0 else None
        self._unsigned = frozenset() if settings.sign_routes or settings.is_private else ROUTES
        self._logged: set[tuple[int, str]] = set()
        self._limited_log = LimitedLog(_log, clock.steady_ms)

    def __call__(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        """Return the response to a request that is refused, or None if the request is permitted.

        Raises:
            RemoteProtocolError: The request cannot be decoded.
        """
        reason = self._refusal(request)
        if reason is None:
            return None
        self._log_refusal(connection, request, reason)
        return request.response(refusal_code(request.version), remark=reason)

    def _log_refusal(self, connection: Connection, request: RemotingCommand, reason: str) -> None:
        """Log a warning once for each connection and reason, ten in a minute: a refused client may retry for days."""
        key = (connection.id, reason)
        log = _log.debug if key in self._logged else self._limited_log.warning
        log("acl.refused", request=str(request), remote=str(connection.remote), reason=reason)
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(key)

    def _refusal(self, request: RemotingCommand) -> str | None:
        access_key = request.ext_fields.get(ACCESS_KEY)
        if access_key is None and request.code in self._unsigned:
            return None
        if access_key is None:
            return "access control is enabled: configure the client with an access key and a secret key"
        account = self._access.accounts.get(access_key)
        secret_key = _UNKNOWN_SECRET if account is None else account.secret_key
        # Compute the signature for an unknown account too: the response time must not reveal which accounts exist.
        if not is_signed_with(request, secret_key) or account is None:
            return f"access key {access_key[:64]!r} is unknown, or its secret key is wrong"
        if self._repeated is not None and self._repeated.refuses(request):
            return (
                f"this signature of access key {access_key!r} was used before, so the request may be a recorded one; "
                "sign the request again with other contents, or set mqtemplate.server.acl.replay-window-ms to 0"
            )
        return None if account.admin else self._missing_right(account, request)

    def _missing_right(self, account: Account, request: RemotingCommand) -> str | None:
        if request.code in ANY_ACCOUNT:
            return None
        code = RequestCode.of(request.code)
        name = code.name if isinstance(code, RequestCode) else str(code)
        if request.code not in RIGHTS:
            return f"access key {account.access_key!r} may not request {name}: only an account with admin: true may"
        for need in RIGHTS[request.code].needs(request):
            if not self._access.permits(account, need):
                advice = "; name a topic" if need.name is None else ""
                return f"access key {account.access_key!r} has no right {need} ({name}){advice}"
        return None
