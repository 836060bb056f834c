"""Trace records have the fields that RocketMQ's tools read."""

from __future__ import annotations

import pytest

from mqtemplate.calls.message_trace import ConsumeCode, TraceMessageType, TraceRecord, trace_messages, trace_record

pytestmark = pytest.mark.feature("message-trace")


def test_a_record_is_one_line_and_is_found_by_its_keys() -> None:
    """A missing text is ``null``, as Java writes it. Source: RocketMQ ``TraceDataEncoder``."""
    record = trace_record("R", "7F01", "7 8", "Pub", 17, None, "7 8", TraceMessageType.DELAY, ConsumeCode.FAILED, True)

    assert record == TraceRecord("Pub\x0117\x01null\x017 8\x013\x014\x01true\x02", ("7F01", "7", "8"), "R")


def test_records_are_put_together_up_to_the_size_of_a_trace_message() -> None:
    records = [TraceRecord(f"{number}:" + "x" * 40_000, (f"id{number}",), "R") for number in range(5)]

    messages = trace_messages(records, lambda record: "traces")

    assert [message.keys for message in messages] == ["id0 id1", "id2 id3", "id4"]
    assert b"".join(message.body for message in messages).decode() == "".join(record.text for record in records)
