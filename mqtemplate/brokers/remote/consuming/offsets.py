"""Offsets of group members: the committed ones, and those at which a member starts to read.

Brokers store the offsets of clustering groups; files store the offsets of broadcasting groups.
Source: RocketMQ ``client: OffsetStore``, ``RemoteBrokerOffsetStore``, ``LocalFileOffsetStore``,
``RebalancePushImpl.computePullFromWhereWithException``.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.brokers.remote.cluster.client import ClientContext
from mqtemplate.brokers.remote.cluster.failures import UNANSWERED, check_response, log_failure, response_error
from mqtemplate.brokers.remote.cluster.queries import Queries
from mqtemplate.brokers.remote.cluster.routes import MASTER_ID
from mqtemplate.errors import BrokerError, MQTemplateError, RemoteConnectError, RemoteProtocolError
from mqtemplate.event_log import get_logger
from mqtemplate.message import MessageQueue
from mqtemplate.processes import write_private
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.topics import RETRY_TOPIC_PREFIX

# --- committed offsets ----------------------------------------------------------------------------


_log = get_logger("mqtemplate.remote")

_OFFSET_RESPONSES = (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)


class OffsetStore(ABC):
    """Committed offsets of one member. Thread-safe.

    Attributes:
        may_carry: False for a member that locks its queues: a pull may reach the broker after the last commit of a
            queue, and the next member would handle messages again.
    """

    def __init__(self, offsets: dict[MessageQueue, int]) -> None:
        self.may_carry = True
        self._offsets = offsets
        self._changed: set[MessageQueue] = set()
        self._acknowledged: set[MessageQueue] = set()
        self._lock = threading.Lock()

    @abstractmethod
    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        """Return the committed offset; None without a commit.

        Args:
            young_is_zero: Also return 0 if there is no offset, the queue still has its first message, and that message
                is near the end of the commit log.
        """

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        """Set the offset of a queue; the next flush stores it."""
        with self._lock:
            if self._offsets.get(queue) != queue_offset:
                self._offsets[queue] = queue_offset
                self._changed.add(queue)

    def own(self, queue: MessageQueue) -> int | None:
        """Return the offset that this member has committed last; None without a commit."""
        return self._offsets.get(queue)

    def repeat(self, broker_names: Container[str]) -> None:
        """Have the next flush commit the offsets at these brokers again."""
        with self._lock:
            repeated = {queue for queue in self._offsets if queue.broker_name in broker_names}
            self._changed |= repeated
            self._acknowledged -= repeated

    def carried(self, queue: MessageQueue) -> int:
        """Return the offset that a pull may commit on its way; 0 for none."""
        return 0

    @abstractmethod
    def read_stored(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | BrokerError | None]:
        """Return the committed offsets as they are stored for all members; a failure is returned as well."""

    @abstractmethod
    def flush(self, queues: Iterable[MessageQueue] | None = None, *, is_last: bool = True) -> None:
        """Store the changed offsets of *queues*, or of all queues, before this returns.

        Args:
            is_last: False if a later flush repeats what fails now.
        """

    @abstractmethod
    def forget(self, queue: MessageQueue) -> None:
        """Remove a queue that is assigned to another member now."""


@dataclass(frozen=True, slots=True)
class BrokerOffsets:
    """Access to the offsets of all clustering groups. A commit returns when its broker has acknowledged it."""

    context: ClientContext

    def read(self, group: str, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        """Return the committed offset; see `OffsetStore.read`.

        Brokers of 4.x behave as if *young_is_zero* were always set. If it is not, their 0 counts as no offset.
        """
        address, request = self._query(group, queue, young_is_zero=young_is_zero)
        response = self.context.instance.invoke(address, request)
        return self._offset_of(group, queue, address, response, young_is_zero=young_is_zero)

    def read_all(self, group: str, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | BrokerError | None]:
        """Return the committed offsets of several queues, which are requested at once; or the error of a queue."""
        results: dict[MessageQueue, int | BrokerError | None] = {}
        responses = self.context.invoke_each(queues, lambda queue: self._query(group, queue, young_is_zero=False))
        for queue, (address, response) in responses.items():
            try:
                results[queue] = self._offset_of(group, queue, address, response, young_is_zero=False)
            except BrokerError as exc:
                results[queue] = exc
        return results

    def _query(self, group: str, queue: MessageQueue, *, young_is_zero: bool) -> tuple[str, RemotingCommand]:
        """Return the address and the request for a committed offset."""
        context = self.context
        header = QueryConsumerOffsetRequestHeader(
            **context.namespace.queue_fields(queue),
            consumer_group=context.namespace.wrap(group),
            set_zero_if_not_found=None if young_is_zero else False,
        )
        address = context.routes.address(queue.broker_name)
        return address, RemotingCommand.request(RequestCode.QUERY_CONSUMER_OFFSET, header)

    def _offset_of(
        self,
        group: str,
        queue: MessageQueue,
        address: str,
        response: RemotingCommand | BrokerError,
        *,
        young_is_zero: bool,
    ) -> int | None:
        if isinstance(response, BrokerError):
            raise response
        check_response(response, f"get the committed offset of group {group!r} in {queue}", address, _OFFSET_RESPONSES)
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        offset = response.header(OffsetResponseHeader).offset
        return None if offset == 0 and not young_is_zero and self.context.instance.is_before_5(address) else offset

    def commit(
        self, group: str, queue: MessageQueue, queue_offset: int, create_group: Callable[[], None] | None = None
    ) -> None:
        """Commit one offset.

        Args:
            create_group: Called if the broker does not have the group; the commit is then repeated.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """
        address, request = self._request(group, queue, queue_offset)
        response = self.context.instance.invoke(address, request)
        if create_group is not None and response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            create_group()
            self.commit(group, queue, queue_offset)
        else:
            check_response(response, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def commit_all(self, group: str, offsets: dict[MessageQueue, int], *, is_last: bool) -> set[MessageQueue]:
        """Commit several offsets; return the queues whose commit failed.

        RocketMQ's broker loses concurrent first commits (``ConsumerOffsetManager.commitOffset`` in 4.9.7 and 5.5.0). It
        looks up the offset table of a topic and group, and creates and stores a missing one, without a lock: each of
        these commits stores a table of its own, and only the last table remains. So for each broker and topic, one
        commit is acknowledged before the others are sent. (If two clients collide, the next commit repairs the offset.)

        A broker that does not answer the first commits gets no others, so that it delays the caller by one time limit.
        """
        first = set({(queue.broker_name, queue.topic): queue for queue in offsets}.values())
        problems = self._commit_concurrently(group, {queue: offsets[queue] for queue in first})
        silent = {queue.broker_name: problem for queue, problem in problems.items() if isinstance(problem, UNANSWERED)}
        others = offsets.keys() - first
        problems |= {queue: silent[queue.broker_name] for queue in others if queue.broker_name in silent}
        problems |= self._commit_concurrently(group, {queue: offsets[queue] for queue in others - problems.keys()})
        for broker_name, problem in {queue.broker_name: problem for queue, problem in problems.items()}.items():
            log_failure(_log, "remote.commit_failed", problem, always=is_last, group=group, broker=broker_name)
        return set(problems)

    def _commit_concurrently(self, group: str, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, BrokerError]:
        problems = dict[MessageQueue, BrokerError]()
        responses = self.context.invoke_each(offsets, lambda queue: self._request(group, queue, offsets[queue]))
        for queue, (address, response) in responses.items():
            if isinstance(response, BrokerError):
                problems[queue] = response
            elif response.code != ResponseCode.SUCCESS:
                problems[queue] = response_error(response, f"commit offsets of group {group!r}", address)
        return problems

    def _request(self, group: str, queue: MessageQueue, queue_offset: int) -> tuple[str, RemotingCommand]:
        """Return the address and the request of a commit."""
        namespace = self.context.namespace
        header = UpdateConsumerOffsetRequestHeader(
            **namespace.queue_fields(queue), consumer_group=namespace.wrap(group), commit_offset=queue_offset
        )
        request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        return self.context.routes.address(queue.broker_name), request


class RemoteBrokerOffsetStore(OffsetStore):
    """Offsets of one member of a clustering group: collected here, and committed by each flush.

    A queue's offset is the member's own from its first commit until the queue is assigned to another member.
    """

    def __init__(self, group: str, brokers: BrokerOffsets) -> None:
        super().__init__({})
        self._group = group
        self._brokers = brokers
        self._flush_lock = threading.Lock()

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        own = self._offsets.get(queue)
        return self._brokers.read(self._group, queue, young_is_zero=young_is_zero) if own is None else own

    def carried(self, queue: MessageQueue) -> int:
        """See `OffsetStore.carried`. The first commit of a queue is never carried; see `BrokerOffsets.commit_all`."""
        return self._offsets.get(queue, 0) if self.may_carry and queue in self._acknowledged else 0

    def read_stored(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | BrokerError | None]:
        return self._brokers.read_all(self._group, queues)

    def flush(self, queues: Iterable[MessageQueue] | None = None, *, is_last: bool = True) -> None:
        """Commit the changed offsets of *queues*, or of all, and wait until the brokers have them.

        A flush in another thread is awaited first: it may be committing offsets of these queues.
        """
        with self._flush_lock:
            with self._lock:
                chosen = self._changed if queues is None else self._changed & set(queues)
                changed = {queue: self._offsets[queue] for queue in chosen}
            failed = self._brokers.commit_all(self._group, changed, is_last=is_last)
            with self._lock:
                self._acknowledged |= self._offsets.keys() & changed.keys() - failed
                self._changed -= {
                    queue
                    for queue, queue_offset in changed.items()
                    if queue not in failed and self._offsets.get(queue) == queue_offset
                }

    def forget(self, queue: MessageQueue) -> None:
        with self._lock:
            self._offsets.pop(queue, None)
            self._changed.discard(queue)
            self._acknowledged.discard(queue)


class _OffsetFile(JsonBody):
    """Content of RocketMQ's ``offsets.json``."""

    offset_table: dict[MessageQueue, int]


