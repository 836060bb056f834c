"""Resolution: from the attributes of a decorator to the settings of a listener."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from mqtemplate.broker import ConsumeFromWhere, MessageModel
from mqtemplate.errors import ListenerError, UnsupportedError
from mqtemplate.listener import ConsumeMode, ListenerSettings, ListenerSpec, default_resolve, resolve_spec
from mqtemplate.selectors.sql92 import Sql92Selector

NOW_MS = 1_767_225_600_000


def spec(topics: tuple[str, ...] = ("orders",), consumer_group: str = "billing", **attributes: Any) -> ListenerSpec:
    return ListenerSpec(topics=topics, consumer_group=consumer_group, attributes=attributes)


def resolved(**attributes: Any) -> ListenerSettings:
    return resolve_spec(spec(**attributes))


def resolver(**values: str) -> Any:
    """Return a function that replaces these keys, and others by their defaults; ``__`` means a dot, ``_`` a dash."""

    def resolve(text: str) -> str:
        for key, value in values.items():
            name = key.replace("__", ".").replace("_", "-")
            text = text.replace(f"${{{name}}}", value).replace(f"${{{name}:}}", value)
        return default_resolve(text)

    return resolve


def test_placeholders_in_all_attributes_are_replaced() -> None:
    given = spec(
        topics=("${demo.topic}",),
        consumer_group="${demo.group:billing}-eu",
        selector_expression="${demo.tags:paid || refunded}",
        consume_thread_number="${demo.threads:4}",
        consume_mode="${demo.mode:orderly}",
        enabled="${demo.on:false}",
    )

    settings = resolve_spec(given, resolver(demo__topic="orders"))

    assert settings.topics == ("orders",)
    assert settings.group == "billing-eu"
    assert settings.selector.tags == {"paid", "refunded"}
    assert settings.thread_number == 4
    assert settings.consume_mode is ConsumeMode.ORDERLY
    assert settings.enabled is False


def test_a_placeholder_may_name_several_topics() -> None:
    given = spec(topics=("${demo.topics}",))

    assert resolve_spec(given, resolver(demo__topics="orders, refunds")).topics == ("orders", "refunds")


def test_defaults_may_hold_placeholders() -> None:
    assert default_resolve("${a:${b:c}}-${d:}") == "c-"


def test_without_configuration_a_placeholder_needs_a_default() -> None:
    with pytest.raises(ListenerError, match=r"\$\{demo.topic\} has no value.*write \$\{demo.topic:default\}"):
        resolved(topics=("${demo.topic}",))


def test_the_consume_timeout_is_in_minutes() -> None:
    assert resolved(consume_timeout=15).consume_timeout_ms == 900_000


def test_by_default_there_are_sixteen_retries_or_no_limit_if_orderly() -> None:
    """-1 has RocketMQ's meaning."""
    assert resolved().retry_limit == 16
    assert resolved(consume_mode=ConsumeMode.ORDERLY).retry_limit == 2**31 - 1
    assert resolved(consume_mode=ConsumeMode.ORDERLY, max_reconsume_times=3).retry_limit == 3


def test_the_maximum_of_threads_limits_their_number() -> None:
    assert resolved(consume_thread_number=20, consume_thread_max=5).thread_number == 5


def test_the_id_is_the_name_unless_one_is_given() -> None:
    assert resolve_spec(spec(), name="shop.Bill").id == "shop.Bill"
    assert resolved(id="bill-${demo.region:eu}").id == "bill-eu"


def test_a_listener_joins_its_group_with_all_topics() -> None:
    settings = resolved(topics=("orders", "refunds"), selector_expression="paid", instance_name="left")

    consumer = settings.consumer_spec(NOW_MS)

    assert consumer.group == "billing"
    assert {topic: selector.expression for topic, selector in consumer.subscriptions.items()} == {
        "orders": "paid",
        "refunds": "paid",
    }
    assert (consumer.max_reconsume_times, consumer.instance_name, consumer.consume_timestamp) == (16, "left", None)


def test_consuming_from_a_timestamp_starts_half_an_hour_ago_by_default() -> None:
    settings = resolved(consume_from_where="CONSUME_FROM_TIMESTAMP")

    assert settings.consumer_spec(NOW_MS).consume_timestamp == NOW_MS - 1_800_000
    assert settings.consume_from_where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP


