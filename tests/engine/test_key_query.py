"""Queries for messages by key: validation, filter and merge."""

from __future__ import annotations

import pytest

from mqtemplate.engine.key_query import KeyQuery
from mqtemplate.errors import MessageError
from mqtemplate.message import HostAddress, MessageExt

HOST = HostAddress("127.0.0.1", 10911)


def query(key: str = "4466", max_count: int = 10, end_ms: int | None = None, *, unique: bool = False) -> KeyQuery:
    return KeyQuery("orders", key, max_count, 100, end_ms, unique)


def message(physical_offset: int, store_timestamp: int = 100, *, broker: str = "a", **properties: str) -> MessageExt:
    return MessageExt(
        "orders", b"", properties or {"KEYS": "4466 4467"}, broker_name=broker, queue_id=0, queue_offset=0,
        physical_offset=physical_offset, store_size=0, sys_flag=0, body_crc=0, born_timestamp=0, born_host=HOST,
        store_timestamp=store_timestamp, store_host=HOST, reconsume_times=0, prepared_transaction_offset=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "max_count", "reason"),
    [
        ("", 1, "a key must be one word, got ''; call once for each key"),
        ("4466 4467", 1, "a key must be one word, got '4466 4467'"),
        ("4466", 0, "max_count must be 1 or more, got 0"),
    ],
)
def test_an_invalid_query_is_refused(key: str, max_count: int, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        query(key, max_count)


def test_a_message_matches_by_one_of_its_keys_or_by_its_id() -> None:
    assert query("4467").matches(message(0))
    assert not query("446").matches(message(0))
    assert query("0A", unique=True).matches(message(0, UNIQ_KEY="0A", KEYS="4466"))
    assert not query("4466", unique=True).matches(message(0, UNIQ_KEY="0A", KEYS="4466"))


def test_a_message_matches_only_in_the_time_span() -> None:
    """Both ends belong to it. An index stores seconds only, so it also finds earlier and later messages."""
    assert [query(end_ms=200).matches(message(0, store_ms)) for store_ms in (99, 100, 200, 201)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert query().matches(message(0, 1 << 60))


def test_the_messages_of_several_brokers_are_merged_newest_first() -> None:
    """Each message once: an index may return a message twice. Two brokers may use the same physical offset."""
    found = [message(5, 101), message(5, 101), message(5, 103, broker="b"), message(9, 102), message(7, 102)]

    merged = query(max_count=3).merge(found)

    assert [(each.broker_name, each.physical_offset) for each in merged] == [("b", 5), ("a", 9), ("a", 7)]
