"""Body of a sequenced send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtemplate.errors import RemoteProtocolError
from mqtemplate.message import Message
from mqtemplate.remoting.protocol.sequenced import decode_queue_batches, encode_queue_batches, read_queue_batches

MESSAGES = [(Message("a", b"1", {"TAGS": "x"}), 0), (Message("a", b"2"), 0), (Message("b", b""), 3)]


def test_batches_keep_the_order_and_the_queues() -> None:
    body = encode_queue_batches(MESSAGES, {"a": "ns%a", "b": "b"})

    batches = list(read_queue_batches(body))
    assert [(batch.topic, batch.queue_id) for batch in batches] == [("ns%a", 0), ("b", 3)]
    assert [(message.topic, message.body, queue_id) for message, queue_id in decode_queue_batches(batches)] == [
        ("ns%a", b"1", 0),
        ("ns%a", b"2", 0),
        ("b", b"", 3),
    ]


def test_a_body_that_is_cut_off_is_an_error_at_every_byte() -> None:
    body = encode_queue_batches(MESSAGES[:1], {"a": "a"})
    for end in range(1, len(body)):
        with pytest.raises(RemoteProtocolError):
            decode_queue_batches(list(read_queue_batches(body[:end])))


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    try:
        decode_queue_batches(list(read_queue_batches(body)))
    except RemoteProtocolError:
        pass
