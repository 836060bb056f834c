"""Rows of Arrow batches as messages, and the options and columns of the sink. Without Spark's JVM."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from mqtemplate.errors import ConfigurationError, MessageError
from mqtemplate.message import Message, Property
from mqtemplate.spark.sink.options import SinkOptions
from mqtemplate.spark.sink.rows import ColumnEncoder, OutgoingRow, RowReader

STORE = {"store": "data"}


def rows_of(columns: dict[str, Any], **options: str) -> list[OutgoingRow]:
    reader = RowReader(SinkOptions.parse(STORE | options), partition=3)
    return reader.read(pa.RecordBatch.from_pydict(columns), 0)


def only_message(columns: dict[str, Any], **options: str) -> Message:
    [(message, _, _)] = rows_of({name: pa.array([value]) for name, value in columns.items()}, **options)
    return message


# --- rows -------------------------------------------------------------------------------------------


def test_each_column_becomes_the_part_of_the_message_that_it_names() -> None:
    columns = {
        "topic": pa.array(["orders"]),
        "body": pa.array([b"\x00\x01"]),
        "tags": pa.array(["paid"]),
        "keys": pa.array([["4466", "4467"]]),
        "properties": pa.array([[("currency", "EUR")]], pa.map_(pa.string(), pa.string())),
        "queueId": pa.array([2]),
        "shardingKey": pa.array(["customer-7"]),
    }

    [(message, queue_id, sharding_key)] = rows_of(columns)

    assert (message.topic, message.body, message.tags, message.keys) == ("orders", b"\x00\x01", "paid", "4466 4467")
    assert message.user_properties == {"currency": "EUR"}
    assert (queue_id, sharding_key) == (2, "customer-7")


def test_a_struct_is_sent_as_json_without_its_null_fields() -> None:
    body = {
        "id": 4466,
        "name": "Zoë",
        "missing": None,
        "amount": Decimal("12.50"),
        "day": date(2021, 12, 31),
        "at": datetime(2021, 12, 31, tzinfo=UTC),
        "raw": b"\x00",
        "lines": [{"count": 2, "note": None}],
    }

    assert only_message({"body": body}, topic="orders").body.decode() == (
        '{"id":4466,"name":"Zoë","amount":"12.50","day":"2021-12-31","at":"2021-12-31T00:00:00+00:00",'
        '"raw":"AA==","lines":[{"count":2}]}'
    )


@pytest.mark.parametrize(
    ("columns", "property_name", "value"),
    [
        ({"delayLevel": 5}, "DELAY", "5"),
        ({"delay": "1m 30s"}, "TIMER_DELAY_MS", "90000"),
        ({"delay": 1.5}, "TIMER_DELAY_MS", "1500"),
        ({"delay": timedelta(hours=3)}, "TIMER_DELAY_MS", "10800000"),
        ({"deliverTime": 1_700_000_000_000}, "TIMER_DELIVER_MS", "1700000000000"),
        ({"deliverTime": datetime(2023, 11, 14, 22, 13, 20, 1, UTC)}, "TIMER_DELIVER_MS", "1700000000001"),
    ],
)
def test_a_delay_is_a_level_a_duration_or_a_time_and_never_early(
    columns: dict[str, Any], property_name: str, value: str
) -> None:
    """A time with microseconds is rounded up to the next millisecond."""
    assert only_message({"body": "x"} | columns, topic="orders").properties == {property_name: value}


def test_level_0_is_not_a_delay() -> None:
    assert only_message({"body": "x", "delayLevel": 0}, topic="orders").properties == {}


def test_a_default_stands_for_null_and_for_a_missing_column_and_the_option_topic_for_all_rows() -> None:
    columns = {"body": pa.array(["a", "b"]), "tags": pa.array(["own", None]), "topic": pa.array(["x", "y"])}

    rows = rows_of(columns, topic="orders", tags="default", delay="10s")

    assert [(row.message.topic, row.message.tags) for row in rows] == [("orders", "own"), ("orders", "default")]
    assert [row.message.properties["TIMER_DELAY_MS"] for row in rows] == ["10000", "10000"]


def test_messages_that_were_read_are_written_with_their_own_properties_only() -> None:
    """The id, the delay and the number of the old message must not reach the new one."""
    properties = {"currency": "EUR", "UNIQ_KEY": "7F00", "__SEQUENCE": "q 1 2 3", "REAL_TOPIC": "x"}

    column = pa.array([list(properties.items())], pa.map_(pa.string(), pa.string()))
    [(message, _, _)] = rows_of({"body": pa.array(["x"]), "properties": column}, topic="orders")

    assert message.properties == {"currency": "EUR"}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": None, "topic": "orders"}, "body is null"),
        ({"body": "x", "topic": None}, "topic is null"),
        ({"body": "x", "topic": "a b"}, "topic: "),
        ({"body": "x", "topic": "orders", "delayLevel": 1, "delay": "1s"}, "it has delayLevel and delay"),
        ({"body": "x", "topic": "orders", "delay": "soon"}, "'3h', '1h 30m'"),
        ({"body": "x", "topic": "orders", "tags": "a\x01b"}, "tags contains \\x01 or \\x02, which separate properties"),
    ],
)
def test_a_row_that_is_not_a_message_is_named_with_its_reason(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(MessageError) as failure:
        only_message(columns)

    assert str(failure.value).startswith("row 0 of partition 3 cannot be sent: ")
    assert reason in str(failure.value)
    assert "filter or correct such rows before the write" in str(failure.value)


# --- options and columns ----------------------------------------------------------------------------


TEXT, NUMBER = pa.string(), pa.int32()


def schema_of(**columns: pa.DataType) -> StructType:
    return from_arrow_schema(pa.schema(list(columns.items())))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"value": TEXT}, "column 'value' is unknown; a message has body, topic"),
        ({"bodies": TEXT}, "column 'bodies' is unknown; did you mean 'body'?"),
        ({"tags": TEXT}, "column 'body' is missing among tags"),
        ({"body": NUMBER}, "column 'body' must be string, binary, or a struct (sent as JSON), got int; cast it"),
        ({"body": TEXT, "delayLevel": TEXT}, "column 'delayLevel' must be int, got string"),
        ({"body": TEXT, "properties": pa.map_(TEXT, NUMBER)}, "column 'properties' must be map<string,string>"),
        ({"body": TEXT, "deliverTime": pa.timestamp("us")}, "column 'deliverTime' must be timestamp, or bigint"),
    ],
)
def test_a_wrong_column_is_refused_before_a_row_is_sent(columns: dict[str, pa.DataType], reason: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        SinkOptions.parse(STORE | {"topic": "orders"}).check_columns(schema_of(**columns))

    assert reason in str(failure.value)


def test_a_write_needs_a_topic() -> None:
    with pytest.raises(ConfigurationError, match="the topic is missing: give option 'topic', or a column 'topic'"):
        SinkOptions.parse(STORE).check_columns(schema_of(body=TEXT))


def test_the_documented_types_are_accepted() -> None:
    options = SinkOptions.parse(STORE | {"topic": "orders"})
    interval, time = pa.duration("us"), pa.timestamp("us", "UTC")
    options.check_columns(schema_of(body=pa.struct({"a": NUMBER}), keys=pa.list_(TEXT), delay=interval))
    options.check_columns(schema_of(body=pa.binary(), queueId=pa.int64(), shardingKey=TEXT, deliverTime=time))
    options.check_columns(schema_of(body=TEXT, delay=pa.float64(), properties=pa.map_(TEXT, TEXT)))


# --- pending keys -----------------------------------------------------------------------------------


def test_a_row_has_a_pending_key_of_its_column_or_of_an_option() -> None:
    own = {"body": "x", "topic": "carts", "pendingKey": "cart-17", "onPending": "postpone", "noLaterThan": "2h"}

    message = only_message(own, delay="15m")
    other = only_message({"body": "x", "topic": "carts"}, delay="15m", pendingKey="cart-18")

    wanted = (Property.PENDING_KEY, Property.ON_PENDING, Property.NO_LATER_THAN)
    assert [message.properties.get(name) for name in wanted] == ["cart-17", "postpone", "7200000"]
    assert [other.properties.get(name) for name in wanted] == ["cart-18", "replace", None]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"pendingKey": "cart-17"}, "it has a pendingKey and no delay"),
        ({"pendingKey": "", "delay": "1h"}, "pending_key is empty"),
        ({"pendingKey": "cart-17", "delay": "1h", "onPending": "drop"}, "on_pending must be one of"),
        ({"pendingKey": "cart-17", "delay": "1h", "noLaterThan": "2h"}, "needs on_pending='postpone'"),
    ],
)
def test_a_row_whose_pending_key_makes_no_sense_is_named(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(MessageError, match=f"row 0 of partition 3 cannot be sent: .*{reason}"):
        only_message({"body": "x", "topic": "carts", **columns})


def test_a_row_is_strict_by_its_column_or_by_the_option_and_only_with_a_pending_key() -> None:
    row = {"body": "x", "topic": "carts", "pendingKey": "cart-17", "delay": "1h"}

    by_column = [only_message(row | {"onPendingStrict": value}) for value in (True, False, None)]
    by_option = [only_message(row, onPendingStrict=text) for text in ("true", "FALSE")]
    without_key = only_message({"body": "x", "topic": "carts"}, onPendingStrict="true")

    strict = [Property.ON_PENDING_STRICT in message.properties for message in (*by_column, *by_option, without_key)]
    assert strict == [True, False, False, True, False, False]


def test_a_strict_option_that_is_false_leaves_batches_simple() -> None:
    """They are encoded column by column, as without the option."""
    options = SinkOptions.parse(STORE | {"topic": "carts", "onPendingStrict": "false"})

    assert ColumnEncoder(options).encode(pa.RecordBatch.from_pydict({"body": ["x"]})) is not None


def test_an_option_for_pending_messages_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="option onPendingStrict='yes' must be true or false"):
        SinkOptions.parse(STORE | {"topic": "carts", "onPendingStrict": "yes"})
    with pytest.raises(ConfigurationError, match="column 'onPendingStrict' must be boolean, got string; cast it"):
        SinkOptions.parse(STORE | {"topic": "carts"}).check_columns(schema_of(body=TEXT, onPendingStrict=TEXT))
    with pytest.raises(ConfigurationError, match="option onPending='drop': it must be one of replace, keep, postpone"):
        SinkOptions.parse(STORE | {"topic": "carts", "onPending": "drop"})
