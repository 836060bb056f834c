"""The interface of a server to the embedded broker that it serves."""

from __future__ import annotations

from typing import Protocol

from mqtemplate.brokers.embedded.transactions.checkers import TransactionChecker
from mqtemplate.message import MessageExt


class RemoteClients(TransactionChecker, Protocol):
    """The remote clients of an embedded broker. A server passes them to `EmbeddedBroker.attach`."""

    def has_members(self, group: str) -> bool:
        """Return True if a remote client is a member of the consumer group."""

    def deliver_reply(self, reply: MessageExt) -> bool:
        """Send a reply to the remote client that it names; return False if that client is not connected."""
