"""``@spark_listener`` and what its container refuses, without Spark."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import ListenerError, SparkError, UnsupportedError
from mqtemplate.spark import (
    AVAILABLE_NOW,
    QueueRange,
    SparkBatch,
    SparkListenerContainer,
    SparkListenerSpec,
    refuse_shared_groups,
    spark_listener,
    spark_listener_specs,
)
from mqtemplate.spark.checkpoint import QueryCheckpoint


@spark_listener("orders", "billing")
def bill(messages: Any, batch: SparkBatch) -> None:
    """A listener that is never called here."""


def container(endpoint: object, tmp_path: Path, store: Path | None = Path("/data")) -> SparkListenerContainer:
    def no_spark() -> Any:
        pytest.fail("nothing may be started")

    return SparkListenerContainer(endpoint, no_spark, store, tmp_path / "checkpoints", lambda *_: None)


def test_the_decorator_records_and_returns_the_function_unchanged() -> None:
    """A test calls it like any other."""

    def work(messages: list[int], batch: SparkBatch) -> int:
        return sum(messages)

    decorated = spark_listener("orders", "billing", selector_expression="paid")(work)

    assert decorated is work
    assert spark_listener_specs(work)[0].topics == ("orders",)
    assert spark_listener_specs(work)[0].selector_expression == "paid"


def test_a_class_needs_on_batch_and_its_objects_carry_the_note() -> None:
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


def test_placeholders_are_filled_in_when_the_container_is_made(tmp_path: Path) -> None:
    @spark_listener("${shop.topic:orders,refunds}", "${shop.group:billing}", max_offsets_per_trigger="${shop.most:500}")
    def work(messages: object, batch: SparkBatch) -> None: ...

    spec = container(work, tmp_path).spec

    assert (spec.topics, spec.consumer_group, spec.max_offsets_per_trigger) == (("orders", "refunds"), "billing", 500)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"topics": ("or ders",)}, "topic 'or ders' has characters that are not allowed"),
        ({"consumer_group": ""}, "the topic is empty"),
        ({"selector_expression": "a || "}, "has an empty tag"),
        ({"trigger": "now and then"}, "trigger must be a timedelta, a text such as '5 seconds', or 'available-now'"),
        ({"max_attempts": 0}, "max_attempts must be a whole number above 0, got 0"),
        ({"max_offsets_per_trigger": "many"}, "max_offsets_per_trigger must be a whole number above 0, got 'many'"),
        ({"on_failure": "shrug"}, "on_failure must be 'stop', got 'shrug'"),
        ({"bad_records": "skip"}, "bad_records must be 'null' or 'fail', got 'skip'"),
    ],
)
def test_attributes_that_cannot_be_are_refused_by_name(attributes: dict[str, Any], words: str) -> None:
    spec = SparkListenerSpec(**{"topics": ("orders",), "consumer_group": "billing", **attributes})

    with pytest.raises(ListenerError, match=words):
        spec.resolved("work", lambda text: text)


@pytest.mark.parametrize("attributes", [{"on_failure": "redeliver"}, {"on_failure": "dlq"}, {"bad_records": "dlq"}])
def test_what_comes_later_is_refused_with_a_way_out(attributes: dict[str, str]) -> None:
    spec = SparkListenerSpec(topics=("orders",), consumer_group="billing", **attributes)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedError, match="comes in a later release; catch the error in the listener"):
        spec.resolved("work", lambda text: text)


@pytest.mark.parametrize("trigger", ["5 seconds", "100 milliseconds", "1 minute", AVAILABLE_NOW, timedelta(seconds=2)])
def test_triggers_are_spans_or_available_now(trigger: Any) -> None:
    spec = SparkListenerSpec(topics=("orders",), consumer_group="billing", trigger=trigger)

    assert spec.resolved("work", lambda text: text).trigger == trigger


def test_a_broker_in_memory_has_nothing_that_spark_could_read(tmp_path: Path) -> None:
    with (
        EmbeddedBroker() as broker,
        pytest.raises(SparkError, match=r"a broker in memory has no files .* embedded:./data"),
    ):
        SparkListenerContainer.on_broker(bill, lambda: pytest.fail("no session"), broker, tmp_path)


def test_what_is_not_decorated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListenerError, match="is not decorated with @spark_listener"):
        container(lambda messages, batch: None, tmp_path)


def test_a_container_that_does_not_run_says_so(tmp_path: Path) -> None:
    idle = container(bill, tmp_path)

    assert not idle.is_running
    assert idle.exception is None
    idle.stop()
    with pytest.raises(SparkError, match="bill does not run; start it first"):
        idle.await_idle()


def test_a_group_has_one_kind_of_listener() -> None:
    """Both would move one progress, and each would miss what the other took."""
    refuse_shared_groups(["billing", "audit"], ["mail"])

    with pytest.raises(ListenerError, match="group 'mail' has a Spark listener and a message listener"):
        refuse_shared_groups(["billing", "mail"], ["mail"])
    with pytest.raises(ListenerError, match="group 'billing' has a Spark listener and another Spark listener"):
        refuse_shared_groups(["billing", "billing"], [])


# --- the checkpoint ---------------------------------------------------------------------------------


def test_a_checkpoint_tells_what_was_planned_and_what_is_done(tmp_path: Path) -> None:
    """As Spark lays it out: the end of a batch before it runs, a note after it."""
    checkpoint = QueryCheckpoint(tmp_path)
    assert (checkpoint.planned(), checkpoint.committed(), checkpoint.end_of(0)) == (-1, -1, None)

    (tmp_path / "offsets").mkdir()
    (tmp_path / "commits").mkdir()
    (tmp_path / "metadata").write_text('{"id":"one-and-only"}')
    for batch_id in range(3):
        lines = ["v1", "{}", json.dumps({"orders": {"0": 10 * batch_id}})]
        (tmp_path / "offsets" / str(batch_id)).write_text("\n".join(lines))
    (tmp_path / "offsets" / ".2.crc").write_text("")
    (tmp_path / "commits" / "1").write_text("v1\n{}")

    assert (checkpoint.planned(), checkpoint.committed()) == (2, 1)
    assert checkpoint.end_of(2) == {("orders", 0): 20}
    assert checkpoint.query_id() == "one-and-only"
    assert checkpoint.is_committed(1)
    assert not checkpoint.is_committed(2)


def test_a_checkpoint_of_another_query_is_refused(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text('v1\n{}\n{"logOffset":3}\n{"logOffset":4}')

    with pytest.raises(SparkError, match="is not of a Spark listener's query"):
        QueryCheckpoint(tmp_path).end_of(0)


def test_where_the_first_batch_begins_is_kept(tmp_path: Path) -> None:
    checkpoint = QueryCheckpoint(tmp_path / "new")
    assert checkpoint.first_offsets() is None

    checkpoint.keep_first_offsets({("orders", 0): 7, ("orders", 1): 0})

    assert QueryCheckpoint(tmp_path / "new").first_offsets() == {("orders", 0): 7, ("orders", 1): 0}


def test_a_batch_counts_what_it_covers() -> None:
    ranges = (QueueRange("orders", 0, 5, 8), QueueRange("orders", 1, 0, 2))
    batch = SparkBatch(
        query_id="q", batch_id=1, attempt=1, ranges=ranges, is_replay=False, topic="orders", consumer_group="billing"
    )

    assert batch.message_count == 5
