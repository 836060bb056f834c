"""Overview: rates, lag, pending messages, dead letters, lateness, disk, health."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqtemplate.broker import GroupInfo, TopicInfo, TopicKind
from mqtemplate.console.cache import OffsetSample
from mqtemplate.console.histogram import DAY_MS, HOUR_MS, DueHistogram, histogram, pending_counts
from mqtemplate.console.site import Call, Routes, Site
from mqtemplate.errors import BrokerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.dead_letters import DeadLetters
from mqtemplate.pending import PendingQuery
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import DiskUsage

_log = get_logger("mqtemplate.dashboard")

_FIRST_PAINT_S = 0.1
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BrokerState:
    """State of the broker.

    Attributes:
        letters: Group -> number of its open dead letters, if it has some.
        store_bytes: Size of the files of the store directory; None if it is not on this machine.
    """

    now_ms: int
    topics: list[TopicInfo]
    groups: list[GroupInfo]
    letters: dict[str, int] = field(default_factory=dict)
    store_bytes: int | None = None
    disk: DiskUsage | None = None

    @property
    def lag(self) -> int:
        """Lag of all groups."""
        return sum(group.lag for group in self.groups)


def overview(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    state = error = None
    age_s = 0.0
    if site.source is not None:
        try:
            cached = site.cache.get("overview", lambda: _read(site), _FIRST_PAINT_S)
            if cached is not None:
                state, age_s = cached.value, cached.age_s
        except MQTemplateError as exc:
            error = str(exc)
    return site.page(
        call,
        "overview.html",
        state=state,
        age_s=age_s,
        error=error,
        stored=site.rates.stored(),
        consumed=site.rates.consumed(),
        history=site.rates.history(),
        due=None if state is None else _due(site, call, state.now_ms),
        busiest=[] if state is None else _busiest(state.topics, site.rates.stored()),
        slowest=[] if state is None else sorted(state.groups, key=lambda group: -group.lag)[:_SHOWN],
        application=_application(site),
    )


def prepare(site: Site) -> None:
    """Start to read what the page shows, without waiting for it."""
    try:
        site.cache.get("overview", lambda: _read(site), 0.0)
        pending_counts(site, PendingQuery(), 0.0)
    except MQTemplateError as exc:  # the page will show it
        _log.debug("dashboard.prepare_failed", reason=str(exc))


def _read(site: Site) -> BrokerState:
    with site.reading() as access:
        topics = [each for each in access.admin.topics() if each.kind is TopicKind.NORMAL]
        groups = access.admin.groups()
        now_ms = access.broker.clock.now_ms()
        letters = {name: each.open for name, each in DeadLetters(access).counts().items() if each.open}
        state = BrokerState(now_ms, topics, groups, letters, *_disk(site))
    stored = {topic.name: sum(span.max_offset for span in topic.queues) for topic in topics}
    consumed = {
        group.name: {each.queue: each.committed for each in group.progress if each.committed is not None}
        for group in groups
    }
    site.rates.add(OffsetSample(now_ms, stored, consumed))
    return state


def _disk(site: Site) -> tuple[int | None, DiskUsage | None]:
    path = None if site.source is None else site.source.path
    return (None, None) if path is None else (_size(path), FolderStoreFiles(path).disk_usage())


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:  # retention has deleted it
            continue
    return total


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
    return {
        "address": "" if site.application is None else site.application.address,
        "health": site.document("health"),
        "listeners": [] if listeners is None else listeners["listeners"],
        "late": [] if lateness is None else lateness["deliveries"],
    }


ROUTES: Routes = {("GET", "/"): overview}
