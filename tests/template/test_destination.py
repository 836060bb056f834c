"""Destinations ``topic:tag``, and the queue of a hash key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.message import Message, MessageQueue
from mqtemplate.template.options import select_queue_by_hash


@given(key=st.text(min_size=1), count=st.integers(min_value=1, max_value=64))
def test_every_key_has_a_queue(key: str, count: int) -> None:
    queues = [MessageQueue("orders", "broker-a", queue_id) for queue_id in range(count)]

    assert select_queue_by_hash(queues, Message("orders", b""), key) in queues
