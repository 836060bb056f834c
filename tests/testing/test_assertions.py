"""Assertions of the harness, handlers that raise, and the marker."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from mqtemplate import Clock, SystemClock, VirtualClock, message_listener
from mqtemplate.testing import HandlerFailedError, Harness, Inbox, StartApp
from tests.kit import Kit
from tests.programs import run_python


@message_listener("orders", "billing", max_reconsume_times=1, delay_level_when_next_consume=1)
class Billing:
    """Listener that takes no empty order."""

    def __init__(self) -> None:
        self.bills: list[str] = []

    def on_message(self, order: str) -> None:
        if order == "bad":
            raise LookupError("no such order")
        self.bills.append(order)


def test_a_handler_that_raises_fails_the_test(kit: Kit) -> None:
    kit.start(Billing)
    sent = kit.template.sync_send("orders", "bad")

    with pytest.raises(HandlerFailedError) as raised:
        kit.harness.run_until_idle()

    assert f"LookupError: no such order (topic orders, msg_id {sent.msg_id})" in str(raised.value)
    assert "raise_handler_errors=False" in str(raised.value)
    assert isinstance(raised.value.__cause__, LookupError)
    kit.harness.run_until_idle()  # each failure is raised once


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_retries_and_dead_letters_can_be_studied(kit: Kit) -> None:
    kit.start(Billing)
    kit.template.sync_send("orders", "bad")
    kit.template.sync_send("orders", "good")

    kit.harness.advance("1m")

    assert [str(failure.error) for failure in kit.harness.failures] == ["no such order"] * 2
    [message] = kit.harness.assert_received(Billing, times=1)
    assert message.body == b"good"
    for listener in (Billing, "billing"):
        [dead] = kit.harness.assert_dead_lettered(listener, times=1)
        assert dead.body == b"bad"


def test_messages_that_were_sent_are_counted_pending_or_not(kit: Kit) -> None:
    kit.template.sync_send("orders:paid", "1")
    kit.template.sync_send("orders:paid", "2", delay="3h")
    kit.template.sync_send("orders:open", "3")

    assert len(kit.harness.assert_sent("orders:paid", times=2)) == 2
    kit.harness.assert_sent("orders", times=3)
    kit.harness.assert_sent("bills", times=0)
    with pytest.raises(AssertionError, match="'orders:paid' has been sent: 2 messages, expected 1\n"):
        kit.harness.assert_sent("orders:paid", times=1)


def test_a_listener_is_named_by_class_function_object_or_id(kit: Kit) -> None:
    collect = Inbox().listener("orders", "audit")
    app = kit.start(Billing, collect)
    kit.template.sync_send("orders", "1")
    kit.harness.run_until_idle()

    for listener in (Billing, app.get(Billing), collect, app.containers[0].endpoint.id):
        kit.harness.assert_received(listener, times=1)
        kit.harness.assert_received(listener)
    with pytest.raises(AssertionError, match="Billing has received: 1 messages, expected 0"):
        kit.harness.assert_received(Billing, times=0)
    with pytest.raises(AssertionError, match="Harness is not a listener of this harness; it has:"):
        kit.harness.assert_received(Harness)


def test_a_failed_assertion_has_one_short_line_a_message_the_newest_first(kit: Kit) -> None:
    kit.start(Billing)
    for number in range(12):
        kit.template.sync_send("orders:paid", f"order {number}\n" + "x" * 500, keys=f"k{number}")
    kit.template.sync_send("orders:later", "4466", delay="3h", keys="z")
    kit.template.sync_send("orders:later", "4467", delay="1h", keys="y")
    kit.harness.run_until_idle()

    with pytest.raises(AssertionError) as raised:
        kit.harness.assert_received(Billing, times=13)

    lines = str(raised.value).splitlines()
    assert lines[0] == "Billing has received: 12 messages, expected 13"
    assert len(lines) == 1 + 10 + 1 + 2
    assert all(line.startswith("  orders:paid, keys k") and line.endswith("xxx...") for line in lines[1:11])
    assert max(map(len, lines)) < 130
    assert lines[11] == "  ... and 2 more"
    assert lines[12] == "  pending: orders:later, keys y, 4 bytes, due 2026-01-01T01:00:00.000+00:00"
    assert lines[13] == "  pending: orders:later, keys z, 4 bytes, due 2026-01-01T03:00:00.000+00:00"


@pytest.mark.mqtemplate(start=datetime(2030, 5, 1, 12, tzinfo=UTC))
def test_the_clock_starts_at_any_instant(mqtemplate_clock: VirtualClock) -> None:
    assert mqtemplate_clock.now_ms() == 1_903_867_200_000


@pytest.mark.mqtemplate(start="now")
def test_the_clock_starts_now(mqtemplate_clock: VirtualClock) -> None:
    assert 0 <= SystemClock().now_ms() - mqtemplate_clock.now_ms() < 86_400_000


class Reminders:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock


def test_the_clock_of_the_test_is_injected(mqtemplate_app: StartApp, mqtemplate_clock: VirtualClock) -> None:
    assert mqtemplate_app(Reminders).get(Reminders).clock is mqtemplate_clock


def test_a_failure_that_no_step_raised_fails_the_test_at_its_end(tmp_path: Path) -> None:
    """A request lets time pass; its handler raises, and the test only expects that no reply comes."""
    output = run_pytest(
        tmp_path,
        """
        import pytest
        from mqtemplate import message_listener
        from mqtemplate.errors import RequestTimeoutError

        @message_listener("prices", "pricing")
        def price(item: str) -> int:
            raise LookupError("no such item")

        def test_one(mqtemplate_app, mqtemplate_template, mqtemplate_harness):
            mqtemplate_app(price)
            with pytest.raises(RequestTimeoutError):
                mqtemplate_template.send_and_receive("prices", "tea", int)
        """,
    )

    assert "1 passed, 1 error" in output
    assert "HandlerFailedError: 1 calls of handlers raised:" in output
    assert "LookupError: no such item" in output


_LOGGING_TEST = """
    import pytest
    from mqtemplate import message_listener

    @message_listener("orders", "billing", max_reconsume_times=0)
    def bill(order: str) -> None:
        raise LookupError("no such order")

    @pytest.mark.mqtemplate(raise_handler_errors=False)
    def test_one(mqtemplate_app, mqtemplate_template, mqtemplate_harness):
        mqtemplate_app(bill)
        mqtemplate_template.sync_send("orders", "bad")
        mqtemplate_harness.run_until_idle()
        assert len(mqtemplate_harness.failures) == {failures}
