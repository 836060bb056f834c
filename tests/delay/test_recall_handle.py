"""The handle of a delayed message, ours and RocketMQ's."""

from __future__ import annotations

import base64

import pytest

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle, encode_handle
from mqtemplate.errors import MessageError

UPSTREAMS = base64.urlsafe_b64encode(b"v1 orders broker-a 1767225600001 7F000001ABCD").decode()


def test_a_decoded_handle_equals_the_encoded_one() -> None:
    handle = RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", 4_711)

    assert decode_handle(encode_handle(handle)) == handle


def test_a_handle_of_rocketmq_is_decoded() -> None:
    """It has five words, and no physical offset."""
    assert decode_handle(UPSTREAMS) == RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", -1)


def test_our_handle_starts_with_the_five_words_of_rocketmq() -> None:
    """RocketMQ ignores the sixth."""
    ours = encode_handle(RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", 4_711))

    assert base64.urlsafe_b64decode(ours).split(b" ")[:5] == base64.urlsafe_b64decode(UPSTREAMS).split(b" ")


@pytest.mark.parametrize("msg_id", ["", " ", "a b", " 7", "7 8 9"])
def test_the_id_of_a_message_may_be_any_text(msg_id: str) -> None:
    """Its producer chooses it. The offset behind it is found nevertheless."""
    handle = RecallHandle("orders", "broker-a", 1_767_225_600_001, msg_id, 4_711)

    assert decode_handle(encode_handle(handle)) == handle


@pytest.mark.parametrize("time", ["9" * 5_000, "\u0663", "1e9", "1_0", ""])
def test_a_number_in_a_handle_has_a_bound(time: str) -> None:
    """A client sends it; `int` would take some of these texts, or end with another error."""
    text = base64.urlsafe_b64encode(f"v1 orders broker-a {time} id 1".encode()).decode()

    with pytest.raises(MessageError, match="its time or its offset is not a number"):
        decode_handle(text)


@pytest.mark.parametrize("text", ["", "x", "4466", "djIgYSBiIDEgYw==", "djEgYSBiIHggYw==", "djEgYQ==", "\N{SNOWMAN}"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(MessageError, match=r"not a handle of a pending message .*; pass SendResult.handle unchanged"):
        decode_handle(text)
