"""One client of a cluster, as its brokers know it: an id, its connections, its groups, its heartbeats.

Source: RocketMQ ``client: MQClientInstance``; section 7 of the specification.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import structlog

from mqtemplate.brokers.remote.settings import RemoteSettings
from mqtemplate.clock import Clock
from mqtemplate.errors import BrokerError, RemoteTimeoutError
from mqtemplate.remoting import Channel, RemotingClient, RemotingClientSettings
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, Version
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, ProducerData
from mqtemplate.remoting.protocol.headers.group import UnregisterClientRequestHeader

_log = structlog.stdlib.get_logger("mqtemplate.remote")

Handler = Callable[[Channel, RemotingCommand], RemotingCommand | None]
"""Takes a broker's request; gives the answer, or None if there is to be none."""

_numbers = itertools.count()


class GroupMember(Protocol):
    """A consumer, as its heartbeat tells of it."""

    def consumer_data(self) -> ConsumerData: ...


def client_id(name_server: str) -> str:
    """``<ip>@<pid>#<nanos>``, another one each time; the address is the one that leads to *name_server*."""
    return f"{_own_ip(name_server)}@{os.getpid()}#{time.time_ns() + next(_numbers)}"


def _own_ip(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        [(family, _, _, _, target), *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return "127.0.0.1"


class ClientInstance:
    """A client id with connections of its own. It has one member of a group at most: brokers tell members apart by it.

    Args:
        handlers: Request code -> what answers a broker's request.
        on_lost: Called with the address when a connection ended.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        clock: Clock,
        handlers: dict[int, Handler],
        on_lost: Callable[[str], None],
    ) -> None:
        self.id = client_id(settings.name_servers[0])
        self.members: dict[str, GroupMember] = {}
        self.producer_groups: set[str] = set()
        self.versions: dict[str, int] = {}
        self._settings = settings
        self._handlers = handlers
        self._heartbeat_lock = threading.Lock()
        wire = RemotingClientSettings(
            connect_timeout_ms=settings.connect_timeout_ms, tls=settings.tls, credentials=settings.credentials
        )
        self._remoting = RemotingClient(wire, clock, self._on_request)
        self._remoting.on_close(on_lost)

    # --- asking --------------------------------------------------------------------------------

    def invoke(self, address: str, request: RemotingCommand, timeout_ms: int) -> RemotingCommand:
        """Ask and wait; see `RemotingClient.invoke`."""
        return self._remoting.invoke(address, self._marked(request), timeout_ms)

    def invoke_async(
        self,
        address: str,
        request: RemotingCommand,
        timeout_ms: int,
        done: Callable[[RemotingCommand | BrokerError], None],
    ) -> None:
        """Ask; *done* is called in the I/O thread, with the answer or an error, once."""
        self._remoting.invoke_async(address, self._marked(request), timeout_ms, done)

    def invoke_one_way(self, address: str, request: RemotingCommand) -> None:
        self._remoting.invoke_one_way(address, self._marked(request))

    def invoke_all(
        self, requests: Iterable[tuple[str, RemotingCommand]], timeout_ms: int
    ) -> list[tuple[str, RemotingCommand | BrokerError]]:
        """Ask several addresses at once, and wait for all: address and answer, or why there is none, in their order."""
        waiting: list[tuple[str, Future[RemotingCommand | BrokerError]]] = []
        for address, request in requests:
            future: Future[RemotingCommand | BrokerError] = Future()
            waiting.append((address, future))
            try:
                self.invoke_async(address, request, timeout_ms, future.set_result)
            except BrokerError as exc:
                future.set_result(exc)
        return [(address, _result_of(future, address, timeout_ms)) for address, future in waiting]

    def _marked(self, request: RemotingCommand) -> RemotingCommand:
        if self._settings.namespace_v2:
            request.ext_fields["nsd"] = "true"
            request.ext_fields["ns"] = self._settings.namespace_v2
        return request

    def is_before_5(self, address: str) -> bool:
        """Whether a broker is known to be of 4.x or older."""
        return self.versions.get(address, int(Version.V5_0_0)) < Version.V5_0_0

    # --- being there ---------------------------------------------------------------------------

    def heartbeat(self, addresses: Iterable[str]) -> bool:
        """Tell brokers who is here; False if one of them did not hear it."""
        if not self.members and not self.producer_groups:
            return True
        with self._heartbeat_lock:  # an older one must not overtake a newer one
            body = self._heartbeat_body()
            requests = [(address, RemotingCommand.request(RequestCode.HEART_BEAT, body=body)) for address in addresses]
            answers = self.invoke_all(requests, self._settings.request_timeout_ms)
        deaf = [address for address, answer in answers if not self._heard(address, answer)]
        return not deaf

    def _heartbeat_body(self) -> bytes:
        return HeartbeatData(
            client_id=self.id,
            producer_data_set=[ProducerData(group_name=group) for group in sorted(self.producer_groups)],
            consumer_data_set=[member.consumer_data() for member in list(self.members.values())],
        ).encode()

    def _heard(self, address: str, answer: RemotingCommand | BrokerError) -> bool:
        if isinstance(answer, RemotingCommand) and answer.code == ResponseCode.SUCCESS:
            self.versions[address] = answer.version
            return True
        _log.warning("remote.heartbeat_failed", address=address, client_id=self.id, reason=_reason(answer))
        return False

    def unregister(
        self, addresses: Iterable[str], *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Leave a group; a broker that does not hear it notices when the heartbeats stay away."""
        header = UnregisterClientRequestHeader(
            client_id=self.id, producer_group=producer_group, consumer_group=consumer_group
        )
        requests = [(address, RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, header)) for address in addresses]
        with self._heartbeat_lock:  # a heartbeat that a broker handles after this would register the member again
            answers = self.invoke_all(requests, self._settings.request_timeout_ms)
        for address, answer in answers:
            if not isinstance(answer, RemotingCommand) or answer.code != ResponseCode.SUCCESS:
                _log.info("remote.unregister_failed", address=address, client_id=self.id, reason=_reason(answer))

    def close(self) -> None:
        self._remoting.close()

    def _on_request(self, channel: Channel, request: RemotingCommand) -> RemotingCommand | None:
        handler = self._handlers.get(request.code)
        if handler is not None:
            return handler(channel, request)
        if request.is_one_way:
            return None
        return request.response(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request code {request.code} is not known to this client"
        )


def _result_of(
    future: Future[RemotingCommand | BrokerError], address: str, timeout_ms: int
) -> RemotingCommand | BrokerError:
    try:
        return future.result(timeout_ms / 1_000 + 5)  # longer than the client's own limits
    except FutureTimeoutError:
        return RemoteTimeoutError(f"{address} did not answer within {timeout_ms} ms")


def _reason(answer: RemotingCommand | BrokerError) -> str:
    return str(answer)