"""


def test_log_events_are_shown_for_a_test_that_fails_only(tmp_path: Path) -> None:
    quiet = run_pytest(tmp_path, _LOGGING_TEST.format(failures=1), "-s")
    failed = run_pytest(tmp_path, _LOGGING_TEST.format(failures=0))

    assert "1 passed" in quiet
    assert "listener.failed" not in quiet
    assert "1 failed" in failed
    assert "listener.failed listener=test_it.bill group=billing error='LookupError: no such order'" in failed


def run_pytest(folder: Path, test_file: str, *options: str) -> str:
    """Run pytest with the installed plugin on one file; return its output."""
    (folder / "test_it.py").write_text(dedent(test_file), encoding="utf-8")
    done = run_python(folder, "-m", "pytest", "-p", "no:cacheprovider", *options, "test_it.py")
    return done.stdout + done.stderr


def test_a_wrong_option_of_the_marker_is_refused(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
        import pytest

        @pytest.mark.mqtemplate(begin="now")
        def test_one(mqtemplate_clock): ...

        @pytest.mark.mqtemplate(start="tomorrow")
        def test_two(mqtemplate_clock): ...
        """,
        "--strict-markers",
    )

    assert "has the options raise_handler_errors, start, by name; got 'begin'" in output
    assert "must be 'now', an aware datetime or epoch milliseconds, got 'tomorrow'" in output
