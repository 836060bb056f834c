"""Queues of a cluster: servers of this library, or Apache RocketMQ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from mqtemplate.brokers.remote.cluster.settings import QueueFields
from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol.codes import RequestCode, ResponseCode
from mqtemplate.remoting.protocol.headers.group import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    QueryConsumerOffsetRequestHeader,
    SearchOffsetRequestHeader,
    TopicQueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from mqtemplate.spark.location.cluster_connection import ClusterConnection, connect, named
from mqtemplate.spark.location.cluster_reads import PULL_GROUP, PULLED, BlockRequests, Pulls, pull_header
from mqtemplate.spark.records.blocks import RecordBlock, blocks_of
from mqtemplate.spark.records.offsets import OffsetTable, QueueRange

_SAMPLE = 32
_RECORD_BLOCK = "RECORD_BLOCK"


@dataclass(frozen=True, slots=True)
class ClusterBlocks:
    """Messages of a cluster, pulled queue by queue. A planner and each task have a connection of their own.

    Args:
        client_file: See `client_settings`; read on the machine that connects.
        group: Consumer group of the pulls; None for RocketMQ's group of tools.
        pulls: True to use ordinary pulls only, which every broker answers.
    """

    name_servers: tuple[str, ...]
    client_file: str | None = None
    group: str | None = None
    pulls: bool = False

    @property
    def _connection(self) -> ClusterConnection:
        return connect(self.name_servers, self.client_file)

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
        return (
            self._connection.call(queue, code, header, f"{what} of {named(queue)}").header(OffsetResponseHeader).offset
        )

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

    def commit(self, group: str, offsets: OffsetTable) -> None:
        """Set the offsets of the group, but none to a lower one: a repeated batch commits again."""
        for queue, offset in offsets.items():
            if offset > (self.committed(group, queue) or 0) and not self._commit_one(group, queue, offset):
                # RocketMQ creates a group with its first pull, and refuses to commit before.
                self._connection.call(
                    queue,
                    RequestCode.PULL_MESSAGE,
                    pull_header(QueueRange.of(queue, offset - 1, offset), offset - 1, offset, group),
                    f"create the group {group!r}",
                    accept=PULLED,
                )
                self._commit_one(group, queue, offset)

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
        if self.pulls or not connection.has_capability(found.queue, _RECORD_BLOCK):
            return blocks_of(Pulls(connection, found, self.group or PULL_GROUP).bodies(), found, source)
        return BlockRequests(connection, found, source).blocks()


def _fields(queue: MessageQueue) -> QueueFields:
    return {"topic": queue.topic, "queue_id": queue.queue_id, "broker_name": queue.broker_name}
