"""Settings that the server returns to gRPC clients, and the time of a long poll."""

from __future__ import annotations

import pytest

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType, Code
from mqtemplate.remoting.protocol.bodies.group import (
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    RetryOffsets,
    SubscriptionGroupConfig,
)
from mqtemplate.server.grpc_api.client_settings import (
    DEFAULT_BACKOFF_MS,
    merged_consumer,
    merged_producer,
    poll_ms,
    retry_policy,
)
from mqtemplate.server.grpc_api.status import GrpcRefusedError


def test_a_producer_gets_its_settings_and_a_policy() -> None:
    settings = protos.Settings(client_type=ClientType.PRODUCER)
    settings.publishing.topics.add().name = "orders"
    settings.user_agent.version = "5.2.0"

    merged = merged_producer(settings, 4 << 20)

    assert merged.client_type == ClientType.PRODUCER
    assert [topic.name for topic in merged.publishing.topics] == ["orders"]
    assert (merged.publishing.max_body_size, merged.publishing.validate_message_type) == (4 << 20, True)
    assert merged.backoff_policy.max_attempts == 3
    assert merged.backoff_policy.exponential_backoff.initial.ToMilliseconds() == 10
    assert merged.backoff_policy.exponential_backoff.max.ToMilliseconds() == 1_000
    assert merged.user_agent.version == "5.2.0"
    assert merged.HasField("metric")
    assert not merged.metric.on


def test_a_consumer_gets_the_settings_of_its_group() -> None:
    settings = protos.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = "billing"
    settings.client_properties["team"] = "payments"

    merged = merged_consumer(settings, SubscriptionGroupConfig(group_name="billing", consume_message_orderly=True))

    assert merged.subscription.group.name == "billing"
    assert merged.subscription.fifo
    assert merged.subscription.receive_batch_size == 32
    assert merged.subscription.long_polling_timeout.ToMilliseconds() == 20_000
    assert merged.backoff_policy.max_attempts == 17
    assert merged.client_properties["team"] == "payments"


def test_a_group_without_a_policy_has_the_delays_of_rocketmq() -> None:
    policy = retry_policy(SubscriptionGroupConfig(group_name="billing"))

    assert [each.ToMilliseconds() for each in policy.customized_backoff.next] == list(DEFAULT_BACKOFF_MS)
    assert len(DEFAULT_BACKOFF_MS) == 18
    assert DEFAULT_BACKOFF_MS[-1] == 7_200_000


def test_a_group_may_have_delays_of_its_own() -> None:
    custom = GroupRetryPolicy(customized_retry_policy=RetryOffsets(next=[500, 1_500]))

    policy = retry_policy(SubscriptionGroupConfig(group_name="billing", retry_max_times=2, group_retry_policy=custom))

    assert policy.max_attempts == 3
    assert [each.ToMilliseconds() for each in policy.customized_backoff.next] == [500, 1_500]


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, (5_000, 7_200_000, 2)), (ExponentialRetryPolicy(initial=100, max=900, multiplier=3), (100, 900, 3))],
)
def test_a_group_may_have_an_exponential_policy(
    configured: ExponentialRetryPolicy | None, expected: tuple[int, int, int]
) -> None:
    group_policy = GroupRetryPolicy(type="EXPONENTIAL", exponential_retry_policy=configured)

    backoff = retry_policy(SubscriptionGroupConfig(group_name="g", group_retry_policy=group_policy)).exponential_backoff

    assert (backoff.initial.ToMilliseconds(), backoff.max.ToMilliseconds(), backoff.multiplier) == expected


@pytest.mark.parametrize(
    ("requested", "left", "expected"),
    [
        (20_000, 23_000, 20_000),
        (60_000, 99_000, 20_000),
        (1, 23_000, 5_000),
        (None, 23_000, 20_000),
        (None, 13_000, 11_500),
        (None, None, 20_000),
        (7_000, None, 7_000),
        (20_000, 20_000, 19_800),
        (20_000, 5_000, 4_800),
        (None, 6_000, 5_000),
    ],
)
def test_a_receive_waits_within_its_deadline(requested: int | None, left: float | None, expected: int) -> None:
    assert poll_ms(requested, left, 3_000, "5.2.0") == expected


@pytest.mark.parametrize(
    ("version", "code"), [("5.2.0", Code.ILLEGAL_POLLING_TIME), ("5.0.2", Code.BAD_REQUEST), ("", Code.BAD_REQUEST)]
)
def test_a_deadline_that_is_too_short_is_refused(version: str, code: Code) -> None:
    with pytest.raises(GrpcRefusedError, match="leaves 4999 ms, and a receive waits at least 5000 ms") as caught:
        poll_ms(20_000, 4_999, 3_000, version)

    assert caught.value.code is code
