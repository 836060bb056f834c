"""Pending messages: a histogram of what falls due, the list, and changes, each with a preview."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

from mqtemplate.broker import Broker, Capability, DelayConsole
from mqtemplate.console.histogram import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    Counted,
    DueHistogram,
    histogram,
    local_time,
    pending_counts,
    pending_topics,
    unit_of,
)
from mqtemplate.console.rendering import render
from mqtemplate.console.site import HTML, Call, Routes, Site
from mqtemplate.errors import MessageError, MQTemplateError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.message import MessageQueue
from mqtemplate.metrics import MetricKind, Metrics, MetricSample
from mqtemplate.observability.collectors import PendingByHorizon
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import parse_property, parse_rate, parse_span
from mqtemplate.operations.changes import Change
from mqtemplate.operations.delayed import (
    MOST_COUNTED,
    DelayedOperations,
    PendingAction,
    PendingChange,
    PendingMessagesChange,
    change_limits,
)
from mqtemplate.operations.why_late import delivered_due_ms, delivery_lateness
from mqtemplate.pending import ON_TIME_MS, BrokerDelays, IndexState, PendingMessage, PendingQuery

_PAGE = 50
_FIRST_PAINT_S = 0.02
_PATIENT_S = 60.0
_PROGRESS_S = 1.0
"""Time between two looks at the progress of the first read."""
_EVENING, _MORNING = 18, 6


def delayed(site: Site, call: Call) -> HttpResponse:
    """Return the page. What takes long to read comes later, as parts of the page."""
    query = query_of(call)
    is_quick = query.tag is None and query.with_property is None and query.after_ms is None
    with site.reading() as access:
        now_ms = access.broker.clock.now_ms()
        can_change = Capability.SCHEDULE_CHANGE in access.broker.capabilities
        is_cluster = access.broker.delay_console is not None
        can_change = can_change or Capability.TIMER_CHANGE in access.broker.capabilities
    is_indexed = _is_read(site, _FIRST_PAINT_S)
    timeline = _timeline(site, call, now_ms, _FIRST_PAINT_S)
    # Beside a thread that counts, the list would take longer than a first paint may.
    listing = _listing(site, call, query) if is_quick and timeline["state"] not in ("counting", "reading") else None
    values: dict[str, Any] = {
        "query": query,
        "now_ms": now_ms,
        "can_change": can_change,
        "spans": [
            (name, call.same_page(**{"from": start, "to": end, "span": name, "cursor": None}))
            for name, start, end in _spans(now_ms)
        ],
        "span": call.text("span"),
        "everything": call.same_page(**{"from": None, "to": None, "span": None, "cursor": None}),
        "timeline": timeline,
        "listing": listing,
        "is_indexed": is_indexed,
        "has_status": is_cluster,
    }
    return site.page(call, "delayed.html", **values)


def _is_read(site: Site, wait_s: float) -> bool:
    """Return False while the index of a cluster is read for the first time; a thread reads it, without a limit."""
    with site.reading() as access:
        console = access.broker.delay_console
        state = None if console is None else console.index_state()
        if console is None or state is None or state.is_complete:
            return True
        found = site.cache.get("index of pending messages", partial(_read_index, site), wait_s)
    return found is not None


def _read_index(site: Site) -> None:
    with site.reading() as access:
        if access.broker.delay_console is not None:
            access.broker.delay_console.update_index(lambda count: None)


def timeline_part(site: Site, call: Call) -> HttpResponse:
    """Return the histogram as a part of the page; during the first read its progress, which requests the part again."""
    _is_read(site, _PROGRESS_S)
    with site.reading() as access:
        now_ms = access.broker.clock.now_ms()
    timeline = _timeline(site, call, now_ms, _PATIENT_S)
    return HttpResponse(200, render("delayed_timeline.html", {"timeline": timeline, "url": call.url}), HTML)


def list_part(site: Site, call: Call) -> HttpResponse:
    """Return the list, as a part of the page."""
    while not _is_read(site, _PATIENT_S):
        pass  # each round waits
    listing = _listing(site, call, query_of(call))
    return site.page(call, "delayed_list.html", listing=listing, query=query_of(call))


def query_of(call: Call) -> PendingQuery:
    """Return the filter of the address."""
    return PendingQuery(
        topic=call.text("topic"),
        key=call.text("key"),
        tag=call.text("tag"),
        with_property=parse_property(call.text("property")),
        after_ms=call.time_ms("from"),
        before_ms=call.time_ms("to"),
    )


def _listing(site: Site, call: Call, query: PendingQuery) -> dict[str, Any]:
    with site.reading() as access:
        page = access.broker.delayed.pending(query, _PAGE, call.text("cursor"))
        now_ms = access.broker.clock.now_ms()
    following = None if page.cursor is None else call.url("/delayed", **{**call.query, "cursor": page.cursor})
    return {"messages": page.messages, "next": following, "now_ms": now_ms}


# --- the histogram ------------------------------------------------------------------------------


def _timeline(site: Site, call: Call, now_ms: int, wait_s: float) -> dict[str, Any]:
    """Return the histogram, or the reason why it is missing."""
    query = query_of(call)
    if (reading := _reading(site)) is not None:
        return {"state": "reading", "histogram": None, "index": reading, "address": _part_address(call)}
    # Topic and time are in the timing wheel and cost little to compare; key, tag and properties are in each record.
    wanted = PendingQuery(topic=query.topic)
    if (query.key, query.tag, query.with_property) != (None, None, None):
        return {"state": "filtered", "histogram": None}
    try:
        counted = pending_counts(site, wanted, wait_s)
        if counted is None:
            return {"state": "counting", "histogram": None, "address": _part_address(call)}
        start_ms, end_ms = _window(counted, query, now_ms)
        unit_ms, _ = unit_of(end_ms - start_ms)
        if counted.unit_ms > unit_ms:
            exact = PendingQuery(topic=query.topic, after_ms=start_ms, before_ms=end_ms)
            counted = pending_counts(site, exact, wait_s, unit_ms)
            if counted is None:
                return {"state": "counting", "histogram": None, "address": _part_address(call)}
    except MQTemplateError as exc:
        return {"state": "failed", "histogram": None, "reason": str(exc)}
    is_stacked = query.topic is None and counted.unit_ms <= unit_ms
    # Each topic is counted for itself, so the bars come first: a thread that counts would delay their first paint.
    topics_wait_s = _PATIENT_S if call.text("stacks") else None
    topics = pending_topics(site, topics_wait_s) if is_stacked else None
    drawn = histogram(
        counted.counts.buckets, start_ms, end_ms, lambda start, end: _address(call, start, end), topics, now_ms
    )
    return {
        "state": "counted",
        "stacks": _part_address(call, stacks=1) if is_stacked and topics is None and not call.text("stacks") else None,
        "histogram": drawn,
        "pending": counted.counts.total,
        "age_s": counted.age_s,
        "now_ms": now_ms,
        "topic_addresses": {name: _page(call, topic=name) for name, _ in drawn.topics},
        **_moves(call, drawn),
    }


def _spans(now_ms: int) -> list[tuple[str, int, int]]:
    """Return names, starts and ends of the spans to choose, in the local time zone; a script has the reader's."""
    now = local_time(now_ms)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    evening = today if now.hour < _MORNING else today + timedelta(hours=_EVENING)
    morning = today + timedelta(days=0 if now.hour < _MORNING else 1, hours=_MORNING)
    monday = today + timedelta(days=7 - today.weekday())
    spans = (
        ("next hour", now, now + timedelta(hours=1)),
        ("tonight", evening, morning),
        ("tomorrow", today + timedelta(days=1), today + timedelta(days=2)),
        ("this week", now, monday),
        ("30 days", now, now + timedelta(days=30)),
    )
    return [(name, round(start.timestamp() * 1_000), round(end.timestamp() * 1_000)) for name, start, end in spans]


