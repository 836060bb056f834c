"""How far groups are: with the brokers for clustering groups, in a file of this machine for broadcasting ones.

Source: RocketMQ ``client: RemoteBrokerOffsetStore``, ``LocalFileOffsetStore``; section 11 of the specification.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import structlog

from mqtemplate.brokers.remote.client_instance import ClientInstance
from mqtemplate.brokers.remote.errors import answer_problem, check_answer
from mqtemplate.brokers.remote.namespace import Namespace
from mqtemplate.brokers.remote.queries import RemoteQueries
from mqtemplate.brokers.remote.routes import RouteTable
from mqtemplate.errors import BrokerError, MQTemplateError, RemoteConnectError, RemoteProtocolError, RemoteTimeoutError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody, body
from mqtemplate.remoting.protocol.headers.group import (
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_NO_ANSWER = (RemoteConnectError, RemoteTimeoutError)


class MemberOffsets(Protocol):
    """Where one member keeps how far it is."""

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None: ...

    def commit(self, queue: MessageQueue, queue_offset: int) -> None: ...

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store the changed offsets of *queues*, or of all queues, before this returns."""

    def forget(self, queue: MessageQueue) -> None:
        """It belongs to another member now."""


class BrokerOffsets:
    """Asks brokers how far any clustering group is, and tells them."""

    def __init__(self, instance: ClientInstance, routes: RouteTable, namespace: Namespace, timeout_ms: int) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace
        self._timeout_ms = timeout_ms

    def read(self, group: str, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        """The committed offset; None if there is none.

        Args:
            young_is_zero: Where there is none and the queue still has its first message, close behind the log's end, 0
                will do. Brokers of 4.x answer so in any case, so that their 0 is taken for none where it will not.
        """
        wire = self._namespace.wrap_queue(queue)
        header = QueryConsumerOffsetRequestHeader(
            topic=wire.topic,
            queue_id=wire.queue_id,
            consumer_group=self._namespace.wrap(group),
            set_zero_if_not_found=None if young_is_zero else False,
            broker_name=wire.broker_name,
        )
        address = self._routes.address(queue.broker_name)
        request = RemotingCommand.request(RequestCode.QUERY_CONSUMER_OFFSET, header)
        answer = self._instance.invoke(address, request, self._timeout_ms)
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        asked = f"ask how far group {group!r} is in {queue}"
        offset = check_answer(answer, asked, address).header(OffsetResponseHeader).offset
        return None if offset == 0 and not young_is_zero and self._instance.is_before_5(address) else offset

    def write(self, group: str, queue: MessageQueue, queue_offset: int) -> None:
        """Commit, and wait until the broker has it.

        Raises:
            BrokerError: It refused; of a group that it does not know, with code 26 in the text.
        """
        address, request = self.request(group, queue, queue_offset)
        answer = self._instance.invoke(address, request, self._timeout_ms)
        check_answer(answer, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def write_new(self, group: str, queue: MessageQueue, queue_offset: int, queries: RemoteQueries) -> None:
        """`write`, also of a group that no broker has heard of: brokers make one when somebody reads for it."""
        address, request = self.request(group, queue, queue_offset)
        answer = self._instance.invoke(address, request, self._timeout_ms)
        if answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            queries.read_as(self._namespace.wrap(group), queue)
            self.write(group, queue, queue_offset)
        else:
            check_answer(answer, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def request(self, group: str, queue: MessageQueue, queue_offset: int) -> tuple[str, RemotingCommand]:
        """Address and request of a commit."""
        wire = self._namespace.wrap_queue(queue)
        header = UpdateConsumerOffsetRequestHeader(
            topic=wire.topic,
            queue_id=wire.queue_id,
            consumer_group=self._namespace.wrap(group),
            commit_offset=queue_offset,
            broker_name=wire.broker_name,
        )
        request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        return self._routes.address(queue.broker_name), request

    def write_all(self, group: str, offsets: dict[MessageQueue, int]) -> set[MessageQueue]:
        """Commit several offsets and wait for the brokers; return the queues whose commit failed.

        RocketMQ's broker loses concurrent first commits (``ConsumerOffsetManager.commitOffset`` in 4.9.7 and 5.5.0). It
        looks up the offset table of a topic and group, and creates and stores a missing one, without a lock: each of
        these commits stores a table of its own, and only the last table remains. So for each broker and topic, one
        commit is acknowledged before the others are sent.

        A broker that does not answer the first commits gets no others, so that it delays the caller by one time limit.
        """
        first = set({(queue.broker_name, queue.topic): queue for queue in offsets}.values())
        problems = self._write(group, {queue: offsets[queue] for queue in first})
        silent = {queue.broker_name: problem for queue, problem in problems.items() if isinstance(problem, _NO_ANSWER)}
        others = offsets.keys() - first
        problems |= {queue: silent[queue.broker_name] for queue in others if queue.broker_name in silent}
        problems |= self._write(group, {queue: offsets[queue] for queue in others - problems.keys()})
        for broker_name, problem in {queue.broker_name: problem for queue, problem in problems.items()}.items():
            _log.warning("remote.commit_failed", group=group, broker=broker_name, reason=str(problem))
        return set(problems)

    def _write(self, group: str, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, BrokerError]:
        """Commit concurrently and wait; return the queues that failed."""
        requests, queues, problems = [], [], dict[MessageQueue, BrokerError]()
        for queue, queue_offset in offsets.items():
            try:
                requests.append(self.request(group, queue, queue_offset))
                queues.append(queue)
            except BrokerError as exc:  # no route names its broker any more
                problems[queue] = exc
        answers = self._instance.invoke_all(requests, self._timeout_ms)
        for queue, (address, answer) in zip(queues, answers, strict=True):
            if isinstance(answer, BrokerError):
                problems[queue] = answer
            elif answer.code != ResponseCode.SUCCESS:
                problems[queue] = answer_problem(answer, f"commit offsets of group {group!r}", address)
        return problems


class GroupOffsets:
    """The offsets of one member of a clustering group: gathered here, told to the brokers from time to time.

    A queue's offset is this member's own from its first commit until the queue goes to another member.
    """

    def __init__(self, group: str, brokers: BrokerOffsets) -> None:
        self._group = group
        self._brokers = brokers
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._offsets: dict[MessageQueue, int] = {}
        self._changed: set[MessageQueue] = set()

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        own = self._offsets.get(queue)
        return self._brokers.read(self._group, queue, young_is_zero=young_is_zero) if own is None else own

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        with self._lock:
            if self._offsets.get(queue) != queue_offset:
                self._offsets[queue] = queue_offset
                self._changed.add(queue)

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Commit the changed offsets of *queues*, or of all, and wait until the brokers have them.

        A flush under way in another thread is awaited first: its commits may be of these queues.
        """
        with self._flush_lock:
            with self._lock:
                chosen = self._changed if queues is None else self._changed & set(queues)
                changed = {queue: self._offsets[queue] for queue in chosen}
            failed = self._brokers.write_all(self._group, changed)
            with self._lock:
                self._changed -= {
                    queue
                    for queue, queue_offset in changed.items()
                    if queue not in failed and self._offsets.get(queue) == queue_offset
                }

    def forget(self, queue: MessageQueue) -> None:
        with self._lock:
            self._offsets.pop(queue, None)
            self._changed.discard(queue)


@body
class _OffsetFile(JsonBody):
    """What RocketMQ's ``offsets.json`` holds."""

    offset_table: dict[MessageQueue, int]


def broadcast_file(folder: Path, instance_name: str, name_servers: Iterable[str], group: str) -> Path:
    """The file of one broadcasting member: another one for each cluster, since queues of two may have one name."""
    cluster = "+".join(sorted(name_servers))
    return folder / quote(f"{instance_name}@{cluster}", safe="@+") / quote(group, safe="%|") / "offsets.json"


class FileOffsets:
    """The offsets of members of a broadcasting group, in a file of RocketMQ's form that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._has_changed = False
        self._offsets = self._load()

    def _load(self) -> dict[MessageQueue, int]:
        with contextlib.suppress(FileNotFoundError):
            try:
                return dict(_OffsetFile.decode(self._path.read_bytes()).offset_table)
            except RemoteProtocolError as exc:
                raise MQTemplateError(
                    f"{self._path} cannot be read: {exc}; repair it, or delete it to have the group begin anew"
                ) from exc
        return {}

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        return self._offsets.get(queue)

    def commit(self, queue: MessageQueue, queue_offset: int) -> None:
        with self._lock:
            if self._offsets.get(queue) != queue_offset:
                self._offsets[queue] = queue_offset
                self._has_changed = True

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        with self._lock:
            if not self._has_changed:
                return
            data = _OffsetFile(offset_table=dict(self._offsets)).encode()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            with fresh.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            self._has_changed = False

    def forget(self, queue: MessageQueue) -> None:
        """A broadcasting member keeps its queues."""
