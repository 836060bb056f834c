"""Topics with their queues and groups, consumer groups with their progress, both created and deleted; delay levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mqtemplate.broker import QueueSpan, TopicKind
from mqtemplate.console.site import Call, ChangeForm, Routes, Site, change_pages
from mqtemplate.console.state import state_of
from mqtemplate.engine.group_rules import FIRST_RETRY_LEVEL
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.numbers import parse_number
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.account import NoRightError
from mqtemplate.operations.changes import Change
from mqtemplate.operations.creation import GroupCreated, TopicCreated, TopicDeleted
from mqtemplate.operations.offsets import GroupForgotten, OffsetPosition
from mqtemplate.operations.progress import behind_ms
from mqtemplate.topics import DLQ_TOPIC_PREFIX, SCHEDULE_TOPIC

T = TypeVar("T")


def topics(site: Site, call: Call) -> HttpResponse:
    """Return the list, or one topic."""
    name = call.text("name")
    if name is not None:
        return _topic(site, call, name)
    kind, text = call.text("kind") or "normal", (call.text("search") or "").lower()
    state = state_of(site)
    everything = [] if state is None else state.value.all_topics
    found = [each for each in everything if kind in ("all", each.kind.value) and text in each.name.lower()]
    shown, pages = _paged(call, found)
    return site.page(
        call,
        "topics.html",
        topics=shown,
        paging=pages,
        kind=kind,
        kinds=[each.value for each in TopicKind],
        rates=site.rates.stored(),
        has_shapes=any(each.shape for each in shown),
        is_known=state is not None,
        age_s=0 if state is None else state.age_s,
    )


_PAGE = 100


@dataclass(frozen=True, slots=True)
class Paging:
    """The part of a list that a page shows.

    Attributes:
        first: Number of the first row, from 1.
        previous: Address of the rows before; None at the start.
        next: Address of the rows after; None at the end.
    """

    first: int
    last: int
    total: int
    previous: str | None
    next: str | None


def _paged(call: Call, rows: Sequence[T]) -> tuple[Sequence[T], Paging]:
    """Return the rows of the page that the address names, and the pages beside it."""
    number = parse_number(call.text("page") or "1") or 1
    number = min(max(1, number), max(1, -(-len(rows) // _PAGE)))
    start, end = (number - 1) * _PAGE, min(number * _PAGE, len(rows))
    previous = call.same_page(page=number - 1) if start else None
    following = call.same_page(page=number + 1) if end < len(rows) else None
    return rows[start:end], Paging(start + 1, end, len(rows), previous, following)


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
    state = state_of(site)
    everything = () if state is None else state.value.reading.groups
    found = sorted((each for each in everything if text in each.name.lower()), key=lambda each: -each.lag)
    shown, pages = _paged(call, found)
    return site.page(
        call,
        "groups.html",
        groups=shown,
        paging=pages,
        behind_ms={} if state is None else state.value.reading.behind_ms,
        trends=site.rates.lag_trends(),
        rates=site.rates.consumed(),
        is_known=state is not None,
        age_s=0 if state is None else state.age_s,
    )


def _group(site: Site, call: Call, name: str) -> HttpResponse:
    with site.reading() as access:
        group = access.admin.group(name)
        has_letters = DLQ_TOPIC_PREFIX + name in access.admin.topic_kinds()
        now_ms = access.broker.clock.now_ms()
        late_ms = behind_ms(access.broker, group.progress, now_ms)
        deliveries = access.admin.deliveries(name)
    trend = site.rates.lag_trends().get(name)
    return site.page(
        call,
        "group.html",
        group=group,
        has_letters=has_letters,
        now_ms=now_ms,
        behind_ms=late_ms,
        trend=trend,
        deliveries=deliveries,
    )


# --- delay levels -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One delay level.

    Attributes:
        stored: Messages that were delayed by it and still exist, delivered or not; None if they may not be seen.
        last_stored_ms: Time of the last one (epoch ms); None if there are no messages.
    """

    level: int
    delay_ms: int
    stored: int | None
    last_stored_ms: int | None


def levels(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    with site.reading() as access:
        known = access.admin.delay_levels_ms()
        by_level: dict[int, list[QueueSpan]] = {}
        spans = _spans(access)
        for span in spans or ():
            by_level.setdefault(span.queue.queue_id + 1, []).append(span)
        rows = [
            LevelRow(
                level,
                delay_ms,
                None if spans is None else sum(span.message_count for span in by_level.get(level, [])),
                max((each.last_stored_ms or 0 for each in by_level.get(level, [])), default=0) or None,
            )
            for level, delay_ms in enumerate(known or access.broker.delay_levels_ms, start=1)
        ]
        retries = access.broker.retry_delays_ms
        if known is not None and not access.broker.is_embedded:
            retries = known[FIRST_RETRY_LEVEL - 1 :] or known[-1:]
    return site.page(call, "levels.html", rows=rows, is_known=known is not None, retries=retries)


def _spans(access: BrokerAccess) -> list[QueueSpan] | None:
    """Return the queues of the levels; None if an account may not see messages of all topics."""
    try:
        return access.admin.queue_spans(SCHEDULE_TOPIC)
    except UnknownNameError:  # a cluster creates it with its first delayed message
        return []
    except NoRightError:
        return None


# --- new ones, and deletions --------------------------------------------------------------------

_QUEUES = 4
_POSITIONS = {"first": OffsetPosition.EARLIEST, "latest": OffsetPosition.LATEST}


def _new_topic(call: Call) -> ChangeForm:
    topic, count = call.needed_field("topic"), call.number_field("queues") or _QUEUES
    after = call.url("/topics", name=topic)
    create = "/topics/create"
    return ChangeForm(
        lambda access: TopicCreated(access, topic, count), "Create topic", ("topic", "queues"), call.url(create), after
    )


def _gone_topic(call: Call) -> ChangeForm:
    topic = call.needed_field("topic")
    back = call.url("/topics", name=topic)
    return ChangeForm(lambda access: TopicDeleted(access, topic), "Delete topic", ("topic",), back, call.url("/topics"))


def _new_group(call: Call) -> ChangeForm:
    group, topic, position = call.needed_field("group"), call.needed_field("topic"), call.field("position")
    if position not in _POSITIONS:
        raise MessageError(f"position must be one of {', '.join(_POSITIONS)}, got {position!r}")

    def build(access: BrokerAccess) -> Change:
        return GroupCreated(access, group, topic, _POSITIONS[position])

    after = call.url("/groups", name=group)
    return ChangeForm(build, "Create group", ("group", "topic", "position"), call.url("/groups/create"), after)


def _gone_group(call: Call) -> ChangeForm:
    group = call.needed_field("group")
    back = call.url("/groups", name=group)
    return ChangeForm(
        lambda access: GroupForgotten(access, group), "Delete group", ("group",), back, call.url("/groups")
    )


def topic_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a new topic."""
    return site.page(call, "topic_new.html", queues=_QUEUES)


def group_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a new group."""
    with site.reading() as access:
        names = access.admin.readable_topics()
    return site.page(call, "group_new.html", topics=names)


ROUTES: Routes = {
    ("GET", "/topics"): topics,
    ("GET", "/groups"): groups,
    ("GET", "/levels"): levels,
    ("GET", "/topics/create"): topic_form,
    ("GET", "/groups/create"): group_form,
    **change_pages("/topics/create", _new_topic),
    **change_pages("/topics/delete", _gone_topic),
    **change_pages("/groups/create", _new_group),
    **change_pages("/groups/delete", _gone_group),
}
