"""Delay levels of the broker, and their queues."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.values import QueueSpan
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.errors import UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.topics import SCHEDULE_TOPIC


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One delay level.

    Attributes:
        stored: Messages that were delayed by it and still exist, delivered or not.
        last_stored_ms: Time of the last one (epoch ms); None if there is none.
    """

    level: int
    delay_ms: int
    stored: int
    last_stored_ms: int | None


def levels(site: Site, call: Call) -> HttpResponse:
    """Return the page."""
    with site.reading() as admin:
        by_level: dict[int, list[QueueSpan]] = {}
        for span in _spans(admin):
            by_level.setdefault(span.queue.queue_id + 1, []).append(span)
        rows = [
            LevelRow(
                level,
                delay_ms,
                sum(span.message_count for span in by_level.get(level, [])),
                max((each.last_stored_ms or 0 for each in by_level.get(level, [])), default=0) or None,
            )
            for level, delay_ms in enumerate(admin.broker.delay_levels_ms, start=1)
        ]
        is_embedded = isinstance(admin.broker, EmbeddedBroker)
        retries = admin.broker.retry_delays_ms
    return site.page(call, "levels.html", rows=rows, is_embedded=is_embedded, retries=retries)


def _spans(admin: BrokerAdmin) -> list[QueueSpan]:
    try:
        return admin.queue_spans(SCHEDULE_TOPIC)
    except UnknownNameError:  # a cluster creates it with its first delayed message
        return []


ROUTES: Routes = {("GET", "/levels"): levels}
