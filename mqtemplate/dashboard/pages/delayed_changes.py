"""Changes of pending messages: cancel, deliver now, shift. Each has a preview."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.delayed import BulkChange, PendingMessages
from mqtemplate.dashboard.call import Call, at_most, check_count, parse_span, parse_time
from mqtemplate.dashboard.jobs import Job
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.delay.recall_handle import decode_handle
from mqtemplate.errors import MessageError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.pending import PendingMessage, PendingQuery

_ACTIONS = {"cancel": "Cancel", "deliver": "Deliver now", "shift": "Shift"}
_FILTERS = ("topic", "key", "tag", "from", "to")
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of some messages, from a form.

    Attributes:
        handles: The chosen messages; empty for all that match the query.
        shift_ms: For ``shift``: how much later; negative for earlier.
        until_ms: Messages stored later are left alone: the user has not seen them.
    """

    action: str
    handles: tuple[str, ...]
    query: PendingQuery
    shift_ms: int
    until_ms: int | None
    rate: float | None

    @property
    def name(self) -> str:
        """The change as a title."""
        return _ACTIONS[self.action]


def change_of(call: Call) -> Change:
    """Return the change that a form describes.

    Raises:
        MessageError: The form is incomplete.
    """
    action, scope = call.field("action"), call.scope_field()
    if action not in _ACTIONS:
        raise MessageError(f"action must be one of {', '.join(_ACTIONS)}, got {action!r}")
    handles = tuple(call.fields("handle"))
    if scope == "chosen" and not handles:
        raise MessageError("no message is chosen; tick some, or change all that match")
    rate = call.field("rate")
    return Change(
        action=action,
        handles=handles if scope == "chosen" else (),
        query=PendingQuery(
            topic=call.field("topic") or None,
            key=call.field("key") or None,
            tag=call.field("tag") or None,
            after_ms=parse_time(call.field("from"), "from"),
            before_ms=parse_time(call.field("to"), "to"),
        ),
        shift_ms=parse_span(call.field("shift"), "shift") if action == "shift" else 0,
        until_ms=parse_time(call.field("until"), "until"),
        rate=parse_rate(rate) if rate else None,
    )


def parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise MessageError(f"the rate must be a number above 0 per second, got {text!r}; leave it empty for no limit")
    return rate


def preview(site: Site, call: Call) -> HttpResponse:
    """Show what a change would do."""
    change = change_of(call)
    with site.reading() as admin:
        pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
        if change.handles:
            shown = list(_chosen(admin, change.handles))
            total = len(shown)
            shown = shown[:_SHOWN]
        else:
            total = pending.counts(change.query, 86_400_000).total
            shown = list(pending.all(change.query, _SHOWN))
    fields = [(name, call.field(name)) for name in ("action", "scope", "shift", *_FILTERS)]
    return site.page(
        call,
        "delayed_preview.html",
        change=change,
        total=total,
        shown=shown,
        missing=len(change.handles) - total if change.handles else 0,
        fields=[pair for pair in fields if pair[1]],
        now_ms=now_ms,
        back=_back(call),
    )


def apply(site: Site, call: Call) -> HttpResponse:
    """Make a change that was shown before."""
    change, expected = change_of(call), call.previewed()
    with site.reading() as admin:
        check_count(expected, _reached(admin, change))
    remote, back = call.request.remote, _back(call)

    def work(job: Job) -> str:
        target = {"handles": list(change.handles) or None, "filter": _filter_text(change.query), "shown": expected}
        with (
            site.changing() as admin,
            site.audit.change(f"delayed.{change.action}", remote, **target, shift_ms=change.shift_ms or None) as result,
        ):
            done = _apply(admin, change, expected, job)
            result.update({status.value: count for status, count in done.counts.items()}, unsupported=done.unsupported)
        return _result_text(done)

    return site.start_job(call, f"{change.name} {expected:,} pending messages", expected or None, back, work)


def _apply(admin: BrokerAdmin, change: Change, expected: int, job: Job) -> BulkChange:
    pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
    messages = at_most(expected, _reached(admin, change))
    if change.action == "cancel":
        return pending.cancel_all(messages, change.rate, job.advance)
    if change.action == "deliver":
        return pending.reschedule_all(messages, now_ms, change.rate, job.advance)
    return pending.shift_all(messages, change.shift_ms, change.rate, job.advance)


def _reached(admin: BrokerAdmin, change: Change) -> Iterator[PendingMessage]:
    return _chosen(admin, change.handles) if change.handles else _seen(PendingMessages(admin), change)


def _seen(pending: PendingMessages, change: Change) -> Iterator[PendingMessage]:
    """Yield the messages that match, and were stored before the preview."""
    for message in pending.all(change.query):
        if change.until_ms is None or message.store_timestamp <= change.until_ms:
            yield message


def _chosen(admin: BrokerAdmin, handles: Iterable[str]) -> Iterator[PendingMessage]:
    """Yield the chosen messages that are still pending."""
    for text in handles:
        handle = decode_handle(text)
        page = admin.broker.pending(PendingQuery(key=handle.msg_id, topic=handle.topic))
        same = [each for each in page.messages if decode_handle(each.handle).physical_offset == handle.physical_offset]
        yield from same[:1]


def _filter_text(query: PendingQuery) -> dict[str, object] | None:
    given = {name: getattr(query, name) for name in ("topic", "key", "tag", "after_ms", "before_ms")}
    return {name: value for name, value in given.items() if value is not None} or None


def _result_text(done: BulkChange) -> str:
    parts = [f"{count:,} {status.value}" for status, count in done.counts.items()]
    if done.unsupported:
        parts.append(f"{done.unsupported:,} that this broker cannot change")
    return ", ".join(parts) or "no message was pending any more"


def _back(call: Call) -> str:
    return call.url("/delayed", **{name: call.field(name) for name in _FILTERS if call.field(name)})


ROUTES: Routes = {("POST", "/delayed/preview"): preview, ("POST", "/delayed/change"): apply}
