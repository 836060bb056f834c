"""Types of listener attributes. ``make lint`` checks this file with mypy; pytest runs it."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import TYPE_CHECKING, assert_type

import pytest

from mqtemplate import (
    Backoff,
    ConsumeMode,
    MessageExt,
    MessageRequestMode,
    SparkBatch,
    message_listener,
    spark_listener,
)
from mqtemplate.listener import ListenerAttributes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def bill(message: str) -> None: ...


def test_a_type_checker_knows_each_attribute_and_its_type() -> None:
    """An unused ``type: ignore`` is an error, so each one below proves that mypy reports the line."""
    decorated = message_listener("orders", "billing", consume_mode=ConsumeMode.ORDERLY, pull_batch_size="${size:8}")(
        bill
    )
    assert assert_type(decorated("hello"), None) is None

    message_listener("orders", "billing", selector_expression=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'consume_thread_number'"):
        message_listener("orders", "billing", consume_thread_numbr=4)  # type: ignore[call-arg]


def test_a_type_checker_knows_the_request_modes_and_more_time_for_a_message() -> None:
    message_listener("orders", "billing", request_mode=MessageRequestMode.POP, invisible_duration="2m")

    @message_listener("orders", "billing", request_mode="POP", invisible_duration=timedelta(minutes=2))
    def slow(message: MessageExt) -> None:
        assert_type(message.extend("10m"), Awaitable[None])
        message.extend([10])  # type: ignore[arg-type]

    message_listener("orders", "billing", request_mode=True)  # type: ignore[arg-type]


def test_a_type_checker_knows_retry_policies() -> None:
    message_listener("orders", "billing", retry=["5s", timedelta(hours=1)], not_retry_for=(ValueError,))
    message_listener("orders", "billing", retry=Backoff("1s", attempts=3), retry_for="OSError")

    message_listener("orders", "billing", retry=5)  # type: ignore[arg-type]
    message_listener("orders", "billing", not_retry_for=(7,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positional"):
        Backoff("1s", 2)  # type: ignore[call-arg]


def test_attributes_can_be_shared_by_several_listeners() -> None:
    shared: ListenerAttributes = {"consume_thread_number": 4, "max_reconsume_times": 2}

    assert message_listener("orders", "billing", **shared)(bill) is bill


def test_a_type_checker_knows_the_attributes_of_a_spark_listener() -> None:
    def count(messages: DataFrame, batch: SparkBatch) -> int:
        return batch.message_count

    assert assert_type(spark_listener("orders", "totals", max_attempts=2)(count).__name__, str) == "count"

    with pytest.raises(TypeError, match="did you mean 'max_attempts'"):
        spark_listener("orders", "totals", max_attemts=2)  # type: ignore[call-arg]
