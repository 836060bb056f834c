"""``topic:tag``, and the queue of a key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import DestinationError
from mqtemplate.message import Message, MessageQueue
from mqtemplate.template.destination import parse_destination, select_queue_by_hash

QUEUES = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(4)]


@pytest.mark.feature("B13")
def test_the_first_colon_splits_topic_and_tag() -> None:
    parsed = parse_destination("schedule-message-topic:sync-tags")

    assert (parsed.topic, parsed.tag) == ("schedule-message-topic", "sync-tags")
    assert parsed.properties == {"TAGS": "sync-tags"}


def test_a_tag_may_hold_further_colons() -> None:
    assert parse_destination("orders:eu:paid").tag == "eu:paid"


def test_a_topic_alone_has_no_tag() -> None:
    parsed = parse_destination("orders")

    assert (parsed.topic, parsed.tag, parsed.properties) == ("orders", None, {})


def test_a_destination_is_read_once() -> None:
    assert parse_destination("orders:cached") is parse_destination("orders:cached")


@pytest.mark.parametrize(
    ("destination", "told"),
    [
        ("", "'' has no topic; give 'topic' or 'topic:tag'"),
        (":paid", "':paid' has no topic; give 'topic' or 'topic:tag'"),
        ("orders:", "'orders:' has an empty tag; without a tag write 'orders'"),
        ("orders: paid", "begins or ends with a blank; write 'paid'"),
        ("orders:a||b", "a message has one tag; '||' belongs into a listener's selector"),
        ("orders:a\x01b", "a tag cannot hold the control characters"),
        ("no blanks:paid", "topic 'no blanks' has characters that are not allowed; use letters, digits"),
        ("topic/slash", "has characters that are not allowed"),
        ("x" * 128, "has 128 characters, allowed are 127"),
        (None, "must be text, 'topic' or 'topic:tag', got NoneType"),
        ({"order": 1}, "got dict; the order of arguments is (destination, payload, timeout, delay_level)"),
    ],
)
def test_a_malformed_destination_is_told_what_is_wrong(destination: Any, told: str) -> None:
    with pytest.raises(DestinationError) as refusal:
        parse_destination(destination)

    assert told in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "queue_id"),
    [
        ("4466", 0),  # hash 1600832
        ("hello", 2),  # hash 99162322
        ("polygenelubricants", 0),  # hash -2147483648, whose absolute value Java's int cannot hold
        ("order-2", 1),  # hash -1207111309: the remainder is -1 in Java, and 3 in Python
    ],
)
def test_a_key_chooses_the_queue_that_a_java_client_chooses(key: str, queue_id: int) -> None:
    """Java and Python senders of one application must agree, or order is lost between them."""
    chosen = select_queue_by_hash(QUEUES, Message("orders", b""), key)

    assert chosen.queue_id == queue_id


@given(key=st.text(min_size=1), count=st.integers(min_value=1, max_value=64))
def test_every_key_has_a_queue(key: str, count: int) -> None:
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(count)]

    assert select_queue_by_hash(queues, Message("orders", b""), key) in queues
