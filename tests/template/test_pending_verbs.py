"""The verbs for pending messages: cancel, reschedule, list and count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import DelayError, MessageError
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.testing import RecordingTemplate, messages_in
from tests.kit import Kit

NOW_MS = VirtualClock().now_ms()
NOW = datetime.fromtimestamp(NOW_MS / 1_000, UTC)

NEW_TIMES = {
    "a time span": {"delay": timedelta(minutes=5)},
    "seconds": {"delay": 300.0},
    "a datetime": {"deliver_at": NOW + timedelta(minutes=5)},
    "epoch milliseconds": {"deliver_at": NOW_MS + 300_000},
}


def test_a_message_is_cancelled_by_its_handle(kit: Kit) -> None:
    result = kit.template.sync_send("orders:paid", "body", delay_level=3)

    answer = kit.template.cancel(result.handle)
    kit.harness.advance("1h")

    assert answer.status is ScheduleChangeStatus.CANCELLED
    assert messages_in(kit.template.broker, "orders") == []


def test_a_message_is_cancelled_by_its_key(kit: Kit) -> None:
    kit.template.sync_send("orders", "body", delay=3_600, keys="4466")

    assert kit.template.cancel(key="4466").count == 1


@pytest.mark.parametrize("new_time", NEW_TIMES.values(), ids=NEW_TIMES)
def test_a_message_is_rescheduled(kit: Kit, new_time: dict[str, object]) -> None:
    result = kit.template.sync_send("orders", "body", delay_level=18)

    kit.template.reschedule(result.handle, **new_time)  # type: ignore[arg-type]
    kit.harness.advance("299999ms")
    before = len(messages_in(kit.template.broker, "orders"))
    kit.harness.advance("1ms")

    assert before == 0
    assert len(messages_in(kit.template.broker, "orders")) == 1


def test_reschedule_without_a_time_delivers_now(mqtemplate_template: RecordingTemplate) -> None:
    result = mqtemplate_template.sync_send("orders", "body", delay_level=18)

    mqtemplate_template.reschedule(result.handle)

    assert len(messages_in(mqtemplate_template.broker, "orders")) == 1


def test_pending_messages_are_listed_and_counted(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.sync_send("orders:paid", "body", deliver_at=NOW + timedelta(days=1), keys="4466")
    mqtemplate_template.sync_send("orders:paid", "body", delay=60)

    page = mqtemplate_template.pending(topic="orders", tag="paid", after=NOW + timedelta(hours=1))
    counts = mqtemplate_template.count_pending("orders", by=timedelta(hours=1), before=NOW + timedelta(days=2))

    assert [(message.keys, message.deliver_at) for message in page.messages] == [("4466", NOW + timedelta(days=1))]
    assert counts.buckets == {NOW_MS: 1, NOW_MS + 86_400_000: 1}


def test_invalid_arguments_are_refused(mqtemplate_template: RecordingTemplate) -> None:
    with pytest.raises(DelayError, match="delay and deliver_at are two delays for one message"):
        mqtemplate_template.reschedule("handle", delay=1, deliver_at=NOW)
    with pytest.raises(DelayError, match="before must be an aware datetime or epoch milliseconds, got datetime"):
        mqtemplate_template.pending(before=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(DelayError, match="after must be an aware datetime or epoch milliseconds, got str 'soon'"):
        mqtemplate_template.pending(after="soon")  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="by must be a millisecond or more"):
        mqtemplate_template.count_pending(by=timedelta(0))
    with pytest.raises(TypeError, match=r"pending\(\) has no option 'befor'; did you mean 'before'\?"):
        mqtemplate_template.pending(befor=NOW)  # type: ignore[call-arg]
