"""Resolution: from the attributes of a decorator to the settings of a listener."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from mqtemplate.broker import ConsumeFromWhere
from mqtemplate.errors import UnsupportedError
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


def test_an_sql92_selector_is_parsed_once_and_an_error_names_listener_and_column() -> None:
    settings = resolved(selector_type="SQL92", selector_expression="price > 6")

    assert settings.selector == Sql92Selector("price > 6")
    assert settings.consumer_spec(0).subscriptions["orders"] is settings.selector


def test_the_reply_timeout_is_in_milliseconds() -> None:
    assert resolved(reply_timeout="${reply:250}").reply_timeout == 250


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
