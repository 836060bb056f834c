"""Pulls of a range: several at a time, each for a part of it, so that no response waits for the next request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from mqtemplate.brokers.remote.cluster.errors import response_error
from mqtemplate.errors import BrokerError, OffsetOutOfRangeError
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, PullMessageResponseHeader
from mqtemplate.spark.offsets import QueueRange
from mqtemplate.spark.reader.cluster_connection import ATTEMPTS, BUSY, TRANSIENT, ClusterConnection, named, pause

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
