"""What a store can be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.errors import ConfigurationError
from mqtemplate.message import HostAddress


class FlushDiskType(Enum):
    """When a message counts as stored: on the disk (sync), or in the operating system's cache (async).

    What was acknowledged survives a killed process either way. A machine that loses power may lose,
    with ``ASYNC_FLUSH``, what came in the last half second.
    """

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Sizes in bytes, times in milliseconds. Names are those of RocketMQ's ``MessageStoreConfig``.

    Attributes:
        max_hash_slot_num: Slots of an index file. A folder keeps it, and the next one.
        max_index_num: Keys an index file has room for, and one. With 21 MB a file is in proportion to a log file of
            64 MiB; RocketMQ's 5,000,000 and 20,000,000 make 420 MB.
        file_reserved_time: Hours that a commit log file is kept after its newest record.
        delete_when: The hours of the day, local time, in which older files are deleted; see `parse_delete_when`.
        disk_max_used_space_ratio: Percent of the disk above which they are deleted at any hour. This ratio and the next
            two count only where there is no room for 16 more commit log files.
        disk_space_clean_forcibly_ratio: Percent above which the oldest files are deleted whatever their age.
        disk_space_warning_level_ratio: Percent above which no new message is taken; 100 switches a ratio off.
        clean_file_forcibly_enable: Whether files may be deleted that are not old.

    Raises:
        ConfigurationError: One of those contradicts another, or cannot be.
    """

    flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
    mapped_file_size_commit_log: int = 64 << 20
    mapped_file_size_consume_queue: int = 600_000
    max_hash_slot_num: int = 250_000
    max_index_num: int = 1_000_000
    flush_interval_commit_log_ms: int = 500
    checkpoint_interval_ms: int = 1_000
    listen_host: HostAddress = HostAddress("127.0.0.1", 10911)
    file_reserved_time: int = 72
    delete_when: str = "04"
    disk_max_used_space_ratio: int = 75
    disk_space_clean_forcibly_ratio: int = 85
    disk_space_warning_level_ratio: int = 90
    clean_file_forcibly_enable: bool = True

    def __post_init__(self) -> None:
        if self.file_reserved_time < 1:
            raise ConfigurationError(
                f"file-reserved-time: files are kept for 1 hour or more, got {self.file_reserved_time}"
            )
        parse_delete_when(self.delete_when)
        check_disk_ratios(
            self.disk_max_used_space_ratio, self.disk_space_clean_forcibly_ratio, self.disk_space_warning_level_ratio
        )


def parse_delete_when(text: str) -> frozenset[int]:
    """The hours of the day that ``delete-when`` names: ``04``, or several as in ``04;16``.

    Raises:
        ConfigurationError: It names something else, or none.
    """
    hours = [hour.strip() for hour in text.split(";") if hour.strip()]
    for hour in hours or [text]:
        if not (hour.isascii() and hour.isdecimal() and int(hour) <= 23):
            raise ConfigurationError(
                f"delete-when: {hour!r} is no hour of the day; give 00 to 23, several with a semicolon between them, "
                "such as 04 or 04;16"
            )
    return frozenset(map(int, hours))


def check_disk_ratios(max_used: int, clean_forcibly: int, warning_level: int) -> None:
    """See that the three percentages ascend.

    Raises:
        ConfigurationError: They do not, or one is no percentage.
    """
    if not 1 <= max_used <= clean_forcibly <= warning_level <= 100:
        raise ConfigurationError(
            "disk-max-used-space-ratio, disk-space-clean-forcibly-ratio and disk-space-warning-level-ratio are percent "
            f"of the disk, 1 to 100, none above the next; got {max_used}, {clean_forcibly} and {warning_level}"
        )
