"""Settings of a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import Ge, Gt, Lt, MultipleOf

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress


class FlushDiskType(Enum):
    """When a message counts as stored: on disk (sync), or in the operating system's cache (async).

    An acknowledged message survives a killed process with both. After a power failure ``ASYNC_FLUSH`` may lose the
    messages of the last half second.
    """

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of a store. Sizes are in bytes; the names are the same as in RocketMQ's ``MessageStoreConfig``.

    The ranges in the types apply to values from ``application.yml``.

    Raises:
        ConfigurationError: Two settings contradict each other, or one has an invalid value.
    """

    listen_host: HostAddress = HostAddress("127.0.0.1", 10911)
    """Address in records and message ids; nothing listens there. A server has its own instead."""

    flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
    """SYNC_FLUSH: a message is on disk before it is acknowledged. ASYNC_FLUSH: a power failure may lose it."""

    # None: the size that the files of the store directory have. It cannot be changed, only contradicted.
    mapped_file_size_commit_log: Annotated[int, Gt(0)] | None = None
    """Size of one commit log file. By default the size in the store directory; 67108864 in a new one."""

    mapped_file_size_consume_queue: Annotated[int, Gt(0), MultipleOf(20)] | None = None
    """Size of one consume queue file, a multiple of its 20-byte units. By default the size in the store
    directory; 600000 in a new one."""

    max_hash_slot_num: Annotated[int, Gt(0), Lt(1 << 31)] | None = None
    """Slots of one index file, 4 bytes each. By default the number in the store directory; 250000 in a new one."""

    # With the slots, an index file has 21 MB: in proportion to a commit log file of 64 MiB. RocketMQ's 5,000,000 slots
    # and 20,000,000 keys have 420 MB.
    max_index_num: Annotated[int, Gt(1), Lt(1 << 31)] | None = None
    """Entries of one index file, 20 bytes each; one is unused. By default the number in the store directory; 1000000
    in a new one."""

    flush_interval_commit_log_ms: Annotated[int, Gt(0)] = 500
    """With ASYNC_FLUSH: milliseconds between two flushes."""

    checkpoint_interval_ms: Annotated[int, Gt(0)] = 1_000
    """Milliseconds between two checkpoints. After a crash the store reads the commit log again from the last one."""

    file_reserved_time: Annotated[int, Ge(1)] = 72
    """Hours that a commit log file is kept after its newest message. Pending messages are kept until their delivery,
    and by default unread messages and dead letters as long as the next three keys say."""

    keep_unread_messages: bool = True
    """True: a file stays while it has messages that a known consumer group has not consumed, or dead letters that are
    not old, until the disk is full. False: RocketMQ's rule, a file is deleted by its age whether or not its messages
    were consumed."""

    dead_letter_reserved_time: Annotated[int, Ge(0)] = 720
    """Hours that dead letters are kept; 0: no longer than other messages. Only with ``keep-unread-messages``."""

    group_reserved_time: Annotated[int, Ge(1)] = 720
    """Hours without a member and without a commit after which the unread messages of a group are not kept any more.
    Only the time in which a broker runs counts. Only with ``keep-unread-messages``."""

    delete_when: str = "04"
    """Hours of the day, local time, in which older files are deleted; several as ``04;16``."""

    disk_max_used_space_ratio: int = 75
    """Percent of the disk above which older files are deleted at any hour. This ratio and the next two apply only if
    the disk has no room for 16 more commit log files."""

    disk_space_clean_forcibly_ratio: int = 85
    """Percent of the disk above which the oldest files are deleted whatever their age, with their unread messages and
    dead letters. Ten percent below there is a warning."""

    disk_space_warning_level_ratio: int = 90
    """Percent of the disk above which the store refuses new messages. None of the three ratios may be above the next;
    100 switches one off."""

    disk_free_warning_ratio: Annotated[int, Ge(0), Lt(100)] = 10
    """Percent of the disk that is free below which a warning is logged, however large the disk is; 0 for never."""

    clean_file_forcibly_enable: bool = True
    """True: files that are not old may be deleted when the disk is that full."""

    max_mapped_queues: Annotated[int, Gt(0)] = 1_000
    """Most consume queues whose files stay open, with two descriptors each; at most an eighth of the limit of open
    files. The files of the others are opened for each read."""

    def __post_init__(self) -> None:
        if self.file_reserved_time < 1:
            raise ConfigurationError(f"file-reserved-time must be 1 hour or more, got {self.file_reserved_time}")
        if self.dead_letter_reserved_time < 0:
            raise ConfigurationError(
                "dead-letter-reserved-time must be 0 hours or more (0: no longer than other messages), got "
                f"{self.dead_letter_reserved_time}"
            )
        if self.group_reserved_time < 1:
            raise ConfigurationError(
                f"group-reserved-time must be 1 hour or more, got {self.group_reserved_time}; to delete files whether "
                "or not a group has read them, set keep-unread-messages to false"
            )
        parse_delete_when(self.delete_when)
        ratios = (
            self.disk_max_used_space_ratio,
            self.disk_space_clean_forcibly_ratio,
            self.disk_space_warning_level_ratio,
        )
        if not 1 <= ratios[0] <= ratios[1] <= ratios[2] <= 100:
            raise ConfigurationError(
                "disk-max-used-space-ratio, disk-space-clean-forcibly-ratio and disk-space-warning-level-ratio are "
                "percent of the disk, 1 to 100, none above the next, "
                f"got {ratios[0]}, {ratios[1]} and {ratios[2]}"
            )


def parse_delete_when(text: str) -> frozenset[int]:
    """Return the hours of the day that ``delete-when`` names: ``04``, or several as in ``04;16``.

    Raises:
        ConfigurationError: It names something else, or no hour.
    """
    hours = [hour.strip() for hour in text.split(";") if hour.strip()]
    for hour in hours or [text]:
        if not (hour.isascii() and hour.isdecimal() and int(hour) <= 23):
            raise ConfigurationError.of_value(
                "delete-when",
                f"{hour!r} is not an hour of the day; give 00 to 23, several with a semicolon between them, such as 04 "
                "or 04;16",
            )
    return frozenset(map(int, hours))
