"""The client that calls a method: its metadata, its account and its rights.

Source: RocketMQ ``proxy: AbstractMessingActivity.createContext``, ``auth: DefaultAuthenticationContextBuilder``.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mqtemplate.clock import Clock
from mqtemplate.event_log import LimitedLog, get_logger
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.remoting.protocol.codes import CURRENT_VERSION, LanguageCode, Version
from mqtemplate.server.acl.access import AccessControl
from mqtemplate.server.acl.rights import GRPC_RIGHTS
from mqtemplate.server.acl.settings import Account
from mqtemplate.server.grpc_api.status import GrpcRefusedError
from mqtemplate.server.requests.caller import Caller

_log = get_logger("mqtemplate.acl")

_SCHEME = "MQv2-HMAC-SHA1"
_MAX_CLIENT_ID = 512
_MAX_LOGGED = 1_000
_UNKNOWN_SECRET = secrets.token_hex()


# --- metadata -------------------------------------------------------------------------------------


@dataclass(slots=True)
class GrpcContext:
    """One call of a client.

    Attributes:
        client_id: The instance of the client, which may use several connections.
        version: Version of the client, as text.
        caller: The client, as the core of the server takes it.
    """

    call: GrpcCall
    client_id: str
    version: str
    caller: Caller

    @property
    def language(self) -> str:
        """Language of the client: a name of `LanguageCode`."""
        return language_name(self.call.metadata.get("x-mq-language", ""))

    def left_ms(self, clock: Clock) -> float | None:
        """Return the time that is left to the deadline of the call; None without one."""
        deadline_ms = self.call.deadline_ms
        return None if deadline_ms is None else deadline_ms - clock.steady_ms()


@lru_cache(maxsize=256)
def language_name(text: str) -> str:
    """Return the name of a language. RocketMQ's proxy fails for an unknown one, so Node says ``HTTP`` there."""
    name = text.strip().upper()
    return name if name in LanguageCode.__members__ else LanguageCode.OTHER.name


@lru_cache(maxsize=256)
def version_number(text: str) -> int:
    """Return the number of a version such as ``V5_0_0`` or ``5.0.0``; of an unknown one the number of this server."""
    name = "V" + text.strip().upper().removeprefix("V").replace(".", "_")
    return Version.__members__.get(name, CURRENT_VERSION)


def is_client_id(text: str) -> bool:
    """Return True if a client may have this ID."""
    return bool(text) and not text.isspace() and len(text) <= _MAX_CLIENT_ID


# --- accounts -------------------------------------------------------------------------------------


class Signature(NamedTuple):
    """The contents of the header ``authorization``."""

    access_key: str
    digest: bytes

    def is_made_with(self, secret_key: str, date_time: str) -> bool:
        """Return True if *secret_key* has signed the text of the header ``x-mq-date-time``.

        It cannot be compared with the time: Java, Python and Go write local time, with a ``Z``.
        """
        expected = hmac.digest(secret_key.encode(), date_time.encode(), hashlib.sha1)
        return hmac.compare_digest(expected, self.digest)


def parse_signature(text: str) -> Signature | None:
    """Return the signature in a header; None if it is not one.

    ``MQv2-HMAC-SHA1 Credential=key/region/service, SignedHeaders=x-mq-date-time, Signature=hex``; the digits are in
    upper case or lower case.
    """
    scheme, _, rest = text.partition(" ")
    items = dict(item.strip().partition("=")[::2] for item in rest.split(","))
    access_key = items.get("Credential", "").partition("/")[0]
    try:
        digest = bytes.fromhex(items.get("Signature", ""))
    except ValueError:
        return None
    return Signature(access_key, digest) if scheme == _SCHEME and access_key and digest else None


class GrpcContexts:
    """Returns the context of each call: who the client is. Without access control every client may do everything."""

    def __init__(self, access: AccessControl, clock: Clock) -> None:
        self._access = access
        self._has_accounts = access.settings is not None
        self._logged: set[tuple[int, str]] = set()
        self._limited_log = LimitedLog(_log, clock.steady_ms)

    def of(self, call: GrpcCall, method: str) -> GrpcContext:
        """Return the context of a call.

        Raises:
            GrpcRefusedError: It has no client ID, or no valid signature.
        """
        get = call.metadata.get
        client_id = get("x-mq-client-id", "")
        if not is_client_id(client_id):
            raise GrpcRefusedError(
                Code.CLIENT_ID_REQUIRED,
                f"the header x-mq-client-id must have 1..{_MAX_CLIENT_ID} characters, it has {len(client_id)}",
            )
        account = self._account(call, method) if self._has_accounts else None  # clients sign without accounts too
        version = get("x-mq-client-version", "")
        return GrpcContext(call, client_id, version, Caller(call.connection, account, version_number(version), method))

    def _account(self, call: GrpcCall, method: str) -> str:
        """Return the access key of a call whose signature is valid."""
        reason = "access control is enabled: configure the client with an access key and a secret key"
        text = call.metadata.get("authorization")
        signature = None if text is None else parse_signature(text)
        if signature is not None:
            access_key = signature.access_key
            account = self._access.accounts.get(access_key)
            secret_key = _UNKNOWN_SECRET if account is None else account.secret_key
            # Compute the signature for an unknown account too: the time must not reveal which accounts exist.
            is_valid = signature.is_made_with(secret_key, call.metadata.get("x-mq-date-time", ""))
            if is_valid and account is not None and "x-mq-date-time" in call.metadata:
                return access_key
            reason = f"access key {access_key[:64]!r} is unknown, or its secret key is wrong"
        elif text is not None:
            reason = f"the header authorization is not {_SCHEME} with Credential, SignedHeaders and Signature"
        raise self._refused(call, method, reason)

    def check_rights(self, context: GrpcContext, method: str, request: Any) -> None:
        """Check the rights that a call needs by the names in its message: see `GRPC_RIGHTS`.

        Raises:
            GrpcRefusedError: The account has not all of them.
        """
        if not self._has_accounts:
            return
        account = self._access.accounts.get(context.caller.account or "")
        missing = self._missing(account, method, request)
        if missing is not None:
            raise self._refused(context.call, method, missing)

    def _missing(self, account: Account | None, method: str, request: Any) -> str | None:
        if account is None:
            return "the account was removed from the configuration of the server"
        if account.admin:
            return None
        for need in GRPC_RIGHTS[method].needs(request):
            if not self._access.permits(account, need):
                return f"access key {account.access_key!r} has no right {need} ({method})"
        return None

    def _refused(self, call: GrpcCall, method: str, reason: str) -> GrpcRefusedError:
        """Return the error for a refused call. It is logged once for each connection and reason."""
        key = (call.connection.id, reason)
        log = _log.debug if key in self._logged else self._limited_log.warning
        log("acl.refused", request=method, remote=str(call.connection.remote), reason=reason)
        if len(self._logged) >= _MAX_LOGGED:
            self._logged.clear()
        self._logged.add(key)
        return GrpcRefusedError(Code.UNAUTHORIZED, reason)
