"""Reads of one range from a cluster: pulls, which every broker answers, or blocks of a server of this library."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from mqtemplate.brokers.remote.cluster.failures import response_error
from mqtemplate.errors import BrokerError, OffsetOutOfRangeError, RemoteProtocolError
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.spark.location.cluster_connection import ATTEMPTS, BUSY, TRANSIENT, ClusterConnection, named, pause
from mqtemplate.spark.records.blocks import MAX_ROWS, RecordBlock, block_at
from mqtemplate.spark.records.offsets import QueueRange

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
    response: Future[RemotingCommand | BrokerError] = field(default_factory=Future)
    attempt: int = 0


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
        pull.response = Future()
        request = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
        self.connection.send(self.found.queue, request, pull.response.set_result)

    def _result(self, pull: _Pull) -> tuple[int, bytes]:
        """Return the offset of the next pull, and the records; repeat the pull if the broker cannot answer now."""
        while True:
            response = pull.response.result()  # each request ends by its time limit
            if isinstance(response, TRANSIENT) and pull.attempt < ATTEMPTS:
                self._repeat(pull)
                continue
            if isinstance(response, BrokerError):
                raise response
            if response.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
                header = response.header(PullMessageResponseHeader)
                return max(header.next_begin_offset, pull.at), response.body
            if response.code == ResponseCode.PULL_OFFSET_MOVED:
                header = response.header(PullMessageResponseHeader)
                raise OffsetOutOfRangeError(
                    f"{named(self.found.queue)}: offset {pull.at} is not stored: the queue goes from "
                    f"{header.min_offset} to {header.max_offset}",
                    header.min_offset,
                )
            # PULL_NOT_FOUND: a broker dispatches to its consume queues a moment after it stored the messages.
            if response.code not in (*BUSY, ResponseCode.PULL_NOT_FOUND) or pull.attempt >= ATTEMPTS:
                address = self.connection.address(self.found.queue)
                raise response_error(response, f"read {named(self.found.queue)}", address)
            self._repeat(pull)

    def _repeat(self, pull: _Pull) -> None:
        pause(pull.attempt)
        pull.attempt += 1
        self._send(pull)


_COUNT = struct.Struct(">i")
_Response = Future[RemotingCommand | BrokerError]


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

    def _send(self, at: int) -> _Response:
        header = GetRecordBlockRequestHeader(
            topic=self.found.topic,
            queue_id=self.found.queue_id,
            broker_name=self.found.broker_name,
            queue_offset=at,
            end_offset=self.found.end,
            max_bytes=MAX_BLOCK_BYTES,
        )
        response: _Response = Future()
        request = RemotingCommand.request(RequestCode.GET_RECORD_BLOCK, header)
        self.connection.send(self.found.queue, request, response.set_result)
        return response

    def _answer(self, waiting: _Response, at: int) -> tuple[RemotingCommand, int]:
        """Return a response with records, and the offset of the next request; repeat it if there is none yet."""
        for attempt in range(ATTEMPTS):
            response = waiting.result()  # each request ends by its time limit
            if isinstance(response, RemotingCommand) and response.code == ResponseCode.SUCCESS:
                following = response.header(GetRecordBlockResponseHeader).next_offset
                if following > at:  # otherwise another reader saw the messages before they were durable
                    return response, following
            elif isinstance(response, RemotingCommand) and response.code == ResponseCode.PULL_OFFSET_MOVED:
                raise OffsetOutOfRangeError(f"{named(self.found.queue)}: {response.remark}", at)
            elif isinstance(response, RemotingCommand) and response.code not in BUSY:
                raise response_error(response, f"read {named(self.found.queue)}", self.source)
            elif isinstance(response, BrokerError) and not isinstance(response, TRANSIENT):
                raise response
            pause(attempt)
            waiting = self._send(at)
        raise OffsetOutOfRangeError(f"{named(self.found.queue)}: offset {at} cannot be read: {waiting.result()}", at)

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
