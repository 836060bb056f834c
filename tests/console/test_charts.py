"""The charts of the overview: of the last day from the store directory, or of the readings of the dashboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.engine.figures import MINUTE_MS
from tests.console.pages import Answer, Shop, open_shop

pytestmark = pytest.mark.usefixtures("utc")


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard over a store directory."""
    with open_shop(tmp_path, store=tmp_path / "store") as shop:
        shop.sign_in()
        yield shop


def charts(page: Answer) -> dict[str, str]:
    """Return title and description of each chart."""
    found = re.findall(r'role="img" aria-label="([^"]*): (now [^"]*)"', page.html)
    return dict(found)


def lines(page: Answer, title: str) -> dict[str, list[int]]:
    """Return the numbers of points between gaps, by the class of the line."""
    [chart] = re.findall(rf'role="img" aria-label="{title}:.*?</svg>\s*</svg>', page.html, re.DOTALL)
    found: dict[str, list[int]] = {}
    for name, points in re.findall(r'<polyline class="([^"]*)" points="([^"]*)"', chart):
        found.setdefault(name, []).append(len(points.split()))
    return found


def test_there_are_no_charts_before_some_minutes_have_passed(stored: Shop) -> None:
    stored.harness.advance("3m")

    assert charts(stored.page("/")) == {}


def test_the_charts_show_what_was_stored_consumed_unread_and_pending(stored: Shop) -> None:
    stored.send_due(48)
    stored.harness.advance("1m")
    for number in range(120):
        stored.send("orders", b"x", f"order-{number}")
    stored.harness.advance("1m")
    stored.app.containers[0].pause()
    for number in range(60):
        stored.send("orders", b"x", f"more-{number}")
    stored.harness.advance("2m")

    page = stored.page("/")

    assert charts(page) == {
        "Stored per second": "now 0, at most 2",
        "Consumed per second": "now 0, at most 2",
        "Lag": "now 60, at most 60",
        "Pending messages": "now 1, at most 1",
    }
    assert lines(page, "Lag") == {"line-0": [3], "line-1": [3]}
    assert page.link("billing").endswith("/groups?name=billing")


def test_a_time_without_figures_is_a_gap(stored: Shop) -> None:
    """The broker did not run, or the machine slept: the clock went on meanwhile."""
    stored.harness.advance("5m")
    clock = stored.broker.clock
    assert isinstance(clock, VirtualClock)
    clock.move_ms(30 * MINUTE_MS)
    stored.harness.advance("5m")

    assert lines(stored.page("/"), "Stored per second") == {"line-0": [4, 6]}


def test_without_a_store_directory_the_readings_of_the_dashboard_are_drawn(shop: Shop) -> None:
    for number in range(5):
        shop.send("orders", b"x", f"order-{number}")
        shop.harness.advance("10s")
        page = shop.page("/")

    assert set(charts(page)) == {"Stored per second", "Consumed per second", "Lag"}
    assert charts(page)["Stored per second"] == "now 0.1, at most 0.1"
