"""The callers of RocketMQ's protocol."""

from __future__ import annotations

from functools import lru_cache

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY
from mqtemplate.remoting.protocol.codes import RequestCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.requests.caller import Caller

_text = lru_cache(RequestCode.text)


class Callers:
    """Returns the caller of each request that arrives at a server of RocketMQ's protocol.

    Args:
        has_accounts: Access control is enabled: `AclGuard` has checked the signature of each request, so its access key
            names its account.
    """

    def __init__(self, *, has_accounts: bool) -> None:
        self._has_accounts = has_accounts

    def of(self, connection: Connection, request: RemotingCommand) -> Caller:
        """Return the client that sent *request*."""
        account = request.ext_fields.get(ACCESS_KEY) if self._has_accounts else None
        return Caller(connection, account, request.version, _text(request.code))