def _reading(site: Site) -> IndexState | None:
    """Return the state of the first read of a cluster; None if it has ended, or there is no index."""
    with site.reading() as access:
        console = access.broker.delay_console
        state = None if console is None else console.index_state()
    return None if state is None or state.is_complete else state


def _window(counted: Counted, query: PendingQuery, now_ms: int) -> tuple[int, int]:
    """Return start and end: from the filter, or from the messages."""
    buckets = counted.counts.buckets
    first = min(now_ms, next(iter(buckets), now_ms))
    last = max(buckets, default=now_ms) + counted.unit_ms
    start_ms = query.after_ms if query.after_ms is not None else first
    end_ms = query.before_ms if query.before_ms is not None else max(last, start_ms + HOUR_MS)
    return start_ms, max(end_ms, start_ms + MINUTE_MS)


def _moves(call: Call, drawn: DueHistogram) -> dict[str, str | None]:
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
    return _page(call, **{"from": start_ms, "to": end_ms, "span": None})


def _page(call: Call, **query: object) -> str:
    """Return the address of the page with other values, also from the address of a part of it."""
    return call.url("/delayed", **{**call.query, "cursor": None, "stacks": None, **query})


def _part_address(call: Call, **more: object) -> str:
    return call.url("/delayed/timeline", **{**call.query, **more})


