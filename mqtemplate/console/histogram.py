"""Pending messages by due time: their counts, and a histogram with a bar for each span of time, each a link into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mqtemplate.console.site import Site
from mqtemplate.errors import MessageError
from mqtemplate.pending import PendingCounts, PendingQuery

MINUTE_MS = 60_000
HOUR_MS = 3_600_000
DAY_MS = 86_400_000

_UNITS = (
    # longest span of time -> length of a bar, and its name
    (2 * HOUR_MS, MINUTE_MS, "minute"),
    (4 * DAY_MS, HOUR_MS, "hour"),
    (200 * DAY_MS, DAY_MS, "day"),
)
_LONGEST_UNIT = (30 * DAY_MS, "30 days")
_MAX_BARS = 400
HEIGHT = 120
BAR_WIDTH = 10


@dataclass(frozen=True, slots=True)
class DueBar:
    """The messages that are due in a span of time.

    Attributes:
        x: Left edge in the drawing.
        height: Height in the drawing, of `HEIGHT`.
        address: Page that shows this span; None if it cannot be divided.
    """

    start_ms: int
    end_ms: int
    count: int
    x: int
    height: float
    address: str | None


@dataclass(frozen=True, slots=True)
class DueHistogram:
    """Bars from the first to the last one, without gaps.

    Attributes:
        unit: Name of the length of a bar.
        total: Messages in all bars.
    """

    bars: tuple[DueBar, ...]
    unit: str
    start_ms: int
    end_ms: int
    total: int

    @property
    def width(self) -> int:
        """Width of the drawing."""
        return max(1, len(self.bars)) * BAR_WIDTH

    @property
    def top(self) -> int:
        """The largest count."""
        return max((bar.count for bar in self.bars), default=0)


def unit_of(span_ms: int) -> tuple[int, str]:
    """Return length and name of the bars for a span of time."""
    return next(((unit_ms, name) for longest_ms, unit_ms, name in _UNITS if span_ms <= longest_ms), _LONGEST_UNIT)


def histogram(
    buckets: Mapping[int, int], start_ms: int, end_ms: int, address_of: Callable[[int, int], str]
) -> DueHistogram:
    """Return the histogram of the messages that are due from *start_ms* to *end_ms*.

    Bars of days start at midnight of the local time zone.

    Args:
        buckets: Start of each span (epoch ms) -> number of messages.
        address_of: Returns the page for a span of time.
    """
    unit_ms, name = unit_of(end_ms - start_ms)
    zone_ms = _zone_ms(start_ms)

    def floor(time_ms: int) -> int:
        return (time_ms + zone_ms) // unit_ms * unit_ms - zone_ms

    counts: Counter[int] = Counter()
    for bucket_ms, count in buckets.items():
        if start_ms <= bucket_ms < end_ms:
            counts[floor(bucket_ms)] += count
    first = floor(start_ms)
    number = min(_MAX_BARS, -(-(end_ms - first) // unit_ms))
    top = max(counts.values(), default=1)
    bars = tuple(
        DueBar(
            at,
            at + unit_ms,
            counts[at],
            index * BAR_WIDTH,
            # A bar of one message beside one of a million is still visible.
            max(counts[at] * HEIGHT / top, 2.0) if counts[at] else 0.0,
            address_of(at, at + unit_ms) if unit_ms > MINUTE_MS and counts[at] else None,
        )
        for index, at in enumerate(range(first, first + number * unit_ms, unit_ms))
    )
    return DueHistogram(bars, name, start_ms, end_ms, counts.total())


def _zone_ms(time_ms: int) -> int:
    """Return the offset of the local time zone from UTC at a time."""
    offset = datetime.fromtimestamp(time_ms / 1_000).astimezone().utcoffset()
    return 0 if offset is None else round(offset.total_seconds() * 1_000)


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
    with site.reading() as access:
        for unit_ms in units[:-1]:
            try:
                counts = access.broker.delayed.count_pending(query, unit_ms)
            except MessageError:  # a server refuses more spans than fit into a response
                continue
            if len(counts.buckets) <= _MAX_SPANS:
                return counts, unit_ms
        return access.broker.delayed.count_pending(query, units[-1]), units[-1]
