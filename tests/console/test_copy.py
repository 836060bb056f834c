"""The page of the continuous copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, Actuator, ActuatorSources, Dashboard, dashboard_audit
from mqtemplate.console.client import LocalActuator
from mqtemplate.copy import CopiedBroker
from mqtemplate.copy.follower import Follower
from mqtemplate.engine.settings import CopyOptions
from mqtemplate.message import Message
from mqtemplate.observability import HealthChecks
from mqtemplate.observability.health import broker_checks
from mqtemplate.observability.settings import HealthSettings
from mqtemplate.testing import Harness
from tests.console.pages import TOKEN, Shop, open_shop
from tests.copy.recorded import small_settings

MANAGEMENT = "management-0123456789"


def dashboard_of(broker: CopiedBroker, folder: Path) -> Shop:
    """Return a dashboard that has the health of an application with this broker."""
    checks = HealthChecks(broker_checks(broker, HealthSettings()), is_virtual=True)
    actuator = Actuator(ActuatorSources(health=checks), token=MANAGEMENT)
    dashboard = Dashboard(
        None,
        LocalActuator(actuator, MANAGEMENT),
        access=Access(TOKEN, allow_changes=False, clock=broker.clock),
        audit=dashboard_audit(folder / "changes.jsonl", broker.clock),
        clock=broker.clock,
    )
    shop = Shop(None, broker, dashboard, folder / "changes.jsonl")  # type: ignore[arg-type]  # no application
    shop.sign_in()
    return shop


def test_the_page_shows_lag_snapshot_epoch_owner_and_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    clock, url = VirtualClock(1_764_547_200_000), f"file://{tmp_path / 'copy'}"
    place = CopyOptions(to=url, interval=5_000)
    with CopiedBroker(tmp_path / "store", small_settings(), clock, copy=place) as broker:
        harness = Harness(broker)
        harness.advance("1s")
        with Follower(url, tmp_path / "standby", settings=small_settings(), clock=clock) as standby:
            standby.catch_up()
            harness.advance("21s")
            broker.sends.send(Message("orders", b"one"))
            harness.advance("1s")

            text, end = dashboard_of(broker, tmp_path).page("/copy").text, broker.store.end_offset

    assert f"To {url} up" in text
    assert f"Not copied yet {end} B, for" in text
    assert "Last snapshot 2025-12-01 00:00:00" in text
    assert "Epoch 1" in text
    assert f"{tmp_path / 'store'} Lease none" in text
    assert f"{tmp_path / 'standby'} 2025-12-01 00:00:0" in text


def test_without_a_copy_the_page_names_the_setting(tmp_path: Path) -> None:
    with open_shop(tmp_path) as shop:
        shop.sign_in()

        assert "mqtemplate.copy.to" in shop.page("/copy").text
