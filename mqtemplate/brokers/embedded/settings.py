"""Settings of an embedded broker."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.delay.divert import TimerLimits
from mqtemplate.delay.levels.table import DEFAULT_DELAY_LEVELS
from mqtemplate.store.settings import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings(StoreSettings):
    """Settings of an embedded broker; `StoreSettings` has those of its files. Sizes are in bytes.

    The names are those of RocketMQ's ``BrokerConfig`` and ``MessageStoreConfig``.

    Attributes:
        broker_name: Name of the broker in results and message queues.
        default_topic_queue_nums: Number of queues of a topic that is created by its first message.
        flush_consumer_offset_interval_ms: Time between two writes of the committed offsets.
        message_delay_level: The level table; its first entry is level 1.
        timer_wheel_enable: False refuses messages with a timer.
        timer_precision_ms: Length of a slot of the timing wheel. Delivery is exact to the millisecond all the same.
            It must not change for an existing store directory.
        timer_max_delay_sec: Longest delay of a timer.
        timer_roll_window_slot: A timer that is due after more than this number of slots is stored again on the way.
        transaction_timeout_ms: Time from the send to the first transaction check.
        transaction_check_interval_ms: Time between two transaction checks.
        transaction_check_max: Number of unanswered checks before the half message is moved to
            ``TRANS_CHECK_MAX_TIME_TOPIC``.
    """

    broker_name: str = "broker-a"
    flush_consumer_offset_interval_ms: int = 5_000
    mapped_file_size_timer_log: int = 4 << 20
    max_message_size: int = 4 << 20
    default_topic_queue_nums: int = 4
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    timer_wheel_enable: bool = True
    timer_precision_ms: int = 1_000
    timer_max_delay_sec: int = 40 * 86_400
    timer_roll_window_slot: int = 172_800
    transaction_timeout_ms: int = 6_000
    transaction_check_interval_ms: int = 30_000
    transaction_check_max: int = 15

    def timer_limits(self) -> TimerLimits:
        """Return the limits for delays."""
        return TimerLimits(
            precision_ms=self.timer_precision_ms,
            max_delay_ms=self.timer_max_delay_sec * 1_000,
            enabled=self.timer_wheel_enable,
        )
