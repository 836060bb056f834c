"""Log events of messages that the broker does not take back."""

from __future__ import annotations

from collections.abc import Callable

from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.errors import SendError
from mqtemplate.listener.failures.failure_log import FailureLog
from mqtemplate.message import MessageExt


def test_an_error_of_the_broker_has_no_stack_and_a_repeated_one_has_it_once(
    make_message: Callable[..., MessageExt],
) -> None:
    """A full disk refuses each message, each time. The text of its error says what to do."""
    log = FailureLog("bill", "billing", VirtualClock())
    message = make_message()

    with capture_logs() as logs:
        for error in (SendError("not stored: the disk is full"), *(KeyError("a mistake") for _ in range(2))):
            log.send_back_failed(message, error, 5_000)

    full, first, again = logs
    assert (full["event"], full["log_level"], full["retry_in_ms"]) == ("listener.send_back_failed", "error", 5_000)
    assert full["reason"] == "not stored: the disk is full"
    assert "exc_info" not in full
    assert isinstance(first["exc_info"], KeyError)
    assert again["repeated"] == 1
    assert "exc_info" not in again