def local_offset_file(folder: Path, instance_name: str, name_servers: Iterable[str], group: str) -> Path:
    """Return the path of a broadcasting member's file; queues of different clusters may have one name."""
    cluster = "+".join(sorted(name_servers))
    return folder / quote(f"{instance_name}@{cluster}", safe="@+") / quote(group, safe="%|") / "offsets.json"


class LocalFileOffsetStore(OffsetStore):
    """Offsets of a broadcasting group, in a file of RocketMQ's format. Each flush replaces the whole file.

    Raises:
        MQTemplateError: The file exists and is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(self._load())

    def _load(self) -> dict[MessageQueue, int]:
        with contextlib.suppress(FileNotFoundError):
            try:
                return dict(_OffsetFile.decode(self._path.read_bytes()).offset_table)
            except RemoteProtocolError as exc:
                raise MQTemplateError(
                    f"{self._path} cannot be read: {exc}; repair it, or delete it to have the group start again"
                ) from exc
        return {}

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        return self._offsets.get(queue)

    def read_stored(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int | BrokerError | None]:
        return {queue: self._offsets.get(queue) for queue in queues}

    def flush(self, queues: Iterable[MessageQueue] | None = None, *, is_last: bool = True) -> None:
        with self._lock:
            if not self._changed:
                return
            data = _OffsetFile(offset_table=dict(self._offsets)).encode()
            write_private(self._path, data)
            self._changed.clear()

    def forget(self, queue: MessageQueue) -> None:
        """Do nothing: a broadcasting member keeps the offsets of all queues."""


# --- start offsets --------------------------------------------------------------------------------


_HALF_AN_HOUR_MS = 1_800_000


@dataclass(slots=True, eq=False)
class StartOffsets:
    """The start offsets of one member: the committed one, or without one what its spec defines.

    A queue that the member gave up because its broker stopped continues after the member's last commit. The broker may
    have stored an older one only: RocketMQ's stores them each five seconds.

    A replica copies the committed offsets every ten seconds. So while a master is away, its answer "no offset" does not
    mean that the group has read nothing: the member then starts at the last offset that it knows itself. If it knows
    none, and the group has offsets in other queues of the topic, the queue is not read until the master is back.
    Otherwise the group would read the whole queue again.
    """

    spec: ConsumerSpec
    offsets: OffsetStore
    context: ClientContext
    queries: Queries
    _known: dict[MessageQueue, int] = field(default_factory=dict, init=False)
    _stopped: set[MessageQueue] = field(default_factory=set, init=False)
    _waiting: set[MessageQueue] = field(default_factory=set, init=False)

    def remember(self, queue: MessageQueue) -> None:
        """Keep the last commit of a queue that is given up: brokers may not have it after a failure."""
        own = self.offsets.own(queue)
        if own is not None:
            self._known[queue] = own
            if not self._has_connection(queue.broker_name):
                self._stopped.add(queue)

    def _has_connection(self, broker_name: str) -> bool:
        master = self.context.routes.brokers().get(broker_name, {}).get(MASTER_ID)
        return master is not None and self.context.instance.is_registered(master)

    def of(self, queue: MessageQueue) -> int:
        """Return the start offset of a queue.

        Raises:
            BrokerError: The broker does not answer, or only a replica that may lack the group's offset.
        """
        if self.spec.message_model is MessageModel.CLUSTERING:
            routes = self.context.routes
            if routes.is_replica(queue.broker_name, routes.address(queue.broker_name)):
                return self._at_replica(queue)
        known = self._known.get(queue)  # the broker may have been killed before it had stored the commit
        committed = self.offsets.read(queue, young_is_zero=self._starts_at_end and known is None)
        if known is not None and (committed is None or (queue in self._stopped and known > committed)):
            self.offsets.commit(queue, known)
            committed = known
        self._stopped.discard(queue)
        return self._without_commit(queue) if committed is None else committed

    @property
    def _starts_at_end(self) -> bool:
        return self.spec.consume_from_where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET

    def _at_replica(self, queue: MessageQueue) -> int:
        committed, known = self.offsets.read(queue), self._known.get(queue)
        if committed is not None or known is not None:
            return max(committed or 0, known or 0)
        if not self._has_progress(queue.topic):
            committed = self.offsets.read(queue, young_is_zero=self._starts_at_end)
            return self._without_commit(queue) if committed is None else committed
        if queue not in self._waiting:
            self._waiting.add(queue)
            _log.warning(
                "remote.offset_unknown",
                group=self.spec.group,
                topic=queue.topic,
                queue=queue.queue_id,
                broker=queue.broker_name,
                reason="the master is away, and its replica has no offset of this group yet; the queue is read when "
                "the master is back",
            )
        raise RemoteConnectError(f"the replica of {queue.broker_name!r} has no offset of group {self.spec.group!r}")

    def _has_progress(self, topic: str) -> bool:
        """Return True if the group has a committed offset in any queue of a topic."""
        route = self.context.routes.existing(topic)
        stored = {} if route is None else self.offsets.read_stored(route.read_queues)
        return any(isinstance(offset, int) and offset > 0 for offset in stored.values())

    def _without_commit(self, queue: MessageQueue) -> int:
        where = self.spec.consume_from_where
        if queue.topic == RETRY_TOPIC_PREFIX + self.spec.group:
            # As Java's consumer: ACL 2.0 refuses the question, and a pull below the first message gets its offset.
            return 0
        if where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            return self.queries.min_offset(queue)
        if where is ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            return self.queries.max_offset(queue)
        since = self.spec.consume_timestamp
        return self.queries.search_offset(
            queue, self.context.clock.now_ms() - _HALF_AN_HOUR_MS if since is None else since
        )
