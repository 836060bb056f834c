"""Unread messages with their age, and dead letters, by group; the clock; series that are folded."""

from __future__ import annotations

import pytest

from mqtemplate import DeadLetter, message_listener
from mqtemplate.metrics import OTHER
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.dead_letters import DeadLetters

from .conftest import Observe


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None:
    if order == "bad":
        raise DeadLetter("no such customer")


def test_the_age_of_the_oldest_unread_message_is_read_without_traffic(observe: Observe) -> None:
    """A paused listener has no deliveries, so no lateness; its group falls behind all the same."""
    observed = observe(bill)
    [container] = observed.app.containers
    observed.app.template.sync_send("orders", "x", hash_key="same")
    observed.harness.advance("1m")
    assert observed.samples("group.behind_ms")["billing", "orders"] == 0

    container.pause()
    observed.app.template.sync_send("orders", "x", hash_key="same")
    observed.harness.advance("5m")
    observed.app.template.sync_send("orders", "x", hash_key="same")
    observed.harness.advance("20s")

    assert observed.samples("group.behind_ms")["billing", "orders"] == 320_000
    container.resume()
    observed.harness.advance("10s")
    assert observed.samples("group.behind_ms")["billing", "orders"] == 0


def test_dead_letters_are_counted_by_the_broker_from_0(observe: Observe) -> None:
    observed = observe(bill)
    observed.app.template.sync_send("orders", "good")
    observed.harness.advance("1s")
    states = ("open", "purged", "resent")
    assert observed.samples("group.dead_letters") == {("billing", state): 0 for state in states}

    for _ in range(3):
        observed.app.template.sync_send("orders", "bad")
    observed.harness.advance("10s")
    assert observed.samples("group.dead_letters")["billing", "open"] == 3

    letters = DeadLetters(BrokerAccess(observed.observability.broker))
    first, second, _ = letters.find("billing")
    letters.purge([first])
    letters.resend([second])
    observed.harness.advance("10s")
    # The one that was sent again has failed again.
    assert observed.samples("group.dead_letters") == {
        ("billing", "open"): 2,
        ("billing", "purged"): 1,
        ("billing", "resent"): 1,
    }


def test_messages_are_not_read_at_each_scrape(observe: Observe) -> None:
    observed = observe(bill)
    assert observed.samples("group.dead_letters")["billing", "open"] == 0
    observed.app.template.sync_send("orders", "bad")
    observed.harness.advance("9s")
    assert observed.samples("group.dead_letters")["billing", "open"] == 0
    observed.harness.advance("1s")
    assert observed.samples("group.dead_letters")["billing", "open"] == 1


def test_the_clock_of_the_process_is_read(observe: Observe) -> None:
    observed = observe()

    assert observed.samples("clock.now_ms") == {(): observed.observability.broker.clock.now_ms()}


def test_the_topics_that_are_folded_are_logged_once(observe: Observe, caplog: pytest.LogCaptureFixture) -> None:
    observed = observe(management__metrics__max_series=10)
    for number in range(20):
        observed.app.template.sync_send(f"orders{number}", "x")

    assert observed.samples("client.send.messages")[OTHER,] == 11
    [line] = [each.getMessage() for each in caplog.records if "metric=client.send.messages" in each.getMessage()]
    assert line.startswith("metrics.limited metric=client.send.messages series=10 counted_as=_other advice='use fewer")


def test_the_errors_that_are_folded_are_logged_once(observe: Observe, caplog: pytest.LogCaptureFixture) -> None:
    @message_listener(topic="orders", consumer_group="billing", id="fail")
    def fail(order: str) -> None:
        raise type(f"Error{order}", (Exception,), {})

    observed = observe(fail)
    for number in range(60):
        observed.app.template.sync_send("orders", str(number))
    observed.harness.advance("1s")

    assert observed.samples("listener.handle.errors")[OTHER, "billing", "fail", "orders"] == 10
    [line] = [each.getMessage() for each in caplog.records if "metric=listener.handle.errors" in each.getMessage()]
    assert "series=50 counted_as=_other advice='raise fewer classes of exceptions; those created" in line
