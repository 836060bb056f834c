"""Overview: problems of now, rates, lag, pending messages, dead letters, lateness, disk, health."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqtemplate.broker import TopicInfo
from mqtemplate.console.histogram import DAY_MS, HOUR_MS, DueHistogram, histogram, pending_counts
from mqtemplate.console.site import Call, Routes, Site
from mqtemplate.console.state import STATE_KEY, read_state
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.problems import (
    Problem,
    ProblemKind,
    application_problems,
    broker_problems,
    errors_first,
)
from mqtemplate.pending import PendingQuery

_log = get_logger("mqtemplate.dashboard")

_FIRST_PAINT_S = 0.1
_SHOWN = 8


def overview(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    state = error = None
    age_s = 0.0
    if site.source is not None:
        try:
            cached = site.cache.get(STATE_KEY, lambda: read_state(site), _FIRST_PAINT_S)
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
        history=site.rates.history(),
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


def prepare(site: Site) -> None:
    """Start to read what the page shows, without waiting for it."""
    try:
        site.cache.get(STATE_KEY, lambda: read_state(site), 0.0)
        pending_counts(site, PendingQuery(), 0.0)
    except MQTemplateError as exc:  # the page will show it
        _log.debug("dashboard.prepare_failed", reason=str(exc))


def _due(site: Site, call: Call, now_ms: int) -> DueHistogram | None:
    """Return what is due in the next two days; None if it is not counted yet, or the broker cannot count."""
    try:
        counted = pending_counts(site, PendingQuery(), _FIRST_PAINT_S / 2)
    except MQTemplateError:
        return None
    if counted is None:
        return None
    buckets = counted.counts.buckets
    start_ms = now_ms // HOUR_MS * HOUR_MS
    end_ms = start_ms + 2 * DAY_MS
    found = histogram(buckets, start_ms, end_ms, lambda start, end: call.url("/delayed", **{"from": start, "to": end}))
    return DueHistogram(found.bars, found.unit, found.start_ms, found.end_ms, counted.counts.total)


def _busiest(topics: list[TopicInfo], stored: dict[str, float]) -> list[TopicInfo]:
    return sorted(topics, key=lambda topic: (-stored.get(topic.name, 0), -topic.message_count))[:_SHOWN]


def _application(site: Site) -> dict[str, Any] | None:
    """Return health, listeners and lateness of the application; None without one."""
    if site.application is None:
        return None
    try:
        cached = site.cache.get("application", lambda: _documents(site), _FIRST_PAINT_S / 2)
    except BrokerError as exc:
        return {"error": str(exc), "address": site.application.address}
    return {"address": site.application.address} if cached is None else cached.value


def _documents(site: Site) -> dict[str, Any]:
    listeners = site.document("listeners")
    lateness = site.document("lateness")
    health = site.document("health")
    found: Sequence[dict[str, Any]] = [] if listeners is None else listeners["listeners"]
    return {
        "address": "" if site.application is None else site.application.address,
        "health": health,
        "listeners": found,
        "problems": application_problems(health, found),
        "late": [] if lateness is None else lateness["deliveries"],
    }


ROUTES: Routes = {("GET", "/"): overview}
