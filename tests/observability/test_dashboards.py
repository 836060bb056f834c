"""The Grafana dashboard and the alert rules use metrics and labels that exist, and Grafana and Prometheus take them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqtemplate.observability import INSTRUMENTS
from tests.programs import run

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


DASHBOARD: dict[str, Any] = json.loads((FOLDER / "mqtemplate.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel, target) for panel in PANELS for target in panel["targets"]]
QUERY_IDS = [f"{panel['title']} {target['refId']}" for panel, target in QUERIES]
UNITS = {"short", "s", "bytes", "ops", "reqps", "percentunit", "bool_yes_no"}
"""Ids of Grafana's units that the panels use; Grafana shows an unknown one behind the value as it is."""
UNITS_OF_NAMES = {"_seconds": {"s"}, "_bytes": {"bytes"}}


def dashboard_expressions() -> Iterator[str]:
    yield from (target["expr"] for _, target in QUERIES)
    yield from (variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query")


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
    cells: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for cell in product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in cells, f"{panel['title']} lies on {cells[cell]}"
            assert cell[0] < 24
            cells[cell] = panel["title"]

    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def unit_of(panel: dict[str, Any], ref_id: str) -> str:
    """Return the unit of a query: an override, or the default of its panel."""
    found = panel["fieldConfig"]["defaults"]["unit"]
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["id"] == "byFrameRefID"
        if override["matcher"]["options"] == ref_id:
            [each] = override["properties"]
            assert each["id"] == "unit"
            found = each["value"]
    return str(found)


def test_each_panel_has_what_grafana_needs_to_show_it() -> None:
    variables = [each["name"] for each in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "instance"]
    titles = [panel["title"] for panel in PANELS]
    assert len({*titles}) == len(titles)
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        ref_ids = [target["refId"] for target in panel["targets"]]
        assert ref_ids == sorted({*ref_ids}), panel["title"]
        matched = [each["matcher"]["options"] for each in panel["fieldConfig"]["overrides"]]
        assert {*matched} <= {*ref_ids}, panel["title"]


@pytest.mark.parametrize(("panel", "target"), QUERIES, ids=QUERY_IDS)
def test_a_query_shows_the_chosen_instances_by_name_and_in_its_unit(
    panel: dict[str, Any], target: dict[str, Any]
) -> None:
    """Two series of one query have different names; a panel with seconds and a number would show one of them wrong."""
    expression, unit = target["expr"], unit_of(panel, target["refId"])

    used = set(re.findall(r"\$\{?(\w+)", expression))
    assert used <= {"instance", "__rate_interval"}
    for selector in re.findall(r"\b(?:messaging|mqtemplate)_\w+\{([^}]*)\}", expression):
        assert 'instance=~"$instance"' in selector.split(",")
    aggregated = re.match(r"(?:histogram_quantile\([\d.]+, )?(?:sum|max|min|count)(?: by \(([^)]*)\) )?\(", expression)
    assert aggregated, "series of two instances would have one name"
    kept = {*(aggregated[1] or "").split(", ")} - {"", "le"}
    assert kept == set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert unit in UNITS
    [name, *_] = [each for each in NAME.findall(expression) if each in METRICS]
    is_count = expression.startswith("count")
    for ending, units in UNITS_OF_NAMES.items():
        has_ending = re.search(rf"{ending}(?:_total|_bucket)?$", name) is not None
        assert has_ending == (unit in units) or is_count, f"{name} in {unit}"


def test_prometheus_takes_each_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing; on Debian: apt-get install prometheus")
    rules = [
        {
            "record": f"query:{number}",
            "expr": target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*"),
        }
        for number, (_, target) in enumerate(QUERIES)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    done = run([promtool, "check", "rules", "rules.yml"], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout


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