# --- state of the delay services of a cluster ---------------------------------------------------


def status(site: Site, call: Call) -> HttpResponse:
    """Return the page: late brokers and why, levels, the index, and the late deliveries of a topic."""
    topic = call.text("topic")
    with site.reading() as access:
        console = access.broker.delay_console
        state = None if console is None else console.index_state()
        return site.page(
            call,
            "delayed_status.html",
            brokers=() if console is None else console.brokers(),
            is_cluster=console is not None,
            index=state,
            by_topic=[] if console is None else list(console.totals("topic").items())[:_SHOWN],
            by_level={} if console is None else console.totals("level"),
            topic=topic,
            lateness=None if topic is None else delivery_lateness(access, topic),
            on_time_ms=ON_TIME_MS,
        )


_MOST_COMPARED = 500
"""Newest messages of a queue whose lateness one read measures at most."""
_READ_INTERVAL_MS = 10_000
_LEVELS, _TIMERS = "delay.schedule", "delay.timer"


class ClusterDelays:
    """Metrics of the delay services of a RocketMQ cluster, whose brokers do not export them by these names.

    - The names are those of our own broker. Each series has the label ``broker``.
    - The brokers are read by `update`, at most once in ten seconds.
    - The lateness of a topic is that of the messages that were delivered since its first read. If there are more than
      500 in a queue since the last read, the newest 500 count.

    Attributes:
        metrics: The values of the last `update`.
    """

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.add_collector(lambda: self._read)
        self._pending: PendingByHorizon | None = None
        self._lock = threading.Lock()
        self._read: list[MetricSample] = []
        self._next_ms = 0
        self._positions: dict[MessageQueue, int] = {}  # queues whose deliveries are compared -> first offset to read

    def update(self, broker: Broker, console: DelayConsole, topics: Collection[str]) -> None:
        """Read the brokers, unless they were read a moment ago.

        Args:
            topics: Topics whose late deliveries are measured.

        Raises:
            MQTemplateError: The cluster does not answer, or a topic is missing, or may not be read.
        """
        with self._lock:
            if broker.clock.steady_ms() < self._next_ms and not self._new_topics(topics):
                return
            samples = [MetricSample("clock.now_ms", MetricKind.GAUGE, broker.clock.now_ms(), {})]
            for each in console.brokers():
                samples += _delay_samples(each)
            state = console.index_state()
            if state is not None and state.is_complete:  # before that a count takes as long as the first read
                self._pending = self._pending or PendingByHorizon(broker, _READ_INTERVAL_MS)
                samples += self._pending.samples()
            for topic in topics:
                self._compare(broker, topic)
            self._read, self._next_ms = samples, broker.clock.steady_ms() + _READ_INTERVAL_MS

    def _new_topics(self, topics: Collection[str]) -> set[str]:
        return set(topics) - {queue.topic for queue in self._positions}

    def _compare(self, broker: Broker, topic: str) -> None:
        """Measure the lateness of what was delivered to a topic since the last call; nothing in the first one."""
        admin = broker.admin()
        levels_ms = admin.delay_levels_ms() or broker.delay_levels_ms
        for span in admin.queue_spans(topic):
            known = self._positions.get(span.queue, span.max_offset)
            if known > span.max_offset:  # the topic was created again
                known = 0
            offset = max(known, span.min_offset, span.max_offset - _MOST_COMPARED)
            histogram = self.metrics.histogram("delay.lag_ms", topic=topic, broker=span.queue.broker_name)
            while offset < span.max_offset:
                result = broker.reader.pull(span.queue, offset)
                for each in result.messages:
                    due_ms = delivered_due_ms(each, levels_ms)
                    if due_ms is not None:
                        histogram.observe(each.store_timestamp - due_ms)
                if result.next_begin_offset <= offset:
                    break
                offset = result.next_begin_offset
            self._positions[span.queue] = max(offset, span.max_offset)


