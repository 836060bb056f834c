"""The hand-over of an application: its actuator endpoint, its metrics, and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, Actuator, ActuatorSources, Dashboard, dashboard_audit
from mqtemplate.console.client import LocalActuator
from mqtemplate.handover import HandOverBroker, HandOverOptions, MoverSettings
from mqtemplate.handover.control import ApplicationHandOver
from mqtemplate.http.exchange import HttpRequest
from mqtemplate.message import Message, Property
from mqtemplate.observability import HealthChecks
from tests.console.pages import TOKEN as SIGN_IN
from tests.console.pages import Shop, open_shop

HOUR_MS = 3_600_000
TOKEN = "management-0123456789"


@dataclass
class Application:
    """An application with a hand-over, as far as its actuator sees it."""

    broker: HandOverBroker
    actuator: Actuator
    hand_over: ApplicationHandOver

    def call(self, method: str, path: str, change: dict[str, Any] | None = None) -> tuple[int, Any]:
        body = b"" if change is None else json.dumps(change).encode()
        headers = {"authorization": f"Bearer {TOKEN}"}
        response = self.actuator.handle(
            HttpRequest(method=method, path=f"/{path}", headers=headers, body=body, remote="127.0.0.1")
        )
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)

    @property
    def phase(self) -> HandOverPhase:
        state = self.broker.old.hand_over.state()
        assert state is not None
        return state.phase


@pytest.fixture
def application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setenv("TZ", "UTC")
    clock = VirtualClock(1_764_547_200_000)
    old, new = EmbeddedBroker(tmp_path / "old", clock=clock), EmbeddedBroker(clock=clock)
    options = HandOverOptions(target="mq1:9876", origin="embedded:./data", mover=MoverSettings())
    with HandOverBroker(old, new, options) as broker:
        for hours in (1, 30):
            old.sends.send(Message("reminders", b"x", {Property.TIMER_DELAY_MS: str(hours * HOUR_MS)}))
        old.groups.commit_offset("billing", old.queues("reminders")[0], 0)
        found = ApplicationHandOver(broker)
        sources = ActuatorSources(health=HealthChecks({}), hand_over=found)
        yield Application(broker, Actuator(sources, token=TOKEN), found)


# --- the actuator ---------------------------------------------------------------------------------


def test_the_endpoint_has_the_status(application: Application) -> None:
    status, document = application.call("GET", "handover")

    assert status == 200
    assert (document["phase"], document["target"], document["pending"]) == ("RUNNING", "mq1:9876", 2)
    assert document["days"] == {"2025-12-01": 1, "2025-12-02": 1}
    assert [each["name"] for each in document["groups"]] == ["billing"]


def test_an_application_without_a_hand_over_has_no_endpoint() -> None:
    assert "handover" not in Actuator(ActuatorSources(health=HealthChecks({}))).endpoints


def test_the_status_needs_the_token(application: Application) -> None:
    response = application.actuator.handle(
        HttpRequest(method="GET", path="/handover", headers={}, body=b"", remote="127.0.0.1")
    )

    assert response.status == 401


def test_a_change_has_a_preview_and_takes_effect(application: Application) -> None:
    status, preview = application.call("POST", "handover/pause", {"dryRun": True})
    assert (status, preview["title"]) == (200, "Pause the hand-over to mq1:9876")
    assert application.phase is HandOverPhase.RUNNING

    assert application.call("POST", "handover/pause", {})[1]["phase"] == "PAUSED"

    assert application.phase is HandOverPhase.PAUSED


def test_a_change_that_is_not_possible_says_why(application: Application) -> None:
    status, document = application.call("POST", "handover/confirm", {})
    assert status == 409
    assert "the old broker is not empty" in document["error"]

    status, document = application.call("POST", "handover/stop", {})
    assert status == 404
    assert "there is: pause, resume, confirm, abort" in document["error"]


def test_the_metrics_count_what_is_not_in_the_new_broker(application: Application) -> None:
    found = {each.name: each.value for each in application.hand_over.samples()}

    assert found == {"hand_over.pending": 2, "hand_over.in_transit": 0, "hand_over.running": True}


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture
def shop(application: Application, tmp_path: Path) -> Shop:
    clock, audit_path = application.broker.clock, tmp_path / "changes.jsonl"
    dashboard = Dashboard(
        None,
        LocalActuator(application.actuator, TOKEN),
        access=Access(SIGN_IN, allow_changes=True, clock=clock),
        audit=dashboard_audit(audit_path, clock),
        clock=clock,
    )
    found = Shop(None, application.broker.old, dashboard, audit_path)  # type: ignore[arg-type]  # no application
    found.sign_in()
    return found


def test_the_page_shows_progress_days_groups_and_what_is_left(shop: Shop) -> None:
    text = shop.page("/hand-over").text

    assert "To mq1:9876 running" in text
    assert "Moved 0 of 2 (0 %)" in text
    assert "Pending at the old broker 2" in text
    assert "2025-12-01 1" in text
    assert "billing 0 not there" in text
    assert "Left at the old broker" in text


def test_a_change_on_the_page_asks_first(shop: Shop, application: Application) -> None:
    form = shop.page("/hand-over").form("/hand-over/change", "pause")
    asked = shop.post("/hand-over/change", {**form, "action": "pause"})
    assert "Pause the hand-over to mq1:9876?" in asked.text
    assert application.phase is HandOverPhase.RUNNING

    confirmed = asked.form("/hand-over/change")
    shop.change("/hand-over/change", {**confirmed, "action": "pause"})

    assert application.phase is HandOverPhase.PAUSED
    assert "hand_over.pause" in shop.audit_path.read_text()
    assert "Resume" in shop.page("/hand-over").text


def test_a_change_that_is_refused_is_explained(shop: Shop) -> None:
    form = shop.page("/hand-over").form("/hand-over/change")

    refused = shop.post("/hand-over/change", {**form, "action": "confirm"})

    assert "the old broker is not empty" in refused.text


def test_the_navigation_has_the_page(shop: Shop) -> None:
    assert "Hand-over" in shop.page("/listeners").text


def test_an_application_without_a_hand_over_has_a_page_that_says_so_and_no_link_to_it(tmp_path: Path) -> None:
    with open_shop(tmp_path) as shop:
        shop.sign_in()

        assert "This application stays with its broker" in shop.page("/hand-over").text
        assert "Hand-over" not in shop.page("/listeners").text
