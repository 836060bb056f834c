"""Rights to what a request reaches beyond the names in it, and the accounts that use client IDs, for processors."""

from __future__ import annotations

from dataclasses import replace

from mqtemplate.message import Message, Property, copy_properties
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.acl import ACCESS_KEY
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.server.acl.rights import topic_need
from mqtemplate.server.acl.settings import AclSettings, Right
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
        """Release the IDs of a closed connection. Called in the I/O thread."""
        for client_id in self._of_connection.pop(connection.id, ()):
            connections = self._owners[client_id][1]
            connections.discard(connection.id)
            if not connections:
                del self._owners[client_id]


def refusal_code(request: RemotingCommand) -> ResponseCode:
    """Return the code for a request without the right.

    Clients from 5.0.0 on receive NO_PERMISSION, as from ACL 2.0; older clients receive SYSTEM_ERROR, as from ACL 1.0.
    An older client would take NO_PERMISSION for a topic that is not writable, and retry with the next broker.
    """
    return ResponseCode.NO_PERMISSION if request.version >= Version.V5_0_0 else ResponseCode.SYSTEM_ERROR


class AccessControl:
    """The accounts, and checks for processors. `AclGuard` has verified the signature of each request before.

    Args:
        settings: None: access control is disabled, and everything is permitted.

    Attributes:
        accounts: By access key.
        client_ids: The accounts that use client IDs.
    """

    def __init__(self, settings: AclSettings | None) -> None:
        self.settings = settings
        self.accounts = {} if settings is None else {account.access_key: account for account in settings.accounts}
        self.client_ids = ClientIds()

    def key_of(self, request: RemotingCommand) -> str | None:
        """Return the access key of the account that sent a request. None if access control is disabled."""
        return None if self.settings is None else request.ext_fields.get(ACCESS_KEY)

    def may(self, access_key: str | None, topic: str, right: Right) -> bool:
        """Return True if an account has *right* on a topic, or access control is disabled."""
        if self.settings is None:
            return True
        account = None if access_key is None else self.accounts.get(access_key)
        return account is not None and (account.admin or account.may(*topic_need(topic, right)))

    def check_topic(self, request: RemotingCommand, topic: str, right: Right, reached: str) -> None:
        """Check the right to the topic of a stored message. The refusal does not tell the name of the topic.

        Args:
            reached: What has the topic, for the text of the error: ``the message at physical offset 7``.

        Raises:
            RefusedError: The account has no such right.
        """
        access_key = self.key_of(request)
        if not self.may(access_key, topic, right):
            raise RefusedError(
                refusal_code(request),
                f"access key {access_key!r} has no right {right} on the topic of {reached} "
                f"({RequestCode.text(request.code)})",
            )

    def checked_origin(self, access_key: str | None, message: Message) -> Message:
        """Return a client's message for a retry or dead letter topic, without an origin that it may not claim.

        A consumer may send a retry itself. Later an operator may send its dead letter to the topic that it names. So
        the origin stays as it is only if the account may send to that topic. If the account may only read it, the name
        stays for the consumer, without an id: `DeadLetters.resend` refuses such a message.
        """
        properties = message.properties
        topics = [properties[name] for name in (Property.RETRY_TOPIC, Property.DLQ_ORIGIN_TOPIC) if name in properties]
        if self.settings is None or all(self.may(access_key, topic, Right.PUB) for topic in topics):
            return message
        left_out = {Property.ORIGIN_MESSAGE_ID, Property.DLQ_ORIGIN_TOPIC, Property.DLQ_ORIGIN_MESSAGE_ID}
        if not self.may(access_key, properties.get(Property.RETRY_TOPIC, ""), Right.SUB):
            left_out.add(Property.RETRY_TOPIC)
        return replace(message, properties=copy_properties(properties, *left_out))

    def bind_client(self, request: RemotingCommand, client_id: str, connection: Connection) -> None:
        """Bind a client ID to the account of a request. Called in the I/O thread.

        Raises:
            RefusedError: Another account uses the ID.
        """
        access_key = self.key_of(request)
        if access_key is not None:
            self.client_ids.bind(client_id, access_key, connection)