def _delay_samples(state: BrokerDelays) -> Iterator[MetricSample]:
    """Yield what a broker reports about its delay services."""

    def gauge(name: str, value: float, **labels: str) -> MetricSample:
        return MetricSample(name, MetricKind.GAUGE, value, {"broker": state.broker, **labels})

    yield gauge("delay.readable", int(state.problem is None))
    if state.problem is not None:
        return
    if state.has_timers:
        yield gauge("delay.dequeue_lag_ms", state.timer_behind_ms, service=_TIMERS)
        yield gauge("delay.enqueue_lag", state.timer_unread, service=_TIMERS)
        yield gauge("delay.waiting.timer", state.timer_pending)
    yield gauge("delay.dequeue_lag_ms", max((each.late_ms or 0 for each in state.levels), default=0), service=_LEVELS)
    yield gauge("delay.waiting.level", sum(each.pending for each in state.levels))
    for each in state.levels:
        yield gauge("delay.pending_levels", each.pending, level=str(each.level))
        if each.late_ms is not None:
            yield gauge("delay.level_lag_ms", each.late_ms, level=str(each.level))


# --- changes ------------------------------------------------------------------------------------


_ACTIONS = {"cancel": "Cancel", "deliver": "Deliver now", "shift": "Shift"}
_FILTERS = ("topic", "key", "tag", "property", "from", "to")
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenChange:
    """A change of some messages, from a form.

    Attributes:
        handles: The chosen messages; empty for all that match the query.
        until_ms: Messages stored later are left alone: the user has not seen them.
    """

    change: PendingChange
    handles: tuple[str, ...]
    query: PendingQuery
    until_ms: int | None
    rate: float | None

    @property
    def action(self) -> str:
        """The action in forms and in the audit log."""
        return self.change.action.value

    @property
    def name(self) -> str:
        """The change as a title."""
        return _ACTIONS[self.action]

    @property
    def shift_ms(self) -> int:
        """Time by which the change moves each message; 0 for other changes."""
        return self.change.shift_ms

    def reached(self, access: BrokerAccess) -> Iterator[PendingMessage]:
        """Yield the chosen messages that are still pending, or all that match and were stored before the preview."""
        pending = DelayedOperations(access)
        if self.handles:
            yield from pending.chosen(self.handles)
            return
        for message in pending.all(self.query):
            if self.until_ms is None or message.store_timestamp <= self.until_ms:
                yield message


