"""Overview: problems of now, rates, lag, pending messages, dead letters, lateness, disk, health."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from mqtemplate.broker import TopicInfo
from mqtemplate.console.histogram import DAY_MS, HOUR_MS, AxisTick, DueHistogram, histogram, pending_counts, time_ticks
from mqtemplate.console.site import Call, Routes, Site
from mqtemplate.console.state import FIRST_PAINT_S, application_of, state_of
from mqtemplate.engine.figures import MINUTE_MS, BrokerFigures, read_figures
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.problems import Problem, ProblemKind, broker_problems, errors_first
from mqtemplate.pending import PendingQuery

_log = get_logger("mqtemplate.dashboard")

_SHOWN = 8


def overview(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    state = error = None
    age_s = 0.0
    if site.source is not None:
        try:
            cached = state_of(site)
            if cached is not None:
                state, age_s = cached.value, cached.age_s
        except MQTemplateError as exc:
            error = str(exc)
    reading = None if state is None else state.reading
    trends, application = site.rates.lag_trends(), _application(site)
    problems = [] if reading is None else broker_problems(reading, trends)
    if application is not None:
        problems = errors_first([*problems, *application.get("problems", [])])
    return site.page(
        call,
        "overview.html",
        state=state,
        trends=trends,
        problems=[(each, *_place(call, each)) for each in problems],
        age_s=age_s,
        error=error,
        stored=site.rates.stored(),
        consumed=site.rates.consumed(),
        charts=[] if reading is None else _charts(_figures(site, reading.now_ms)),
        due=None if state is None else _due(site, call, state.reading.now_ms),
        busiest=[] if state is None else _busiest(state.topics, site.rates.stored()),
        slowest=[] if reading is None else sorted(reading.groups, key=lambda group: -group.lag)[:_SHOWN],
        application=application,
    )


_PLACES = {
    # kind -> page, field of its address, what the user does there
    ProblemKind.GROUP: ("/groups", "name", "see its members and queues"),
    ProblemKind.GROUPS: ("/groups", None, "see all groups"),
    ProblemKind.DEAD_LETTERS: ("/dead-letters", "group", "see the causes, resend or purge"),
    ProblemKind.RETENTION: ("/groups", "name", "see its progress"),
    ProblemKind.DELAYED: ("/delayed", None, "see them, deliver or cancel"),
    ProblemKind.LISTENER: ("/listeners", None, "see the listeners, resume"),
    ProblemKind.LATENESS: ("/lateness", None, "see the causes"),
    ProblemKind.DISK: ("/topics", None, "see the largest topics"),
}


def _place(call: Call, problem: Problem) -> tuple[str | None, str]:
    """Return the address of the cause of a problem, and what the user does there; None without a page."""
    if problem.kind not in _PLACES:
        return None, ""
    path, field, action = _PLACES[problem.kind]
    return call.url(path, **{field: problem.name} if field and problem.name else {}), action


def prepare(site: Site, wait_s: float = 0.0) -> None:
    """Start to read what the page shows, and wait for it, but no longer than *wait_s*."""
    end_s = time.monotonic() + wait_s
    try:
        state_of(site, 0.0)
        pending_counts(site, PendingQuery(), wait_s)
        state_of(site, max(0.0, end_s - time.monotonic()))
    except MQTemplateError as exc:  # the page will show it
        _log.debug("dashboard.prepare_failed", reason=str(exc))


def _due(site: Site, call: Call, now_ms: int) -> DueHistogram | None:
    """Return what is due in the next two days; None if it is not counted yet, or the broker cannot count."""
    try:
        counted = pending_counts(site, PendingQuery(), FIRST_PAINT_S / 2)
    except MQTemplateError:
        return None
    if counted is None:
        return None
    buckets = counted.counts.buckets
    start_ms = now_ms // HOUR_MS * HOUR_MS
    end_ms = start_ms + 2 * DAY_MS

    def address(start: int, end: int) -> str:
        return call.url("/delayed", **{"from": start, "to": end})

    found = histogram(buckets, start_ms, end_ms, address, now_ms=now_ms)
    return replace(found, total=counted.counts.total)


def _busiest(topics: list[TopicInfo], stored: dict[str, float]) -> list[TopicInfo]:
    return sorted(topics, key=lambda topic: (-stored.get(topic.name, 0), -topic.message_count))[:_SHOWN]


# --- charts -------------------------------------------------------------------------------------

_LEAST_POINTS = 3
_MAX_POINTS = 240
_GAP_MS = 3 * MINUTE_MS
"""A longer time between two figures is a gap in the line: the broker did not run, or the dashboard did not read."""
_CHART_WIDTH = 1_000
_CHART_HEIGHT = 60
_CHART_TICKS = 6
_MAX_GROUPS = 4


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a chart.

    Attributes:
        group: The group; empty for all.
        pieces: Points of the line between gaps, as SVG's ``polyline`` has them.
    """

    group: str
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Values over a time: those of all, and of some groups.

    Attributes:
        top: The largest value.
        last: The newest value.
    """

    title: str
    top: float
    last: float
    lines: tuple[ChartLine, ...]
    ticks: tuple[AxisTick, ...]


_Value = Callable[[BrokerFigures], float | None]


def _figures(site: Site, now_ms: int) -> list[BrokerFigures]:
    """Return the figures of the last day from the store directory, or of the time that the dashboard has read."""
    path = None if site.source is None else site.source.path
    if path is not None:
        found = site.cache.get("figures of the last day", lambda: read_figures(path, now_ms), FIRST_PAINT_S)
        if found is None or len(found.value) >= _LEAST_POINTS:
            return [] if found is None else found.value
    return site.rates.history()


def _charts(figures: Sequence[BrokerFigures]) -> list[Chart]:
    """Return the charts; none before there are some figures."""
    if len(figures) < _LEAST_POINTS:
        return []
    totals: Counter[str] = Counter()
    for each in figures:
        totals.update(each.lags)
    lags: list[tuple[str, _Value]] = [("", lambda each: each.lag)]
    for group, _ in totals.most_common(_MAX_GROUPS):
        lags.append((group, partial(_lag_of, group)))
    found = [
        _chart("Stored per second", figures, [("", lambda each: each.stored)], fmean),
        _chart("Consumed per second", figures, [("", lambda each: each.consumed)], fmean),
        _chart("Lag", figures, lags, max),
        _chart("Pending messages", figures, [("", lambda each: each.pending)], max),
    ]
    return [chart for chart in found if chart is not None]


def _lag_of(group: str, figures: BrokerFigures) -> float:
    return figures.lags.get(group, 0)


def _chart(
    title: str,
    figures: Sequence[BrokerFigures],
    values: Sequence[tuple[str, _Value]],
    combine: Callable[[list[float]], float],
) -> Chart | None:
    """Return a chart, the first values of which are those of all; None without values."""
    series = []
    for group, value_of in values:
        points = [(each.time_ms, value) for each in figures if (value := value_of(each)) is not None]
        series.append((group, _thinned(points, combine)))
    total = [value for _, value in series[0][1]]
    if not total:
        return None
    start_ms, end_ms, top = figures[0].time_ms, figures[-1].time_ms, max(total)
    lines = tuple(ChartLine(group, tuple(_pieces(points, start_ms, end_ms, top))) for group, points in series)
    return Chart(title, top, total[-1], lines, tuple(time_ticks(start_ms, end_ms, _CHART_TICKS)))


def _thinned(points: list[tuple[int, float]], combine: Callable[[list[float]], float]) -> list[tuple[int, float]]:
    """Return at most `_MAX_POINTS` points: each has the last time of several, and their values combined."""
    step = max(1, -(-len(points) // _MAX_POINTS))
    parts = [points[at : at + step] for at in range(0, len(points), step)]
    return [(part[-1][0], combine([value for _, value in part])) for part in parts]


def _pieces(points: list[tuple[int, float]], start_ms: int, end_ms: int, top: float) -> Iterator[str]:
    """Yield the points of the line between gaps."""
    gap_ms = max(_GAP_MS, 3 * (end_ms - start_ms) // _MAX_POINTS)
    piece: list[str] = []
    before_ms = start_ms
    for time_ms, value in points:
        if piece and time_ms - before_ms > gap_ms:
            yield " ".join(piece)
            piece = []
        left = (time_ms - start_ms) * _CHART_WIDTH / max(1, end_ms - start_ms)
        piece.append(f"{left:.1f},{_CHART_HEIGHT * (1 - value / (top or 1)):.1f}")
        before_ms = time_ms
    yield " ".join(piece)


# --- the application ----------------------------------------------------------------------------


def _application(site: Site) -> dict[str, Any] | None:
    """Return health, listeners and lateness of the application; None without one."""
    if site.application is None:
        return None
    shown: dict[str, Any] = {"address": site.application.address}
    try:
        cached = application_of(site, FIRST_PAINT_S / 2)
    except BrokerError as exc:
        return shown | {"error": str(exc)}
    if cached is not None:
        state = cached.value
        shown |= {"health": state.health, "listeners": state.listeners, "late": state.late, "problems": state.problems}
    return shown


ROUTES: Routes = {("GET", "/"): overview}
