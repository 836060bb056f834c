"""Codes 11 and 361: consumers pull messages. Code 500,020: programs read blocks of records.

Source: RocketMQ ``broker: PullMessageProcessor``, ``DefaultPullMessageResultHandler``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mqtemplate.engine.engine import Engine
from mqtemplate.message import MessageQueue
from mqtemplate.record.layout import SMALLEST_RECORD
from mqtemplate.remoting.connection import Connection
from mqtemplate.remoting.protocol.bodies.own_requests import (
    MAX_BLOCK_BYTES,
    GetRecordBlockRequestHeader,
    GetRecordBlockResponseHeader,
)
from mqtemplate.remoting.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from mqtemplate.remoting.protocol.command import RemotingCommand
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader
from mqtemplate.server.pulls.pull_checks import PullChecks
from mqtemplate.server.pulls.pull_hold import HeldPull, PullHold
from mqtemplate.server.pulls.raw_reader import RawReader, RawStatus
from mqtemplate.server.requests.deferred_work import DeferredWork
from mqtemplate.server.requests.registration import answers, handles
from mqtemplate.server.requests.response import RefusedError
from mqtemplate.server.state.creations import ClientCreations
from mqtemplate.server.state.settings import BrokerServerSettings
from mqtemplate.server.state.subscriptions import LONG_EXPRESSION, Subscriptions
from mqtemplate.server.state.topics import TopicConfigs
from mqtemplate.store.files.layout import PRE_BLANK_SIZE_MARK

_MAX_BLOCK_UNITS = 65_536


@dataclass(frozen=True, slots=True)
class PullProcessor:
    """Answers a pull at once if it found a message or may not wait. `PullHold` holds the others."""

    engine: Engine
    settings: BrokerServerSettings
    creations: ClientCreations
    checks: PullChecks
    subscriptions: Subscriptions
    raw: RawReader
    hold: PullHold
    deferred_work: DeferredWork

    @handles(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def _process(self, connection: Connection, request: RemotingCommand) -> RemotingCommand | None:
        header = request.header(PullMessageRequestHeader)
        if self.creations.groups.find(header.consumer_group) is not None:
            return self._pull(connection, request, header, may_compile=False)
        return self.deferred_work.run(connection, request, partial(self._pull, connection, request, header))

    def _pull(
        self,
        connection: Connection,
        request: RemotingCommand,
        header: PullMessageRequestHeader,
        *,
        may_compile: bool = True,
    ) -> RemotingCommand | None:
        group = self.creations.group(connection, request, header.consumer_group)
        self.checks.check(header, group)
        expression = self.subscriptions.expression_of_pull(header)
        compiled = self.subscriptions.cache.find(expression)
        if compiled is None:
            if not may_compile and len(expression[1]) > LONG_EXPRESSION:
                again = partial(self._pull, connection, request, header)
                return self.deferred_work.run(connection, request, again)
            compiled = self.subscriptions.compile(*expression)
        if header.sys_flag & PullSysFlag.COMMIT_OFFSET:
            offset = max(0, header.commit_offset)
            self.engine.offsets.commit(header.consumer_group, header.topic, header.queue_id, offset)
        query, at = self.checks.query(header, compiled.selector), header.queue_offset
        found = self.raw.pull(query, at)
        may_wait = header.sys_flag & PullSysFlag.SUSPEND and header.suspend_timeout_millis > 0
        if found.status is RawStatus.NO_NEW_MSG and may_wait:
            suspend_ms = min(header.suspend_timeout_millis, self.settings.max_suspend_ms)
            deadline_ms = self.engine.clock.steady_ms() + suspend_ms
            owner = self.creations.limits.owner(connection, request)
            self.hold.hold(HeldPull(connection, request, query, at, at, deadline_ms, owner))
            return None
        return found.response_to(request)


@dataclass(frozen=True, slots=True)
class RecordBlockProcessor:
    """Returns a block of records of one queue as they are stored, for programs that parse many at once.

    A pull returns 32 messages, each verified and copied on its own. A block has megabytes, and its receiver verifies
    the records: unlike a pull it also has the checksum property, which covers all bytes. RocketMQ has no such request.
    """

    topics: TopicConfigs
    raw: RawReader

    @answers(RequestCode.GET_RECORD_BLOCK, slow=True)
    def _block(self, header: GetRecordBlockRequestHeader) -> tuple[GetRecordBlockResponseHeader, bytes]:
        self.topics.check_readable(header.topic, header.queue_id)
        queue = MessageQueue(header.topic, self.topics.broker_name, header.queue_id)
        low, high = self.raw.reader.min_offset(queue), self.raw.reader.max_offset(queue)
        if not low <= header.queue_offset <= high:
            raise RefusedError(
                ResponseCode.PULL_OFFSET_MOVED,
                f"offset {header.queue_offset} is not stored: the queue has {low}..{high}",
            )
        records, at = self._read(header, min(high, header.end_offset))
        sizes = np.array([len(record) for record in records], ">i4")
        body = b"".join([struct.pack(">i", len(records)), sizes.tobytes(), *records])
        return GetRecordBlockResponseHeader(next_offset=at, min_offset=low, max_offset=high), body

    def _read(self, header: GetRecordBlockRequestHeader, end: int) -> tuple[list[bytes], int]:
        """Return the records, and the queue offset after them."""
        store, at = self.raw.store, header.queue_offset
        units = store.consume_queue(header.topic, header.queue_id).units(at, max(0, min(end - at, _MAX_BLOCK_UNITS)))
        sizes = units["size"].astype(np.int64)
        is_record = (sizes >= SMALLEST_RECORD) & (sizes != PRE_BLANK_SIZE_MARK)  # others are marks without a message
        count = _fitting(np.where(is_record, sizes, 0), max(1, min(header.max_bytes, MAX_BLOCK_BYTES)))
        records: list[bytes] = []
        pairs = zip(units["physical_offset"][:count].tolist(), sizes[:count].tolist(), strict=True)
        for number, ((physical_offset, size), counts) in enumerate(zip(pairs, is_record[:count].tolist(), strict=True)):
            if not counts:
                continue
            record = store.read_bytes(physical_offset, size)
            if not record:  # deleted by retention
                return records, at + number
            records.append(record)
        return records, at + count


def _fitting(sizes: npt.NDArray[np.int64], max_bytes: int) -> int:
    """Return the number of leading records that have *max_bytes* together; one at least, if there is one."""
    return min(len(sizes), max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))))
