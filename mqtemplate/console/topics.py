"""Topics with their queues and groups, consumer groups with their progress, delay levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mqtemplate.broker import QueueSpan, TopicKind
from mqtemplate.console.cache import Cached
from mqtemplate.console.site import Call, Routes, Site
from mqtemplate.console.state import STATE_KEY, read_state
from mqtemplate.engine.group_rules import FIRST_RETRY_LEVEL
from mqtemplate.errors import UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.progress import behind_ms
from mqtemplate.topics import DLQ_TOPIC_PREFIX, SCHEDULE_TOPIC

T = TypeVar("T")


def topics(site: Site, call: Call) -> HttpResponse:
    """Return the list, or one topic."""
    name = call.text("name")
    if name is not None:
        return _topic(site, call, name)
    kind, text = call.text("kind") or "normal", (call.text("search") or "").lower()
    everything = _cached(site, "topics", lambda access: access.admin.topics())
    found = [each for each in everything.value if kind in ("all", each.kind.value) and text in each.name.lower()]
    kinds = [each.value for each in TopicKind]
    rates = site.rates.stored()
    return site.page(call, "topics.html", topics=found, kind=kind, kinds=kinds, rates=rates, age_s=everything.age_s)


def _cached(site: Site, key: str, read: Callable[[BrokerAccess], list[T]]) -> Cached[list[T]]:
    """Return a list that may be some seconds old."""

    def read_all() -> list[T]:
        with site.reading() as access:
            return read(access)

    return site.cache.needed(key, read_all)


def _topic(site: Site, call: Call, name: str) -> HttpResponse:
    with site.reading() as access:
        topic = access.admin.topic(name)
        progress = {group: sum(each.lag for each in access.admin.progress(group, name)) for group in topic.groups}
    return site.page(call, "topic.html", topic=topic, lags=progress)


# --- groups -------------------------------------------------------------------------------------


def groups(site: Site, call: Call) -> HttpResponse:
    """Return the list, or one group."""
    name = call.text("name")
    if name is not None:
        return _group(site, call, name)
    text = (call.text("search") or "").lower()
    state = site.cache.needed(STATE_KEY, lambda: read_state(site))
    reading = state.value.reading
    return site.page(
        call,
        "groups.html",
        groups=[each for each in reading.groups if text in each.name.lower()],
        behind_ms=reading.behind_ms,
        trends=site.rates.lag_trends(),
        rates=site.rates.consumed(),
        age_s=state.age_s,
    )


def _group(site: Site, call: Call, name: str) -> HttpResponse:
    with site.reading() as access:
        group = access.admin.group(name)
        has_letters = DLQ_TOPIC_PREFIX + name in access.admin.topic_kinds()
        now_ms = access.broker.clock.now_ms()
        late_ms = behind_ms(access.broker, group.progress, now_ms)
    trend = site.rates.lag_trends().get(name)
    return site.page(
        call, "group.html", group=group, has_letters=has_letters, now_ms=now_ms, behind_ms=late_ms, trend=trend
    )


# --- delay levels -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One delay level.

    Attributes:
        stored: Messages that were delayed by it and still exist, delivered or not.
        last_stored_ms: Time of the last one (epoch ms); None if there are no messages.
    """

    level: int
    delay_ms: int
    stored: int
    last_stored_ms: int | None


def levels(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    with site.reading() as access:
        known = access.admin.delay_levels_ms()
        by_level: dict[int, list[QueueSpan]] = {}
        for span in _spans(access):
            by_level.setdefault(span.queue.queue_id + 1, []).append(span)
        rows = [
            LevelRow(
                level,
                delay_ms,
                sum(span.message_count for span in by_level.get(level, [])),
                max((each.last_stored_ms or 0 for each in by_level.get(level, [])), default=0) or None,
            )
            for level, delay_ms in enumerate(known or access.broker.delay_levels_ms, start=1)
        ]
        retries = access.broker.retry_delays_ms
        if known is not None and not access.broker.is_embedded:
            retries = known[FIRST_RETRY_LEVEL - 1 :] or known[-1:]
    return site.page(call, "levels.html", rows=rows, is_known=known is not None, retries=retries)


def _spans(access: BrokerAccess) -> list[QueueSpan]:
    try:
        return access.admin.queue_spans(SCHEDULE_TOPIC)
    except UnknownNameError:  # a cluster creates it with its first delayed message
        return []


ROUTES: Routes = {("GET", "/topics"): topics, ("GET", "/groups"): groups, ("GET", "/levels"): levels}