def test_a_timestamp_is_epoch_milliseconds_or_rocketmqs_local_form() -> None:
    local = datetime(2026, 1, 2, 3, 4, 5).astimezone()

    assert resolved(consume_timestamp=NOW_MS).consume_timestamp == NOW_MS
    assert resolved(consume_timestamp="20260102030405").consume_timestamp == int(local.timestamp()) * 1_000


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"consume_thread_number": "many"}, "consume_thread_number must be a whole number from 1 to 1000, got 'many'"),
        ({"consume_thread_number": 0}, "consume_thread_number must be a whole number from 1 to 1000, got 0"),
        ({"consume_thread_number": True}, "consume_thread_number must be a whole number from 1 to 1000, got True"),
        ({"pull_batch_size": "${demo.size:1.5}"}, r"got '1.5' from '\$\{demo.size:1.5\}'"),
        ({"max_reconsume_times": -2}, "max_reconsume_times must be a whole number from -1"),
        ({"suspend_current_queue_time_millis": 9}, "from 10ms to 30s .*, got 9"),
        ({"delay_level_when_next_consume": -2}, "delay_level_when_next_consume must be a whole number from -1"),
        ({"enabled": "maybe"}, "enabled must be true or false, got 'maybe'"),
        ({"consume_mode": "SOMEHOW"}, "consume_mode must be one of CONCURRENTLY, ORDERLY, got 'SOMEHOW'"),
        ({"consumer_group": "${demo.group:}"}, "consumer_group is empty; name the group whose members share work"),
        ({"consumer_group": "a b"}, "consumer_group: topic 'a b' has characters that are not allowed"),
        ({"topics": ("a:b",)}, "topic: topic 'a:b' has characters that are not allowed"),
        ({"selector_expression": "a ||"}, "has an empty tag; write 'a || b'"),
        ({"consume_timestamp": "yesterday"}, "consume_timestamp must be epoch milliseconds or yyyyMMddHHmmss"),
    ],
)
def test_a_wrong_value_is_shown_with_the_allowed_ones(attributes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ListenerError, match=f"^listener .*{sentence}"):
        resolved(**attributes)


@pytest.mark.feature("X14")
def test_broadcasting_in_order_is_refused() -> None:
    """A queue can be locked for order by one member only."""
    with pytest.raises(
        ListenerError, match=r"BROADCASTING and ORDERLY exclude each other.*use CLUSTERING with ORDERLY"
    ):
        resolved(message_model=MessageModel.BROADCASTING, consume_mode=ConsumeMode.ORDERLY)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"access_key": "me"}, "has no users"),
        ({"secret_key": "hush"}, "has no users"),
        ({"tls_enable": "true"}, "nothing travels over a network"),
        ({"namespace": "prod"}, "has no namespaces"),
        ({"namespace_v2": "prod"}, "has no namespaces"),
        ({"access_channel": "CLOUD"}, "no cloud broker"),
    ],
)
def test_an_attribute_that_cannot_be_honoured_is_refused_with_a_reason(attributes: dict[str, Any], reason: str) -> None:
    """It is not ignored. A listener of another cluster is not connected to the wrong one."""
    with pytest.raises(UnsupportedError, match=f"{next(iter(attributes))}.*{reason}"):
        resolved(**attributes)


def test_an_sql92_selector_is_parsed_once_and_an_error_names_listener_and_column() -> None:
    settings = resolved(selector_type="SQL92", selector_expression="price > 6")

    assert settings.selector == Sql92Selector("price > 6")
    assert settings.consumer_spec(0).subscriptions["orders"] is settings.selector
    with pytest.raises(ListenerError, match=r"^listener .*SQL92 expression 'price >> 6', column 8: found '>'"):
        resolved(selector_type="${kind:sql92}", selector_expression="price >> 6")


def test_the_reply_timeout_is_in_milliseconds() -> None:
    assert resolved(reply_timeout="${reply:250}").reply_timeout == 250


def test_a_secret_is_not_shown_when_it_is_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(secret_key="hush")

    assert "hush" not in str(caught.value)


CLUSTER = "10.0.0.1:9876"


def on_a_cluster(own: dict[str, str], **attributes: Any) -> None:
    resolve_spec(spec(**attributes), resolver(rocketmq__name_server=CLUSTER, **own))


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("access_key", "me"),
        ("secret_key", "hush"),
        ("tls_enable", "true"),
        ("namespace", "prod"),
        ("namespace_v2", "p"),
    ],
)
def test_on_a_cluster_a_listener_may_repeat_an_attribute_of_the_application(attribute: str, value: str) -> None:
    own = {f"rocketmq__producer__{attribute}": value}

    on_a_cluster(own, **{attribute: value})

    with pytest.raises(UnsupportedError, match=f"{attribute}.*talks to its cluster as one client") as refused:
        on_a_cluster({}, **{attribute: value})
    assert "hush" not in str(refused.value)


def test_on_a_cluster_the_operator_may_be_a_cloud_provider() -> None:
    on_a_cluster({}, access_channel="CLOUD")


def test_the_name_server_of_the_application_is_allowed() -> None:
    given = spec(name_server="embedded:memory")

    assert resolve_spec(given, resolver(rocketmq__name_server="embedded:memory")).group == "billing"
