"""Settings of a listener: its attributes, resolved and checked, and its retry schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from mqtemplate.broker.consumers import ConsumeFromWhere, ConsumerSpec, MessageModel
from mqtemplate.durations import Duration, duration_ms, format_ms, warn_of_unit
from mqtemplate.errors import ListenerError
from mqtemplate.selectors.tags import Selector

if TYPE_CHECKING:
    from mqtemplate.key_limits import KeyLimits

_MAX_RETRIES = 10_000
_LONGEST_DELAY_MS = 40 * 86_400_000

SCHEDULE_FORMS = (
    "delays such as ['5s', '1m', '1h'] (text with the units d h m s ms, or a timedelta, up to 40d), or a Backoff"
)
"""End of the sentence "retry must be …"."""


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """One delay for each retry. If ``max_reconsume_times`` allows more retries, the last delay repeats."""

    delays_ms: tuple[int, ...]

    @property
    def retries(self) -> int:
        """Number of retries."""
        return len(self.delays_ms)

    def delay_ms(self, retry: int, _random: Random) -> int:
        """Return the delay before a retry; the first retry is 1."""
        return self.delays_ms[min(retry, len(self.delays_ms)) - 1]

    def __str__(self) -> str:
        return ", ".join(map(format_ms, self.delays_ms))


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential retry schedule: each delay is *factor* times the one before, up to *maximum*.

    ::

        Backoff("1s", factor=2, maximum="1h", jitter=0.1, attempts=10)  # 1s, 2s, 4s, … before 9 retries

    Args:
        first: Duration before the first retry: ``"1s"`` or a timedelta.
        factor: 1 or more.
        maximum: Longest delay.
        jitter: Random share of each delay, 0 to 1: with 0.1 a delay is 90 to 110 percent of the computed one, so that
            messages that failed together are not retried together. No delay is longer than *maximum*.
        attempts: Number of calls of the handler in total, the first one included.

    Raises:
        ListenerError: A value is not allowed.
    """

    first: Duration
    factor: float = field(default=2, kw_only=True)
    maximum: Duration = field(default="1h", kw_only=True)
    jitter: float = field(default=0.1, kw_only=True)
    attempts: int = field(default=10, kw_only=True)
    _first_ms: int = field(init=False, repr=False, compare=False)
    _maximum_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first_ms, maximum_ms = self._read("first"), self._read("maximum")
        self._check("first", 1 <= first_ms <= maximum_ms, "a delay of 1 ms or more and at most the maximum")
        self._check("factor", _is_number(self.factor) and 1 <= self.factor <= 1_000, "a number from 1 to 1000")
        self._check("jitter", _is_number(self.jitter) and 0 <= self.jitter <= 1, "a number from 0 to 1")
        is_whole = _is_number(self.attempts) and self.attempts % 1 == 0
        self._check("attempts", is_whole and 1 <= self.attempts <= _MAX_RETRIES + 1, "a whole number from 1 to 10001")
        for name in ("first", "maximum"):
            warn_of_unit(f"Backoff: {name}={{}}", getattr(self, name), 1_000)
        object.__setattr__(self, "_first_ms", first_ms)
        object.__setattr__(self, "_maximum_ms", maximum_ms)

    def _read(self, name: str) -> int:
        try:
            return retry_delay_ms(getattr(self, name))
        except ValueError as error:
            raise ListenerError.of_value("Backoff", f"{name} must be {error}") from None

    def _check(self, name: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ListenerError.of_value("Backoff", f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def retries(self) -> int:
        """Number of retries: all attempts but the first."""
        return self.attempts - 1

    def delay_ms(self, retry: int, random: Random) -> int:
        """Return the delay before a retry; the first retry is 1."""
        delay = min(math.log(self._first_ms) + (retry - 1) * math.log(self.factor), math.log(self._maximum_ms))
        spread = 1 + self.jitter * (2 * random.random() - 1)
        return min(round(math.exp(delay) * spread), self._maximum_ms)

    def __str__(self) -> str:
        first, maximum = format_ms(self._first_ms), format_ms(self._maximum_ms)
        return f"{first}, then {self.factor:g} times as long each, up to {maximum}, {self.attempts} attempts"


def retry_delay_ms(delay: object) -> int:
    """Return the delay of a retry in milliseconds; a number is seconds. It is never shorter than the one given.

    Raises:
        ValueError: It is not a duration, or longer than 40 days. The text is the end of the sentence "… must be".
    """
    delay_ms = duration_ms(delay, 1_000)
    if delay_ms > _LONGEST_DELAY_MS:
        raise ValueError(f"{format_ms(_LONGEST_DELAY_MS)} or shorter, got {delay!r}")
    return delay_ms


RetrySchedule: TypeAlias = RetryDelays | Backoff


def read_schedule(value: Any) -> RetrySchedule | None:
    """Return the schedule for a list of delays, a text with commas, or a `Backoff`; None for None and an empty text.

    Raises:
        ValueError: It is something else, or a delay is not allowed.
    """
    if value is None or isinstance(value, Backoff | RetryDelays):
        return value
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
        if not value:
            return None
    if not isinstance(value, Sequence) or not 1 <= len(value) <= _MAX_RETRIES:
        raise ValueError(value)
    return RetryDelays(tuple(map(retry_delay_ms, value)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PayloadSettings:
    """Attributes of a listener that choose its converter; None or empty for the application's.

    Attributes:
        converter: A converter, or a class of converters.
        content_type: Content type of bodies that name none, and of replies.
        charset: Encoding of text.
    """

    converter: Any = None
    content_type: str = ""
    charset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """Attributes of a decorator that choose a cluster; empty ones are not given.

    Attributes:
        broker: Name of a further template of the application, whose broker the listener uses.
        name_server: Instead of it, the address of the cluster.
    """

    broker: str = ""
    name_server: str = ""
    access_key: str = ""
    secret_key: str = ""
    tls_enable: bool = False
    namespace: str = ""
    namespace_v2: str = ""
    access_channel: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(broker={self.broker!r}, name_server={self.name_server!r})"  # no secrets


_DEFAULT_PAYLOADS = PayloadSettings()
_DEFAULT_RETRIES = 16
_UNLIMITED_RETRIES = 2**31 - 1
_HALF_AN_HOUR_MS = 30 * 60 * 1_000


class ConsumeMode(Enum):
    """Order in which a listener handles messages.

    ``CONCURRENTLY``: many at a time, in any order. A message that failed is redelivered through the retry topic.
    ``ORDERLY``: one message of each queue after the other. A message that failed is retried before the next one. By POP
    it is one message of each ``hash_key`` after the other: other keys of the queue go on.
    """

    CONCURRENTLY = "CONCURRENTLY"
    ORDERLY = "ORDERLY"


class MessageRequestMode(Enum):
    """Way in which a listener gets its messages. RocketMQ: ``MessageRequestMode``.

    ``PULL``: the queues are divided among the members of the group, and each member commits its offsets.
    ``POP``: the members share all queues. The broker gives each message to one member, which acknowledges it.
    """

    PULL = "PULL"
    POP = "POP"


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
        cluster: The cluster to use; None for the cluster of the application.
        payloads: What the listener says about its converter.
        key_limits: ``fair_by``, and the limits for each key; None without it.
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
    request_mode: MessageRequestMode = MessageRequestMode.PULL
    invisible_duration: int = 60_000
    key_limits: KeyLimits | None = None

    @property
    def is_orderly(self) -> bool:
        """True if the messages of each queue, or of each ``hash_key`` by POP, are handled in order."""
        return self.consume_mode is ConsumeMode.ORDERLY

    @property
    def is_pop(self) -> bool:
        """True if the broker gives each message to one member, which acknowledges it."""
        return self.request_mode is MessageRequestMode.POP

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
        """Return the settings with the retry policy of the application where the listener does not set it."""
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
            is_ordered=self.is_orderly,
            key_limits=self.key_limits if self.is_pop else None,
        )
