"""Log events of failures: attempt n of m, the time of the next try, and one full stack for many equal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.listener import message_listener
from mqtemplate.record.dead_letter import iso_time

if TYPE_CHECKING:
    from tests.listener.conftest import App

SECOND = 1_000
MINUTE = 60 * SECOND


def failed_events(logs: list[Any]) -> list[Any]:
    return [event for event in logs if event["event"] == "listener.failed"]


def test_each_failure_names_its_attempt_and_the_time_of_the_next_one(app: App) -> None:
    @message_listener(topic="orders", consumer_group="billing", retry=["5s", "1m"])
    def bill(message: str) -> None:
        raise RuntimeError("no")

    start_ms = app.broker.clock.now_ms()
    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "bad")
        app.advance(2 * MINUTE)

    names = ("attempt", "attempts", "next_step", "retry_in_ms", "retry_at")
    assert [tuple(event.get(name) for name in names) for event in failed_events(logs)] == [
        (1, 3, "redelivery", 5 * SECOND, iso_time(start_ms + 5 * SECOND)),
        (2, 3, "redelivery", MINUTE, iso_time(start_ms + 65 * SECOND)),
        (3, 3, "dead_letter", None, None),
    ]


def test_an_ordered_listener_without_a_limit_names_no_last_attempt(app: App) -> None:
    @message_listener(topic="orders", consumer_group="billing", consume_mode="ORDERLY")
    def bill(message: str) -> None:
        raise RuntimeError("no")

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "bad")
        app.run_until_idle()

    [event] = failed_events(logs)
    assert (event["attempt"], event["next_step"], event["retry_in_ms"]) == (1, "retry_in_place", SECOND)
    assert "attempts" not in event


def test_a_repeated_stack_is_one_line_with_a_count(app: App) -> None:
    """A stack that differs is logged in full, and so is the same one after ten minutes."""

    @message_listener(topic="orders", consumer_group="billing", max_reconsume_times=0)
    def bill(message: str) -> None:
        if message == "other":
            raise RuntimeError("from another line")
        raise RuntimeError(message)

    with capture_logs() as logs:
        app.listen(bill)
        app.send("orders", "one", "two", "three", "other", "four")
        app.run_until_idle()
        app.advance(10 * MINUTE)
        app.send("orders", "five")
        app.run_until_idle()

    assert [("exc_info" in event, event.get("repeated")) for event in failed_events(logs)] == [
        (True, None),
        (False, 1),
        (False, 2),
        (True, None),
        (False, 3),
        (True, None),
    ]
    assert failed_events(logs)[2]["error"] == "RuntimeError: three"


def test_each_listener_logs_its_own_stack(app: App) -> None:
    """Handlers with a common function: the log of each one shows where its messages fail."""

    def fail() -> None:
        raise RuntimeError("no")

    @message_listener(topic="orders", consumer_group="billing")
    def bill(message: str) -> None:
        fail()

    @message_listener(topic="orders", consumer_group="audit")
    def audit(message: str) -> None:
        fail()

    with capture_logs() as logs:
        app.listen(bill, audit)
        app.send("orders", "bad")
        app.run_until_idle()

    assert ["exc_info" in event for event in failed_events(logs)] == [True, True]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "by the broker"),
        ({"retry": ["5s", "90s"]}, "5s, 1m 30s, exact"),
        ({"consume_mode": "ORDERLY"}, "1s, in place"),
        ({"message_model": "BROADCASTING"}, "none"),
    ],
)
def test_the_start_of_a_listener_says_how_it_retries(app: App, attributes: Any, expected: str) -> None:
    @message_listener(topic="orders", consumer_group="billing", **attributes)
    def bill(message: str) -> None: ...

    with capture_logs() as logs:
        app.listen(bill)

    [event] = [event for event in logs if event["event"] == "listener.started"]
    assert event["retry"] == expected
