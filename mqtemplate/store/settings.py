"""What a store can be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.message import HostAddress

__all__ = ["FlushDiskType", "StoreSettings"]


class FlushDiskType(Enum):
    """When a message counts as stored: on the disk (sync), or in the operating system's cache (async).

    What was acknowledged survives a killed process either way. A machine that loses power may lose,
    with ``ASYNC_FLUSH``, what came in the last half second.
    """

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Sizes in bytes, times in milliseconds. Names are those of RocketMQ's ``MessageStoreConfig``."""

    flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
    mapped_file_size_commit_log: int = 64 << 20
    mapped_file_size_consume_queue: int = 600_000
    flush_interval_commit_log_ms: int = 500
    checkpoint_interval_ms: int = 1_000
    store_host: HostAddress = HostAddress("127.0.0.1", 10911)
