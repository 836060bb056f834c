"""Record batches: Arrow columns with the same values as the record parser."""

from __future__ import annotations

import tempfile
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import CorruptRecordError
from mqtemplate.message import (
    Message,
    MessageQueue,
)
from mqtemplate.record.codec import (
    RecordDraft,
    parse_record,
    to_message_ext,
)
from mqtemplate.record.compression import (
    CompressionType,
    compress_body,
)
from mqtemplate.record.layout import (
    CHECK_CRC_AT,
    CHECK_SIZE,
)
from mqtemplate.record.properties import encode_properties
from mqtemplate.spark.location.folder import QueueSlice, StoreFolder, local_blocks
from mqtemplate.spark.records.arrow_arrays import LARGEST_IN_RUN, number_column, timestamp_column
from mqtemplate.spark.records.record_batches import ARROW_SCHEMA, record_batches

pa = pytest.importorskip("pyarrow")


def read_all(
    store: Path, topic: str = "orders", queue_id: int = 0, schema: Any = ARROW_SCHEMA, *, check_crcs: bool = True
) -> list[dict[str, Any]]:
    folder = StoreFolder(store)
    start, end = folder.min_offset(topic, queue_id), folder.max_offset(topic, queue_id)
    units = folder.units(topic, queue_id, start, end)
    queue = QueueSlice(MessageQueue(topic, "broker-a", queue_id), np.arange(start, end), units)
    batches = record_batches(local_blocks(folder, queue), schema, check_crcs=check_crcs)
    return [row for batch in batches for row in batch.to_pylist()]


def expected_rows(store: Path, topic: str = "orders", queue_id: int = 0) -> list[dict[str, Any]]:
    """Return the same rows from the record parser, one record at a time."""
    folder = StoreFolder(store)
    units = folder.units(topic, queue_id, 0, folder.max_offset(topic, queue_id))
    log = b"".join(segment.path.read_bytes() for segment in folder.log_segments())
    return [
        expected_row(log[at : at + size], topic, queue_id, number)
        for number, (at, size, _) in enumerate(units.tolist())
    ]


def expected_row(data: bytes, topic: str, queue_id: int, queue_offset: int) -> dict[str, Any]:
    message = to_message_ext(parse_record(data), "broker-a")
    return {
        "topic": topic,
        "brokerName": "broker-a",
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "msgId": message.msg_id,
        "tags": message.tags,
        "keys": message.keys,
        "body": message.body,
        "flag": message.flag,
        "properties": list(message.properties.items()),
        "bornTimestamp": instant(message.born_timestamp),
        "storeTimestamp": instant(message.store_timestamp),
        "deliverTimestamp": instant(message.deliver_timestamp),
        "reconsumeTimes": message.reconsume_times,
    }


def instant(milliseconds: int | None) -> datetime | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds // 1_000, UTC).replace(microsecond=milliseconds % 1_000 * 1_000)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "properties": sorted(row["properties"])} for row in rows]


PAIRS = st.tuples(
    st.sampled_from(
        [b"TAGS", b"KEYS", b"UNIQ_KEY", b"UNIQ_KEX", b"REAL_TOPIC", b"", b"x", "schlüssel".encode(), b"\xff"]
    ),
    st.sampled_from([b"\x01", b"\x01", b"\x01", b"", b"\x01a\x01"]),
    st.one_of(st.sampled_from([b"", b"pay", b"1767225600000", "größe".encode(), b"\xc3"]), st.binary(max_size=4)),
).map(b"".join)
DUE = st.sampled_from([b"", b"TIMER_DELIVER_MS\x011767225600000\x02", b"TIMER_DELIVER_MS\x0112\x02REAL_TOPIC\x01t\x02"])
PROPERTIES = st.builds(
    lambda pairs, due, end: (due + b"\x02".join(pairs) + end).rstrip(b"\0"),
    st.lists(PAIRS, max_size=6),
    DUE,
    st.sampled_from([b"", b"\x02"]),
)


