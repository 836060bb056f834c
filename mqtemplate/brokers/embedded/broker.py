"""The embedded broker: it stores messages in this process, in a store directory or in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from mqtemplate.broker import Broker, CheckTransaction, Consumer, ConsumerSpec, Registration
from mqtemplate.clock import Clock
from mqtemplate.engine.engine import Engine
from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.futures import AwaitableFuture
from mqtemplate.message import Message, MessageExt, MessageQueue, SendSequence
from mqtemplate.metrics import Metrics
from mqtemplate.pending import PendingCounts, PendingPage, PendingQuery, ScheduleChange
from mqtemplate.results import HalfMessage, PullResult, SendResult, SequencedResult, TransactionState
from mqtemplate.selectors.tags import Selector
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

    # --- sending -------------------------------------------------------------------------------

    def send(self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000) -> SendResult:
        return self.engine.sends.send(message, queue, timeout_ms)

    def send_batch(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> SendResult:
        return self.engine.sends.send_batch(messages, queue, timeout_ms)

    def send_async(
        self, messages: Sequence[Message], queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> AwaitableFuture[SendResult]:
        return self.engine.sends.send_async(messages, queue)

    def send_one_way(self, message: Message, queue: MessageQueue | None = None) -> None:
        self.engine.sends.send_one_way(message, queue)

    def send_sequenced(
        self, messages: Sequence[tuple[Message, MessageQueue]], sequence: SendSequence, timeout_ms: int = 10_000
    ) -> SequencedResult:
        return self.engine.sends.send_sequenced(messages, sequence, timeout_ms)

    # --- transactions and requests -------------------------------------------------------------

    def send_half(
        self, message: Message, group: str, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> HalfMessage:
        return self.engine.sends.send_half(message, group, queue, timeout_ms)

    def end_transaction(self, half: HalfMessage, state: TransactionState, remark: str | None = None) -> None:
        self.engine.transactions.end_transaction(half, state, remark)

    def check_transactions(
        self, group: str, check: CheckTransaction, *, threads: int = 1, max_waiting: int = 2_000
    ) -> Registration:
        return self.engine.transactions.check_transactions(group, check, threads, max_waiting)

    def request(
        self, message: Message, queue: MessageQueue | None = None, timeout_ms: int = 3_000
    ) -> Future[MessageExt]:
        self._check_open()
        return self.engine.requests.request(message, queue, timeout_ms)

    def reply(
        self, request: MessageExt, body: bytes, properties: Mapping[str, str] | None = None, timeout_ms: int = 3_000
    ) -> None:
        self._check_open()
        self.engine.requests.reply(request, body, properties)

    # --- reading and groups --------------------------------------------------------------------

    def pull(
        self,
        queue: MessageQueue,
        queue_offset: int,
        max_count: int = 32,
        wait_ms: int = 0,
        selector: Selector | None = None,
    ) -> PullResult:
        return self.engine.reader.pull(queue, queue_offset, max_count, wait_ms, selector)

    def min_offset(self, queue: MessageQueue) -> int:
        return self.engine.reader.min_offset(queue)

    def max_offset(self, queue: MessageQueue) -> int:
        return self.engine.reader.max_offset(queue)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        return self.engine.reader.search_offset(queue, timestamp)

    def message_by_id(self, offset_msg_id: str) -> MessageExt | None:
        return self.engine.reader.message_by_id(offset_msg_id)

    def messages_by_key(
        self,
        topic: str,
        key: str,
        max_count: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int | None = None,
        unique: bool = False,
    ) -> list[MessageExt]:
        self._check_open()
        return self.engine.reader.messages_by_key(KeyQuery(topic, key, max_count, begin_ms, end_ms, unique))

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        return self.engine.groups.subscribe(spec)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        return self.engine.groups.committed_offset(group, queue)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        self.engine.groups.commit_offset(group, queue, queue_offset)

    # --- delayed messages ----------------------------------------------------------------------

    def cancel(self, handle: str | None = None, *, key: str | None = None, topic: str | None = None) -> ScheduleChange:
        return self.engine.delayed.cancel(handle, key=key, topic=topic)

    def reschedule(
        self,
        handle: str | None = None,
        deliver_ms: int = 0,
        *,
        key: str | None = None,
        topic: str | None = None,
    ) -> ScheduleChange:
        return self.engine.delayed.reschedule(handle, deliver_ms, key=key, topic=topic)

    def pending(self, query: PendingQuery, max_count: int = 100, cursor: str | None = None) -> PendingPage:
        return self.engine.delayed.pending(query, max_count, cursor)

    def count_pending(self, query: PendingQuery, bucket_ms: int = 60_000) -> PendingCounts:
        return self.engine.delayed.count_pending(query, bucket_ms)

    def pending_positions(self, query: PendingQuery, after: tuple[int, int], max_count: int) -> bytes:
        """Return where the records of pending messages are; see `LocalDelayedMessages.pending_positions`."""
        return self.engine.delayed.pending_positions(query, after, max_count)

    def change_delay_levels(self, text: str) -> None:
        """Use another level table until the next start; see `Engine.change_delay_levels`."""
        self.engine.change_delay_levels(text)
