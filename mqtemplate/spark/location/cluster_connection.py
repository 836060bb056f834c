"""Connection of a planner or a task to a cluster: access key and TLS, routes, requests with retries."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, TypeVar

from mqtemplate.brokers.remote.cluster.failures import check_response
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID, NameServers
from mqtemplate.brokers.remote.cluster.settings import Namespace
from mqtemplate.clock import SystemClock
from mqtemplate.errors import (
    BrokerError,
    RemoteConnectError,
    RemoteTimeoutError,
    SparkError,
)
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.client import RemotingClient
from mqtemplate.remoting.identity import ClientTls, Credentials
from mqtemplate.remoting.protocol.bodies.group import HeartbeatData
from mqtemplate.remoting.protocol.bodies.own_requests import (
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
)
from mqtemplate.remoting.protocol.codes import Perm, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.fields import CommandHeader
from mqtemplate.remoting.settings import RemotingClientSettings
from mqtemplate.remoting.sockets import AddressMap
from mqtemplate.spark.location.location import BrokerLocation, read_client, refuse_unknown


def client_settings(path: str | None, client: str | None = None) -> RemotingClientSettings:
    """Return the settings of this machine's connections.

    Args:
        path: The file of the option ``clientFile``; None for the environment.
        client: See `BrokerLocation.client`; it has priority.

    Raises:
        ConfigurationError: The file is missing or damaged, or a key is unknown or missing.
    """
    given, where = read_client(path) if client is None else (json.loads(client), "the client settings of the driver")
    tls, credentials = None, None
    if "tls" in given:
        known = sorted(each.name.replace("_", "-") for each in fields(ClientTls))
        refuse_unknown(given["tls"], known, f"{where}: tls: ")
        tls = ClientTls(**_with_underscores(given.pop("tls")))
    if "access-key" in given:
        credentials = Credentials(**_with_underscores(given))
    return RemotingClientSettings(tls=tls, credentials=credentials)


def _with_underscores(given: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in given.items()}


_BUSY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL, ResponseCode.SERVICE_NOT_AVAILABLE})
"""Responses of a broker that cannot answer now: a cold one sends them while its page cache fills."""
TRANSIENT = (RemoteConnectError, RemoteTimeoutError)
"""Errors after which a request is repeated."""
RETRY_S = 60.0
"""Time for the repetitions of a request: a server that restarts, or another one that takes over, ends no query."""
_TIMEOUT_MS = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_CONNECT_TIMEOUT_MS = 3_000


class Retries:
    """Pauses between the attempts of one request, until the time for them is over.

    Args:
        seconds: Time for all attempts.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._pause_s = _FIRST_PAUSE_S

    def pause(self) -> bool:
        """Wait before the next attempt: 0.1 s, 0.2 s, up to 2 s. Return False if no time is left for one."""
        if time.monotonic() + self._pause_s > self._deadline:
            return False
        threading.Event().wait(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return True


# --- connections of this process: Spark uses its Python processes for many tasks ------------------


_KeptT = TypeVar("_KeptT")
_MOST = 8
_kept: dict[Hashable, Any] = {}
_connecting = threading.Lock()


def kept_connection(key: Hashable, connect: Callable[[], _KeptT]) -> _KeptT:
    """Return the connection of this process with this key, or a new one. The oldest of many is closed.

    Args:
        key: All that the connection depends on, also access key and TLS settings, and its kind.
    """
    key = os.getpid(), key  # a forked process has no connection
    with _connecting:
        found: _KeptT | None = _kept.get(key)
        if found is None:
            found = connect()
            while len(_kept) >= _MOST:
                _kept.pop(next(iter(_kept))).close()
            _kept[key] = found
        return found


def close_connections() -> None:
    """Close the connections of this process. New ones are opened when they are needed."""
    with _connecting:
        while _kept:
            _kept.popitem()[1].close()


# --- requests ------------------------------------------------------------


def connect(location: BrokerLocation, retry_s: float = RETRY_S) -> ClusterConnection:
    """Return this process's connection to a cluster.

    Args:
        retry_s: See `ClusterConnection`.

    Raises:
        ConfigurationError: The access key or TLS settings of this machine are wrong.
    """
    settings = client_settings(location.client_file, location.client)
    key = ClusterConnection, location.name_servers, location.address_map, settings.credentials, settings.tls, retry_s
    return kept_connection(key, lambda: ClusterConnection(location, settings, retry_s))


def named(queue: MessageQueue) -> str:
    """Return the name of a queue for errors."""
    return f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name}"


Answer = Future[RemotingCommand | BrokerError]
"""Response to a request, or the error of the connection."""


