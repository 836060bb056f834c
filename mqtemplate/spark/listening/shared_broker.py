"""Broker of a Spark listener as Spark's processes reach it: a folder or a cluster; the commit of offsets; metrics."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mqtemplate.broker import Broker
from mqtemplate.engine.group_rules import SentBack
from mqtemplate.errors import SparkError
from mqtemplate.message import MessageQueue, SendSequence
from mqtemplate.metrics import Metrics
from mqtemplate.spark.listening.batches import BatchMetrics
from mqtemplate.spark.listening.redelivery import SendBackRows
from mqtemplate.spark.location.connection import commit_offsets, in_broker, location_of
from mqtemplate.spark.location.local_server import LocalServer
from mqtemplate.spark.location.location import ACCESS_KEY, CLIENT_FILE, BrokerLocation
from mqtemplate.spark.records.offsets import OffsetTable, from_spark

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.brokers.remote.broker import RemoteBroker
    from mqtemplate.brokers.remote.cluster.settings import RemoteSettings


def send_back_rows(broker: Broker) -> SendBackRows:
    """Return the function that sends rows back, for a broker of this process or a client."""
    if location_of(broker).store is None:
        return partial(_request, cast("RemoteBroker", broker))
    return partial(_store, cast("EmbeddedBroker", broker))


def _store(broker: EmbeddedBroker, sent_back: Sequence[SentBack], sequence: SendSequence) -> None:
    """Store retries and dead letters with numbers: a repeated batch stores none of them again."""
    numbered = []
    for each in sent_back:
        copy = each.dead_letter() if each.is_dead else broker.engine.drafts.delayed_retry(each)
        broker.create_topic(copy.topic, 1)
        message, times = each.message, each.message.reconsume_times + 1
        stored = replace(message, topic=copy.topic, properties=copy.properties, reconsume_times=times)
        numbered.append((stored, broker.queues(copy.topic)[0]))
    broker.sends.send_sequenced(numbered, sequence)


def _request(broker: RemoteBroker, sent_back: Sequence[SentBack], sequence: SendSequence) -> None:
    """Have the broker create retries and dead letters. A repeated batch sends its rows again."""
    for each in sent_back:
        broker.groups.send_back(each)


class SharedBroker(ABC):
    """Broker of a listener as Spark's processes reach it.

    Attributes:
        metrics: Metrics of the broker, or of the listener alone if the broker is a cluster.
        send_back: Function that sends rows back.
    """

    def __init__(self, broker: Broker, metrics: Metrics, location: BrokerLocation) -> None:
        self.broker, self.metrics, self._location = broker, metrics, location
        self.send_back = send_back_rows(broker)

    @abstractmethod
    def start(self, retry_topic: str) -> None:
        """Let Spark's processes reach the broker. A second call has no effect."""

    @abstractmethod
    def stop(self) -> None:
        """End what `start` started. A second call has no effect."""

    def location(self) -> BrokerLocation:
        """Return the location for Spark's processes."""
        return self._location

    def options(self) -> dict[str, str]:
        """Return the options of the source for it."""
        return self.location().options()

    @abstractmethod
    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the queues of a topic, or none if a cluster does not have it."""

    def commit(self, group: str, end: OffsetTable) -> None:
        """Commit the end of a batch for a group; see `commit_offsets`."""
        commit_offsets(self.broker, group, end)


class SharedFolder(SharedBroker):
    """Folder of an embedded broker in this process. Spark's processes write to it through a `LocalServer`."""

    def __init__(self, broker: EmbeddedBroker, location: BrokerLocation) -> None:
        super().__init__(broker, broker.metrics, location)
        self._server = LocalServer(broker)

    def start(self, retry_topic: str) -> None:
        """Create the retry topic, and start the server."""
        self.broker.create_topic(retry_topic, 1)
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def options(self) -> dict[str, str]:
        """Return the folder and the name of its broker, which the folder does not contain."""
        return {**super().options(), "brokerName": self.broker.name}

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `SharedBroker.queues`."""
        return self.broker.queues(topic)

    def commit(self, group: str, end: OffsetTable) -> None:
        """See `SharedBroker.commit`."""
        super().commit(group, in_broker(self.broker.name, end))


class SharedCluster(SharedBroker):
    """Cluster of a client in this process.

    Access key and TLS settings of the client are in a file that only this user can read, for Spark's processes on this
    machine. If the environment has them for Spark, there is no such file.
    """

    def __init__(self, broker: RemoteBroker, location: BrokerLocation) -> None:
        super().__init__(broker, Metrics(), location)
        self._client = broker

    def start(self, retry_topic: str) -> None:
        """Write the file; the first row that comes back creates the retry topic."""
        settings = self._client.settings
        in_environment = ACCESS_KEY in os.environ or CLIENT_FILE in os.environ
        if self._location.client_file or in_environment or (settings.credentials is None and settings.tls is None):
            return
        file = Path(tempfile.mkdtemp(prefix="mqtemplate-client-"), "client.json")  # only this user can read it
        file.write_text(json.dumps(_client_file(settings)))
        self._location = replace(self._location, client_file=str(file))

    def stop(self) -> None:
        """Remove the file."""
        if self._location.client_file is not None:
            shutil.rmtree(Path(self._location.client_file).parent, ignore_errors=True)
            self._location = replace(self._location, client_file=None)

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `SharedBroker.queues`."""
        route = self._client.client_context.routes.existing(topic)
        return () if route is None else route.read_queues


