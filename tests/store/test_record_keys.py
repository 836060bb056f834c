"""Keys of many records at once equal the keys of each record alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.record.properties import PENDING_KEY, REAL_TOPIC, property_format
from mqtemplate.store.key_reader import (
    hash_keys,
    index_key_hashes,
    keys_of,
    pending_key_hash,
    pending_key_text,
)


def one_by_one(records: list[tuple[str, bytes]]) -> tuple[list[int], list[int]]:
    keys = [keys_of(topic, properties) for topic, properties in records]
    return index_key_hashes([key for each in keys for key in each]).tolist(), [len(each) for each in keys]


def at_once(records: list[tuple[str, bytes]]) -> tuple[list[int], list[int]]:
    hashes, counts = hash_keys([topic for topic, _ in records], [properties for _, properties in records])
    return hashes.tolist(), counts.tolist()


def properties(number: int, *, keys: str = "", tags: str = "") -> bytes:
    values = {"UNIQ_KEY": f"{number:032X}", "KEYS": keys, "TAGS": tags, "user": f"{number % 7}"}
    return "".join([f"{name}\x01{value}\x02" for name, value in values.items() if value]).encode()


def pending(number: int) -> bytes:
    """Return the properties of a delayed message with a pending key."""
    return properties(number) + property_format(REAL_TOPIC, b"carts") + property_format(PENDING_KEY, b"%04d" % number)


def test_pending_keys_are_the_same_in_all_topics() -> None:
    in_topic = {topic: at_once([(topic, pending(number)) for number in range(20)])[0] for topic in ("carts", "%T")}

    for topic, hashes in in_topic.items():
        assert hashes == one_by_one([(topic, pending(number)) for number in range(20)])[0]
        assert hashes[1::2] == [pending_key_hash("carts", f"{number:04}") for number in range(20)]


def test_keys_of_similar_records_are_in_the_order_of_the_log() -> None:
    records = [("orders", properties(number, keys=f"A{number:03} B{number:03}", tags="paid")) for number in range(100)]

    assert at_once(records) == one_by_one(records)
    assert at_once(records)[1] == [4] * 100


def test_records_of_several_shapes_may_be_mixed() -> None:
    records = [
        (f"topic-{number % 3}", properties(number, keys="k" * (number % 4), tags="t" * (number % 2)))
        for number in range(200)
    ]

    assert at_once(records) == one_by_one(records)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(b"KEYS\x01one  two\x02", id="blanks together"),
        pytest.param("KEYS\x01größe\x02".encode(), id="not ASCII"),
        pytest.param(b"KEYS\x01one two\x02KEYS\x01three\x02", id="a name twice"),
        pytest.param(b"MY_KEYS\x01one two\x02KEYS\x01three\x02", id="a longer name that ends alike"),
        pytest.param(b"KEYS\x01one two", id="no separator at the end"),
        pytest.param(b"KEYS\x01\x02TAGS\x01\x02", id="empty values"),
        pytest.param(b"KEYS\x01a\x01b\x02", id="a separator in the value"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_irregular_properties_have_the_same_keys(odd: bytes) -> None:
    records = [("orders", odd)] * 20

    assert at_once(records) == one_by_one(records)


_TEXT = st.text(st.sampled_from("ab 1é\x01\x02"), max_size=4).map(str.encode)
_NAMES = st.sampled_from([b"UNIQ_KEY", b"KEYS", b"TAGS", b"user", b"XKEYS", PENDING_KEY, REAL_TOPIC])
_PROPERTIES = st.lists(st.tuples(_NAMES, _TEXT), max_size=4).map(
    lambda pairs: b"".join(name + b"\x01" + value + b"\x02" for name, value in pairs)
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "größe"]), _PROPERTIES), max_size=12), st.integers(1, 30))
def test_any_properties_have_the_same_keys(records: list[tuple[str, bytes]], times: int) -> None:
    assert at_once(records * times) == one_by_one(records * times)


@given(st.text(max_size=12), st.text(max_size=90))
def test_a_pending_key_has_the_hash_of_its_text(topic: str, key: str) -> None:
    """Texts of any characters; a long key takes the general way."""
    assert [pending_key_hash(topic, key)] == index_key_hashes([pending_key_text(topic, key)]).tolist()
