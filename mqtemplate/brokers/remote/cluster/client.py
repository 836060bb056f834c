"""One client of a cluster: its id, connections, groups and heartbeats, and what all parts of a remote broker share.

Source: RocketMQ ``client: MQClientInstance``.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.failures import UNANSWERED, Outages, check_response, log_failure
from mqtemplate.brokers.remote.cluster.routes import RouteTable
from mqtemplate.brokers.remote.cluster.settings import Namespace, RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteConnectError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.bodies.own_requests import (
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
    Refusal,
    RefusalHeader,
)
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import UnregisterClientRequestHeader
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.results import SendResult

_log = get_logger("mqtemplate.remote")

Handler = Callable[[Connection, RemotingCommand], RemotingCommand | None]
"""Handles a broker's request; returns the response, or None for no response."""

KeyT = TypeVar("KeyT")
_numbers = itertools.count()
_MAX_WARNINGS = 100


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


def capabilities_of(names: str | None) -> frozenset[Capability]:
    """Return the capabilities with these names; a newer server may announce more than this client knows."""
    known = Capability.__members__
    return frozenset(known[name] for name in (names or "").split(",") if name in known)


class ClientInstance:
    """A client id with its own connections.

    A broker tells members of a group apart by their client ids, so an instance has at most one member of each group.

    Args:
        settings: Among them the time limit of heartbeats and unregistrations, and the namespace of each request.
        members: Members by group as named on the wire; handlers may share this table.
        handlers: Request code -> handler of that request from a broker.
        on_lost: Called with the address when a connection has ended, or could not be opened. It must not block.
        origin_of: See `RemotingClient`.

    Attributes:
        remoting: The connections. Requests go through the methods of the instance.
        producer_groups: Producer groups as named on the wire.
        outages: Log of servers that do not answer; all instances of a client share it.
        versions: Address -> version of the broker there, from its last response to a heartbeat.
        announced: Address -> capabilities that the server there announced; one of RocketMQ announces none.
        changes: Number of registrations at a broker that did not have this client, or that has another version now.
        refusals: Group, as named on the wire -> why a strict server refused its member, at the last heartbeat.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        clock: Clock,
        members: dict[str, GroupMember],
        handlers: Mapping[int, Handler],
        on_lost: Callable[[str], None],
        outages: Outages,
        origin_of: Callable[[str], str | None],
    ) -> None:
        self.id = create_client_id(settings.name_servers[0])
        self.members = members
        self.producer_groups: set[str] = set()
        self.versions: dict[str, int] = {}
        self.announced: dict[str, frozenset[Capability]] = {}
        self.changes = 0
        self.refusals: dict[str, str] = {}
        self._logged: set[str] = set()
        self._handlers = handlers
        self.outages = outages
        self._is_closed = False
        self._request_timeout_ms = settings.request_timeout_ms
        self._extra_fields = {"nsd": "true", "ns": settings.namespace_v2} if settings.namespace_v2 else {}
        self._registration_lock = threading.Lock()
        self._clock = clock
        self._on_lost = on_lost
        self._registered_ms: dict[str, int] = {}
        self._refused: set[str] = set()
        connections = RemotingClientSettings(
            connect_timeout_ms=settings.connect_timeout_ms, tls=settings.tls, credentials=settings.credentials
        )
        self.remoting = RemotingClient(
            connections, clock, self._on_request, self._on_connection_lost, origin_of=origin_of
        )

    # --- requests ------------------------------------------------------------------------------

    def invoke(self, address: str, request: RemotingCommand, timeout_ms: int | None = None) -> RemotingCommand:
        """Send a request and wait for the response; see `RemotingClient.invoke`.

        Args:
            timeout_ms: None for ``settings.request_timeout_ms``.
        """
        timeout_ms = timeout_ms or self._request_timeout_ms
        seen = self.outages.changes
        try:
            response = self.remoting.invoke(address, self._with_extra_fields(request), timeout_ms)
        except UNANSWERED as exc:
            self.report(address, exc, seen, timeout_ms)
            raise
        self.outages.report(address, None, seen)
        return response

    def invoke_async(
        self,
        address: str,
        request: RemotingCommand,
        timeout_ms: int,
        done: Callable[[RemotingCommand | BrokerError], None],
    ) -> None:
        """Send a request; *done* is called once in the I/O thread, with the response or an error."""
        self.remoting.invoke_async(address, self._with_extra_fields(request), timeout_ms, done)

    def invoke_one_way(self, address: str, request: RemotingCommand) -> None:
        """Send a request that has no response."""
        self.remoting.invoke_one_way(address, self._with_extra_fields(request))

    def invoke_all(
        self, requests: Iterable[tuple[str, RemotingCommand]], timeout_ms: int | None = None
    ) -> list[tuple[str, RemotingCommand | BrokerError]]:
        """Send requests to several addresses at once and wait for all of them; otherwise as `invoke`.

        Returns:
            For each request, in their order, the address and the response or error.
        """
        timeout_ms, seen = timeout_ms or self._request_timeout_ms, self.outages.changes
        pending: list[tuple[str, Future[RemotingCommand | BrokerError]]] = []
        for address, request in requests:
            future: Future[RemotingCommand | BrokerError] = Future()
            pending.append((address, future))
            try:
                self.invoke_async(address, request, timeout_ms, future.set_result)
            except BrokerError as exc:
                future.set_result(exc)
        results = [(address, future.result()) for address, future in pending]  # each request ends by its time limit
        for address, result in results:
            self.report(address, result, seen, timeout_ms)
        return results

    def report(
        self, address: str, result: RemotingCommand | BrokerError, seen: int, timeout_ms: int | None = None
    ) -> None:
        """Report the result of a request to `Outages.report`, and note if its connection was lost."""
        if isinstance(result, RemotingCommand):
            self.outages.report(address, None, seen)
        elif not self._is_closed:
            self.outages.report(address, result, seen, timeout_ms)
            if isinstance(result, RemoteConnectError):
                self._on_connection_lost(address)

    def _on_connection_lost(self, address: str) -> None:
        """Note that a broker has forgotten this client, as brokers do when a connection ends."""
        self._registered_ms.pop(address, None)
        self._refused.discard(address)
        self._on_lost(address)

    def disconnect(self, address: str) -> None:
        """Close the connection to an address that a broker has left; its pending requests fail."""
        self.remoting.disconnect(address, "the broker has another address now")

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
            header = HeartbeatRequestHeader(requests_capabilities=True)
            requests = [
                (address, RemotingCommand.request(RequestCode.HEART_BEAT, header, body)) for address in addresses
            ]
            self.refusals = {}
            responses = self.invoke_all(requests)
        failed = [address for address, response in responses if not self._note_registration(address, response)]
        return not failed

    def is_registered(self, address: str, for_ms: int = 0) -> bool:
        """Return True if the broker at *address* has this client's groups, and has had them for *for_ms* or longer."""
        since_ms = self._registered_ms.get(address)
        return since_ms is not None and self._clock.steady_ms() - since_ms >= for_ms

    def has_answer(self, address: str) -> bool:
        """Return True if the broker at *address* has answered a heartbeat, even by a refusal, since the last loss."""
        return address in self._registered_ms or address in self._refused

    def register_at(self, addresses: Iterable[str]) -> None:
        """Send a heartbeat to those brokers that have answered none yet, so that `announced` has their capabilities."""
        missing = [address for address in addresses if address not in self.versions]
        if missing:
            self.heartbeat(missing)

    def _note_registration(self, address: str, response: RemotingCommand | BrokerError) -> bool:
        if isinstance(response, RemotingCommand) and response.code == ResponseCode.SUCCESS:
            header = response.header(HeartbeatResponseHeader)
            announced = capabilities_of(header.capabilities)
            before = self.versions.get(address), self.announced.get(address)
            is_known = address in self._registered_ms and before == (response.version, announced)
            self._registered_ms.setdefault(address, self._clock.steady_ms())
            self._refused.discard(address)
            self.versions[address], self.announced[address] = response.version, announced
            self.changes += not is_known  # the last: who reads it finds the rest
            self._log_warnings(address, header.warnings)
            return True
        if isinstance(response, RemotingCommand):
            self._refused.add(address)
            refusal = response.header(RefusalHeader)
            if refusal.refusal == Refusal.DIFFERENT_SUBSCRIPTIONS and refusal.group is not None:
                self.refusals[refusal.group] = response.remark or ""
        log_failure(_log, "remote.heartbeat_failed", response, address=address, client_id=self.id)
        return False

    def _log_warnings(self, address: str, warnings: str | None) -> None:
        """Log each warning of a server once: it repeats them with each heartbeat."""
        for warning in (warnings or "").splitlines()[:_MAX_WARNINGS]:
            if warning not in self._logged and len(self._logged) < _MAX_WARNINGS:
                self._logged.add(warning)
                _log.warning("remote.subscriptions_differ", address=address, reason=warning)

    def unregister(
        self, addresses: Iterable[str], *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Remove a group of this client from brokers; one that fails removes it when heartbeats stop."""
        header = UnregisterClientRequestHeader(
            client_id=self.id, producer_group=producer_group, consumer_group=consumer_group
        )
        requests = [(address, RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, header)) for address in addresses]
        with self._registration_lock:  # a heartbeat that a broker handles after this would register the group again
            responses = self.invoke_all(requests)
        for address, response in responses:
            if not isinstance(response, RemotingCommand) or response.code != ResponseCode.SUCCESS:
                _log.info("remote.unregister_failed", address=address, client_id=self.id, reason=str(response))

    def close(self) -> None:
        """Close the connections; pending requests end with an error."""
        self._is_closed = True
        self.remoting.close()

    def _on_request(self, channel: Connection, request: RemotingCommand) -> RemotingCommand | None:
        handler = self._handlers.get(request.code)
        if handler is not None:
            return handler(channel, request)
        if request.is_one_way:
            return None
        return request.response(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {request.code} is not supported by clients"
        )


# --- context of all parts -------------------------------------------------------------------------


_REMEMBERED_MS = 5_000
_OFFSET_DIGITS = 16  # an offset message id ends with the physical offset in hexadecimal digits


class SentOffsets:
    """The highest offsets this client has seen, by queue and by broker; remembered for some seconds.

    A broker acknowledges a send when the message is in its commit log. The message enters its consume queue and the
    index a moment later, one after the other. With these offsets, later reads include the messages that this client has
    sent or received.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue_ends: dict[MessageQueue, tuple[int, int]] = {}  # (offset, time of the entry in ms)
        self._physical: dict[str, tuple[int, int]] = {}

    def add_sent(self, result: SendResult, count: int, queue: MessageQueue | None) -> None:
        """Remember a send.

        Args:
            count: Number of messages, more than one for a batch.
            queue: The queue that has the messages; for a delayed message, a queue of a system topic. None if unknown.
        """
        if queue is not None:
            self._queue_ends[queue] = (result.queue_offset + count, self._clock.steady_ms())
        digits = result.offset_msg_id[-_OFFSET_DIGITS:]
        if len(digits) == _OFFSET_DIGITS:
            self.add_seen(result.message_queue.broker_name, int(digits, 16))

    def add_seen(self, broker_name: str, physical_offset: int) -> None:
        """Remember that a broker's commit log has a message at this offset."""
        latest = self._physical.get(broker_name)
        if latest is None or latest[0] < physical_offset:
            self._physical[broker_name] = (physical_offset, self._clock.steady_ms())

    def queue_end(self, queue: MessageQueue) -> int:
        """Return the queue offset after the last message sent to *queue*; 0 without a recent one."""
        return self._recent(self._queue_ends.get(queue))

    def physical_offset(self, broker_name: str) -> int:
        """Return the highest physical offset seen of a broker; 0 without a recent one."""
        return self._recent(self._physical.get(broker_name))

    def age_ms(self, broker_name: str) -> int:
        """Return the time since the highest physical offset of a broker was seen; some seconds without one."""
        latest = self._physical.get(broker_name)
        return _REMEMBERED_MS if latest is None else self._clock.steady_ms() - latest[1]

    def _recent(self, entry: tuple[int, int] | None) -> int:
        return entry[0] if entry is not None and self._clock.steady_ms() - entry[1] < _REMEMBERED_MS else 0


@dataclass(frozen=True, slots=True)
class ClientContext:
    """One client of a cluster.

    Attributes:
        instance: The instance that sends requests: the client's first one, or a group member's.
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
            timeout_ms: As `ClientInstance.invoke`.

        Raises:
            BrokerError: The broker cannot be reached, did not answer in time, or refused.
        """
        response = self.instance.invoke(address, request, timeout_ms)
        return check_response(response, operation, address, accept)

    def invoke_each(
        self, keys: Iterable[KeyT], create: Callable[[KeyT], tuple[str, RemotingCommand]], timeout_ms: int | None = None
    ) -> dict[KeyT, tuple[str, RemotingCommand | BrokerError]]:
        """Send a request for each key, all at once, and wait for all of them.

        Args:
            keys: For example queues, or the names of brokers.
            create: Returns address and request for a key. Its `BrokerError` is the result of that key: no route may
                contain its broker any more.
            timeout_ms: As `ClientInstance.invoke`.

        Returns:
            For each key the address, and the response or error.
        """
        results: dict[KeyT, tuple[str, RemotingCommand | BrokerError]] = {}
        requests: dict[KeyT, tuple[str, RemotingCommand]] = {}
        for key in keys:
            try:
                requests[key] = create(key)
            except BrokerError as exc:
                results[key] = "", exc
        responses = self.instance.invoke_all(requests.values(), timeout_ms)
        return results | dict(zip(requests, responses, strict=True))
