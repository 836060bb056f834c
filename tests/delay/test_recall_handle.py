"""The handle of a waiting message, ours and RocketMQ's."""

from __future__ import annotations

import base64

import pytest

from mqtemplate.delay.recall_handle import RecallHandle, decode_handle, encode_handle
from mqtemplate.errors import MessageError

UPSTREAMS = base64.urlsafe_b64encode(b"v1 orders broker-a 1767225600001 7F000001ABCD").decode()


def test_a_handle_says_what_it_was_made_of() -> None:
    handle = RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", 4_711)

    assert decode_handle(encode_handle(handle)) == handle


def test_a_handle_of_rocketmq_is_understood() -> None:
    """It has five words, and does not say where the message waits."""
    assert decode_handle(UPSTREAMS) == RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", -1)


def test_rocketmq_finds_its_five_words_in_ours() -> None:
    ours = encode_handle(RecallHandle("orders", "broker-a", 1_767_225_600_001, "7F000001ABCD", 4_711))

    assert base64.urlsafe_b64decode(ours).split(b" ")[:5] == base64.urlsafe_b64decode(UPSTREAMS).split(b" ")


@pytest.mark.parametrize("text", ["", "x", "4466", "djIgYSBiIDEgYw==", "djEgYSBiIHggYw==", "djEgYQ==", "\N{SNOWMAN}"])
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(
        MessageError, match=r"is not a handle of a pending message .*; pass SendResult.handle unchanged"
    ):
        decode_handle(text)
