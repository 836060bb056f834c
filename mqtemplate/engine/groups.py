"""Consumer groups of a broker: their members in this process, and the offsets that they committed."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from mqtemplate.broker import Consumer, ConsumerSpec, MessageModel
from mqtemplate.engine.consumers import EmbeddedConsumer, LocalGroups
from mqtemplate.engine.lifecycle import Lifecycle
from mqtemplate.engine.reader import QueueReader
from mqtemplate.engine.retries import SentBack
from mqtemplate.engine.topics import TopicRoutes
from mqtemplate.errors import ListenerError
from mqtemplate.message import MessageQueue
from mqtemplate.services import AfterChangeService
from mqtemplate.store.consumer_offsets import ConsumerOffsets
from mqtemplate.store.message_store import MessageStore


class CommittedOffsets:
    """The offset tables of one broker: one for all clustering groups, and one for each member of a broadcasting group.

    Attributes:
        clustering: The table of all clustering groups, in RocketMQ's file.
        service: Writes changed tables after an interval.
    """

    def __init__(self, store: MessageStore, interval_ms: int) -> None:
        self._store = store
        self.service = AfterChangeService("broker.offsets", self.persist, store.clock, interval_ms)
        self.clustering = ConsumerOffsets(store.store_files, store.clock, flush=store.flush)
        self.clustering.on_change(self.service.changed)
        self._broadcasting: dict[tuple[str, str], ConsumerOffsets] = {}

    def table(self, spec: ConsumerSpec) -> ConsumerOffsets:
        """Return the table that a member of a group uses."""
        if spec.message_model is MessageModel.CLUSTERING:
            return self.clustering
        key = (spec.instance_name, spec.group)
        if key not in self._broadcasting:
            name = f"broadcast/{_file_name(spec.instance_name, '@+')}/{_file_name(spec.group, '%|')}.json"
            table = ConsumerOffsets(self._store.store_files, self._store.clock, name, self._store.flush)
            table.load()
            table.on_change(self.service.changed)
            self._broadcasting[key] = table
        return self._broadcasting[key]

    def persist(self) -> None:
        """Write the changed tables."""
        for table in (self.clustering, *self._broadcasting.values()):
            table.persist()


class Groups:
    """The consumer groups of one broker. All members of a group are in this process, or all are remote clients.

    Args:
        local: The members in this process.
        send_back: Stores a message that a member sends back; see `Consumer.send_back`.

    Attributes:
        local: The members in this process.
        committed: The committed offsets.
    """

    def __init__(
        self,
        store: MessageStore,
        queues: QueueReader,
        routes: TopicRoutes,
        local: LocalGroups,
        send_back: Callable[[SentBack], None],
        committed: CommittedOffsets,
        lifecycle: Lifecycle,
    ) -> None:
        self._store = store
        self._queues = queues
        self._routes = routes
        self._send_back = send_back
        self._lifecycle = lifecycle
        self._has_remote_members: Callable[[str], bool] = lambda group: False
        self.local = local
        self.committed = committed

    def connect_remote(self, has_members: Callable[[str], bool]) -> None:
        """Note how to find out whether a group has members that are remote clients."""
        self._has_remote_members = has_members

    def has_remote_members(self, group: str) -> bool:
        """Return True if *group* has members that are clients of a server of this broker."""
        return self._has_remote_members(group)

    def subscribe(self, spec: ConsumerSpec) -> Consumer:
        """See `Broker.subscribe`."""
        self._lifecycle.check()
        if self._has_remote_members(spec.group):
            raise ListenerError(
                f"group {spec.group!r} is read by remote clients of this broker, which share no queues with listeners "
                "in its own process; give the listener a group of its own"
            )
        self._routes.expect(spec.subscriptions)
        group, offsets = self.local.group(spec.group), self.committed.table(spec)
        return EmbeddedConsumer(self._store, self._queues, self._routes, group, spec, offsets, self._send_back)

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """See `Broker.committed_offset`."""
        self._lifecycle.check()
        return self.committed.clustering.offset(group, queue.topic, queue.queue_id)

    def commit_offset(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """See `Broker.commit_offset`."""
        self._lifecycle.check()
        self.committed.clustering.commit(group, queue.topic, queue.queue_id, queue_offset)


def _file_name(name: str, safe: str) -> str:
    """Return *name* as the name of one file. The offsets of a remote broker have the same form."""
    quoted = quote(name, safe=safe)
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted
