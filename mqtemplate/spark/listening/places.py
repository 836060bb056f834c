"""Places whose messages a Spark listener reads: the folder of an embedded broker, or a cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.errors import SparkError
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.spark.broker_access.local_server import LocalServer
from mqtemplate.spark.broker_access.location import ACCESS_KEY, CLIENT_FILE, BrokerLocation
from mqtemplate.spark.listening.redelivery import EmbeddedSendBacks, RemoteSendBacks, SendBacks
from mqtemplate.spark.offsets import OffsetTable


class Place(Protocol):
    """Broker of a listener, as Spark's processes reach it.

    Attributes:
        metrics: Metrics of the broker, or of the listener alone if the broker is a cluster.
        send_backs: Sender of rows that come back.
    """

    metrics: Metrics
    send_backs: SendBacks

    @property
    def broker(self) -> Broker: ...

    def start(self, retry_topic: str) -> None:
        """Let Spark's processes reach the broker. A second call has no effect."""

    def stop(self) -> None:
        """End what `start` started. A second call has no effect."""

    def location(self) -> BrokerLocation:
        """Return the location for Spark's processes."""

    def options(self) -> dict[str, str]:
        """Return the options of the source for it."""

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of a topic; none if it is missing."""

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue of the broker for one in a checkpoint."""


class FolderPlace:
    """Folder of an embedded broker in this process. Spark's processes write to it through a `LocalServer`."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.broker, self.metrics = broker, broker.metrics
        self.send_backs: SendBacks = EmbeddedSendBacks(broker)
        self._server = LocalServer(broker)

    def start(self, retry_topic: str) -> None:
        """Create the retry topic, and start the server."""
        self.broker.create_topic(retry_topic, 1)
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def location(self) -> BrokerLocation:
        """Return the folder."""
        return BrokerLocation(store=str(self.broker.path))

    def options(self) -> dict[str, str]:
        """Return the folder and the name of its broker, which the folder does not contain."""
        return {"store": str(self.broker.path), "brokerName": self.broker.name}

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `Place.queues`."""
        return self.broker.queues(topic)

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue with the present name of the broker: a folder has one broker, whatever its name was."""
        return MessageQueue(read.topic, self.broker.name, read.queue_id)


class ClusterPlace:
    """Cluster of a client in this process.

    Access key and TLS settings of the client are in a file that only this user can read, for Spark's processes on this
    machine. If the environment has them for Spark, there is no such file.
    """

    def __init__(self, broker: RemoteBroker) -> None:
        self.broker, self.metrics = broker, Metrics()
        self.send_backs: SendBacks = RemoteSendBacks(broker)
        self._folder: Path | None = None

    def start(self, retry_topic: str) -> None:
        """Write the file; the first row that comes back creates the retry topic."""
        settings = self.broker.settings
        in_environment = ACCESS_KEY in os.environ or CLIENT_FILE in os.environ
        if self._folder is not None or in_environment or (settings.credentials is None and settings.tls is None):
            return
        self._folder = Path(tempfile.mkdtemp(prefix="mqtemplate-client-"))  # only this user can read it
        (self._folder / "client.json").write_text(json.dumps(_client_file(self.broker)))

    def stop(self) -> None:
        """Remove the file."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def location(self) -> BrokerLocation:
        """Return the name servers."""
        names = ";".join(self.broker.settings.name_servers)
        return BrokerLocation(name_server=names, client_file=self._client_file)

    def options(self) -> dict[str, str]:
        """Return the name servers, and the path of the file."""
        names = {"nameServer": ";".join(self.broker.settings.name_servers)}
        return names if self._client_file is None else {**names, "clientFile": self._client_file}

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `Place.queues`."""
        route = self.broker.client_context.routes.existing(topic)
        return () if route is None else route.read_queues

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue itself."""
        return read

    @property
    def _client_file(self) -> str | None:
        return None if self._folder is None else str(self._folder / "client.json")


def place_of(broker: Broker, listener: str) -> Place:
    """Return the place for a broker.

    Raises:
        SparkError: Spark cannot read from the broker.
    """
    if isinstance(broker, RemoteBroker):
        if broker.settings.namespace or broker.settings.namespace_v2:
            raise SparkError(
                f"{listener}: the data source has no namespaces; use a client without one, and write the prefix of the "
                "topics and groups in the listener"
            )
        return ClusterPlace(broker)
    if not isinstance(broker, EmbeddedBroker):
        raise SparkError(
            f"{listener}: Spark reads from an EmbeddedBroker or a RemoteBroker, not {type(broker).__name__}"
        )
    if broker.path is None:
        raise SparkError(
            f"{listener}: a broker in memory has no files that Spark could read; "
            "keep the broker in a folder, such as rocketmq.name-server: embedded:./data"
        )
    return FolderPlace(broker)


def commit_offsets(
    broker: Broker, queue_of: Callable[[MessageQueue], MessageQueue], group: str, end: OffsetTable
) -> None:
    """Commit the end of a batch for a group, but no lower offset than before, as a repeated batch would.

    Args:
        queue_of: Returns the queue of the broker for one in a checkpoint.
    """
    for read, offset in sorted(end.items()):
        queue = queue_of(read)
        if offset > (broker.committed_offset(group, queue) or 0):
            broker.commit_offset(group, queue, offset)


def _client_file(broker: RemoteBroker) -> dict[str, Any]:
    credentials, tls = broker.settings.credentials, broker.settings.tls
    given: dict[str, Any] = {}
    if credentials is not None:
        named = dataclasses.asdict(credentials)
        given |= {name.replace("_", "-"): value for name, value in named.items() if value is not None}
    if tls is not None:
        given["tls"] = {name.replace("_", "-"): value for name, value in dataclasses.asdict(tls).items()}
    return given
