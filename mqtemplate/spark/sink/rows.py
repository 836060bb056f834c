"""Rows of Arrow batches as messages: row by row, or simple batches column by column."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqtemplate.durations import duration_ms
from mqtemplate.errors import DestinationError, MessageError
from mqtemplate.message import DELAY_PROPERTIES, RESERVED_PROPERTIES, Message, Property, joined_keys, storable
from mqtemplate.pending import pending_key_properties
from mqtemplate.record.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from mqtemplate.remoting.protocol.messages import BATCH_FRONT_FIELDS, LONGEST_PROPERTIES, EncodedBatch
from mqtemplate.spark.sink.options import COLUMNS, SinkOptions
from mqtemplate.topics import check_send_topic


class OutgoingRow(NamedTuple):
    """A message, and what the row says about its queue.

    Attributes:
        queue_id: None: the sink chooses the queue.
        sharding_key: Messages with equal keys go to one queue; None: no order.
    """

    message: Message
    queue_id: int | None
    sharding_key: str | None


@dataclass(frozen=True, slots=True)
class RowReader:
    """Creates the messages of rows.

    Args:
        partition: Number of the task, for errors.
    """

    options: SinkOptions
    partition: int

    def read(self, batch: pa.RecordBatch, first_row: int) -> list[OutgoingRow]:
        """Return the messages of a batch.

        Args:
            first_row: Number of its first row in the task, for errors.

        Raises:
            MessageError: A row is not a message; it names the row and the reason.
        """
        rows = []
        for number, values in enumerate(self._values(batch), first_row):
            try:
                rows.append(self._row(*values))
            except (MessageError, ValueError, TypeError) as exc:
                raise MessageError(
                    f"row {number} of partition {self.partition} cannot be sent: {exc}; filter or correct such rows "
                    "before the write"
                ) from exc
        return rows

    def _values(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        columns = [self._column(batch, name) for name in COLUMNS]
        return iter(zip(*columns, strict=False)) if batch.num_rows else iter(())

    def _column(self, batch: pa.RecordBatch, name: str) -> Any:
        """Return the values of a column, with its default for null; the default without end if it is missing."""
        default = self.options.topic if name == "topic" else self.options.defaults.get(name)
        if name not in batch.schema.names or (name == "topic" and default is not None):
            return repeat(default)
        column = batch.column(name)
        if name == "body" and pa.types.is_string(column.type):
            column = column.cast(pa.binary())  # without a copy: each value becomes bytes once
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.int64())
            values = [None if value is None else -(-value // 1_000) for value in column.to_pylist()]  # never early
        else:
            values = column.to_pylist()
        return values if default is None else [default if value is None else value for value in values]

    def _row(
        self,
        body: Any,
        topic: str | None,
        tags: str | None,
        keys: str | Sequence[str] | None,
        properties: Sequence[tuple[str, str]] | Mapping[str, str] | None,
        queue_id: int | None,
        sharding_key: str | None,
        delay_level: int | None,
        delay: Any,
        deliver_time: int | None,
        pending_key: str | None,
        on_pending: str | None,
        no_later_than: Any,
        is_strict: bool | None,
    ) -> OutgoingRow:
        if topic is None:
            raise MessageError("topic is null")
        sent: dict[str, str] = _own_properties(properties) if properties else {}
        if tags:
            sent[Property.TAGS] = storable("tags", tags)
        if keys:
            # A text is stored as it is, as by columns: a mirror keeps the blanks of Java's messages.
            keys = keys if isinstance(keys, str) else joined_keys(list(filter(None, keys)))
            sent[Property.KEYS] = storable("keys", keys)
        if sharding_key is not None:
            sent[Property.SHARDING_KEY] = storable("shardingKey", sharding_key)
        if delay_level is not None or delay is not None or deliver_time is not None:
            self._add_delay(sent, delay_level, delay, deliver_time)
        if pending_key is not None:
            if sent.keys().isdisjoint(DELAY_PROPERTIES):
                raise MessageError("it has a pendingKey and no delay, and only a delayed message is pending")
            span = None if no_later_than is None else timedelta(milliseconds=duration_ms(no_later_than, 1_000))
            sent |= pending_key_properties(pending_key, on_pending, span, is_strict=bool(is_strict))
        return OutgoingRow(Message(_checked_topic(topic), _body(body), sent), queue_id, sharding_key)

    def _add_delay(self, sent: dict[str, str], level: int | None, delay: Any, deliver_time: int | None) -> None:
        delays = {"delayLevel": level or None, "delay": delay, "deliverTime": deliver_time}
        given = [name for name, value in delays.items() if value is not None]
        if len(given) > 1:
            raise MessageError(f"it has {' and '.join(given)}; a message has one delay")
        if level:
            sent[Property.DELAY] = str(level)  # the broker has the table, and refuses what is not in it
        elif delay is not None:
            sent[Property.TIMER_DELAY_MS] = str(duration_ms(delay, 1_000))
        elif deliver_time is not None:
            sent[Property.TIMER_DELIVER_MS] = str(deliver_time)


_checked: set[str] = set()


def _checked_topic(topic: str) -> str:
    if topic not in _checked:
        try:
            check_send_topic(topic)
        except DestinationError as exc:
            raise MessageError(f"topic: {exc}") from exc
        if len(_checked) < 10_000:
            _checked.add(topic)
    return topic


def _own_properties(properties: Sequence[tuple[str, str]] | Mapping[str, str]) -> dict[str, str]:
    """Return the properties of the application, without the properties of the broker, such as ``UNIQ_KEY``.

    So messages that were read from a topic can be written to another one with their properties.
    """
    own = dict(properties)
    for name in RESERVED_PROPERTIES.intersection(own):
        del own[name]
    return {storable("a property's name", name): storable(name, value) for name, value in own.items() if value}


def _body(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict):
        plain = _without_nulls(value)
        return json.dumps(plain, default=_json_value, ensure_ascii=False, separators=(",", ":")).encode()
    raise MessageError("body is null" if value is None else f"body is {type(value).__name__}")


def _without_nulls(value: Any) -> Any:
    """Leave out null fields, as Spark's ``to_json`` does."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _json_value(value: object) -> object:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise MessageError(f"body: a value of type {type(value).__name__} has no form in JSON")


