"""An outage is logged when it starts, each half minute, and when it ends."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers.remote.cluster.outages import SUMMARY_MS, Outages
from mqtemplate.clock import VirtualClock
from mqtemplate.errors import RemoteConnectError

REFUSED = RemoteConnectError("connection refused")
A, B = "10.0.0.1:10911", "10.0.0.2:10911"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def outages(clock: VirtualClock) -> Outages:
    return Outages(clock)


def test_an_outage_has_one_line_at_its_start_and_one_at_its_end(outages: Outages, clock: VirtualClock) -> None:
    with capture_logs() as logs:
        for _ in range(5):
            outages.failed(A, REFUSED)
        clock.move_ms(2_500)
        outages.answered(A)
        outages.answered(A)

    assert logs == [
        {"event": "remote.outage_started", "log_level": "warning", "server": A, "reason": "connection refused"},
        {
            "event": "remote.reconnected",
            "log_level": "info",
            "server": A,
            "outage_ms": 2_500,
            "failed_requests": 5,
        },
    ]


def test_the_outage_of_several_servers_is_one(outages: Outages, clock: VirtualClock) -> None:
    with capture_logs() as logs:
        outages.failed(A, REFUSED)
        outages.failed(B, REFUSED)
        outages.answered(A)
        clock.move_ms(1_000)
        outages.answered(B)

    assert [log["event"] for log in logs] == ["remote.outage_started", "remote.reconnected"]
    assert logs[1]["outage_ms"] == 1_000


def test_a_summary_comes_each_half_minute(outages: Outages, clock: VirtualClock) -> None:
    with capture_logs() as logs:
        outages.failed(A, REFUSED)
        for _ in range(3):
            next_ms = outages.step()
            assert next_ms is not None
            clock.move_ms(next_ms - clock.now_ms())
            outages.failed(A, REFUSED)
        outages.step()

    summaries = [log for log in logs if log["event"] == "remote.outage_continued"]
    assert [log["outage_ms"] for log in summaries] == [SUMMARY_MS, 2 * SUMMARY_MS, 3 * SUMMARY_MS]
    assert summaries[-1]["servers"] == [A]
    assert summaries[-1]["failed_requests"] == 4


def test_a_server_to_which_no_request_is_sent_any_more_ends_the_outage(outages: Outages, clock: VirtualClock) -> None:
    """A broker that was removed from the cluster never answers again."""
    with capture_logs() as logs:
        outages.failed(A, REFUSED)
        for _ in range(2):
            clock.move_ms(SUMMARY_MS)
            outages.step()

    assert [log["event"] for log in logs][1:] == ["remote.outage_continued", "remote.outage_dropped"]
    assert not outages.is_open
    assert outages.step() is None