class ClusterConnection:
    """Requests to the name servers and brokers of a cluster. Thread-safe.

    A request is repeated while a name server or broker does not answer, or is busy. Meanwhile the last route of a topic
    is used: a name server that was started again knows no topic until the brokers have registered.

    Args:
        retry_s: Time for the attempts of one request.
    """

    def __init__(self, location: BrokerLocation, settings: RemotingClientSettings, retry_s: float) -> None:
        self.client = RemotingClient(
            settings,
            SystemClock(),
            origin_of=lambda address: self._names.origin_of(address),  # noqa: PLW0108
        )
        self.retry_s = retry_s
        self._place = f"the {location}"
        self._client_id = f"{socket.gethostname()}@{os.getpid()}#{time.time_ns()}"
        self._names = NameServers(
            location.name_servers,
            self.client.invoke,
            _CONNECT_TIMEOUT_MS,
            Namespace(""),
            AddressMap(dict(location.address_map)),
            "option addressMap",
        )
        self._queues: dict[str, list[MessageQueue]] = {}
        self._addresses: dict[str, str] = {}
        self._unreached: set[str] = set()
        self._capabilities: dict[str, frozenset[str]] = {}

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def topics(self) -> set[str]:
        """Return the topics of the cluster."""
        return set(self._repeated(self._names.topics))

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic on all brokers, sorted; none if the topic is missing.

        The queues of a broker that is not registered now are expected again: it may be restarting.
        """
        retries = Retries(self.retry_s)
        while True:
            found = self._repeated(lambda: self._routed_queues(topic))
            missing = {queue.broker_name for queue in self._queues.get(topic, ()) if queue not in found}
            if not missing or missing <= self._registered() or not retries.pause():
                self._queues[topic] = found
                return found

    def _registered(self) -> set[str]:
        return set(self._repeated(self._names.cluster_info).broker_addr_table)

    def _routed_queues(self, topic: str) -> list[MessageQueue]:
        data = self._names.topic_route(topic)
        if data is None:
            return []
        for broker in data.broker_datas:
            addresses = broker.broker_addrs
            if addresses:
                self._addresses[broker.broker_name] = addresses.get(MASTER_ID) or next(iter(addresses.values()))
        return sorted(
            MessageQueue(topic, each.broker_name, queue_id)
            for each in data.queue_datas
            if each.perm & Perm.READ and each.broker_name in self._addresses
            for queue_id in range(each.read_queue_nums)
        )

    def _repeated(self, ask: Callable[[], _KeptT]) -> _KeptT:
        """Return the answer of the name servers; repeat the question while none answers."""
        retries = Retries(self.retry_s)
        while True:
            try:
                return ask()
            except TRANSIENT:
                if not retries.pause():
                    raise

    def address(self, queue: MessageQueue) -> str:
        """Return the address of the broker of a queue: the last known one while no name server answers.

        Raises:
            SparkError: The cluster that this machine reaches does not have the broker.
        """
        name = queue.broker_name
        if name not in self._addresses:
            self.queues(queue.topic)
        elif name in self._unreached:  # the broker may have moved
            with contextlib.suppress(*TRANSIENT):
                self._routed_queues(queue.topic)
        if name not in self._addresses:
            raise SparkError(
                f"{self._place} has no broker {name!r} with {queue.topic!r}: it was removed, or this machine reaches "
                "another cluster under this address"
            )
        return self._addresses[name]

    def call(
        self, queue: MessageQueue, code: int, header: CommandHeader, what: str, accept: Collection[int] = ()
    ) -> RemotingCommand:
        """Send a request to the broker of a queue; repeat it if the broker is busy or does not answer.

        Raises:
            BrokerError: The broker refused, or did not answer in time.
        """
        retries = Retries(self.retry_s)
        while True:
            response = self.send(queue, code, header).result()
            if self.is_final(queue, response) or not retries.pause():
                if isinstance(response, BrokerError):
                    raise response
                return check_response(response, what, self.address(queue), (ResponseCode.SUCCESS, *accept))

    def send(self, queue: MessageQueue, code: int, header: CommandHeader) -> Answer:
        """Send a request to the broker of a queue. Each one ends by its time limit."""
        answer: Answer = Future()
        self.client.invoke_async(
            self.address(queue), RemotingCommand.request(code, header), _TIMEOUT_MS, answer.set_result
        )
        return answer

    def is_final(self, queue: MessageQueue, response: RemotingCommand | BrokerError) -> bool:
        """Return False if the broker of *queue* cannot answer now, so that the request is repeated."""
        if isinstance(response, TRANSIENT):
            self._unreached.add(queue.broker_name)
            return False
        self._unreached.discard(queue.broker_name)
        return isinstance(response, BrokerError) or response.code not in _BUSY

    def has_capability(self, queue: MessageQueue, name: str) -> bool:
        """Return True if the broker of a queue is a server of this library that announced the capability."""
        address = self.address(queue)
        if address not in self._capabilities:
            header = HeartbeatRequestHeader(requests_capabilities=True)
            body = HeartbeatData(client_id=self._client_id, producer_data_set=[], consumer_data_set=[]).encode()
            request = RemotingCommand.request(RequestCode.HEART_BEAT, header, body)
            try:
                response = self.client.invoke(address, request, _TIMEOUT_MS)
            except BrokerError:
                return False  # the request that follows fails too, and is repeated
            if response.code != ResponseCode.SUCCESS:
                return False
            names = response.header(HeartbeatResponseHeader).capabilities or ""
            self._capabilities[address] = frozenset(names.split(","))
        return name in self._capabilities[address]
