"""Requests for blocks of records, which servers of this library answer: megabytes in one response."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from mqtemplate.brokers.remote.errors import response_error
from mqtemplate.errors import BrokerError, OffsetOutOfRangeError, RemoteProtocolError
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.delayed import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.spark.offsets import QueueRange
from mqtemplate.spark.reader.cluster_connection import ATTEMPTS, BUSY, TRANSIENT, ClusterConnection, named, pause
from mqtemplate.spark.reader.record_block import MAX_ROWS, RecordBlock, block_at

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
