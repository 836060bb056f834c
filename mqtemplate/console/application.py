"""Pages of a running application, through its actuator: listeners, schedules, lateness, configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from mqtemplate.console.site import ApplicationDocuments, Call, Routes, Site
from mqtemplate.context.config.masking import masked
from mqtemplate.errors import MessageError, UnsupportedError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.observability.lateness import Cause
from mqtemplate.operations.application import change_each, listeners_of_group
from mqtemplate.operations.changes import LISTENER_SEEK, ChangePreview, most_of_reset, offset_value

_ACTIONS = ("pause", "resume", "concurrency")
_GROUP_ACTIONS = ("pause", "resume")
_SCHEDULE_ACTIONS = ("pause", "resume", "trigger")
_MAX_BARS = 100
_MAX_DAYS = 60

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
    document = site.document("listeners")
    found = [] if document is None else document["listeners"]
    reach = {each["group"]: _reach_of(listeners_of_group(found, each["group"])) for each in found}
    return site.page(call, "listeners.html", listeners=found, reach=reach, is_known=document is not None)


def _reach_of(listeners: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Return the number of listeners, and the processes that have them; no names of an application of one process."""
    return len(listeners), sorted({worker["worker"] for each in listeners for worker in each.get("workers", ())})


def change_group(site: Site, call: Call) -> HttpResponse:
    """Pause or resume all listeners of a group, in all processes of the application."""
    group, application, action = call.field("group"), _application(site), call.action_field(_GROUP_ACTIONS)

    def post(path: str, change: dict[str, Any]) -> Any:
        listener = unquote(path.removeprefix("listeners/"))
        with site.audit.change(f"listener.{action}", call.request.remote, listener=listener, group=group) as entry:
            found = application.post(path, change)
            entry.result["listener_state"] = found["state"]
        return found

    known = listeners_of_group(application.get("listeners")["listeners"], group)
    _, failed = change_each(post, [each["id"] for each in known], {"action": action})
    site.cache.clear()
    if failed is not None:
        raise failed
    return site.redirect(call.url("/listeners"))


def change_listener(site: Site, call: Call) -> HttpResponse:
    """Pause or resume a listener, or change its concurrency."""
    listener, application, action = call.field("listener"), _application(site), call.action_field(_ACTIONS)
    change: dict[str, Any] = {"action": action}
    if action == "concurrency":
        change["number"] = _number(call)
    number = change.get("number")
    with site.audit.change(f"listener.{action}", call.request.remote, listener=listener, to=number) as entry:
        found = application.post(f"listeners/{quote(listener, safe='')}", change)
        entry.result["listener_state"] = found["state"]
    site.cache.clear()
    return site.redirect(call.url("/listeners"))


def seek(site: Site, call: Call) -> HttpResponse:
    """Let a listener continue at another position: show what that does, then do it."""
    listener, position = call.field("listener"), _position(call)
    seek = _Seek(
        path=f"listeners/{quote(listener, safe='')}",
        change={"action": "seek", **position},
        title=f"Move listener {listener}",
        fields=[("listener", listener), *position.items()],
        target={"listener": listener, **position},
    )
    return _previewed(site, call, seek)


def undo_seek(site: Site, call: Call) -> HttpResponse:
    """Let a listener continue at the offsets before a seek: show what that does, then do it."""
    logged = site.audit.get(call.field("id"))
    of_application = logged.facts.get("application_change")
    if of_application is None:
        raise MessageError(f"change {logged.id} ({logged.action}) is not a seek that this dashboard has made")
    listener = logged.facts.get("listener")
    seek = _Seek(
        path=f"changes/{quote(str(of_application), safe=',')}",
        change={"action": "undo"},
        title=f"Undo the move of listener {listener}",
        fields=[("id", logged.id)],
        target={"listener": listener, "undo_of": logged.id},
    )
    return _previewed(site, call, seek)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seek:
    """A seek, or the undoing of one.

    Attributes:
        path: Path of the document to change, below the actuator.
        fields: Fields of the form that confirms it.
        target: Fields of the audit log.
    """

    path: str
    change: dict[str, Any]
    title: str
    fields: list[tuple[str, str]]
    target: dict[str, Any]