_FRONT = np.dtype(BATCH_FRONT_FIELDS)
_LENGTH = np.dtype(">i2")  # of the encoded properties
_MOST_BYTES = 1 << 30  # an Arrow array of bytes has less than twice as many
_TEXT = (pa.string(), pa.binary())
_PROPERTIES = {"tags": Property.TAGS, "keys": Property.KEYS, "deliverTime": Property.TIMER_DELIVER_MS}
"""Column -> the property that it becomes, in the order of `RowReader`."""


@dataclass(frozen=True, slots=True)
class ColumnEncoder:
    """Encodes simple batches: one topic, any queue, a body of text or bytes, and of the other columns `_PROPERTIES`.

    It takes a fifth of the time of `RowReader`, which has the rules for rows, and gets every batch that is not simple:
    one in which a column decides something for each row, or in which a row is not a message.
    """

    options: SinkOptions

    def encode(self, batch: pa.RecordBatch) -> EncodedBatch | None:
        """Return the messages of a batch; None if `RowReader` must create them, or name the row that is wrong."""
        topic = self.options.topic
        if topic is None or not self._is_simple(batch):
            return None
        values = {name: self._values(batch, name) for name in _PROPERTIES if self._has(batch, name)}
        if not all(map(_is_one_line, values.values())):
            return None
        body = batch.column("body").cast(pa.binary())
        properties = _concatenated([_encoded(_PROPERTIES[name], each) for name, each in values.items()])
        if properties is not None and pc.max(pc.binary_length(properties)).as_py() > LONGEST_PROPERTIES:
            return None
        return _batch(topic, body, properties)

    def _is_simple(self, batch: pa.RecordBatch) -> bool:
        used = {name for name in COLUMNS if name not in ("body", "topic") and self._has(batch, name)}
        types = {name: batch.schema.field(name).type for name in {"body", *used} & {*batch.schema.names}}
        times = types.pop("deliverTime", pa.int64())
        return (
            used <= _PROPERTIES.keys()
            and all(kind in _TEXT for kind in types.values())
            and (pa.types.is_int64(times) or pa.types.is_timestamp(times))
            and 0 < batch.nbytes < _MOST_BYTES
            and not batch.column("body").null_count
        )

    def _has(self, batch: pa.RecordBatch, name: str) -> bool:
        """Return True if a row has a value of the column, or there is a default."""
        is_filled = name in batch.schema.names and batch.column(name).null_count < batch.num_rows
        return is_filled or name in self.options.defaults

    def _values(self, batch: pa.RecordBatch, name: str) -> Any:
        """Return the values of a property as bytes, or null: an empty text gives no property."""
        default = self.options.defaults.get(name)
        if name in batch.schema.names:
            column = batch.column(name)
            column = _milliseconds(column).cast(pa.string()) if name == "deliverTime" else column
            values = column.cast(pa.binary())
            values = values if default is None else pc.fill_null(values, str(default).encode())
        else:
            values = pa.array([str(default).encode()] * batch.num_rows)
        return pc.if_else(pc.equal(pc.binary_length(values), 0), None, values)


