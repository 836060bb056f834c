"""Settings of an embedded broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen

from mqtemplate.delay.divert import TimerLimits
from mqtemplate.delay.settings import DEFAULT_DELAY_LEVELS, TopicShape
from mqtemplate.record.compression import max_body_bytes
from mqtemplate.store.settings import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Continuous copy of a store directory."""

    to: str | None = None
    """Where the copy is: ``file:///mnt/copy``, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or
    ``az://container/prefix``. Not given: no copy."""

    interval: Annotated[int, Ge(10)] = 1_000
    """Time between two copies of what is new: about this much is lost with the machine, while the place answers."""

    snapshot_interval: Annotated[int, Ge(1_000)] = 86_400_000
    """Time between two snapshots of all tables. A restore reads the changes since the last one."""

    keep: Annotated[int, Ge(1_000)] = 30 * 86_400_000
    """Time for which each moment can be restored. Older objects are deleted with each snapshot."""

    keep_uncopied: bool = True
    """True: a commit log file that is not copied yet stays until it is, or until the disk is full. False: retention
    deletes it at its age, and the copy has a gap, which is logged."""

    max_lag: Annotated[int, Ge(1_000)] = 600_000
    """Lag above which the health component ``copy`` is down."""

    lease: Annotated[int, Ge(1_000)] | None = None
    """Time for which this broker may store messages after its last sign of life in the copy, which it renews three
    times as often. When it is over, nothing is accepted and nothing released until the place answers again, so that a
    follower can take over without a second owner. Not given: this broker works whether the place answers or not."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the object store by the names of the library obstore, such as ``aws_endpoint``. What is not given
    comes from the environment, such as ``AWS_REGION``, or from the role of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings(StoreSettings):
    """Settings of an embedded broker and its store. The names come from RocketMQ's ``BrokerConfig``."""

    broker_name: Annotated[str, MinLen(1)] = "broker-a"
    """Name of the broker in queues and results."""

    mapped_file_size_timer_log: Annotated[int, Gt(0)] | None = None
    """Size of one timer log file. By default the size that the store directory has; 4194304 in a new one."""

    max_message_size: Annotated[int, Gt(0)] = 4 << 20
    """Largest message that the broker accepts, in bytes."""

    max_decompressed_size: Annotated[int, Gt(0)] | None = None
    """Largest body in bytes that is decompressed for a listener; four times ``max-message-size`` if not given. A larger
    one stays compressed, and its message fails with an error that says so."""

    default_topic_queue_nums: Annotated[int, Ge(1), Le(1_024)] = 4
    """Queues of a topic that its first message creates."""

    auto_create_topic_enable: bool = True
    """True: the first message to an unknown topic creates it, and that is logged. False: it is refused. Topics that a
    listener of the application reads, or that ``topics`` names, are known. The client of a cluster does the same."""

    topics: tuple[str, ...] = ()
    """Topics that the broker creates when it starts; in a cluster the first message creates them."""

    flush_consumer_offset_interval_ms: Annotated[int, Gt(0)] = 5_000
    """Milliseconds between two writes of the consumer offsets, and of the groups that clients have created by joining
    them."""

    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """Delay levels, level 1 first, with the units s, m, h and d. A client of a cluster checks levels by this table."""

    clamp_delay_level: bool = False
    """False: a message with a delay level that the table does not have is refused. True: it gets the highest level, as
    in RocketMQ; for RocketMQ's clients that rely on it."""

    timer_wheel_enable: bool = True
    """False: messages with a delay that is not a level are refused."""

    timer_precision_ms: Annotated[int, Gt(0), Le(1_000)] = 1_000
    """Length of a slot of the timer wheel; it must not change for an existing store directory. Delivery is exact to the
    millisecond with any length."""

    timer_max_delay_sec: Annotated[int, Gt(0)] = 40 * 86_400
    """Longest delay that the broker accepts."""

    timer_roll_window_slot: Annotated[int, Gt(1)] = 172_800
    """Slots of the timer wheel. A message with a longer delay is rolled: written again before the window ends."""

    transaction_timeout_ms: Annotated[int, Gt(0)] = 6_000
    """Milliseconds after which the broker checks a transaction that has not ended."""

    transaction_check_interval_ms: Annotated[int, Gt(0)] = 30_000
    """Milliseconds from one transaction check to the next."""

    transaction_check_max: Annotated[int, Ge(1)] = 15
    """Transaction checks without an answer before the message goes to ``TRANS_CHECK_MAX_TIME_TOPIC``."""

    topic_shapes: Mapping[str, TopicShape] = field(default_factory=dict)
    """Topic -> shape of the releases of its delayed messages: ``max-rate`` (a second), ``fair-by``,
    ``max-rate-per-key``, ``message-priority``, ``jitter``, ``spread``, ``priority``. Messages with a level are stored
    as timers then; those that were stored before keep their way."""

    max_send_sequences: Annotated[int, Ge(1)] = 100_000
    """Partitions of sequenced sends that the broker remembers. With more, it forgets the writer that is unused for the
    longest time, one of the account that has the most: repeats of its messages would be stored again."""

    pop_in_flight_max: Annotated[int, Ge(1)] = 10_000
    """Most messages of a queue that a group has received by POP and not acknowledged; it gets no more from there until
    some are acknowledged, or their time is over."""

    pop_unwritten_max_bytes: Annotated[int, Ge(1 << 10)] = 4 << 20
    """Most bytes of the progress of POP that wait in memory while the disk refuses them. With more, no message is
    delivered by POP, until they are written."""

    max_held_pops: Annotated[int, Ge(1)] = 100_000
    """Most POP requests that wait for messages at a time; further ones are refused at once."""

    def max_body_bytes(self) -> int:
        """Return the largest body that is decompressed for consumers in the process of the broker."""
        return max_body_bytes(self.max_decompressed_size, self.max_message_size)

    def timer_limits(self) -> TimerLimits:
        """Return the limits of timers."""
        return TimerLimits(
            precision_ms=self.timer_precision_ms,
            max_delay_ms=self.timer_max_delay_sec * 1_000,
            enabled=self.timer_wheel_enable,
            shaped=frozenset(self.topic_shapes),
        )
