"""The Grafana dashboard and the alert rules use metrics and labels that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqtemplate.observability import INSTRUMENTS

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
METRICS = {name for instrument in INSTRUMENTS for name in instrument.prometheus_names}
LABELS = {
    "instance",
    "job",
    "le",
    "error_type",
    "messaging_consumer_group_name",
    "messaging_destination_name",
    "mqtemplate_broker",
    "mqtemplate_cause",
    "mqtemplate_decision",
    "mqtemplate_horizon",
    "mqtemplate_level",
    "mqtemplate_listener",
    "mqtemplate_method",
    "mqtemplate_next_step",
    "mqtemplate_service",
    "mqtemplate_state",
    "mqtemplate_worker",
}
NAME = re.compile(r"\b(?:messaging|mqtemplate)_\w+")


def dashboard_expressions() -> Iterator[str]:
    dashboard: dict[str, Any] = json.loads((FOLDER / "mqtemplate.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query")


def alert_expressions() -> Iterator[str]:
    rules: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


@pytest.mark.feature("14.3")
@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions])
def test_all_names_exist(expressions: Any) -> None:
    used = {name for expression in expressions() for name in NAME.findall(expression)}

    assert used - METRICS - LABELS == set()
    assert len(used & METRICS) >= 10


def test_each_group_of_metrics_has_a_panel() -> None:
    """A group is the first part of a name: ``copy`` of ``copy.lag_ms``."""
    used = {name for expression in dashboard_expressions() for name in NAME.findall(expression)}
    shown = {each.source.partition(".")[0] for each in INSTRUMENTS if used & {*each.prometheus_names}}

    assert shown == {each.source.partition(".")[0] for each in INSTRUMENTS}


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    dashboard: dict[str, Any] = json.loads((FOLDER / "mqtemplate.json").read_text(encoding="utf-8"))
    cells: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        for cell in product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in cells, f"{panel['title']} lies on {cells[cell]}"
            assert cell[0] < 24
            cells[cell] = panel["title"]

    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions])
def test_counters_are_used_as_rates_and_brackets_match(expressions: Any) -> None:
    for expression in expressions():
        for counter in re.findall(r"\w+_(?:total|bucket)\b(?:\{[^}]*\})?(\[?)", expression):
            assert counter or "label_values" in expression or " unless max_over_time(" in expression, expression
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")


def test_each_alert_says_what_is_wrong() -> None:
    rules: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = set(re.findall(r"by \(([^)]*)\)", rule["expr"])[0].split(", ")) if "by (" in rule["expr"] else LABELS
        assert shown <= kept, rule["alert"]
