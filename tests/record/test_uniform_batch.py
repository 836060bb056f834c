"""Messages of a batch as rows of one array: the same bytes as from `RecordDraft`, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import RecordDraft, pack_host, parse_record
from mqtemplate.record.columns import to_rows
from mqtemplate.record.layout import MAX_PROPERTIES_BYTES
from mqtemplate.record.record_arrays import BatchOrigin, UniformBatch

V4, V6 = pack_host(HostAddress("10.0.0.1", 10_911)), pack_host(HostAddress("::1", 10_911))
IDS = [b"7F0001", b"7F0002", b"ab12ZZ"]


def batch_of(first: RecordDraft, bodies: list[bytes], ids: list[bytes]) -> UniformBatch:
    return UniformBatch(first, to_rows(bodies), to_rows(ids), first.properties.index(ids[0]))


@given(
    bodies=st.integers(0, 40).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=3, max_size=3)
    ),
    properties=st.sampled_from([b"UNIQ_KEY\x01%b\x02WAIT\x01true\x02", b"TAGS\x01paid\x02UNIQ_KEY\x01%b\x02"]),
    topic=st.sampled_from(["orders", "%RETRY%" + "g" * 200]),
    born=st.sampled_from([V4, V6]),
    host=st.sampled_from([V4, V6]),
    offset=st.integers(0, 2**40),
)
def test_rows_are_the_records_of_each_message(
    bodies: list[bytes], properties: bytes, topic: str, born: bytes, host: bytes, offset: int
) -> None:
    first = RecordDraft(topic, 3, bodies[0], properties % IDS[0], 5, 6, 0, 1_700, born, 2)
    expected, at = [], offset
    for number, (body, unique_id) in enumerate(zip(bodies, IDS, strict=True)):
        draft = replace(first, body=body, properties=properties % unique_id)
        expected.append(draft.encode(7 + number, at, 1_800, host))
        at += len(expected[-1])

    records = batch_of(first, bodies, IDS).encode([7], offset, 1_800, host)

    assert [bytes(row) for row in records] == expected
    assert parse_record(bytes(records[2])).body == bodies[2]


def test_rows_of_several_batches_have_their_queues_offsets_and_times() -> None:
    properties = b"UNIQ_KEY\x01%b\x02"
    ids = [b"7F%02d" % number for number in range(6)]
    first = RecordDraft("orders", 3, b"body", properties % ids[0], 5, born_timestamp=1_700)
    origins = [BatchOrigin(3, 1_700), BatchOrigin(0, 2**40), BatchOrigin(3, 1_701)]
    batch = UniformBatch(first, to_rows([b"body"] * 6), to_rows(ids), first.properties.index(ids[0]), origins)
    places = [(3, 7, 1_700), (3, 8, 1_700), (0, 90, 2**40), (0, 91, 2**40), (3, 9, 1_701), (3, 10, 1_701)]
    expected = b""
    for unique_id, (queue_id, offset, born) in zip(ids, places, strict=True):
        draft = replace(first, queue_id=queue_id, properties=properties % unique_id, born_timestamp=born)
        expected += draft.encode(offset, 500 + len(expected), 1_800, V4)

    assert batch.encode([7, 90, 9], 500, 1_800, V4).tobytes() == expected
    assert [each[1:] for each in batch.queues()] == [(3, range(2)), (0, range(2, 4)), (3, range(4, 6))]


def test_properties_above_the_limit_are_refused() -> None:
    properties = b"UNIQ_KEY\x017F0001\x02big\x01" + b"x" * MAX_PROPERTIES_BYTES
    batch = batch_of(RecordDraft("orders", 0, b"x", properties), [b"x"] * 3, IDS)

    with pytest.raises(MessageError, match="keys, tags and properties take"):
        batch.encode([0], 0, 0, V4)