def _previewed(site: Site, call: Call, seek: _Seek) -> HttpResponse:
    """Show the preview of a seek; make it if the form has the number of the preview, and it is about as many now."""
    application, problem = _application(site), ""
    preview = ChangePreview.of(application.post(seek.path, {**seek.change, "dryRun": True})["preview"])
    if call.field("expected"):
        expected = call.previewed()
        if preview.count <= most_of_reset(expected):
            old = map(offset_value, preview.offsets)
            remote, shown = call.request.remote, preview.count
            with site.audit.change(LISTENER_SEEK, remote, old, shown=shown, **seek.target) as entry:
                found = application.post(seek.path, {**seek.change, "confirm": shown})
                entry.result.update(application_change=found["change"], listener_state=found["state"])
            site.cache.clear()
            return site.redirect(call.url("/listeners"))
        problem = f"The preview showed {expected:,} messages, and now it would be {preview.count:,}."
    return site.page(
        call,
        "change_preview.html",
        409 if problem else 200,
        heading=seek.title,
        request="",
        preview=preview,
        problem=problem,
        address=call.url(call.request.path),
        fields=seek.fields,
        button=seek.title,
        back=call.url("/listeners"),
    )


def _list(site: Site, call: Call, kind: str) -> HttpResponse:
    """Return the page of a document that has a list under its own name."""
    document = site.document(kind)
    found: dict[str, Any] = {kind: [] if document is None else document[kind]}
    return site.page(call, f"{kind}.html", **found, is_known=document is not None)


def _application(site: Site) -> ApplicationDocuments:
    if site.application is None:
        raise UnsupportedError("this dashboard has no application; start it with --app URL")
    return site.application


def _position(call: Call) -> dict[str, str]:
    to, back = call.field("to"), call.field("back")
    if to in ("first", "latest") and not back:
        return {"to": to}
    if back and not to:
        return {"back": back}
    raise MessageError("choose the first message, the latest, or a duration to go back; one of them")


def _number(call: Call) -> int:
    number = call.number_field("number")
    if not number:
        raise MessageError("give the number of handlers that may run at a time")
    return number


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


# --- hand-over ----------------------------------------------------------------------------------

_HAND_OVER_CHANGES = {
    # phase -> changes that may follow
    "RUNNING": ("pause", "confirm", "abort"),
    "PAUSED": ("resume", "confirm", "abort"),
    "ABORTING": ("resume",),
    "ABORTED": ("resume",),
}


def hand_over(site: Site, call: Call) -> HttpResponse:
    """Return the progress of the hand-over of the application."""
    document = site.document("handover")
    days = sorted((document or {}).get("days", {}).items())
    return site.page(
        call,
        "hand_over.html",
        found=document,
        days=days[:_MAX_DAYS],
        most_of_day=max((count for _, count in days), default=1),
        actions=_HAND_OVER_CHANGES.get((document or {}).get("phase", ""), ()),
    )


def change_hand_over(site: Site, call: Call) -> HttpResponse:
    """Show the preview of a change of the hand-over; with its confirmation, make it."""
    application = _application(site)
    action = call.action_field({each for actions in _HAND_OVER_CHANGES.values() for each in actions})
    if call.field("confirmed") != "1":
        preview = application.post(f"handover/{action}", {"dryRun": True})
        return site.page(call, "hand_over_preview.html", preview=preview, action=action, back=call.url("/hand-over"))
    with site.audit.change(f"hand_over.{action}", call.request.remote):
        application.post(f"handover/{action}", {})
    return site.redirect(call.url("/hand-over"))


# --- copy ---------------------------------------------------------------------------------------


def copy_of_store(site: Site, call: Call) -> HttpResponse:
    """Return the state of the continuous copy of the application's store directory."""
    components = (site.document("health") or {}).get("components", {})
    return site.page(call, "copy.html", found=components.get("copy"))


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
    ("POST", "/listeners/group"): change_group,
    ("POST", "/listeners/seek"): seek,
    ("POST", "/listeners/undo"): undo_seek,
    ("GET", "/schedules"): schedules,
    ("POST", "/schedules/change"): change_schedule,
    ("GET", "/hand-over"): hand_over,
    ("GET", "/copy"): copy_of_store,
    ("POST", "/hand-over/change"): change_hand_over,
    ("GET", "/lateness"): lateness,
    ("GET", "/configuration"): configuration,
}