def _change_of(call: Call) -> ChosenChange:
    """Return the change that a form describes.

    Raises:
        MessageError: The form is incomplete.
    """
    scope = call.scope_field()
    action = PendingAction(call.action_field(_ACTIONS))
    handles = tuple(call.fields("handle"))
    if scope == "chosen" and not handles:
        raise MessageError("no message is chosen; tick some, or change all that match")
    return ChosenChange(
        change=PendingChange(action, _shift_of(call) if action is PendingAction.SHIFT else 0),
        handles=handles if scope == "chosen" else (),
        query=PendingQuery(
            topic=call.field("topic") or None,
            key=call.field("key") or None,
            tag=call.field("tag") or None,
            with_property=parse_property(call.field("property")),
            after_ms=call.time_field("from"),
            before_ms=call.time_field("to"),
        ),
        until_ms=call.time_field("until"),
        rate=parse_rate(call.field("rate")),
    )


def _shift_of(call: Call) -> int:
    text = call.field("shift")
    span_ms = parse_span(text)
    if span_ms is None:
        raise MessageError(f"shift must be a duration such as 30m, 2h or -15m, got {text!r}")
    return span_ms


def _plan(wanted: ChosenChange, access: BrokerAccess, count: int) -> PendingMessagesChange:
    """Return the change as it is now. *count* is its number of messages, as far as is known."""
    total = count if count > MOST_COUNTED and not wanted.handles else None
    names = ("topic", "key", "tag", "with_property", "after_ms", "before_ms")
    query = {name.removeprefix("with_"): getattr(wanted.query, name) for name in names}
    target = {
        "filter": {name: value for name, value in query.items() if value is not None} or None,
        "shift_ms": wanted.shift_ms or None,
    }
    return PendingMessagesChange(access, wanted.reached, wanted.change, target, rate=wanted.rate, total=total)


def preview(site: Site, call: Call) -> HttpResponse:
    """Show what a change would do."""
    return _preview(site, call)


def _preview(site: Site, call: Call, problem: str = "") -> HttpResponse:
    wanted = _change_of(call)
    with site.reading() as access:
        pending, now_ms = DelayedOperations(access), access.broker.clock.now_ms()
        count = 0 if wanted.handles else access.broker.delayed.count_pending(wanted.query, DAY_MS).total
        found = _plan(wanted, access, count).preview
        shown = pending.chosen(wanted.handles) if wanted.handles else pending.all(wanted.query, _SHOWN)
        first = list(islice(shown, _SHOWN))
    return site.page(
        call,
        "delayed_preview.html",
        409 if problem else 200,
        change=wanted,
        preview=found,
        is_final=not change_limits(access, wanted.change),
        total=found.count,
        shown=first,
        problem=problem,
        missing=len(wanted.handles) - found.count if wanted.handles else 0,
        fields=call.given_fields("action", "scope", "shift", *_FILTERS),
        now_ms=now_ms,
        back=_back(call),
    )


def apply(site: Site, call: Call) -> HttpResponse:
    """Make a change that was shown before."""
    wanted = _change_of(call)
    if wanted.until_ms is None:
        raise MessageError("a change needs its preview first")

    def build(access: BrokerAccess) -> Change:
        return _plan(wanted, access, call.previewed())

    return site.start_change(call, build, _back(call), lambda problem: _preview(site, call, problem))


def _back(call: Call) -> str:
    return call.url("/delayed", **dict(call.given_fields(*_FILTERS)))


ROUTES: Routes = {
    ("GET", "/delayed"): delayed,
    ("GET", "/delayed/timeline"): timeline_part,
    ("GET", "/delayed/list"): list_part,
    ("GET", "/delayed/status"): status,
    ("POST", "/delayed/preview"): preview,
    ("POST", "/delayed/change"): apply,
}
