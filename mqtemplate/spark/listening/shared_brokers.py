"""Places whose messages a Spark listener reads: the folder of an embedded broker, or a cluster."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.brokers.remote.broker import RemoteBroker
from mqtemplate.engine.group_rules import SentBack
from mqtemplate.errors import SparkError
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.metrics import Metrics
from mqtemplate.spark.listening.redelivery import SendBacks
from mqtemplate.spark.listening.shared_broker import SharedBroker
from mqtemplate.spark.location.local_server import LocalServer
from mqtemplate.spark.location.location import ACCESS_KEY, CLIENT_FILE, BrokerLocation


@dataclass(frozen=True, slots=True)
class EmbeddedSendBacks:
    """Stores retries and dead letters with numbers: a repeated batch stores none of them again."""

    broker: EmbeddedBroker

    def send(self, sent_back: Sequence[SentBack], sequence: SendSequence) -> None:
        """See `SendBacks.send`."""
        self.broker.sends.send_sequenced([self._copy(each) for each in sent_back], sequence)

    def _copy(self, sent_back: SentBack) -> tuple[Message, MessageQueue]:
        copy = sent_back.dead_letter() if sent_back.is_dead else self.broker.engine.drafts.delayed_retry(sent_back)
        self.broker.create_topic(copy.topic, 1)
        message, times = sent_back.message, sent_back.message.reconsume_times + 1
        stored = replace(message, topic=copy.topic, properties=copy.properties, reconsume_times=times)
        return stored, self.broker.queues(copy.topic)[0]


@dataclass(frozen=True, slots=True)
class RemoteSendBacks:
    """Requests of a client: the broker creates retries and dead letters. A repeated batch sends its rows again."""

    broker: RemoteBroker

    def send(self, sent_back: Sequence[SentBack], sequence: SendSequence) -> None:
        """See `SendBacks.send`."""
        for each in sent_back:
            self.broker.groups.send_back(each)


class SharedFolder:
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
        return {**self.location().options(), "brokerName": self.broker.name}

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `SharedBroker.queues`."""
        return self.broker.queues(topic)

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue with the present name of the broker: a folder has one broker, whatever its name was."""
        return MessageQueue(read.topic, self.broker.name, read.queue_id)


class SharedCluster:
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
        return BrokerLocation(name_servers=self.broker.settings.name_servers, client_file=self._client_file)

    def options(self) -> dict[str, str]:
        """Return the options of the location."""
        return self.location().options()

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """See `SharedBroker.queues`."""
        route = self.broker.client_context.routes.existing(topic)
        return () if route is None else route.read_queues

    def queue(self, read: MessageQueue) -> MessageQueue:
        """Return the queue itself."""
        return read

    @property
    def _client_file(self) -> str | None:
        return None if self._folder is None else str(self._folder / "client.json")


def share_broker(broker: Broker, listener: str) -> SharedBroker:
    """Return a broker as Spark's processes can reach it.

    Raises:
        SparkError: Spark cannot read from the broker.
    """
    if isinstance(broker, RemoteBroker):
        if broker.settings.namespace or broker.settings.namespace_v2:
            raise SparkError(
                f"{listener}: the data source has no namespaces; use a client without one, and write the prefix of the "
                "topics and groups in the listener"
            )
        return SharedCluster(broker)
    if not isinstance(broker, EmbeddedBroker):
        raise SparkError(
            f"{listener}: Spark reads from an EmbeddedBroker or a RemoteBroker, not {type(broker).__name__}"
        )
    if broker.path is None:
        raise SparkError(
            f"{listener}: a broker in memory has no files that Spark could read; "
            "keep the broker in a folder, such as rocketmq.name-server: embedded:./data"
        )
    return SharedFolder(broker)


def send_backs_of(broker: Broker) -> SendBacks:
    """Return the sender of rows that come back, for a broker of this process or a client."""
    if isinstance(broker, EmbeddedBroker):
        return EmbeddedSendBacks(broker)
    assert isinstance(broker, RemoteBroker)
    return RemoteSendBacks(broker)


def _client_file(broker: RemoteBroker) -> dict[str, Any]:
    credentials, tls = broker.settings.credentials, broker.settings.tls
    given: dict[str, Any] = {}
    if credentials is not None:
        named = asdict(credentials)
        given |= {name.replace("_", "-"): value for name, value in named.items() if value is not None}
    if tls is not None:
        given["tls"] = {name.replace("_", "-"): value for name, value in asdict(tls).items()}
    return given
