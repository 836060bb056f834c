"""What an embedded broker can be told."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.delay import DEFAULT_DELAY_LEVELS, TimerLimits, TimerSettings
from mqtemplate.message import HostAddress
from mqtemplate.store import FlushDiskType, StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLimits:
    """How long a transaction may stay open, and how often it is asked for. Names of ``BrokerConfig``.

    Attributes:
        timeout_ms: From the sending to the first question.
        check_interval_ms: From one question to the next.
        check_max: Questions that may stay without an answer.
        longest_wait_ms: A transaction that nobody could be asked about ends here, as the log keeps no message longer.
    """

    timeout_ms: int = 6_000
    check_interval_ms: int = 30_000
    check_max: int = 15
    longest_wait_ms: int = 72 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """Sizes in bytes. Names are those of RocketMQ's ``BrokerConfig`` and ``MessageStoreConfig``.

    Attributes:
        listen_host: Stands in records and offset message ids; nothing listens there.
        message_delay_level: The level table: level 1 is the first entry.
        timer_max_delay_sec: The farthest deliver time.
        timer_precision_ms: Length of a wheel slot in the files; delivery is exact to the millisecond all the same.
            Must not change for an existing folder.
        max_hash_slot_num: Slots of an index file.
        max_index_num: Keys an index file has room for, and one.
        file_reserved_time: Hours that messages are kept after the newest one of their file; longer while they wait.
        delete_when: The hours of the day, local time, in which older files are deleted: ``04``, or ``04;16``.
        disk_max_used_space_ratio: Percent of the disk above which they are deleted at any hour. This ratio and the next
            two count only where there is no room for 16 more commit log files.
        disk_space_clean_forcibly_ratio: Percent above which the oldest files are deleted whatever their age.
        disk_space_warning_level_ratio: Percent above which no new message is taken; 100 switches a ratio off.
        clean_file_forcibly_enable: Whether files may be deleted that are not old.
        transaction_timeout_ms: A transaction that has not ended after so long is asked for.
        transaction_check_interval_ms: How long after a question the next one comes.
        transaction_check_max: Questions without an answer before the message goes to ``TRANS_CHECK_MAX_TIME_TOPIC``.
        timer_roll_window_slot: A message farther away than so many slots is parked and written again on the way.
    """

    broker_name: str = "broker-a"
    listen_host: HostAddress = HostAddress("127.0.0.1", 10911)
    flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
    flush_interval_commit_log_ms: int = 500
    flush_consumer_offset_interval_ms: int = 5_000
    checkpoint_interval_ms: int = 1_000
    mapped_file_size_commit_log: int = 64 << 20
    mapped_file_size_consume_queue: int = 600_000
    mapped_file_size_timer_log: int = 4 << 20
    max_hash_slot_num: int = 250_000
    max_index_num: int = 1_000_000
    max_message_size: int = 4 << 20
    default_topic_queue_nums: int = 4
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    timer_wheel_enable: bool = True
    timer_precision_ms: int = 1_000
    timer_max_delay_sec: int = 40 * 86_400
    timer_roll_window_slot: int = 172_800
    file_reserved_time: int = 72
    delete_when: str = "04"
    disk_max_used_space_ratio: int = 75
    disk_space_clean_forcibly_ratio: int = 85
    disk_space_warning_level_ratio: int = 90
    clean_file_forcibly_enable: bool = True
    transaction_timeout_ms: int = 6_000
    transaction_check_interval_ms: int = 30_000
    transaction_check_max: int = 15

    def store_settings(self) -> StoreSettings:
        return StoreSettings(
            flush_disk_type=self.flush_disk_type,
            mapped_file_size_commit_log=self.mapped_file_size_commit_log,
            mapped_file_size_consume_queue=self.mapped_file_size_consume_queue,
            max_hash_slot_num=self.max_hash_slot_num,
            max_index_num=self.max_index_num,
            flush_interval_commit_log_ms=self.flush_interval_commit_log_ms,
            checkpoint_interval_ms=self.checkpoint_interval_ms,
            store_host=self.listen_host,
            file_reserved_time=self.file_reserved_time,
            delete_when=self.delete_when,
            disk_max_used_space_ratio=self.disk_max_used_space_ratio,
            disk_space_clean_forcibly_ratio=self.disk_space_clean_forcibly_ratio,
            disk_space_warning_level_ratio=self.disk_space_warning_level_ratio,
            clean_file_forcibly_enable=self.clean_file_forcibly_enable,
        )

    def timer_limits(self) -> TimerLimits:
        return TimerLimits(
            precision_ms=self.timer_precision_ms,
            max_delay_ms=self.timer_max_delay_sec * 1_000,
            enabled=self.timer_wheel_enable,
        )

    def timer_settings(self) -> TimerSettings:
        return TimerSettings(
            precision_ms=self.timer_precision_ms,
            roll_window_slots=self.timer_roll_window_slot,
            log_file_size=self.mapped_file_size_timer_log,
        )

    def transaction_limits(self) -> TransactionLimits:
        return TransactionLimits(
            timeout_ms=self.transaction_timeout_ms,
            check_interval_ms=self.transaction_check_interval_ms,
            check_max=self.transaction_check_max,
            longest_wait_ms=self.file_reserved_time * 3_600_000,
        )
