"""One client as brokers see it: its id, connections, groups and heartbeats.

Source: RocketMQ ``client: MQClientInstance``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Protocol

from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError
from mqtemplate.event_log import get_logger
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import UnregisterClientRequestHeader
from mqtemplate.remoting.settings import RemotingClientSettings

_log = get_logger("mqtemplate.remote")

Handler = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Handles a broker's request; returns the response, or None if there is none."""

_numbers = itertools.count()


class GroupMember(Protocol):
    """A consumer, as heartbeats describe it."""

    def consumer_data(self) -> ConsumerData:
        """Return this member's part of a heartbeat."""


def create_client_id(name_server: str) -> str:
    """Return a new ``<ip>@<pid>#<nanos>``; the IP address is the one that connects to *name_server*."""
    return f"{_local_ip(name_server)}@{os.getpid()}#{time.time_ns() + next(_numbers)}"


def _local_ip(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        [(family, _, _, _, target), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: this sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return "127.0.0.1"


class ClientInstance:
    """A client id with its own connections.

    A broker tells members of a group apart by their client ids, so an instance has at most one member of each group.

    Args:
        settings: Among them the time limit of heartbeats and unregistrations, and the namespace of each request.
        members: Members by group as named on the wire; handlers may share this table.
        handlers: Request code -> handler of that request from a broker.
        on_connection_lost: Called with the address when a connection has ended.

    Attributes:
        producer_groups: Producer groups as named on the wire.
        versions: Address -> version of the broker there, from its last response to a heartbeat.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        clock: Clock,
        members: dict[str, GroupMember],
        handlers: Mapping[int, Handler],
        on_connection_lost: Callable[[str], None],
    ) -> None:
        self.id = create_client_id(settings.name_servers[0])
        self.members = members
        self.producer_groups: set[str] = set()
        self.versions: dict[str, int] = {}
        self._handlers = handlers
        self._request_timeout_ms = settings.request_timeout_ms
        self._extra_fields = {"nsd": "true", "ns": settings.namespace_v2} if settings.namespace_v2 else {}
        self._registration_lock = threading.Lock()
        connections = RemotingClientSettings(
            connect_timeout_ms=settings.connect_timeout_ms, tls=settings.tls, credentials=settings.credentials
        )
        self._remoting = RemotingClient(connections, clock, self._on_request)
        self._remoting.on_close(on_connection_lost)

    # --- requests ------------------------------------------------------------------------------

    def invoke(self, address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        """Send a request and wait for the response; see `RemotingClient.invoke`."""
        return self._remoting.invoke(address, self._with_extra_fields(request), timeout_ms)

    def invoke_async(
        self,
        address: str,
        request: RemotingCommand,
        timeout_ms: int,
        done: Callable[[RemotingCommand | BrokerError], None],
    ) -> None:
        """Send a request; *done* is called once in the I/O thread, with the response or an error."""
        self._remoting.invoke_async(address, self._with_extra_fields(request), timeout_ms, done)

    def invoke_one_way(self, address: str, request: RemotingCommand) -> None:
        """Send a request that has no response."""
        self._remoting.invoke_one_way(address, self._with_extra_fields(request))

    def invoke_all(
        self, requests: Iterable[tuple[str, RemotingCommand]], timeout_ms: int
    ) -> list[tuple[str, RemotingCommand | BrokerError]]:
        """Send requests to several addresses at once and wait for all of them.

        Returns:
            For each request, in their order, the address and the response or error.
        """
        pending: list[tuple[str, Future[RemotingCommand | BrokerError]]] = []
        for address, request in requests:
            future: Future[RemotingCommand | BrokerError] = Future()
            pending.append((address, future))
            try:
                self.invoke_async(address, request, timeout_ms, future.set_result)
            except BrokerError as exc:
                future.set_result(exc)
        return [(address, future.result()) for address, future in pending]  # each request ends by its time limit

    def _with_extra_fields(self, request: RemotingCommand) -> RemotingCommand:
        if self._extra_fields:
            request.ext_fields.update(self._extra_fields)
        return request

    def is_before_5(self, address: str) -> bool:
        """Return True if the broker at *address* is known to be older than RocketMQ 5."""
        return self.versions.get(address, int(Version.V5_0_0)) < Version.V5_0_0

    # --- registration --------------------------------------------------------------------------

    def heartbeat(self, addresses: Iterable[str]) -> bool:
        """Register all groups of this client with brokers; return False if one of them failed."""
        if not self.members and not self.producer_groups:
            return True
        with self._registration_lock:  # a newer heartbeat must not arrive before an older one
            body = HeartbeatData(
                client_id=self.id,
                producer_data_set=[ProducerData(group_name=group) for group in sorted(self.producer_groups)],
                consumer_data_set=[member.consumer_data() for member in list(self.members.values())],
            ).encode()
            requests = [(address, RemotingCommand.request(RequestCode.HEART_BEAT, body=body)) for address in addresses]
            responses = self.invoke_all(requests, self._request_timeout_ms)
        failed = [address for address, response in responses if not self._is_registered(address, response)]
        return not failed

    def _is_registered(self, address: str, response: RemotingCommand | BrokerError) -> bool:
        if isinstance(response, RemotingCommand) and response.code == ResponseCode.SUCCESS:
            self.versions[address] = response.version
            return True
        _log.warning("remote.heartbeat_failed", address=address, client_id=self.id, reason=str(response))
        return False

    def unregister(
        self, addresses: Iterable[str], *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Remove a group of this client from brokers; one that fails removes it when heartbeats stop."""
        header = UnregisterClientRequestHeader(
            client_id=self.id, producer_group=producer_group, consumer_group=consumer_group
        )
        requests = [(address, RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, header)) for address in addresses]
        with self._registration_lock:  # a heartbeat that a broker handles after this would register the group again
            responses = self.invoke_all(requests, self._request_timeout_ms)
        for address, response in responses:
            if not isinstance(response, RemotingCommand) or response.code != ResponseCode.SUCCESS:
                _log.info("remote.unregister_failed", address=address, client_id=self.id, reason=str(response))

    def close(self) -> None:
        """Close the connections; pending requests end with an error."""
        self._remoting.close()

    def _on_request(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        handler = self._handlers.get(request.code)
        if handler is not None:
            return handler(channel, request)
        if request.is_one_way:
            return None
        return request.response(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {request.code} is not supported by clients"
        )
