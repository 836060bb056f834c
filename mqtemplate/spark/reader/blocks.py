"""Interface of a place that has messages: a store folder or a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mqtemplate.message import MessageQueue
from mqtemplate.spark.offsets import OffsetTable, QueueRange
from mqtemplate.spark.reader.record_block import RecordBlock


class Blocks(Protocol):
    """Queues of a place, and their records in blocks.

    It is picklable: planner and tasks run in different processes, tasks perhaps on other machines.
    """

    def topics(self) -> set[str]:
        """Return all topics, also those without a message."""

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, sorted; none if the topic is missing or, in a folder, has no message yet."""

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the first queue offset that is stored; the maximum if there is none."""

    def max_offset(self, queue: MessageQueue) -> int:
        """Return one past the last queue offset that can be read."""

    def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first queue offset stored at or after *timestamp_ms*; the maximum if there is none."""

    def committed(self, group: str, queue: MessageQueue) -> int | None:
        """Return the offset of a group; None if it has none."""

    def commit(self, group: str, offsets: OffsetTable) -> None:
        """Set the offsets of a group, if this place can do so from outside of the broker."""

    def make_durable(self, latest: OffsetTable) -> None:
        """Have all messages before *latest* survive a crash of the machine."""

    def message_bytes(self, found: QueueRange) -> float:
        """Return the average size of a record of a range, estimated from some of them."""

    def identity(self, found: QueueRange) -> str:
        """Return a text that is equal for equal stores and differs for others, from the content of a range."""

    def check_identity(self, found: QueueRange, identity: str) -> None:
        """Check in a task that this is the store that was planned.

        Raises:
            SparkError: This machine has another store at the same path, or none.
        """

    def blocks(self, found: QueueRange, tag_codes: npt.NDArray[np.int64] | None) -> Iterator[RecordBlock]:
        """Yield the records of a range in order.

        Args:
            tag_codes: Hash codes of tags: records with others may be left out. None: all.

        Raises:
            OffsetOutOfRangeError: A record was deleted.
            CorruptRecordError: The records cannot be separated.
        """

    def where(self) -> str:
        """Return advice for the error about lost messages: what may have happened here."""
