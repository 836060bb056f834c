"""Schedules of an application through its actuator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mqtemplate import MQApplication
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Actuator
from mqtemplate.scheduling import scheduled
from mqtemplate.testing import Harness
from tests.console.actuators import respond

TOKEN = "t-0123456789abcde"
KEYS = {
    "rocketmq.name-server": "embedded:memory",
    "mqtemplate.management.enabled": True,
    "mqtemplate.management.token": TOKEN,
}
runs: list[str] = []


@scheduled(every="1h", name="report")
def report() -> None:
    runs.append("report")


class Shop:
    """An application with a schedule, on a virtual clock."""

    def __init__(self, app: MQApplication) -> None:
        self.harness = Harness(app)
        self._actuator = app.get(Actuator)

    def state(self) -> dict[str, Any]:
        [found] = json.loads(respond(self._actuator, "GET", "/schedules", f"Bearer {TOKEN}").body)["schedules"]
        return dict(found)

    def change(self, name: str = "report", token: str = TOKEN, **change: object) -> tuple[int, Any]:
        body = json.dumps(change).encode()
        answer = respond(self._actuator, "POST", f"/schedules/{name}", f"Bearer {token}", body)
        return answer.status, json.loads(answer.body)


@pytest.fixture
def shop() -> Iterator[Shop]:
    runs.clear()
    with MQApplication(report, settings=KEYS, clock=VirtualClock()) as app:
        yield Shop(app)


@pytest.mark.feature("14.1")
def test_schedules_have_trigger_next_run_and_pause(shop: Shop) -> None:
    assert shop.state() == {
        "name": "report",
        "trigger": "every 1h",
        "nextRun": "2026-01-01T01:00:00+00:00",
        "paused": False,
        "pausedUntil": None,
    }


@pytest.mark.feature("14.1")
def test_a_schedule_is_paused_resumed_and_run_now(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    status, paused = shop.change(action="pause")
    shop.harness.advance("3h")
    none = list(runs)
    shop.change(action="trigger")
    shop.harness.advance("1s")
    one = list(runs)
    shop.change(action="resume")
    shop.harness.advance("1h")

    assert (status, paused["schedules"][0]["paused"], paused["schedules"][0]["pausedUntil"]) == (200, True, None)
    assert (none, one, runs) == ([], ["report"], ["report", "report"])
    assert [str(each.msg).split()[0] for each in caplog.records].count("schedule.changed") == 3


def test_a_pause_can_have_an_end(shop: Shop) -> None:
    shop.change(action="pause", until="2026-01-01T03:30:00+01:00")
    during = shop.state()["pausedUntil"]
    shop.harness.advance("3h")

    assert during == "2026-01-01T02:30:00+00:00"
    assert runs == ["report"]


def test_an_invalid_change_is_refused(shop: Shop) -> None:
    assert shop.change(action="stop") == (
        400,
        {"status": 400, "error": "action must be one of pause, resume, trigger, got 'stop'"},
    )
    assert "until must be an ISO time with a time zone" in shop.change(action="pause", until="2026-01-01")[1]["error"]
    assert "until must be an ISO time with a time zone" in shop.change(action="pause", until="soon")[1]["error"]
    status, unknown = shop.change("reports", action="trigger")
    assert (status, unknown["error"]) == (409, "there is no schedule 'reports'; did you mean 'report'?")
    assert shop.change(token="t-2", action="pause")[0] == 401
