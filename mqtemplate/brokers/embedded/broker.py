"""The embedded broker: it stores messages in this process, in a store directory or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mqtemplate.broker import (
    Broker,
    BrokerAdmin,
    ConsumerGroups,
    DelayedMessages,
    MessageReader,
    MessageSends,
    Requests,
    StoreHealth,
    Transactions,
)
from mqtemplate.brokers.embedded.admin import EmbeddedAdmin
from mqtemplate.clock import Clock
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import Metrics
from mqtemplate.services import Service
from mqtemplate.store.files.store_files import StoreFiles
from mqtemplate.topics import is_application_topic


class EmbeddedBroker(Broker):
    """A broker in this process.

    - With a store directory, acknowledged messages survive the process. One process owns the directory.
    - In memory the same code uses anonymous memory, for tests and for messages that may be lost.
    - On a virtual clock it starts no thread: a harness steps ``services()``.
    - It is started once. To start again, create another broker.
    - It works in the process that starts it. In a process that was forked later, each use raises `ForkedError`, and
      `close` does nothing.

    Args:
        path: The store directory, created if missing; None for memory. A relative path is resolved here, once.
        store_files: Store files to use instead of a directory, for tests with a simulated disk.

    Attributes:
        engine: Does the work. A server uses it too.
        store: Commit log and consume queues of the engine.
        topics: The table of topics of the engine.
    """

    is_embedded = True

    def __init__(
        self,
        path: Path | str | None = None,
        settings: EmbeddedSettings | None = None,
        clock: Clock | None = None,
        *,
        store_files: StoreFiles | None = None,
    ) -> None:
        self.engine = engine = Engine(path, settings, clock, store_files=store_files)
        self.settings, self.clock, self.name, self.path = engine.settings, engine.clock, engine.name, engine.path
        self.capabilities = engine.capabilities
        self.store, self.topics = engine.store, engine.topics
        self._check_open = engine.lifecycle.check

    @property
    def delay_levels_ms(self) -> Sequence[int]:
        return self.engine.levels.delays_ms

    @property
    def retry_delays_ms(self) -> Sequence[int]:
        return self.engine.drafts.retry_delays_ms

    @property
    def metrics(self) -> Metrics:
        """Metrics of this broker; docs/metrics.md has their names."""
        return self.store.metrics

    def start(self) -> None:
        """Open the files and recover; see `Engine.start` for the errors."""
        self.engine.start()

    def services(self) -> Sequence[Service]:
        return self.engine.services()

    def close(self) -> None:
        self.engine.close()

    # --- topics --------------------------------------------------------------------------------

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        self._check_open()
        return self.engine.routes.queues(topic)

    def topic_names(self) -> Sequence[str]:
        return [topic for topic in self.topics.names() if is_application_topic(topic)]

    def expect_topics(self, topics: Iterable[str]) -> None:
        self.engine.routes.expect(topics)

    def create_topic(self, topic: str, queue_count: int = 4) -> None:
        self._check_open()
        self.engine.routes.create(topic, queue_count)

    # --- operators -----------------------------------------------------------------------------

    def admin(self) -> BrokerAdmin:
        return EmbeddedAdmin(self.engine)

    def store_health(self) -> StoreHealth:
        flush, cleaning = self.store.group_commit, self.store.cleaning
        error = cleaning.refusal if flush.error is None else str(flush.error)
        used = cleaning.disk_used_ratio
        return StoreHealth(error, self.store.end_offset - flush.flushed, None if used is None else used())

    # --- parts ---------------------------------------------------------------------------------

    @property
    def sends(self) -> MessageSends:
        return self.engine.sends

    @property
    def requests(self) -> Requests:
        return self.engine.requests

    @property
    def transactions(self) -> Transactions:
        return self.engine.transactions

    @property
    def reader(self) -> MessageReader:
        return self.engine.reader

    @property
    def groups(self) -> ConsumerGroups:
        return self.engine.groups

    @property
    def delayed(self) -> DelayedMessages:
        return self.engine.delayed

    def change_delay_levels(self, text: str) -> None:
        """Use another level table until the next start; see `Engine.change_delay_levels`."""
        self.engine.change_delay_levels(text)
