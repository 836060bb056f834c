"""Settings of a listener: its attributes, resolved and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from mqtemplate.broker import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.errors import ListenerError
from mqtemplate.listener.failures.schedule import RetrySchedule
from mqtemplate.listener.registration.cluster_choice import ClusterChoice
from mqtemplate.listener.registration.payloads import PayloadSettings
from mqtemplate.selectors.tags import Selector

_DEFAULT_PAYLOADS = PayloadSettings()
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


Exceptions = tuple[type[BaseException], ...]
"""Classes of exceptions; their subclasses count too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDefaults:
    """Retry policy of listeners whose decorator does not say otherwise, from ``mqtemplate.listener.*``."""

    retry: RetrySchedule | None = None
    retry_for: Exceptions = ()
    not_retry_for: Exceptions = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """Resolved attributes of a listener, with the names and units of `ListenerAttributes`.

    Attributes:
        cluster: The cluster to use; None for that of the application.
        payloads: What the listener says about its converter.
        topics: Topics to read: those that the decorator names, and those that match a pattern.
        topic_patterns: Patterns of further topics.
    """

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
    retry: RetrySchedule | None
    retry_for: Exceptions
    not_retry_for: Exceptions
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
    middlewares: tuple[object, ...]
    enabled: bool
    auto_startup: bool
    cluster: ClusterChoice | None = None
    payloads: PayloadSettings = _DEFAULT_PAYLOADS
    enable_msg_trace: bool = False
    customized_trace_topic: str = ""
    access_channel: str = ""
    topic_patterns: tuple[str, ...] = ()

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

    def with_thread_number(self, number: int) -> ListenerSettings:
        """Return the settings with another number of consume threads.

        Raises:
            ListenerError: It is not 1 to ``consume_thread_max``.
        """
        if not 1 <= number <= self.consume_thread_max:
            raise ListenerError(
                f"the concurrency of listener {self.id} must be 1..{self.consume_thread_max}, its consume_thread_max, "
                f"got {number}; for more, raise consume_thread_max"
            )
        return replace(self, consume_thread_number=number)

    @property
    def consume_timeout_ms(self) -> int:
        """Time after which a handler counts as hanging."""
        return round(self.consume_timeout * 60_000)

    @property
    def retry_limit(self) -> int:
        """Number of retries before a message goes to the dead letter topic."""
        if self.max_reconsume_times >= 0:
            return self.max_reconsume_times
        if self.retry is not None:
            return self.retry.retries
        return _UNLIMITED_RETRIES if self.is_orderly else _DEFAULT_RETRIES

    @property
    def attempts(self) -> int | None:
        """Number of calls of the handler before a message goes to the dead letter topic; None if unlimited."""
        limit = self.retry_limit
        return None if limit == _UNLIMITED_RETRIES else limit + 1

    def with_defaults(self, defaults: RetryDefaults) -> ListenerSettings:
        """Return the settings with the retry policy of the application where the listener has none."""
        has_schedule = self.retry is not None or self.delay_level_when_next_consume != 0 or self.is_broadcasting
        return replace(
            self,
            retry=self.retry if has_schedule else defaults.retry,
            retry_for=self.retry_for or defaults.retry_for,
            not_retry_for=self.not_retry_for or defaults.not_retry_for,
        )

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
