"""Settings of a listener: its attributes, resolved and checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.selectors.tags import Selector

_DEFAULT_RETRIES = 16
_UNLIMITED_RETRIES = 2**31 - 1
_HALF_AN_HOUR_MS = 30 * 60 * 1_000


class ConsumeMode(Enum):
    """Order in which a listener handles messages.

    ``CONCURRENTLY``: many at a time, in any order. A message that failed is redelivered through the retry topic.
    ``ORDERLY``: one message of each queue after the other. A message that failed is retried before the next one.
    """

    CONCURRENTLY = "CONCURRENTLY"
    ORDERLY = "ORDERLY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """Resolved attributes of a listener, with the names and units of `ListenerAttributes`."""

    id: str
    topics: tuple[str, ...]
    group: str
    selector: Selector
    consume_mode: ConsumeMode
    message_model: MessageModel
    consume_thread_number: int
    consume_thread_max: int
    max_reconsume_times: int
    consume_timeout: float
    delay_level_when_next_consume: int
    suspend_current_queue_time_millis: int
    await_termination_millis_when_shutdown: int
    reply_timeout: int
    instance_name: str
    pull_interval: int
    pull_batch_size: int
    consume_message_batch_max_size: int
    consume_from_where: ConsumeFromWhere
    consume_timestamp: int | None
    batch: bool | None
    enabled: bool
    auto_startup: bool

    @property
    def is_orderly(self) -> bool:
        """True if the messages of each queue are handled in order."""
        return self.consume_mode is ConsumeMode.ORDERLY

    @property
    def is_broadcasting(self) -> bool:
        """True if each member of the group gets all messages."""
        return self.message_model is MessageModel.BROADCASTING

    @property
    def thread_number(self) -> int:
        """Number of consume threads while no handler hangs."""
        return min(self.consume_thread_number, self.consume_thread_max)

    @property
    def consume_timeout_ms(self) -> int:
        """Time after which a handler counts as hanging."""
        return round(self.consume_timeout * 60_000)

    @property
    def retry_limit(self) -> int:
        """Number of retries before a message goes to the dead letter topic."""
        if self.max_reconsume_times >= 0:
            return self.max_reconsume_times
        return _UNLIMITED_RETRIES if self.is_orderly else _DEFAULT_RETRIES

    def consumer_spec(self, now_ms: int) -> ConsumerSpec:
        """Return how a container joins its group.

        Args:
            now_ms: ``CONSUME_FROM_TIMESTAMP`` without a timestamp starts half an hour before this time.
        """
        timestamp = self.consume_timestamp
        if timestamp is None and self.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
            timestamp = now_ms - _HALF_AN_HOUR_MS
        return ConsumerSpec(
            group=self.group,
            subscriptions=dict.fromkeys(self.topics, self.selector),
            message_model=self.message_model,
            consume_from_where=self.consume_from_where,
            consume_timestamp=timestamp,
            max_reconsume_times=self.retry_limit,
            instance_name=self.instance_name,
        )