@settings(max_examples=150)
@given(data=st.data())
def test_columns_have_the_values_of_the_record_parser(
    data: st.DataObject, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """For both layouts, both kinds of address, and any properties."""
    record = st.builds(
        foreign_record,
        body=st.binary(max_size=40),
        properties=PROPERTIES,
        v2=st.booleans(),
        born_host=st.sampled_from([bytes(8), b"\x7f" * 20]),
        store_host=st.sampled_from([bytes(8), bytes(range(20))]),
        flag=st.integers(-(2**31), 2**31 - 1),
        born_timestamp=st.integers(0, 2**41),
        store_timestamp=st.integers(0, 2**41),
        reconsume_times=st.integers(0, 20),
    )
    records = data.draw(st.lists(record, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        store = write_foreign_folder(Path(folder, "store"), records, log_file_size=1_024)

        assert ordered(read_all(store)) == ordered(expected_rows(store))


def test_the_check_of_our_own_records_is_not_a_property(broker: EmbeddedBroker) -> None:
    broker.store.put(draft(b"one", TAGS="pay", KEYS="a b", region="north"))
    broker.store.put(draft(b""))

    rows = read_all(broker.path)

    assert ordered(rows) == ordered(expected_rows(broker.path))
    assert dict(rows[0]["properties"]) == {"TAGS": "pay", "KEYS": "a b", "region": "north"}
    assert rows[1]["properties"] == []


def draft(body: bytes, *, sys_flag: int = 0, topic: str = "orders", **properties: str) -> RecordDraft:
    return RecordDraft(topic=topic, queue_id=0, body=body, properties=encode_properties(properties), sys_flag=sys_flag)


def test_a_message_without_a_producers_id_has_the_brokers_id(broker: EmbeddedBroker) -> None:
    broker.store.put(draft(b"", UNIQ_KEY="7F00"))
    broker.store.put(draft(b""))

    assert [row["msgId"] for row in read_all(broker.path)] == [row["msgId"] for row in expected_rows(broker.path)]
    assert len(read_all(broker.path)[1]["msgId"]) == 32


@pytest.mark.parametrize(("kind", "codec"), [(0x000, "zlib"), (0x100, "lz4"), (0x200, "zstd"), (0x300, "zlib")])
def test_a_compressed_body_is_decompressed(broker: EmbeddedBroker, kind: int, codec: str) -> None:
    """The four codecs of RocketMQ's clients, between plain bodies, since a batch may mix them."""
    body = b"many words " * 50
    broker.store.put(draft(b"plain"))
    broker.store.put(draft(compress(body, codec), sys_flag=0x1 | kind))
    broker.store.put(draft(b"plain too"))

    assert [row["body"] for row in read_all(broker.path)] == [b"plain", body, b"plain too"]


def compress(body: bytes, codec: str) -> bytes:
    if codec == "zlib":
        return zlib.compress(body)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(body)
    return sink.getvalue().to_pybytes()


def test_the_error_for_a_damaged_compressed_body_names_file_and_offset(broker: EmbeddedBroker) -> None:
    broker.store.put(draft(b"not compressed at all", sys_flag=0x1))

    with pytest.raises(
        CorruptRecordError, match=r"^0{20}: bad record at physical offset 0: its zlib body cannot be decompressed"
    ):
        read_all(broker.path)


def test_a_topic_of_more_than_127_characters_is_read(broker: EmbeddedBroker) -> None:
    """Such records have a two-byte topic length."""
    topic = "%RETRY%" + "g" * 150
    broker.store.put(draft(b"again", topic=topic))

    assert [row["body"] for row in read_all(broker.path, topic)] == [b"again"]


def test_only_the_selected_columns_are_built(broker: EmbeddedBroker) -> None:
    broker.store.put(draft(b"one", TAGS="pay"))
    schema = pa.schema([("tags", pa.string()), ("body", pa.binary())])

    assert read_all(broker.path, schema=schema) == [{"tags": "pay", "body": b"one"}]


def test_a_delayed_message_has_its_due_time(tmp_path: Path) -> None:
    """But only in its real topic: a message with the property and without a real topic was not delayed."""
    clock = VirtualClock()
    due = clock.now_ms() + 1_500
    with EmbeddedBroker(tmp_path / "store", clock=clock) as broker:
        broker.store.put(draft(b"was delayed", TIMER_DELIVER_MS=str(due), REAL_TOPIC="orders"))
        broker.store.put(draft(b"was not", TIMER_DELIVER_MS=str(due)))
        broker.store.put(draft(b"nonsense", TIMER_DELIVER_MS="soon", REAL_TOPIC="orders"))

        rows = read_all(tmp_path / "store")

    assert [row["deliverTimestamp"] for row in rows] == [instant(due), None, None]


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (0, "its length is not the one in the consume queue"),
        (4, "it has no magic code of a record"),
        (20, "it does not match its CRC-32"),
        (30, "its own physical offset is another one"),
        (84, "the lengths inside it do not add up"),
        (90, "its body does not match its CRC-32"),
        (110, "it does not match its CRC-32"),
    ],
)
def test_the_error_for_a_flipped_bit_names_file_and_offset(broker: EmbeddedBroker, at: int, reason: str) -> None:
    """The second of three records is damaged."""
    records = [broker.store.put(draft(b"a body of some length", TAGS="pay")) for _ in range(3)]
    (log,) = [segment for segment in StoreFolder(broker.path).log_segments() if segment.start == 0]
    flip(log.path, records[1].physical_offset + at)

    with pytest.raises(CorruptRecordError) as caught:
        read_all(broker.path)

    assert str(caught.value).startswith(
        f"{0:020d}: bad record at physical offset {records[1].physical_offset}: {reason}"
    )


def test_each_flipped_bit_of_a_record_is_detected(broker: EmbeddedBroker) -> None:
    """For each byte but the name of the check, which covers the bytes that the CRC of the body does not."""
    record = broker.store.put(draft(b"body", TAGS="pay", KEYS="a"))
    broker.store.put(draft(b"next"))
    log = StoreFolder(broker.path).log_segments()[0].path
    check_at = record.size - CHECK_SIZE

    for at in [*range(check_at), *range(check_at + CHECK_CRC_AT, record.size)]:
        flip(log, at)
        with pytest.raises(CorruptRecordError):
            read_all(broker.path)
        flip(log, at)

    assert len(read_all(broker.path)) == 2


@pytest.mark.parametrize("size", [20, LARGEST_IN_RUN, LARGEST_IN_RUN + 1])
def test_damage_is_found_beside_bodies_of_any_size(broker: EmbeddedBroker, size: int) -> None:
    """One sum covers the records of a block if all bodies are small, and else the rest of the records only."""
    records = [broker.store.put(draft(body, TAGS="pay")) for body in (b"", bytes(size), b"x")]
    log = StoreFolder(broker.path).log_segments()[0].path
    assert [len(row["body"]) for row in read_all(broker.path)] == [0, size, 1]

    for record, at, reason in (
        (records[2], 88, "its body does"),
        (records[0], 20, "it does"),
        (records[2], 20, "it does"),
    ):
        flip(log, record.physical_offset + at)
        with pytest.raises(CorruptRecordError, match=f"offset {record.physical_offset}: {reason} not match its CRC-32"):
            read_all(broker.path)
        flip(log, record.physical_offset + at)


def test_without_check_crcs_changed_bytes_are_returned(broker: EmbeddedBroker) -> None:
    """A record whose length or position does not match is an error all the same."""
    record = broker.store.put(draft(b"body", TAGS="pay"))
    log = StoreFolder(broker.path).log_segments()[0].path
    flip(log, record.physical_offset + 88, 0x01)

    assert [row["body"] for row in read_all(broker.path, check_crcs=False)] == [b"cody"]

    flip(log, record.physical_offset + 84)
    with pytest.raises(CorruptRecordError, match="the lengths inside it do not add up"):
        read_all(broker.path, check_crcs=False)


def test_a_character_that_is_not_a_hex_digit_is_detected_in_a_check(broker: EmbeddedBroker) -> None:
    """Such as ``:``, the character after 9, for ``a``, the digit after 9."""
    damaged = set[bytes]()
    for number in range(40):
        record = broker.store.put(draft(b"body", KEYS=str(number)))
        log = StoreFolder(broker.path).log_segments()[0].path
        crc_at = record.end - CHECK_SIZE + CHECK_CRC_AT
        digits = log.read_bytes()[crc_at : crc_at + 8]
        for letter, wrong in zip(b"abcdef", b":;<=>?", strict=True):
            at = crc_at + digits.find(letter)
            if letter in digits:
                flip(log, at, letter ^ wrong)
                with pytest.raises(CorruptRecordError):
                    read_all(broker.path)
                flip(log, at, letter ^ wrong)
                damaged.add(bytes([letter]))

    assert len(damaged) == 6


def flip(path: Path, at: int, bits: int = 0x40) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def test_batches_are_split_by_rows_and_at_the_end_of_each_log_file(
    tmp_path: Path, foreign_record: Any, write_foreign_folder: Any
) -> None:
    """A window of the log is in one file, and the size of a batch is limited."""
    store = write_foreign_folder(
        tmp_path / "store", [foreign_record(body=bytes(100))] * 9_000, log_file_size=1 << 20, units_a_file=10_000
    )
    folder = StoreFolder(store)
    queue = QueueSlice(MessageQueue("orders", "b", 0), np.arange(9_000), folder.units("orders", 0, 0, 9_000))

    sizes = [batch.num_rows for batch in record_batches(local_blocks(folder, queue), ARROW_SCHEMA)]

    in_first_file = sizes[0]
    assert in_first_file == ((1 << 20) - 8) // len(foreign_record(body=bytes(100)).pack(0, 0))
    assert sizes == [in_first_file, 9_000 - in_first_file]


def test_sent_messages_are_read(broker: EmbeddedBroker) -> None:
    """They are sent through the `Broker` interface, as by an application."""
    for number in range(8):
        broker.sends.send(Message("orders", b"%d" % number, {"TAGS": "pay"}))

    rows = [row for queue_id in range(4) for row in read_all(broker.path, "orders", queue_id)]

    assert sorted(row["body"] for row in rows) == [b"%d" % number for number in range(8)]
    assert {row["tags"] for row in rows} == {"pay"}


def test_a_body_that_becomes_too_large_stays_compressed(tmp_path: Path) -> None:
    """The other rows are read as usual, and a warning names the record."""
    with EmbeddedBroker(tmp_path) as broker:
        broker.create_topic("orders", 1)
        for kind in (CompressionType.ZLIB, CompressionType.ZSTD, CompressionType.LZ4):
            body, flag = compress_body(bytes(1_001), kind)
            broker.engine.writer.put(RecordDraft("orders", 0, body, b"", sys_flag=flag), "orders", 0)
        body, flag = compress_body(bytes(1_000))
        broker.engine.writer.put(RecordDraft("orders", 0, body, b"", sys_flag=flag), "orders", 0)

    folder = StoreFolder(tmp_path)
    queue = QueueSlice(MessageQueue("orders", "broker-a", 0), np.arange(4), folder.units("orders", 0, 0, 4))
    with capture_logs() as events:
        batches = list(record_batches(local_blocks(folder, queue), ARROW_SCHEMA, 1_000))
        bodies = [row["body"] for batch in batches for row in batch.to_pylist()]

    packed = [compress_body(bytes(1_001), kind)[0] for kind in (CompressionType.ZLIB, CompressionType.ZSTD)]
    assert bodies[:2] == packed
    assert len(bodies[2]) < 1_000
    assert bodies[3] == bytes(1_000)
    assert [(event["event"], event["max_bytes"]) for event in events] == [("spark.body_too_large", 1_000)] * 3


def test_numbers_and_times_of_other_programs_are_null_where_they_are_none() -> None:
    """One such row would fail the whole query: Arrow refuses the number, or `datetime` the year."""
    texts = pa.array(["5", None, "9" * 5_000, "\u0663", "", "x", "-1", "+7", "9" * 19])
    times = pa.array([0, 10**17, -(10**17), None, 2**63 - 1, -(2**63)], pa.int64())

    assert number_column(texts).to_pylist() == [5, None, None, None, None, None, -1, 7, None]
    assert timestamp_column(times).to_pylist() == [datetime(1970, 1, 1, tzinfo=UTC), None, None, None, None, None]
