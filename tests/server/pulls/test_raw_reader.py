"""Records as bytes: none is lost or duplicated, and each is a valid record of RocketMQ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.message import HostAddress, MessageQueue
from mqtemplate.record.codec import RecordDraft, pack_host, parse_record, read_without_check, without_check
from mqtemplate.record.properties import encode_properties
from mqtemplate.selectors.sql92 import Sql92Selector
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.server.pulls.raw_reader import RawQuery, RawReader, RawStatus, ReadAhead
from tests.server.pulls.pulled import numbers
from tests.server.serving import Serving
from tests.thirds import examples

TAGS = st.sampled_from(["a", "b", "Aa", "BB", ""])
SELECTORS = st.one_of(
    st.none(),
    st.lists(st.sampled_from(["a", "b", "Aa", "BB"]), min_size=1).map(lambda tags: TagSelector(" || ".join(tags))),
    st.sampled_from(["TAGS = 'a'", "number > 3", "number BETWEEN 2 AND 5 OR TAGS IN ('BB')"]).map(Sql92Selector),
)


@settings(max_examples=examples(50), deadline=None)
@given(tags=st.lists(TAGS, max_size=40), selector=SELECTORS, max_count=st.integers(1, 8), max_bytes=st.integers(1, 900))
def test_successive_pulls_return_each_matching_message_once_and_in_order(
    tags: list[str], selector: TagSelector | Sql92Selector | None, max_count: int, max_bytes: int
) -> None:
    with Serving() as serving:
        for number, tag in enumerate(tags):
            serving.send("orders", b"%d" % number, {"number": str(number)} | ({"TAGS": tag} if tag else {}))
        raw = RawReader(serving.engine.store, serving.engine.engine.queues, ReadAhead(serving.engine.store))
        query, at, found = RawQuery(MessageQueue("orders", "broker-a", 0), max_count, max_bytes, selector), 0, []
        while (pull := raw.pull(query, at)).status is not RawStatus.NO_NEW_MSG:
            assert pull.count <= max_count
            assert pull.next_begin_offset > at
            found += numbers(pull)
            at = pull.next_begin_offset

    assert at == len(tags)
    assert found == [
        number
        for number, tag in enumerate(tags)
        if selector is None or selector.matches({"number": str(number)} | ({"TAGS": tag} if tag else {}))
    ]


@given(
    body=st.binary(max_size=200),
    properties=st.dictionaries(
        st.text("abcXYZ", min_size=1, max_size=5),
        st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=20),
    ),
    topic=st.sampled_from(["t", "%RETRY%" + "g" * 150]),
    born=st.sampled_from([HostAddress("10.0.0.1", 1), HostAddress("2001:db8::1", 2)]),
)
def test_a_record_without_its_checksum_is_otherwise_unchanged(
    body: bytes, properties: dict[str, str], topic: str, born: HostAddress
) -> None:
    draft = RecordDraft(topic, 3, body, encode_properties(properties), born_host=pack_host(born), born_timestamp=9)
    data = draft.encode(7, 4_096, 10, pack_host(HostAddress("127.0.0.1", 10911)))
    record = parse_record(data)

    bare = without_check(data, record)

    assert len(bare) == len(data) - 24
    assert parse_record(bare) == record._replace(total_size=len(bare))
    assert without_check(bare, parse_record(bare)) is bare


CHECKED = RecordDraft(
    "orders", 3, b"a body", b"UNIQ_KEY\x01A1\x02", born_host=pack_host(HostAddress("10.0.0.1", 1)), born_timestamp=9
).encode(7, 4_096, 10, pack_host(HostAddress("127.0.0.1", 10911)))


def test_a_plain_record_is_read_as_parsing_it_reads_it() -> None:
    assert read_without_check(CHECKED, "orders", 3, 7, 4_096) == without_check(CHECKED, parse_record(CHECKED))


@given(at=st.integers(0, len(CHECKED) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(at: int, bit: int) -> None:
    data = bytearray(CHECKED)
    data[at] ^= 1 << bit

    assert read_without_check(bytes(data), "orders", 3, 7, 4_096) is None


@given(st.integers(0, len(CHECKED) - 1))
def test_a_cut_record_is_found(end: int) -> None:
    assert read_without_check(CHECKED[:end], "orders", 3, 7, 4_096) is None


@pytest.mark.parametrize(
    "other", [("paid", 3, 7, 4_096), ("orders", 2, 7, 4_096), ("orders", 3, 8, 4_096), ("orders", 3, 7, 0)]
)
def test_another_record_than_expected_is_found(other: tuple[str, int, int, int]) -> None:
    assert read_without_check(CHECKED, *other) is None
