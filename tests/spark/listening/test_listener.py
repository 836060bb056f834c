"""``@spark_listener``, its attributes, and errors of its container, without Spark."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import ListenerError, SparkError
from mqtemplate.spark import (
    AVAILABLE_NOW,
    QueueRange,
    SparkBatch,
    SparkListenerContainer,
    refuse_shared_groups,
    spark_listener,
    spark_listener_specs,
)
from mqtemplate.spark.listening.listener import SparkListenerSettings
from tests.spark.listening.listeners import resolved


@spark_listener("orders", "billing")
def bill(messages: Any, batch: SparkBatch) -> None:
    """Listener that is never called here."""


def container(endpoint: object, folder: Path | None) -> SparkListenerContainer:
    """Return a container over a broker that is not started."""

    def no_spark() -> Any:
        pytest.fail("no session may be created")

    return SparkListenerContainer(endpoint, no_spark, EmbeddedBroker(folder), "checkpoints")


def test_the_decorator_returns_the_function_unchanged() -> None:
    """A test calls it like any other."""

    def work(messages: list[int], batch: SparkBatch) -> int:
        return sum(messages)

    decorated = spark_listener("orders", "billing", selector_expression="paid")(work)

    assert decorated is work
    assert spark_listener_specs(work)[0].topics == ("orders",)
    assert spark_listener_specs(work)[0].attributes == {"selector_expression": "paid"}


def test_a_class_needs_on_batch_and_its_objects_have_its_specs() -> None:
    @spark_listener(["orders", "refunds"], "billing")
    class Billing:
        def on_batch(self, messages: object, batch: SparkBatch) -> None: ...

    assert spark_listener_specs(Billing()) == spark_listener_specs(Billing)
    with pytest.raises(ListenerError, match=r"class .*Silent has no method on_batch; write 'def on_batch"):

        @spark_listener("orders", "billing")
        class Silent: ...


@pytest.mark.parametrize("topic", ["", [], [""]])
def test_a_listener_without_topic_is_refused(topic: Any) -> None:
    with pytest.raises(ListenerError, match="topic must be a name or a list of names"):
        spark_listener(topic, "billing")


def test_placeholders_are_replaced_when_the_container_is_created(tmp_path: Path) -> None:
    @spark_listener("${shop.topic:orders,refunds}", "${shop.group:billing}", max_offsets_per_trigger="${shop.most:500}")
    def work(messages: object, batch: SparkBatch) -> None: ...

    settings = container(work, tmp_path).settings

    assert (settings.topics, settings.consumer_group, settings.max_offsets_per_trigger) == (
        ("orders", "refunds"),
        "billing",
        500,
    )


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"topics": ("or ders",)}, "topic 'or ders' has characters that are not allowed"),
        ({"consumer_group": ""}, "consumer_group is empty; name the group"),
        ({"selector_expression": "a || "}, "has an empty tag"),
        (
            {"trigger": "now and then"},
            "trigger must be '5s', a timedelta, an interval of Spark such as '5 seconds', or 'available-now'",
        ),
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 2147483647, got 0"),
        (
            {"max_offsets_per_trigger": "many"},
            "max_offsets_per_trigger must be a whole number from 1 to .*, got 'many'",
        ),
        ({"on_failure": "shrug"}, "on_failure must be 'stop', 'redeliver' or 'dlq', got 'shrug'"),
        ({"bad_records": "skip"}, "bad_records must be 'null', 'fail' or 'dlq', got 'skip'"),
    ],
)
def test_the_error_for_a_wrong_attribute_names_it(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(ListenerError, match=f"^Spark listener work: .*{words}"):
        resolved(**attributes)


@pytest.mark.parametrize("trigger", ["5 seconds", "100 milliseconds", "1 minute", AVAILABLE_NOW, timedelta(seconds=2)])
def test_a_trigger_is_a_span_or_available_now(trigger: Any) -> None:
    assert resolved(trigger=trigger).trigger == trigger


def test_each_span_takes_a_text_with_a_unit_or_a_timedelta() -> None:
    settings = resolved(
        trigger="1m 30s", retry_delay="500ms", restart_delay=timedelta(minutes=1), redelivery_delay="2h"
    )

    assert settings.trigger == timedelta(seconds=90)
    assert (settings.retry_delay, settings.restart_delay, settings.redelivery_delay) == (500, 60_000, 7_200_000)


@pytest.mark.parametrize("name", ["retry_delay", "restart_delay"])
@pytest.mark.parametrize("value", [None, -1, "soon"])
def test_a_span_that_is_no_duration_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ListenerError, match=f"^Spark listener work: {name} must be '3h', '1h 30m', '250ms'"):
        resolved(**{name: value})


def test_the_defaults_suit_batches_of_a_second() -> None:
    assert resolved() == SparkListenerSettings(
        topics=("orders",),
        consumer_group="billing",
        selector_expression="*",
        payload=None,
        bad_records="null",
        trigger=timedelta(seconds=1),
        max_offsets_per_trigger=100_000,
        min_partitions=None,
        include_properties=True,
        fail_on_data_loss=True,
        max_attempts=3,
        retry_delay=1_000,
        on_failure="stop",
        max_redeliveries=16,
        redelivery_delay=None,
        max_restarts=None,
        restart_delay=10_000,
        checkpoint=None,
    )


def test_a_broker_in_memory_is_refused() -> None:
    with pytest.raises(SparkError, match=r"a broker in memory has no files .* embedded:./data"):
        container(bill, None)


def test_an_undecorated_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListenerError, match="is not decorated with @spark_listener"):
        container(lambda messages, batch: None, tmp_path)


def test_a_container_that_does_not_run_cannot_be_awaited(tmp_path: Path) -> None:
    idle = container(bill, tmp_path)

    assert not idle.is_running
    assert idle.exception is None
    idle.stop()
    with pytest.raises(SparkError, match="bill does not run; start it first"):
        idle.await_idle()


def test_a_group_with_a_spark_listener_has_no_other_listener() -> None:
    """Both would commit its offsets, and each would miss messages of the other."""
    refuse_shared_groups(["billing", "audit"], ["mail"])

    with pytest.raises(ListenerError, match="group 'mail' has a Spark listener and a message listener"):
        refuse_shared_groups(["billing", "mail"], ["mail"])
    with pytest.raises(ListenerError, match="group 'billing' has a Spark listener and another Spark listener"):
        refuse_shared_groups(["billing", "billing"], [])


def test_a_batch_counts_the_messages_of_its_ranges() -> None:
    ranges = (QueueRange("orders", 0, 5, 8), QueueRange("orders", 1, 0, 2))
    batch = SparkBatch(
        query_id="q", batch_id=1, attempt=1, ranges=ranges, is_replay=False, topic="orders", consumer_group="billing"
    )

    assert batch.message_count == 5
