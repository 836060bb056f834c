"""Trace records have the fields that RocketMQ's tools read."""

from __future__ import annotations

import pytest

from mqtemplate.calls.message_trace import trace_messages
from mqtemplate.calls.trace_records import (
    ConsumeCode,
    TraceMessageType,
    TraceRecord,
    after_record,
    before_record,
    sent_record,
)

pytestmark = pytest.mark.feature("message-trace")


def test_a_sent_message_is_one_record() -> None:
    """A missing tag is ``null``, as Java writes it. Source: RocketMQ ``TraceDataEncoder``."""
    record = sent_record(
        time_ms=1_700_000_000_000,
        region="DefaultRegion",
        group="shop",
        topic="orders",
        msg_id="7F01",
        tags=None,
        keys="7 8",
        store_host="127.0.0.1:10911",
        body_bytes=3,
        cost_ms=5,
        kind=TraceMessageType.DELAY,
        offset_msg_id="7F02",
        success=True,
    )

    fields = "Pub 1700000000000 DefaultRegion shop orders 7F01 null 7|8 127.0.0.1:10911 3 5 3 7F02 true"
    assert record.text == fields.replace(" ", "\x01").replace("|", " ") + "\x02"
    assert record.keys == ("7F01", "7", "8")


def test_a_call_of_a_handler_is_two_records_with_one_request_id() -> None:
    before = before_record(time_ms=1, region="R", group="billing", request_id="Q", msg_id="M", retries=2, keys=None)
    after = after_record(
        time_ms=9,
        region="R",
        group="billing",
        request_id="Q",
        msg_id="M",
        keys=None,
        cost_ms=8,
        code=ConsumeCode.EXCEPTION,
    )

    assert before.text.split("\x01") == ["SubBefore", "1", "R", "billing", "Q", "M", "2", "null\x02"]
    assert after.text.split("\x01") == ["SubAfter", "Q", "M", "8", "false", "null", "2", "9", "billing\x02"]
    assert before.keys == after.keys == ("M",)


def test_for_a_cloud_provider_the_last_record_has_no_time() -> None:
    record = after_record(
        time_ms=9,
        region="R",
        group="billing",
        request_id="Q",
        msg_id="M",
        keys="7",
        cost_ms=8,
        code=ConsumeCode.SUCCESS,
        is_cloud=True,
    )

    assert record.text.split("\x01") == ["SubAfter", "Q", "M", "8", "true", "7", "0\x02"]


def test_records_are_put_together_up_to_the_size_of_a_trace_message() -> None:
    records = [TraceRecord(f"{number}:" + "x" * 40_000, (f"id{number}",), "R") for number in range(5)]

    messages = trace_messages(records, lambda record: "traces")

    assert [message.keys for message in messages] == ["id0 id1", "id2 id3", "id4"]
    assert b"".join(message.body for message in messages).decode() == "".join(record.text for record in records)
