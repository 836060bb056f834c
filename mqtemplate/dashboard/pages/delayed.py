"""The delay timeline: a histogram of what falls due, and the pending messages."""

from __future__ import annotations

from typing import Any

from mqtemplate.admin.delayed import PendingMessages
from mqtemplate.broker import Capability
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.histogram import DAY_MS, HOUR_MS, MINUTE_MS, Histogram, histogram, unit_of
from mqtemplate.dashboard.pending_counts import Counted, pending_counts
from mqtemplate.dashboard.rendering import render
from mqtemplate.dashboard.site import HTML, Routes, Site
from mqtemplate.errors import MQTemplateError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.pending import PendingQuery

_PAGE = 50
_FIRST_PAINT_S = 0.02
_PATIENT_S = 60.0
_SPANS = (("minute", HOUR_MS), ("hour", 2 * DAY_MS), ("day", 30 * DAY_MS))


def delayed(site: Site, call: Call) -> HttpResponse:
    """Return the page. What takes long to read comes later, as parts of the page."""
    query = query_of(call)
    is_quick = query.tag is None and query.after_ms is None
    with site.reading() as admin:
        now_ms = admin.broker.clock.now_ms()
        can_change = Capability.SCHEDULE_CHANGE in admin.broker.capabilities
        can_change = can_change or Capability.TIMER_CHANGE in admin.broker.capabilities
    # The list first: beside the thread that counts it would take longer.
    listing = _listing(site, call, query) if is_quick else None
    timeline = _timeline(site, call, now_ms, _FIRST_PAINT_S)
    values: dict[str, Any] = {
        "query": query,
        "now_ms": now_ms,
        "can_change": can_change,
        "spans": [
            (name, call.same_page(**{"from": now_ms, "to": now_ms + length, "cursor": None})) for name, length in _SPANS
        ],
        "everything": call.same_page(**{"from": None, "to": None, "cursor": None}),
        "timeline": timeline,
        "listing": listing,
    }
    return site.page(call, "delayed.html", **values)


def timeline_part(site: Site, call: Call) -> HttpResponse:
    """Return the histogram, as a part of the page."""
    with site.reading() as admin:
        now_ms = admin.broker.clock.now_ms()
    timeline = _timeline(site, call, now_ms, _PATIENT_S)
    return HttpResponse(200, render("delayed_timeline.html", {"timeline": timeline, "url": call.url}), HTML)


def list_part(site: Site, call: Call) -> HttpResponse:
    """Return the list, as a part of the page."""
    listing = _listing(site, call, query_of(call))
    return site.page(call, "delayed_list.html", listing=listing, query=query_of(call))


def query_of(call: Call) -> PendingQuery:
    """Return the filter of the address."""
    return PendingQuery(
        topic=call.text("topic"),
        key=call.text("key"),
        tag=call.text("tag"),
        after_ms=call.time_ms("from"),
        before_ms=call.time_ms("to"),
    )


def _listing(site: Site, call: Call, query: PendingQuery) -> dict[str, Any]:
    with site.reading() as admin:
        page = PendingMessages(admin).page(query, _PAGE, call.text("cursor"))
        now_ms = admin.broker.clock.now_ms()
    following = None if page.cursor is None else call.url("/delayed", **{**call.query, "cursor": page.cursor})
    return {"messages": page.messages, "next": following, "now_ms": now_ms}


# --- the histogram ------------------------------------------------------------------------------


def _timeline(site: Site, call: Call, now_ms: int, wait_s: float) -> dict[str, Any]:
    """Return the histogram, or why there is none."""
    query = query_of(call)
    # Topic and time are in the timing wheel and cost little to compare; key and tag are in each record.
    wanted = PendingQuery(topic=query.topic)
    if query.key is not None or query.tag is not None:
        return {"state": "filtered", "histogram": None}
    try:
        counted = pending_counts(site, wanted, wait_s)
        if counted is None:
            return {"state": "counting", "histogram": None, "address": _part_address(call, "/delayed/timeline")}
        start_ms, end_ms = _window(counted, query, now_ms)
        unit_ms, _ = unit_of(end_ms - start_ms)
        if counted.unit_ms > unit_ms:
            exact = PendingQuery(topic=query.topic, after_ms=start_ms, before_ms=end_ms)
            counted = pending_counts(site, exact, wait_s, unit_ms)
            if counted is None:
                return {"state": "counting", "histogram": None, "address": _part_address(call, "/delayed/timeline")}
    except MQTemplateError as exc:
        return {"state": "failed", "histogram": None, "reason": str(exc)}
    drawn = histogram(counted.counts.buckets, start_ms, end_ms, lambda start, end: _address(call, start, end))
    return {
        "state": "counted",
        "histogram": drawn,
        "pending": counted.counts.total,
        "age_s": counted.age_s,
        "now_ms": now_ms,
        **_moves(call, drawn),
    }


def _window(counted: Counted, query: PendingQuery, now_ms: int) -> tuple[int, int]:
    """Return start and end: those of the filter, or those of the messages."""
    buckets = counted.counts.buckets
    first = min(now_ms, next(iter(buckets), now_ms))
    last = max(buckets, default=now_ms) + counted.unit_ms
    start_ms = query.after_ms if query.after_ms is not None else first
    end_ms = query.before_ms if query.before_ms is not None else max(last, start_ms + HOUR_MS)
    return start_ms, max(end_ms, start_ms + MINUTE_MS)


def _moves(call: Call, drawn: Histogram) -> dict[str, str | None]:
    """Return the addresses of the spans before and after, and of a longer one."""
    length = drawn.end_ms - drawn.start_ms
    middle = (drawn.start_ms + drawn.end_ms) // 2
    longer = next((span for span in (HOUR_MS, DAY_MS, 7 * DAY_MS, 30 * DAY_MS) if span > length), None)
    return {
        "earlier": _address(call, max(0, drawn.start_ms - length), drawn.start_ms),
        "later": _address(call, drawn.end_ms, drawn.end_ms + length),
        "longer": None if longer is None else _address(call, max(0, middle - longer // 2), middle + longer // 2),
    }


def _address(call: Call, start_ms: int, end_ms: int) -> str:
    return call.url("/delayed", **{**call.query, "from": start_ms, "to": end_ms, "cursor": None})


def _part_address(call: Call, path: str) -> str:
    return call.url(path, **call.query)


ROUTES: Routes = {
    ("GET", "/delayed"): delayed,
    ("GET", "/delayed/timeline"): timeline_part,
    ("GET", "/delayed/list"): list_part,
}