def _client_file(settings: RemoteSettings) -> dict[str, Any]:
    """Return the settings as `client_settings` reads them."""
    credentials = {} if settings.credentials is None else asdict(settings.credentials)
    given = _with_hyphens({name: value for name, value in credentials.items() if value is not None})
    return given if settings.tls is None else {**given, "tls": _with_hyphens(asdict(settings.tls))}


def _with_hyphens(given: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in given.items()}


def share_broker(broker: Broker, listener: str) -> SharedBroker:
    """Return a broker as Spark's processes can reach it.

    Raises:
        SparkError: Spark cannot read from the broker.
    """
    try:
        location = location_of(broker)
    except SparkError as exc:
        raise SparkError(f"{listener}: {exc}") from None
    if location.store is None:
        return SharedCluster(cast("RemoteBroker", broker), location)
    return SharedFolder(cast("EmbeddedBroker", broker), location)


class ListenerMonitor(BatchMetrics):
    """Metrics of a listener, among the metrics of its broker.

    Attributes:
        metrics: All metrics of the broker; if the broker is a cluster, only the metrics of this listener.
    """

    def __init__(self, shared: SharedBroker, group: str, topics: tuple[str, ...]) -> None:
        super().__init__(shared.metrics, group)
        self._shared, self._group, self._topics = shared, group, topics
        self.metrics = shared.metrics
        prefix = f"spark.{group}"
        self.failures = self.metrics.counter(f"{prefix}.failures")
        self.restarts = self.metrics.counter(f"{prefix}.restarts")
        self.is_running = False
        self.metrics.gauge(f"{prefix}.running", lambda: int(self.is_running))
        self.metrics.gauge(f"{prefix}.lag", lambda: sum(self.lag().values()))

    def lag(self) -> dict[MessageQueue, int]:
        """Return for each queue the number of messages after the committed offset of the group."""
        lags, broker = {}, self._shared.broker
        for topic in self._topics:
            for queue in self._shared.queues(topic):
                start = broker.reader.min_offset(queue)
                committed = max(broker.groups.committed_offset(self._group, queue) or 0, start)
                lags[queue] = max(0, broker.reader.max_offset(queue) - committed)
        return lags


def messages_of(progress: Any, first: OffsetTable) -> int:
    """Return the number of messages between the offsets of a batch, before tags are selected.

    Args:
        progress: Progress of the query, of one batch. Its numbers of rows count a row each time that it is read.
        first: Start of the first batch.
    """
    (source,) = progress["sources"]
    start, end = (_offset_of(source[name]) for name in ("startOffset", "endOffset"))
    if end is None:
        return 0
    known = first if start is None else from_spark(start, "")
    return sum(max(0, offset - known.get(queue, 0)) for queue, offset in from_spark(end, "").items())


def _offset_of(text: str | None) -> Any:
    """Return an offset of a progress; None if it is missing.

    PySpark 4.0 and 4.1 have the ``str()`` of the parsed JSON over Spark Connect, later versions JSON. Source:
    ``SourceProgress.fromJson``.
    """
    try:
        return json.loads(text or "null")
    except ValueError:
        return literal_eval(text or "None")
