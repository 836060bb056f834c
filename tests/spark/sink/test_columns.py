"""Simple batches of the sink, encoded column by column: the bytes that the rows would have."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from mqtemplate.remoting.protocol.messages import encode_batch, split_batch  # noqa: E402
from mqtemplate.spark.sink.options import SinkOptions  # noqa: E402
from mqtemplate.spark.sink.rows import (  # noqa: E402
    ColumnEncoder,
    RowReader,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), max_size=20)
TIME = st.integers(0, 2**53).map(lambda us: datetime.fromtimestamp(us / 1e6, UTC))
COLUMNS = {
    "tags": (TEXT, pa.string()),
    "keys": (TEXT, pa.string()),
    "deliverTime": (TIME, pa.timestamp("us", "UTC")),
}


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """A batch with bodies of text or bytes, and some other columns whose values may be null."""
    count = draw(st.integers(1, 8))
    kind = draw(st.sampled_from([pa.string(), pa.binary()]))
    body = st.binary(max_size=40) if kind == pa.binary() else TEXT
    columns = {"body": pa.array(draw(st.lists(body, min_size=count, max_size=count)), kind)}
    for name in draw(st.sets(st.sampled_from(sorted(COLUMNS)))):
        values, kind = COLUMNS[name]
        column = st.lists(st.none() | values, min_size=count, max_size=count)
        columns[name] = pa.array(draw(column), kind)
    return pa.RecordBatch.from_pydict(columns).slice(draw(st.integers(0, count - 1)))


def options(**given: str) -> SinkOptions:
    return SinkOptions.parse({"store": "data", "topic": "orders", **given})


@given(batches(), st.sampled_from([{}, {"tags": "paid"}, {"keys": "k", "tags": ""}, {"deliverTime": "1700000000000"}]))
def test_the_encoded_messages_are_those_of_the_rows(batch: Any, defaults: dict[str, str]) -> None:
    messages = [row.message for row in RowReader(options(**defaults), 0).read(batch, 0)]

    encoded = ColumnEncoder(options(**defaults)).encode(batch)

    assert encoded is not None
    assert encoded.topic == "orders"
    assert bytes(encoded.data) == encode_batch(messages)
    spans = zip([0, *encoded.ends], encoded.ends, strict=False)
    bodies = [split_batch(bytes(encoded.data[at:end]))[0][0] for at, end in spans]
    assert bodies == [message.body for message in messages]


@pytest.mark.parametrize(
    "column",
    [
        {"queueId": [0, None]},
        {"shardingKey": ["a", None]},
        {"delayLevel": [None, 3]},
        {"delay": [None, "5s"]},
        {"keys": [["a", "b"], None]},
        {"properties": pa.array([[("a", "b")], None], pa.map_(pa.string(), pa.string()))},
        {"tags": ["a\x01b", None]},
        {"keys": [None, "a\x02b"]},
        {"keys": ["k" * 32_767, None]},
        {"body": ["a", None]},
        {"body": [{"id": 1}, {"id": 2}]},
    ],
)
def test_a_batch_that_is_not_simple_is_left_to_the_reader_of_rows(column: dict[str, Any]) -> None:
    """Some have a row that is not a message: the reader names it."""
    batch = pa.RecordBatch.from_pydict({"body": ["x", "y"]} | column)

    assert ColumnEncoder(options()).encode(batch) is None


def test_a_default_for_what_is_not_simple_and_a_column_of_topics_are_left_to_the_reader_of_rows() -> None:
    batch = pa.RecordBatch.from_pydict({"body": ["x"], "topic": ["orders"]})

    assert ColumnEncoder(options(delay="5s")).encode(batch) is None
    assert ColumnEncoder(SinkOptions.parse({"store": "data"})).encode(batch) is None
    assert ColumnEncoder(options()).encode(batch.slice(1)) is None
