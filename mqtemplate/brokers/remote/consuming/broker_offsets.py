"""Committed offsets of clustering groups, which brokers store.

Source: RocketMQ ``client: RemoteBrokerOffsetStore``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import structlog

from mqtemplate.brokers.remote.client_context import ClientContext
from mqtemplate.brokers.remote.errors import check_response, response_error
from mqtemplate.errors import BrokerError, RemoteConnectError, RemoteTimeoutError
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

_log = structlog.stdlib.get_logger("mqtemplate.remote")

_NO_ANSWER = (RemoteConnectError, RemoteTimeoutError)


class BrokerOffsets:
    """Access to the offsets of all clustering groups. A commit returns when its broker has acknowledged it."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context

    def read(self, group: str, queue: MessageQueue, *, young_is_zero: bool = False) -> int | None:
        """Return the committed offset; see `OffsetStore.read`.

        Brokers of 4.x behave as if *young_is_zero* were always set. If it is not, their 0 counts as no offset.
        """
        context, wire = self._context, self._context.namespace.wrap_queue(queue)
        header = QueryConsumerOffsetRequestHeader(
            topic=wire.topic,
            queue_id=wire.queue_id,
            consumer_group=context.namespace.wrap(group),
            set_zero_if_not_found=None if young_is_zero else False,
            broker_name=wire.broker_name,
        )
        address = context.routes.address(queue.broker_name)
        request = RemotingCommand.request(RequestCode.QUERY_CONSUMER_OFFSET, header)
        response = context.instance.invoke(address, request, context.settings.request_timeout_ms)
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        operation = f"get the committed offset of group {group!r} in {queue}"
        offset = check_response(response, operation, address).header(OffsetResponseHeader).offset
        return None if offset == 0 and not young_is_zero and context.instance.is_before_5(address) else offset

    def commit(
        self,
        group: str,
        queue: MessageQueue,
        queue_offset: int,
        create_group: Callable[[], None] | None = None,
    ) -> None:
        """Commit one offset.

        Args:
            create_group: Called if the broker does not have the group; the commit is then repeated.

        Raises:
            BrokerError: The broker did not answer, or refused.
        """
        address, request = self._request(group, queue, queue_offset)
        response = self._context.instance.invoke(address, request, self._context.settings.request_timeout_ms)
        if create_group is not None and response.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            create_group()
            self.commit(group, queue, queue_offset)
        else:
            check_response(response, f"commit offset {queue_offset} of group {group!r} in {queue}", address)

    def commit_all(self, group: str, offsets: dict[MessageQueue, int]) -> set[MessageQueue]:
        """Commit several offsets; return the queues whose commit failed.

        RocketMQ's broker loses concurrent first commits (``ConsumerOffsetManager.commitOffset`` in 4.9.7 and 5.5.0). It
        looks up the offset table of a topic and group, and creates and stores a missing one, without a lock: each of
        these commits stores a table of its own, and only the last table remains. So for each broker and topic, one
        commit is acknowledged before the others are sent. (If two clients collide, the next commit repairs the offset.)

        A broker that does not answer the first commits gets no others, so that it delays the caller by one time limit.
        """
        first = set({(queue.broker_name, queue.topic): queue for queue in offsets}.values())
        problems = self._commit_concurrently(group, {queue: offsets[queue] for queue in first})
        silent = {queue.broker_name: problem for queue, problem in problems.items() if isinstance(problem, _NO_ANSWER)}
        others = offsets.keys() - first
        problems |= {queue: silent[queue.broker_name] for queue in others if queue.broker_name in silent}
        problems |= self._commit_concurrently(group, {queue: offsets[queue] for queue in others - problems.keys()})
        for broker_name, problem in {queue.broker_name: problem for queue, problem in problems.items()}.items():
            _log.warning("remote.commit_failed", group=group, broker=broker_name, reason=str(problem))
        return set(problems)

    def _commit_concurrently(self, group: str, offsets: dict[MessageQueue, int]) -> dict[MessageQueue, BrokerError]:
        requests, queues, problems = [], [], dict[MessageQueue, BrokerError]()
        for queue, queue_offset in offsets.items():
            try:
                requests.append(self._request(group, queue, queue_offset))
                queues.append(queue)
            except BrokerError as exc:  # no route contains its broker any more
                problems[queue] = exc
        responses = self._context.instance.invoke_all(requests, self._context.settings.request_timeout_ms)
        for queue, (address, response) in zip(queues, responses, strict=True):
            if isinstance(response, BrokerError):
                problems[queue] = response
            elif response.code != ResponseCode.SUCCESS:
                problems[queue] = response_error(response, f"commit offsets of group {group!r}", address)
        return problems

    def _request(self, group: str, queue: MessageQueue, queue_offset: int) -> tuple[str, RemotingCommand]:
        """Return the address and the request of a commit."""
        wire = self._context.namespace.wrap_queue(queue)
        header = UpdateConsumerOffsetRequestHeader(
            topic=wire.topic,
            queue_id=wire.queue_id,
            consumer_group=self._context.namespace.wrap(group),
            commit_offset=queue_offset,
            broker_name=wire.broker_name,
        )
        request = RemotingCommand.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
        return self._context.routes.address(queue.broker_name), request


class RemoteBrokerOffsetStore:
    """Offsets of one member of a clustering group: collected here, and committed by each flush.

    A queue's offset is the member's own from its first commit until the queue is assigned to another member.
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

    def commit_now(self, queue: MessageQueue, queue_offset: int) -> None:
        self._brokers.commit(self._group, queue, queue_offset)

    def flush(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Commit the changed offsets of *queues*, or of all, and wait until the brokers have them.

        A flush in another thread is awaited first: it may be committing offsets of these queues.
        """
        with self._flush_lock:
            with self._lock:
                chosen = self._changed if queues is None else self._changed & set(queues)
                changed = {queue: self._offsets[queue] for queue in chosen}
            failed = self._brokers.commit_all(self._group, changed)
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
