"""Numbers of pending messages by due time, for the histogram. With a million messages a count takes about a second."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.admin.delayed import PendingMessages
from mqtemplate.dashboard.histogram import DAY_MS, HOUR_MS, MINUTE_MS
from mqtemplate.dashboard.site import Site
from mqtemplate.errors import MessageError, MQTemplateError
from mqtemplate.pending import PendingCounts, PendingQuery

_UNITS_MS = (MINUTE_MS, HOUR_MS, DAY_MS, 30 * DAY_MS)
_MAX_SPANS = 200_000


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts with the length of their time spans.

    Attributes:
        age_s: Seconds since they were read.
    """

    counts: PendingCounts
    unit_ms: int
    age_s: float


def pending_counts(site: Site, query: PendingQuery, wait_s: float, finest_ms: int = MINUTE_MS) -> Counted | None:
    """Return the counts of a query by minute, or by a longer span if there would be too many spans.

    Args:
        wait_s: None is returned if the counts are not known after this time. They are read further.
        finest_ms: Shortest span to try.
    """
    units = [unit_ms for unit_ms in _UNITS_MS if unit_ms >= finest_ms]
    found = site.cache.get(("pending", query, finest_ms), lambda: _read(site, query, units), wait_s)
    return None if found is None else Counted(*found.value, found.age_s)


def _read(site: Site, query: PendingQuery, units: list[int]) -> tuple[PendingCounts, int]:
    with site.reading() as admin:
        for unit_ms in units[:-1]:
            try:
                counts = PendingMessages(admin).counts(query, unit_ms)
            except MessageError:  # a server refuses more spans than fit into a response
                continue
            if len(counts.buckets) <= _MAX_SPANS:
                return counts, unit_ms
        return PendingMessages(admin).counts(query, units[-1]), units[-1]


def pending_total(site: Site, wait_s: float) -> int | None:
    """Return the number of all pending messages; None if it is not known in time, or the broker cannot count them."""
    try:
        found = pending_counts(site, PendingQuery(), wait_s)
    except MQTemplateError:
        return None
    return None if found is None else found.counts.total
