"""Collaborators that all parts of a remote broker share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import check_response
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.brokers.remote.sent_offsets import SentOffsets
from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.remoting.protocol.codes import ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand


@dataclass(frozen=True, slots=True)
class ClientContext:
    """One client of a cluster.

    Attributes:
        instance: The instance that sends requests: the client's first one, or that of a group member.
        sent: Offsets of the messages that this client has sent.
    """

    settings: RemoteSettings
    clock: Clock
    namespace: Namespace
    instance: ClientInstance
    routes: RouteTable
    sent: SentOffsets

    def call(
        self,
        address: str,
        request: RemotingCommand,
        operation: str,
        *,
        accept: Collection[int] = (ResponseCode.SUCCESS,),
        timeout_ms: int | None = None,
    ) -> RemotingCommand:
        """Send a request to a broker and return the response.

        Args:
            operation: What the request is for, such as "read queue 1 of orders", for the error.
            accept: Codes of the responses that are not errors.
            timeout_ms: None for ``settings.request_timeout_ms``.

        Raises:
            BrokerError: The broker cannot be reached, did not answer in time, or refused.
        """
        response = self.instance.invoke(address, request, timeout_ms or self.settings.request_timeout_ms)
        return check_response(response, operation, address, accept)
