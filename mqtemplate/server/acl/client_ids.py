"""Client IDs and the accounts that use them."""

from __future__ import annotations

from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.server.requests.response import RefusedError

_MAX_IDS_OF_CONNECTION = 256


class ClientIds:
    """Binds each client ID to the account that used it first, until its connections are closed.

    The server sends replies to the connection that registered a client ID last. Without the binding any account could
    register the ID of another client and receive its replies. Not thread-safe: the I/O thread calls it.
    """

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, set[int]]] = {}  # client ID -> access key, connection IDs
        self._of_connection: dict[int, set[str]] = {}

    def bind(self, client_id: str, access_key: str, connection: Connection) -> None:
        """Bind *client_id* to an account while *connection* is open.

        Raises:
            RefusedError: It is bound to another account, or the connection uses too many IDs.
        """
        owner, connections = self._owners.get(client_id, (access_key, set()))
        if owner != access_key:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"client ID {client_id[:64]!r} is in use by another account; give this client another instance name",
            )
        ids = self._of_connection.setdefault(connection.id, set())
        if client_id not in ids and len(ids) >= _MAX_IDS_OF_CONNECTION:
            raise RefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"one connection may have {_MAX_IDS_OF_CONNECTION} client IDs; open another connection",
            )
        ids.add(client_id)
        connections.add(connection.id)
        self._owners[client_id] = owner, connections

    def forget(self, connection: Connection) -> None:
        """Release the IDs of a closed connection."""
        for client_id in self._of_connection.pop(connection.id, ()):
            connections = self._owners[client_id][1]
            connections.discard(connection.id)
            if not connections:
                del self._owners[client_id]
