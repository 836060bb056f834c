"""CONCURRENTLY on a virtual clock: which messages are handled, and what happens to those that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mqtemplate.calls.pauses import PauseListener
from mqtemplate.listener import message_listener
from mqtemplate.record.dead_letter import iso_time

if TYPE_CHECKING:
    from tests.listener.conftest import App


SECOND = 1_000
MINUTE = 60 * SECOND


@pytest.mark.feature("C2", "B15")
def test_a_decorated_class_receives_its_messages(app: App) -> None:
    received: list[str] = []

    @message_listener(topic="schedule-message-topic", consumer_group="schedule-consumer-group")
    class ScheduleListener:
        def on_message(self, message: str) -> None:
            received.append(message)

    app.listen(ScheduleListener())
    app.send("schedule-message-topic", "one", "two")
    app.run_until_idle()

    assert received == ["one", "two"]
    assert app.committed("schedule-consumer-group", "schedule-message-topic") == 2


@pytest.mark.feature("U19", "C8")
def test_a_failure_is_one_structured_error_with_its_stack(app: App) -> None:
    """The event names the message, the handler, the stack and the next step."""

    @message_listener(topic="orders", consumer_group="billing", id="bill")
    def bill(message: str) -> None:
        raise LookupError("no such customer")

    with capture_logs() as logs:
        app.listen(bill)
        [sent] = app.send("orders", "bad", tag="paid", queue_id=1)
        app.run_until_idle()

    [event] = [event for event in logs if event["event"] == "listener.failed"]
    assert isinstance(event.pop("exc_info"), LookupError)
    assert event == {
        "event": "listener.failed",
        "log_level": "error",
        "listener": "bill",
        "group": "billing",
        "topic": "orders",
        "tag": "paid",
        "msg_id": sent.msg_id,
        "queue": 1,
        "offset": 0,
        "reconsume_times": 0,
        "error": "LookupError: no such customer",
        "next_step": "redelivery",
        "attempt": 1,
        "attempts": 17,
        "retry_in_ms": 10_000,
        "retry_at": iso_time(app.broker.clock.now_ms() + 10_000),
    }


def test_a_resumed_member_does_not_handle_what_was_reassigned_while_it_was_paused(app: App) -> None:
    """It had fetched the messages before. Another member has handled them since."""
    received: list[tuple[str, str]] = []

    def listener(name: str) -> Callable[..., None]:
        @message_listener(topic="orders", consumer_group="billing", id=name)
        def bill(body: str) -> None:
            if name == "first" and not received:
                raise PauseListener("1h")
            received.append((name, body))

        return bill

    [first] = app.registry.register(listener("first"))
    [second] = app.registry.register(listener("second"))
    first.start()
    app.send("orders", "0", "1", queue_id=3)
    app.run_until_idle()
    second.start()
    app.advance("10s")

    first.resume()
    app.advance("10s")

    assert received == [("second", "0"), ("second", "1")]
