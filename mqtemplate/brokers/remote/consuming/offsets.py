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
from mqtemplate.errors import BrokerError, MQTemplateError, RemoteProtocolError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.bodies.json_body import JsonBody
from mqtemplate.remoting.protocol.headers.group import (
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_TIMEOUT_MS = 5_000


class MemberOffsets(Protocol):
    """Where one member keeps how far it is."""

    def read(self, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None: ...

    def commit(self, queue: MessageQueue, queue_offset: int) -> None: ...

    def flush_later(self) -> None:
        """Write what changed, without waiting for an answer."""

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Write what changed of these queues, or of all; done when this returns."""

    def forget(self, queue: MessageQueue) -> None:
        """It belongs to another member now."""


class BrokerOffsets:
    """Asks brokers how far any clustering group is, and tells them."""

    def __init__(self, instance: ClientInstance, routes: RouteTable, namespace: Namespace) -> None:
        self._instance = instance
        self._routes = routes
        self._namespace = namespace

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
        answer = self._instance.invoke(address, request, _TIMEOUT_MS)
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
        answer = self._instance.invoke(address, request, _TIMEOUT_MS)
        check_answer(answer, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def write_new(self, group: str, queue: MessageQueue, queue_offset: int, queries: RemoteQueries) -> None:
        """`write`, also of a group that no broker has heard of: brokers make one when somebody reads for it."""
        address, request = self.request(group, queue, queue_offset)
        answer = self._instance.invoke(address, request, _TIMEOUT_MS)
        if answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            queries.read_as(self._namespace.wrap(group), queue)
            self.write(group, queue, queue_offset)
        else:
            check_answer(answer, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def request(
        self, group: str, queue: MessageQueue, queue_offset: int, *, one_way: bool = False
    ) -> tuple[str, RemotingCommand]:
        """Address and request of a commit."""
        wire = self._namespace.wrap_queue(queue)
        header = UpdateConsumerOffsetRequestHeader(
            topic=wire.topic,
            queue_id=wire.queue_id,
            consumer_group=self._namespace.wrap(group),
            commit_offset=queue_offset,
            broker_name=wire.broker_name,
        )
        request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, header, one_way=one_way)
        return self._routes.address(queue.broker_name), request

    def write_all(self, group: str, offsets: dict[MessageQueue, int]) -> set[MessageQueue]:
        """Commit several at once, and wait; gives those that did not reach their broker, which are logged."""
        requests, queues, failed = [], [], set()
        for queue, queue_offset in offsets.items():
            try:
                requests.append(self.request(group, queue, queue_offset))
                queues.append(queue)
            except BrokerError as exc:
                failed.add(queue)
                self._report(group, queue, exc)
        answers = self._instance.invoke_all(requests, _TIMEOUT_MS)
        for queue, (address, answer) in zip(queues, answers, strict=True):
            if not isinstance(answer, RemotingCommand) or answer.code != ResponseCode.SUCCESS:
                failed.add(queue)
                problem = answer_problem(answer, "commit", address) if isinstance(answer, RemotingCommand) else answer
                self._report(group, queue, problem)
        return failed

    def tell(self, group: str, offsets: dict[MessageQueue, int]) -> None:
        """Commit one way."""
        for queue, queue_offset in offsets.items():
            try:
                self._instance.invoke_one_way(*self.request(group, queue, queue_offset, one_way=True))
            except BrokerError as exc:
                self._report(group, queue, exc)

    @staticmethod
    def _report(group: str, queue: MessageQueue, problem: BrokerError) -> None:
        _log.warning("remote.commit_failed", group=group, topic=queue.topic, queue=queue.queue_id, reason=str(problem))


class GroupOffsets:
    """The offsets of one member of a clustering group: gathered here, told to the brokers from time to time.

    A queue's offset is this member's own from its first commit until the queue goes to another member.
    """

    def __init__(self, group: str, brokers: BrokerOffsets) -> None:
        self._group = group
        self._brokers = brokers
        self._lock = threading.Lock()
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

    def flush_later(self) -> None:
        self._brokers.tell(self._group, self._take_changed(None))

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        changed = self._take_changed(queues)
        if not changed:
            return
        failed = self._brokers.write_all(self._group, changed)
        with self._lock:
            self._changed |= failed & self._offsets.keys()

    def forget(self, queue: MessageQueue) -> None:
        with self._lock:
            self._offsets.pop(queue, None)
            self._changed.discard(queue)

    def _take_changed(self, queues: Iterable[MessageQueue] | None) -> dict[MessageQueue, int]:
        with self._lock:
            taken = self._changed if queues is None else self._changed & set(queues)
            self._changed = self._changed - taken
            return {queue: self._offsets[queue] for queue in taken}


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

    def flush_later(self) -> None:
        self.flush()

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
