"""Schedules on our server and on Apache RocketMQ, from a remote application."""

from __future__ import annotations

from datetime import timedelta

import pytest

from mqtemplate import MQApplication, ScheduledRun, Schedules, scheduled
from tests.conformance.servers import Server
from tests.waiting import eventually

pytestmark = pytest.mark.conformance


@pytest.mark.feature("X17")
def test_a_schedule_runs_is_paused_and_triggered_on_a_server(server: Server) -> None:
    """The timers, the index and the stored values are the same as on the server."""
    runs: list[ScheduledRun] = []

    @scheduled(every="2s", name="conformance", catch_up="all")
    def tick(run: ScheduledRun) -> None:
        runs.append(run)

    settings = {"rocketmq.name-server": server.address}
    with MQApplication(tick, settings=settings, environment={}) as app:
        schedules = app.get(Schedules)
        eventually(lambda: len(runs) >= 3, "three runs")
        schedules.pause("conformance")
        [state] = schedules.list()
        schedules.trigger("conformance")
        eventually(lambda: any(run.is_manual for run in runs), "the run on request")
        schedules.resume("conformance")
        count = len(runs)
        eventually(lambda: len(runs) >= count + 1, "a run after the pause")

    assert state.paused_until is not None
    times = [run.scheduled_at for run in runs if not run.is_manual]
    assert times[:3] == [times[0] + timedelta(seconds=2 * number) for number in range(3)]
    assert len(set(times)) == len(times)
    assert all(run.late >= timedelta(0) for run in runs)
