"""Destinations ``topic:tag``, and the queue of a hash key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import DestinationError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.template.options import parse_destination, select_queue_by_hash

QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(4)]


def test_a_parsed_destination_is_cached() -> None:
    assert parse_destination("orders:cached") is parse_destination("orders:cached")


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        ("orders:a\x01b", "the tag contains '\\x01'"),
        ("x" * 128, "has 128 characters, allowed are 127"),
        (None, "must be text, 'topic' or 'topic:tag', got NoneType"),
        ({"order": 1}, "got dict; the order of arguments is (destination, payload, timeout, delay_level)"),
    ],
)
def test_an_invalid_destination_is_refused(destination: Any, error: str) -> None:
    with pytest.raises(DestinationError) as refusal:
        parse_destination(destination)

    assert error in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "queue_id"),
    [
        ("4466", 0),  # hash 1600832
        ("hello", 2),  # hash 99162322
        ("polygenelubricants", 0),  # hash -2147483648, whose absolute value Java's int cannot hold
        ("order-2", 1),  # hash -1207111309: the remainder is -1 in Java, and 3 in Python
    ],
)
def test_a_hash_key_selects_the_same_queue_as_in_java(key: str, queue_id: int) -> None:
    """Java and Python producers of one application must select the same queue; otherwise messages get out of order."""
    chosen = select_queue_by_hash(QUEUES, Message("orders", b""), key)

    assert chosen.queue_id == queue_id


@given(key=st.text(min_size=1), count=st.integers(min_value=1, max_value=64))
def test_every_key_has_a_queue(key: str, count: int) -> None:
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(count)]

    assert select_queue_by_hash(queues, Message("orders", b""), key) in queues
