"""Rights to what a request reaches beyond the names in it, and the accounts that use client IDs, in any protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from mqtemplate.message import Message, Property, copy_properties
from mqtemplate.remoting.protocol.codes import ResponseCode, Version
from mqtemplate.server.acl.settings import Account, AclSettings, Need, Right, group_need, pop_pairs, topic_need
from mqtemplate.server.requests.caller import Caller
from mqtemplate.server.requests.refusal import RefusedError

_MAX_IDS_OF_CONNECTION = 256


class ClientIds:
    """Binds each client ID to the account that used it first, until its connections are closed.

    The server sends replies to the connection that registered a client ID last. Without the binding any account could
    register the ID of another client and receive its replies. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[str, tuple[str, set[int]]] = {}  # client ID -> access key, connection IDs
        self._of_connection: dict[int, set[str]] = {}

    def bind(self, client_id: str, access_key: str, connection: int) -> None:
        """Bind *client_id* to an account while the connection with this ID is open.

        Raises:
            RefusedError: It is bound to another account, or the connection uses too many IDs.
        """
        with self._lock:
            self._bind(client_id, access_key, connection)

    def _bind(self, client_id: str, access_key: str, connection: int) -> None:
        owner, connections = self._owners.get(client_id, (access_key, set()))
        if owner != access_key:
            raise RefusedError(
                ResponseCode.NO_PERMISSION,
                f"client ID {client_id[:64]!r} is in use by another account; give this client another instance name",
            )
        ids = self._of_connection.setdefault(connection, set())
        if client_id not in ids and len(ids) >= _MAX_IDS_OF_CONNECTION:
            raise RefusedError(
                ResponseCode.SYSTEM_BUSY,
                f"one connection may have {_MAX_IDS_OF_CONNECTION} client IDs; open another connection",
            )
        ids.add(client_id)
        connections.add(connection)
        self._owners[client_id] = owner, connections

    def forget(self, connection: int) -> None:
        """Release the IDs of a closed connection."""
        with self._lock:
            for client_id in self._of_connection.pop(connection, ()):
                connections = self._owners[client_id][1]
                connections.discard(connection)
                if not connections:
                    del self._owners[client_id]


def refusal_code(version: int) -> ResponseCode:
    """Return the code for a request without the right.

    Clients from 5.0.0 on receive NO_PERMISSION, as from ACL 2.0; older clients receive SYSTEM_ERROR, as from ACL 1.0.
    An older client would take NO_PERMISSION for a topic that is not writable, and retry with the next broker.
    """
    return ResponseCode.NO_PERMISSION if version >= Version.V5_0_0 else ResponseCode.SYSTEM_ERROR


class AccessControl:
    """The accounts, and checks of callers. The signature of each request was verified before: see `Caller.account`.

    Args:
        settings: None: access control is disabled, and everything is permitted.
        has_group: Returns True if the broker has this consumer group; None: its groups are not known here.
        has_topic: Returns True if the broker has this topic.

    Attributes:
        accounts: By access key.
        client_ids: The accounts that use client IDs.
    """

    def __init__(
        self,
        settings: AclSettings | None,
        has_group: Callable[[str], bool] | None = None,
        has_topic: Callable[[str], bool] = lambda topic: False,
    ) -> None:
        self.settings = settings
        self._has_group = has_group
        self._has_topic = has_topic
        self.accounts = {} if settings is None else {account.access_key: account for account in settings.accounts}
        self.client_ids = ClientIds()

    def change_accounts(self, settings: AclSettings) -> set[str]:
        """Use the accounts of other settings, from the next request on. Return the access keys that have changed.

        Args:
            settings: The window for repeated signatures stays as it was.
        """
        before, after = self.accounts, {account.access_key: account for account in settings.accounts}
        self.accounts = after  # in one step: other threads read it
        return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}

    def may(self, access_key: str | None, topic: str, right: Right) -> bool:
        """Return True if an account has *right* on a topic, or access control is disabled."""
        if self.settings is None:
            return True
        account = None if access_key is None else self.accounts.get(access_key)
        return account is not None and self.permits(account, topic_need(topic, right))

    def permits(self, account: Account, need: Need) -> bool:
        """Return True if an account has a right.

        A retry topic may be that of a group, and of another group for a topic that it receives by POP: only the groups
        and topics of the broker tell. The account needs the rights for all that it can be, so a denied one prevails.
        """
        if account.admin:
            return True
        if not need.is_retry or need.name is None or self._has_group is None:
            return account.may(*need)
        return all(account.may(*each) for each in self._retry_needs(need.name, self._has_group))

    def _retry_needs(self, name: str, has_group: Callable[[str], bool]) -> list[Need]:
        needs: list[Need] = []
        for group, topic in pop_pairs(name):
            if self._has_topic(topic) and has_group(group):
                needs += [group_need(group), Need("topic", topic, Right.SUB)]
        return [*needs, group_need(name)] if not needs or has_group(name) else needs

    def application_scope(self, access_key: str | None) -> str:
        """Return the account to which the applications of sequenced sends belong; empty for the owner of the store.

        A repeat must be found after a restart of the owner too, and if it opens the folder itself.
        """
        account = None if access_key is None else self.accounts.get(access_key)
        return "" if account is None or account.is_owner else account.access_key

    def check_topic(self, caller: Caller, topic: str, right: Right, reached: str) -> None:
        """Check the right to the topic of a stored message. The refusal does not tell the name of the topic.

        Args:
            reached: What has the topic, for the text of the error: ``the message at physical offset 7``.

        Raises:
            RefusedError: The account has no such right.
        """
        if not self.may(caller.account, topic, right):
            raise RefusedError(
                refusal_code(caller.version),
                f"access key {caller.account!r} has no right {right} on the topic of {reached} ({caller.request})",
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

    def bind_client(self, caller: Caller, client_id: str) -> None:
        """Bind a client ID to the account of a caller, while its connection is open.

        Raises:
            RefusedError: Another account uses the ID, or the connection uses too many.
        """
        if caller.account is not None:
            self.client_ids.bind(client_id, caller.account, caller.connection.id)
            if not caller.connection.is_open:  # it was closed before the ID was bound: `forget` came too early
                self.client_ids.forget(caller.connection.id)
