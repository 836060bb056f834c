"""Queues of a cluster, servers of this library or Apache RocketMQ. Only a read of a cluster loads this module."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from mqtemplate.broker import Capability
from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.brokers.remote.cluster.settings import QueueFields
from mqtemplate.errors import (
    BrokerError,
    OffsetOutOfRangeError,
    RemoteProtocolError,
)
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.group import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.spark.location.cluster_connection import (
    RETRY_S,
    Answer,
    ClusterConnection,
    Retries,
    connect,
    named,
)
from mqtemplate.spark.location.location import BrokerLocation
from mqtemplate.spark.records.blocks import MAX_ROWS, RecordBlock, block_at, blocks_of
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange

PULL_GROUP = "TOOLS_CONSUMER"
"""Group of pulls without a group of their own. Every broker has it. Source: ``MixAll.TOOLS_CONSUMER_GROUP``."""

PULLED = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED)
"""Responses to a pull without messages."""

_IN_FLIGHT = 8
_MOST_A_PULL = 1_024  # a broker returns fewer: RocketMQ 32, unless it is configured otherwise
_MAX_BYTES = 4 << 20


def pull_header(found: QueueRange, start: int, end: int, group: str) -> PullMessageRequestHeader:
    """Return the header of a pull of the messages from *start* to *end*, which the broker may not hold."""
    return PullMessageRequestHeader(
        consumer_group=group,
        topic=found.topic,
        queue_id=found.queue_id,
        broker_name=found.broker_name,
        queue_offset=start,
        max_msg_nums=end - start,
        sys_flag=PullSysFlag.SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
        max_msg_bytes=_MAX_BYTES,
    )


@dataclass(slots=True)
class _Pull:
    """One request for the messages ``at <= queue offset < end``."""

    at: int
    end: int
    answer: Answer = field(default_factory=Future)


@dataclass(slots=True)
class Pulls:
    """Ordinary pulls of one range, which every broker answers. The responses are returned in order."""

    connection: ClusterConnection
    found: QueueRange
    group: str

    def bodies(self) -> Iterator[bytes]:
        """Yield records as brokers send them: one after the other, in order. A body may have records after the range.

        Raises:
            OffsetOutOfRangeError: The broker does not have the messages any more.
            BrokerError: The broker refused, or did not answer several times.
        """
        first = _Pull(self.found.start, min(self.found.end, self.found.start + _MOST_A_PULL))
        self._send(first)
        at, body = self._result(first)
        if body:
            yield body
        size = max(1, at - self.found.start)  # what the broker returns at once
        waiting: deque[_Pull] = deque()
        following = at
        while following < self.found.end or waiting:
            while following < self.found.end and len(waiting) < _IN_FLIGHT:
                pull = _Pull(following, min(self.found.end, following + size))
                following = pull.end
                self._send(pull)
                waiting.append(pull)
            pull = waiting.popleft()
            at, body = self._result(pull)
            if body:
                yield body
            if at < pull.end:  # the bodies are larger here: the response was limited by its bytes
                rest = _Pull(at, pull.end)
                self._send(rest)
                waiting.appendleft(rest)

    def _send(self, pull: _Pull) -> None:
        header = pull_header(self.found, pull.at, pull.end, self.group)
        pull.answer = self.connection.send(self.found.queue, RequestCode.PULL_MESSAGE, header)

    def _result(self, pull: _Pull) -> tuple[int, bytes]:
        """Return the offset of the next pull, and the records; repeat the pull if the broker cannot answer now."""
        retries = Retries(self.connection.retry_s)
        while True:
            response = pull.answer.result()
            # PULL_NOT_FOUND: a broker dispatches to its consume queues a moment after it stored the messages.
            is_final = self.connection.is_final(self.found.queue, response) and not _is_not_found(response)
            if is_final or not retries.pause():
                return self._parsed(response, pull.at)
            self._send(pull)

    def _parsed(self, response: RemotingCommand | BrokerError, at: int) -> tuple[int, bytes]:
        if isinstance(response, BrokerError):
            raise response
        if response.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            header = response.header(PullMessageResponseHeader)
            return max(header.next_begin_offset, at), response.body
        if response.code == ResponseCode.PULL_OFFSET_MOVED:
            header = response.header(PullMessageResponseHeader)
            raise OffsetOutOfRangeError(
                f"{named(self.found.queue)}: offset {at} is not stored: the queue goes from "
                f"{header.min_offset} to {header.max_offset}",
                header.min_offset,
            )
        raise response_error(response, f"read {named(self.found.queue)}", self.connection.address(self.found.queue))


def _is_not_found(response: RemotingCommand | BrokerError) -> bool:
    return isinstance(response, RemotingCommand) and response.code == ResponseCode.PULL_NOT_FOUND


_COUNT = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class BlockRequests:
    """Blocks of one range. The next one is requested while the last one is parsed."""

    connection: ClusterConnection
    found: QueueRange
    source: str

    def blocks(self) -> Iterator[RecordBlock]:
        """Yield the records in order.

        Raises:
            OffsetOutOfRangeError: The server does not have the messages any more.
            RemoteProtocolError: A response is not a block.
            BrokerError: The server refused, or did not answer several times.
        """
        at = self.found.start
        waiting = self._send(at)
        while at < self.found.end:
            response, at = self._answer(waiting, at)
            if at < self.found.end:
                waiting = self._send(at)
            yield from self._parsed(response.body)

    def _send(self, at: int) -> Answer:
        header = GetRecordBlockRequestHeader(
            topic=self.found.topic,
            queue_id=self.found.queue_id,
            broker_name=self.found.broker_name,
            queue_offset=at,
            end_offset=self.found.end,
            max_bytes=MAX_BLOCK_BYTES,
        )
        return self.connection.send(self.found.queue, RequestCode.GET_RECORD_BLOCK, header)

    def _answer(self, waiting: Answer, at: int) -> tuple[RemotingCommand, int]:
        """Return a response with records, and the offset of the next request; repeat it if there is none yet."""
        retries = Retries(self.connection.retry_s)
        while True:
            response = waiting.result()
            if self.connection.is_final(self.found.queue, response):
                if isinstance(response, BrokerError):
                    raise response
                if response.code == ResponseCode.PULL_OFFSET_MOVED:
                    raise OffsetOutOfRangeError(f"{named(self.found.queue)}: {response.remark}", at)
                if response.code != ResponseCode.SUCCESS:
                    raise response_error(response, f"read {named(self.found.queue)}", self.source)
                following = response.header(GetRecordBlockResponseHeader).next_offset
                if following > at:  # otherwise another reader saw the messages before they were durable
                    return response, following
            if not retries.pause():
                if isinstance(response, BrokerError):
                    raise response
                raise OffsetOutOfRangeError(f"{named(self.found.queue)}: offset {at} cannot be read: {response}", at)
            waiting = self._send(at)

    def _parsed(self, body: bytes) -> Iterator[RecordBlock]:
        count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else -1
        front = _COUNT.size * (count + 1)
        if count < 0 or front > len(body):
            raise RemoteProtocolError(f"{self.source}: a block of {len(body)} bytes has no {count} records")
        ends = np.cumsum(np.frombuffer(body, ">i4", count, _COUNT.size).astype(np.int64))
        if count and int(ends[-1]) != len(body) - front:
            raise RemoteProtocolError(f"{self.source}: the sizes in a block of {len(body)} bytes do not add up")
        starts = np.concatenate(([0], ends))
        for first in range(0, count, MAX_ROWS):
            bounds = starts[first : first + MAX_ROWS + 1]
            data = memoryview(body)[front + int(bounds[0]) : front + int(bounds[-1])]
            yield block_at(data, bounds[:-1] - bounds[0], self.found, self.source)


_SAMPLE = 32


@dataclass(frozen=True, slots=True)
class ClusterBlocks:
    """Messages of a cluster, pulled queue by queue. A planner and each task have a connection of their own.

    Args:
        group: Consumer group of the pulls; None for RocketMQ's group of tools.
        pulls: True to use ordinary pulls only, which every broker answers.
        retry_s: See `ClusterConnection`.
    """

    location: BrokerLocation
    group: str | None = None
    pulls: bool = False
    retry_s: float = RETRY_S

    @property
    def _connection(self) -> ClusterConnection:
        return connect(self.location, self.retry_s)

    # --- queues and offsets --------------------------------------------------------------------

    def topics(self) -> set[str]:
        """See `Blocks.topics`."""
        return self._connection.topics()

    def queues(self, topic: str) -> list[MessageQueue]:
        """See `Blocks.queues`."""
        return self._connection.queues(topic)

    def min_offset(self, queue: MessageQueue) -> int:
        """See `Blocks.min_offset`."""
        header = TopicQueueRequestHeader(**_fields(queue))
        return self._offset(queue, RequestCode.GET_MIN_OFFSET, header, "get the first offset")

    def max_offset(self, queue: MessageQueue) -> int:
        """See `Blocks.max_offset`."""
        header = GetMaxOffsetRequestHeader(**_fields(queue))
        return self._offset(queue, RequestCode.GET_MAX_OFFSET, header, "get the end")

    def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """See `Blocks.search_offset`."""
        header = SearchOffsetRequestHeader(**_fields(queue), timestamp=timestamp_ms)
        return self._offset(queue, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header, f"get the offset at {timestamp_ms}")

    def _offset(self, queue: MessageQueue, code: int, header: TopicQueueRequestHeader, what: str) -> int:
        response = self._connection.call(queue, code, header, f"{what} of {named(queue)}")
        return response.header(OffsetResponseHeader).offset

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        """See `Blocks.committed`."""
        header = QueryConsumerOffsetRequestHeader(**_fields(queue), consumer_group=group, set_zero_if_not_found=False)
        response = self._connection.call(
            queue,
            RequestCode.QUERY_CONSUMER_OFFSET,
            header,
            f"get the offset of group {group!r} in {named(queue)}",
            accept=(ResponseCode.QUERY_NOT_FOUND,),
        )
        if response.code == ResponseCode.QUERY_NOT_FOUND:
            return None
        return response.header(OffsetResponseHeader).offset

    def commit(self, group: str, offsets: OffsetTable) -> OffsetTable:
        """See `Blocks.commit`: a repeated batch commits again."""
        ahead: OffsetTable = {}
        for queue, offset in offsets.items():
            committed = self.committed(group, queue) or 0
            if offset < committed:
                ahead[queue] = committed
            elif offset > committed and not self._commit_one(group, queue, offset):
                # RocketMQ creates a group with its first pull, and refuses to commit before.
                self._connection.call(
                    queue,
                    RequestCode.PULL_MESSAGE,
                    pull_header(QueueRange.of(queue, offset - 1, offset), offset - 1, offset, group),
                    f"create the group {group!r}",
                    accept=PULLED,
                )
                self._commit_one(group, queue, offset)
        return ahead

    def _commit_one(self, group: str, queue: MessageQueue, offset: int) -> bool:
        """Return False if the broker does not have the group."""
        header = UpdateConsumerOffsetRequestHeader(**_fields(queue), consumer_group=group, commit_offset=offset)
        response = self._connection.call(
            queue,
            RequestCode.UPDATE_CONSUMER_OFFSET,
            header,
            f"commit the offset of group {group!r} in {named(queue)}",
            accept=(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,),
        )
        return response.code == ResponseCode.SUCCESS

    def make_durable(self, latest: OffsetTable) -> None:
        """Do nothing: a broker shows its consumers no message that it may lose."""

    def message_bytes(self, found: QueueRange) -> float:
        """Return the average size of the first messages."""
        first = QueueRange.of(found.queue, found.start, min(found.end, found.start + _SAMPLE))
        sizes = [len(each.sizes) and float(each.sizes.mean()) for each in islice(self.blocks(first, None), 1)]
        return sizes[0] if sizes else 0.0

    def where(self) -> str:
        """See `Blocks.where`."""
        return "The broker deleted them after their retention, the topic was created again, or the broker was replaced"

    # --- tasks ---------------------------------------------------------------------------------

    def identity(self, found: QueueRange) -> str:
        """Return nothing: a task finds the broker by its name, and `ClusterConnection.address` reports another one."""
        return ""

    def check_identity(self, found: QueueRange, identity: str) -> None:
        """Do nothing; see `identity`."""

    def blocks(self, found: QueueRange, tag_codes: npt.NDArray[np.int64] | None) -> Iterator[RecordBlock]:
        """Yield blocks of a server of this library, else pulled records. The caller leaves out other tags."""
        connection = self._connection
        source = f"{found.broker_name} at {connection.address(found.queue)}"
        if self.pulls or not connection.has_capability(found.queue, Capability.RECORD_BLOCK.name):
            return blocks_of(Pulls(connection, found, self.group or PULL_GROUP).bodies(), found, source)
        return BlockRequests(connection, found, source).blocks()


def _fields(queue: MessageQueue) -> QueueFields:
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker_name": queue.broker_name}
