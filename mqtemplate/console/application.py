"""Pages of a running application, through its actuator: listeners, schedules, lateness, configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import quote

from mqtemplate.console.site import ApplicationDocuments, Call, Routes, Site
from mqtemplate.context.config.masking import masked
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.observability.lateness import Cause

_ACTIONS = ("pause", "resume", "seek", "concurrency")
_SCHEDULE_ACTIONS = ("pause", "resume", "trigger")
_MAX_BARS = 100

CAUSES = {
    Cause.BROKER_STOPPED.value: "the broker did not run",
    Cause.BACKLOG.value: "the broker released other messages first",
    Cause.RATE_LIMIT.value: "the topic is shaped: rate, jitter or spread",
    Cause.RELEASE.value: "the broker, which is another process",
    Cause.CONSUMER_LAG.value: "the listener did not fetch it: stopped, paused or far behind",
    Cause.SLOW_HANDLER.value: "handlers of the listener were busy",
}


def listeners(site: Site, call: Call) -> HttpResponse:
    """Return the listeners of the application."""
    return _list(site, call, "listeners")


def change_listener(site: Site, call: Call) -> HttpResponse:
    """Pause or resume a listener, let it continue at another position, or change its concurrency."""
    listener, application, action = call.field("listener"), _application(site), call.action_field(_ACTIONS)
    change: dict[str, Any] = {"action": action}
    if action == "seek":
        change |= _seek(call)
    elif action == "concurrency":
        change["number"] = _number(call)
    with site.audit.change(f"listener.{action}", call.request.remote, listener=listener, to=_target(change)) as result:
        found = application.post(f"listeners/{quote(listener, safe='')}", change)
        result["listener_state"] = found["state"]
    site.cache.clear()
    return site.redirect(call.url("/listeners"))


def _list(site: Site, call: Call, kind: str) -> HttpResponse:
    """Return the page of a document that has a list under its own name."""
    document = site.document(kind)
    found: dict[str, Any] = {kind: [] if document is None else document[kind]}
    return site.page(call, f"{kind}.html", **found, is_known=document is not None)


def _application(site: Site) -> ApplicationDocuments:
    if site.application is None:
        raise UnsupportedError("this dashboard has no application; start it with --app URL")
    return site.application


def _seek(call: Call) -> dict[str, Any]:
    to, back = call.field("to"), call.field("back")
    if to in ("first", "latest") and not back:
        return {"to": to}
    if back:
        return {"back": back}
    raise MessageError("choose the first message, the latest, or a duration to go back")


def _number(call: Call) -> int:
    number = call.number_field("number")
    if not number:
        raise MessageError("give the number of handlers that may run at a time")
    return number


def _target(change: dict[str, Any]) -> object:
    return next((change[key] for key in ("to", "back", "number") if key in change), None)


# --- schedules ----------------------------------------------------------------------------------


def schedules(site: Site, call: Call) -> HttpResponse:
    """Return the schedules of the application."""
    return _list(site, call, "schedules")


def change_schedule(site: Site, call: Call) -> HttpResponse:
    """Pause or resume a schedule, or run it now."""
    name, application, action = call.field("schedule"), _application(site), call.action_field(_SCHEDULE_ACTIONS)
    with site.audit.change(f"schedule.{action}", call.request.remote, schedule=name):
        application.post(f"schedules/{quote(name, safe='')}", {"action": action})
    return site.redirect(call.url("/schedules"))


# --- lateness -----------------------------------------------------------------------------------


def lateness(site: Site, call: Call) -> HttpResponse:
    """Return the recent late deliveries, and their time by cause."""
    document = site.document("lateness")
    deliveries = [] if document is None else document["deliveries"]
    totals: Counter[str] = Counter()
    for each in deliveries:
        totals.update(each["causes"])
    longest = max((each["lateMs"] for each in deliveries), default=1) or 1
    return site.page(
        call,
        "lateness.html",
        deliveries=deliveries[:_MAX_BARS],
        totals=totals.most_common(),
        all_ms=totals.total() or 1,
        longest_ms=longest,
        causes=CAUSES,
        is_known=document is not None,
    )


# --- configuration ------------------------------------------------------------------------------


def configuration(site: Site, call: Call) -> HttpResponse:
    """Return all settings with their origins, and the conditions of the starters."""
    document = site.document("configprops")
    text = (call.text("search") or "").lower()
    with_defaults = call.text("defaults") == "1"
    rows = [row for row in _rows(document) if with_defaults or row["origin"] != "default"]
    rows = [row for row in rows if text in row["key"].lower() or text in str(row["value"]).lower()]
    return site.page(
        call,
        "configuration.html",
        rows=rows,
        is_known=document is not None,
        with_defaults=with_defaults,
        conditions=_conditions(site.document("conditions")),
    )


def _rows(document: Any) -> list[dict[str, Any]]:
    if document is None:
        return []
    return [
        {
            "key": f"{prefix}.{name}" if prefix else name,
            "value": masked(value),  # the application may have an older version
            "origin": bean["inputs"].get(name, {}).get("origin", "default"),
        }
        for context in document["contexts"].values()
        for prefix, bean in context["beans"].items()
        for name, value in bean["properties"].items()
    ]


def _conditions(document: Any) -> list[dict[str, Any]]:
    if document is None:
        return []
    rows = []
    for context in document["contexts"].values():
        for name, lines in context["positiveMatches"].items():
            rows.append({"starter": name, "is_applied": True, "reason": lines[0]["message"]})
        for name, lines in context["negativeMatches"].items():
            rows.append({"starter": name, "is_applied": False, "reason": lines["notMatched"][0]["message"]})
    return rows


ROUTES: Routes = {
    ("GET", "/listeners"): listeners,
    ("POST", "/listeners/change"): change_listener,
    ("GET", "/schedules"): schedules,
    ("POST", "/schedules/change"): change_schedule,
    ("GET", "/lateness"): lateness,
    ("GET", "/configuration"): configuration,
}
