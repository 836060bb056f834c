"""Synchronous sends: a service that sends, and the timeout. The scripts have the rest."""

from __future__ import annotations

import itertools
import logging
from datetime import datetime
from uuid import uuid4

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import SendTimeoutError
from mqtemplate.results import SendResult, SendStatus
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import messages_in
from tests.kit import Kit


@pytest.mark.feature("B10", "B11", "B12", "B14", "B16")
def test_a_service_sends_checks_the_status_and_logs_the_id(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A service as in a Spring application, with a timeout of 100 ms."""

    class ScheduleMessageService:
        log = logging.getLogger("ScheduleMessageService")

        def __init__(self, template: RocketMQTemplate) -> None:
            self.template = template

        def send_sync_schedule_message(self, key: str, message: str, timeout: int, delay_level: int) -> SendResult:
            result = self.template.sync_send(
                "schedule-message-topic:sync-tags", message, timeout, delay_level, headers={"KEYS": key}
            )
            if result.send_status is SendStatus.SEND_OK:
                self.log.info("sent %s at %s", result.msg_id, datetime.now().astimezone())
            else:
                self.log.warning("not safe: %s at %s", result.msg_id, datetime.now().astimezone())
            return result

    key = str(uuid4())
    with caplog.at_level(logging.INFO):
        result = ScheduleMessageService(kit.template).send_sync_schedule_message(key, "hello" + key, 100, 3)

    assert f"sent {result.msg_id}" in caplog.text
    kit.harness.advance("10s")
    [message] = messages_in(kit.broker, "schedule-message-topic")
    assert (message.body, message.tags, message.keys) == (f"hello{key}".encode(), "sync-tags", key)
    assert message.msg_id == result.msg_id


# --- timeouts --------------------------------------------------------------------------------------


def test_the_timeout_includes_the_choice_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker gets the rest of the timeout; with nothing left, nothing is sent."""
    before_and_after = iter([10.000, 10.003])
    monkeypatch.setattr("mqtemplate.template.rocketmq_template.monotonic", lambda: next(before_and_after))

    with EmbeddedBroker() as broker, RocketMQTemplate(broker) as template:
        with pytest.raises(SendTimeoutError, match="timeout of 2ms was over before the message reached the broker"):
            template.sync_send("orders", b"body", timeout="2ms", hash_key="k")

        assert messages_in(broker, "orders") == []


def test_on_the_virtual_clock_a_slow_machine_uses_up_no_timeout(
    mqtemplate_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("mqtemplate.template.rocketmq_template.monotonic", lambda: float(next(seconds)))

    with RocketMQTemplate(mqtemplate_broker) as template:
        assert template.sync_send("orders", b"body", timeout="1ms").send_status is SendStatus.SEND_OK
