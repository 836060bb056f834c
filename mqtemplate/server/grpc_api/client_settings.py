"""Settings that clients report and the server completes, and the time of a long poll.

A client sends its settings first, and starts when it has the answer.

Source: RocketMQ ``proxy: GrpcClientSettingsManager``, ``ReceiveMessageActivity``.
"""

from __future__ import annotations

from typing import Any

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.remoting.protocol.bodies.group import ExponentialRetryPolicy, SubscriptionGroupConfig
from mqtemplate.server.grpc_api.status import GrpcRefusedError

RECEIVE_BATCH_SIZE = 32
MAX_POLL_MS = 20_000
MIN_POLL_MS = 5_000
_ANSWER_MS = 200
"""Time before the deadline at which a receive is answered: later the client would log an error instead."""
_PRODUCER_ATTEMPTS = 3
_PRODUCER_BACKOFF_MS = (10, 1_000)
_MAX_LITE_TOPIC_LENGTH = 64
_LITE_QUOTA = 2_000

DEFAULT_BACKOFF_MS = tuple(
    seconds * 1_000 for seconds in (1, 5, 10, 30, *(minute * 60 for minute in (*range(1, 11), 20, 30, 60, 120)))
)
"""Delays before the retries of a group without a policy. Source: ``remoting: CustomizedRetryPolicy``."""

CONSUMER_TYPES = frozenset({ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER})


def duration(milliseconds: int) -> Any:
    """Return a ``Duration``."""
    return protos.message_class("google.protobuf.Duration")(
        seconds=milliseconds // 1_000, nanos=milliseconds % 1_000 * 1_000_000
    )


def merged_producer(settings: Any, max_body_bytes: int) -> Any:
    """Return the settings of a producer for the answer: its own, and what the server decides.

    Go requires the kind of the client and a policy, and Node an exponential policy. The metric block is always there.
    """
    merged = _copy(settings)
    initial_ms, max_ms = _PRODUCER_BACKOFF_MS
    policy = merged.backoff_policy
    policy.max_attempts = _PRODUCER_ATTEMPTS
    policy.exponential_backoff.initial.CopyFrom(duration(initial_ms))
    policy.exponential_backoff.max.CopyFrom(duration(max_ms))
    policy.exponential_backoff.multiplier = 2
    merged.publishing.max_body_size = max_body_bytes
    merged.publishing.validate_message_type = True
    return merged


def merged_consumer(settings: Any, group: SubscriptionGroupConfig) -> Any:
    """Return the settings of a consumer for the answer: its own, and what its group and the server decide."""
    merged = _copy(settings)
    merged.backoff_policy.CopyFrom(retry_policy(group))
    subscription = merged.subscription
    subscription.fifo = group.consume_message_orderly
    subscription.receive_batch_size = RECEIVE_BATCH_SIZE
    subscription.long_polling_timeout.CopyFrom(duration(MAX_POLL_MS))
    subscription.lite_subscription_quota = _LITE_QUOTA
    subscription.max_lite_topic_size = _MAX_LITE_TOPIC_LENGTH
    return merged


def retry_policy(group: SubscriptionGroupConfig) -> Any:
    """Return the policy of a group as ``RetryPolicy``; the first attempt counts."""
    policy = protos.RetryPolicy(max_attempts=max_attempts(group))
    configured = group.group_retry_policy
    if configured is not None and configured.type == "EXPONENTIAL":
        found = configured.exponential_retry_policy or ExponentialRetryPolicy()
        policy.exponential_backoff.initial.CopyFrom(duration(found.initial))
        policy.exponential_backoff.max.CopyFrom(duration(found.max))
        policy.exponential_backoff.multiplier = found.multiplier
        return policy
    custom = None if configured is None else configured.customized_retry_policy
    delays = custom.next if custom is not None and custom.next else DEFAULT_BACKOFF_MS
    policy.customized_backoff.next.extend(duration(each) for each in delays)
    return policy


def max_attempts(group: SubscriptionGroupConfig) -> int:
    """Return the number of deliveries after which a message is a dead letter."""
    return max(group.retry_max_times, 0) + 1


def _copy(settings: Any) -> Any:
    merged = protos.Settings()
    merged.CopyFrom(settings)
    merged.metric.on = False
    return merged


# --- long polls -----------------------------------------------------------------------------------


def is_before_5_0_3(version: str) -> bool:
    """Return True for the versions that know no code for a wrong polling time. The texts are compared, as there."""
    return version < "5.0.3"


def poll_ms(requested_ms: int | None, left_ms: float | None, request_timeout_ms: int, version: str) -> int:
    """Return how long a receive waits for messages: *requested_ms*, 5 to 20 seconds, and within its deadline.

    Args:
        requested_ms: None: the time that is left to the deadline, less half a request timeout.
        left_ms: Time that is left to the deadline; None without one.
        request_timeout_ms: The client's timeout of other requests.

    Raises:
        GrpcRefusedError: The deadline leaves no time for the shortest wait.
    """
    if requested_ms is None:
        requested_ms = MAX_POLL_MS if left_ms is None else int(left_ms - request_timeout_ms / 2)
    wait_ms = min(max(requested_ms, MIN_POLL_MS), MAX_POLL_MS)
    if left_ms is None:
        return wait_ms
    if left_ms >= MIN_POLL_MS:
        return min(wait_ms, int(left_ms) - _ANSWER_MS)
    raise GrpcRefusedError(
        Code.BAD_REQUEST if is_before_5_0_3(version) else Code.ILLEGAL_POLLING_TIME,
        f"the deadline of the request leaves {int(left_ms)} ms, and a receive waits at least {MIN_POLL_MS} ms; give it "
        "a longer timeout",
    )