def _milliseconds(column: Any) -> Any:
    """Return times in milliseconds, rounded up: a message is never early."""
    if not pa.types.is_timestamp(column.type):
        return column
    microseconds = column.cast(pa.int64())
    return pa.array(
        -(-pc.fill_null(microseconds, 0).to_numpy(zero_copy_only=False) // 1_000),
        mask=pc.is_null(microseconds).to_numpy(zero_copy_only=False),
    )


def _is_one_line(values: Any) -> bool:
    """Return False if a value contains a separator of properties."""
    separators = (NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR)
    return not any(pc.any(pc.match_substring(values, separator)).as_py() for separator in separators)


def _encoded(name: str, values: Any) -> Any:
    """Return the encoded property of each value, and null for null."""
    before, after = pa.scalar(name.encode() + NAME_VALUE_SEPARATOR), pa.scalar(PROPERTY_SEPARATOR)
    return pc.binary_join_element_wise(before, values, after, b"")


def _concatenated(parts: list[Any]) -> Any:
    """Return the values of some arrays one after the other, with nothing for null; None for no arrays."""
    if not parts:
        return None
    return pc.binary_join_element_wise(*parts, b"", null_handling="replace", null_replacement=b"")


def _batch(topic: str, body: Any, properties: Any) -> EncodedBatch:
    count = len(body)
    lengths = np.zeros(count, _LENGTH)
    if properties is not None:
        lengths[:] = pc.binary_length(properties).to_numpy(zero_copy_only=False)
    fronts = np.zeros(count, _FRONT)
    fronts["body_length"] = pc.binary_length(body).to_numpy(zero_copy_only=False)
    fronts["size"] = _FRONT.itemsize + _LENGTH.itemsize + fronts["body_length"] + lengths
    columns = [_fixed(fronts), body, _fixed(lengths), *([] if properties is None else [properties])]
    data = _concatenated(columns)
    ends = np.frombuffer(data.buffers()[1], np.int32)[1 : count + 1].tolist()
    return EncodedBatch(topic, memoryview(data.buffers()[2])[: ends[-1]], ends)


def _fixed(numbers: Any) -> Any:
    """Return the bytes of each element of an array."""
    width = numbers.dtype.itemsize
    offsets = pa.py_buffer(np.arange(0, (len(numbers) + 1) * width, width, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, offsets, pa.py_buffer(numbers)])
