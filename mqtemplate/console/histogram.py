"""Pending messages by due time: their counts, and a histogram with a bar for each span of time, each a link into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

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
_COUNTS_WIDTH = 160
"""Most characters of counts, with spaces between them, above all bars; of more bars only the highest has its count."""
_COMPACT_WIDTH = 5
"""Most characters of a count of a thousand and more, such as 41.7k."""
_MAX_TICKS = 12
_NARROW_TICKS = 6
_MS = timedelta(milliseconds=1)
_STEPS = (
    *(timedelta(minutes=minutes) for minutes in (5, 10, 15, 30)),
    *(timedelta(hours=hours) for hours in (1, 2, 3, 6, 12)),
    *(timedelta(days=days) for days in (1, 2, 7, 14, 28, 91, 182, 364, 1_820, 3_640)),
)
_EDGE = 4.0
"""Distance from an edge, in percent, at which a text in the middle of its mark would be cut."""
HEIGHT = 120
TOP = 24
"""Height above the highest bar, for its count."""


@dataclass(frozen=True, slots=True)
class DuePart:
    """The messages of one topic in a bar.

    Attributes:
        number: Index of the topic; the number of topics for all others.
        top: Upper edge in the drawing.
        height: Height in the drawing, of `HEIGHT`.
    """

    number: int
    top: float
    height: float


@dataclass(frozen=True, slots=True)
class DueBar:
    """The messages that are due in a span of time.

    Attributes:
        left: Left edge in percent of the width.
        height: Height in the drawing, of `HEIGHT`.
        address: Page that shows this span; None if it cannot be divided.
        parts: The bar by topic, the first one at the bottom; one part without topics.
        has_count: True if its count is written above it.
        is_highest: True for the first of the highest bars: its count is written on a narrow screen too.
    """

    start_ms: int
    end_ms: int
    count: int
    left: float
    height: float
    address: str | None
    parts: tuple[DuePart, ...] = ()
    has_count: bool = False
    is_highest: bool = False

    @property
    def top(self) -> float:
        """Upper edge in the drawing."""
        return TOP + HEIGHT - self.height


@dataclass(frozen=True, slots=True)
class AxisTick:
    """A mark of the time axis.

    Attributes:
        left: Position in percent of the width.
        is_minor: True if a narrow screen has no space for its text.
    """

    left: float
    text: str
    is_midnight: bool
    is_minor: bool

    @property
    def anchor(self) -> str:
        """The side of the text at the mark, as SVG names it."""
        return "start" if self.left < _EDGE else "end" if self.left > 100 - _EDGE else "middle"


@dataclass(frozen=True, slots=True)
class DueHistogram:
    """Bars from the first to the last one, without gaps.

    Attributes:
        unit: Name of the length of a bar.
        total: Messages in all bars.
        topics: Topics of the parts of bars, with their messages in all bars; empty if bars have one part.
        others: Messages of other topics.
        ticks: Marks of the time axis.
        now_left: Position of now in percent of the width; None outside of it.
    """

    bars: tuple[DueBar, ...]
    unit: str
    start_ms: int
    end_ms: int
    total: int
    topics: tuple[tuple[str, int], ...] = ()
    others: int = 0
    ticks: tuple[AxisTick, ...] = ()
    now_left: float | None = None

    @property
    def bar_width(self) -> float:
        """Width of a bar with its gap, in percent of the width."""
        return 100 / max(1, len(self.bars))

    @property
    def top(self) -> int:
        """The largest count."""
        return max((bar.count for bar in self.bars), default=0)

    @property
    def scale(self) -> list[tuple[int, float]]:
        """Counts of the scale, each with its height in the drawing: the largest one, and half of it as a whole number.

        Without a half there is the largest count only: it is 1, or there is none.
        """
        counts = sorted({self.top, self.top // 2} - {0}, reverse=True)
        return [(count, TOP + HEIGHT - HEIGHT * count / self.top) for count in counts]


def unit_of(span_ms: int) -> tuple[int, str]:
    """Return length and name of the bars for a span of time."""
    return next(((unit_ms, name) for longest_ms, unit_ms, name in _UNITS if span_ms <= longest_ms), _LONGEST_UNIT)


def histogram(
    buckets: Mapping[int, int],
    start_ms: int,
    end_ms: int,
    address_of: Callable[[int, int], str],
    by_topic: Mapping[str, Mapping[int, int]] | None = None,
    now_ms: int | None = None,
) -> DueHistogram:
    """Return the histogram of the messages that are due from *start_ms* to *end_ms*.

    Bars of hours start at the hour, and bars of days at midnight, in the local time zone.

    Args:
        buckets: Start of each span (epoch ms) -> number of messages.
        address_of: Returns the page for a span of time.
        by_topic: Topic -> such counts of it, which are parts of the bars.
        now_ms: Time to mark.
    """
    unit_ms, name = unit_of(end_ms - start_ms)
    zone_ms = _zone_ms(start_ms)
    by_topic = by_topic or {}

    def counted(of: Mapping[int, int]) -> Counter[int]:
        found: Counter[int] = Counter()
        for bucket_ms, count in of.items():
            if start_ms <= bucket_ms < end_ms:
                found[_floor(bucket_ms, unit_ms, zone_ms)] += count
        return found

    counts, parts = counted(buckets), [counted(each) for each in by_topic.values()]
    first = _floor(start_ms, unit_ms, zone_ms)
    number = min(_MAX_BARS, -(-(end_ms - first) // unit_ms))
    last = first + number * unit_ms
    top = max(counts.values(), default=1)
    highest = min((at for at, count in counts.items() if count == top), default=None)
    has_counts = number * (min(len(str(top)), _COMPACT_WIDTH) + 1) <= _COUNTS_WIDTH

    def bar(index: int, at: int) -> DueBar:
        count = counts[at]
        # A bar of one message beside one of a million is still visible.
        height = max(count * HEIGHT / top, 2.0) if count else 0.0
        address = address_of(at, at + unit_ms) if unit_ms > MINUTE_MS and count else None
        is_highest = at == highest
        has_count = bool(count) and (has_counts or is_highest)
        shares = [each[at] for each in parts]
        split = tuple(_parts(count, shares, height))
        return DueBar(at, at + unit_ms, count, index * 100 / number, height, address, split, has_count, is_highest)

    totals = [each.total() for each in parts]
    return DueHistogram(
        tuple(bar(index, at) for index, at in enumerate(range(first, last, unit_ms))),
        name,
        start_ms,
        end_ms,
        counts.total(),
        topics=tuple(zip(by_topic, totals, strict=True)),
        others=max(0, counts.total() - sum(totals)),
        ticks=tuple(time_ticks(first, last)),
        now_left=None if now_ms is None or not first <= now_ms <= last else (now_ms - first) * 100 / (last - first),
    )


def _floor(time_ms: int, unit_ms: int, zone_ms: int) -> int:
    return (time_ms + zone_ms) // unit_ms * unit_ms - zone_ms


def _parts(count: int, shares: list[int], height: float) -> Iterator[DuePart]:
    """Yield the parts of a bar from the bottom up. The counts of topics may be older than those of all messages."""
    given = [*shares, max(0, count - sum(shares))]
    total, bottom = sum(given), TOP + HEIGHT
    at = float(bottom)
    for number, share in enumerate(given):
        if share and count:
            part = height * share / total
            at -= part
            yield DuePart(number, at, part)


def time_ticks(start_ms: int, end_ms: int, most: int = _MAX_TICKS) -> list[AxisTick]:
    """Return marks at full hours or at midnights of the local time zone, also where its offset changes.

    Args:
        most: Number of marks for which there is space.
    """
    step = next((each for each in _STEPS if (end_ms - start_ms) <= most * each // _MS), _STEPS[-1])
    midnight = local_time(start_ms).replace(hour=0, minute=0, second=0, microsecond=0)
    found: list[tuple[int, datetime]] = []
    at = midnight
    while (at_ms := round(at.timestamp() * 1_000)) <= end_ms and len(found) <= 2 * most:
        if at_ms >= start_ms:
            found.append((at_ms, at))
        at += step
    midnights = sum(_is_midnight(each) for _, each in found)
    of_midnights = 2 <= midnights <= _NARROW_TICKS and midnights < len(found)
    return [
        AxisTick(
            (at_ms - start_ms) * 100 / (end_ms - start_ms),
            f"{each.day} {each:%b}" if _is_midnight(each) else f"{each:%H:%M}",
            _is_midnight(each),
            len(found) > _NARROW_TICKS and (not _is_midnight(each) if of_midnights else bool(index % 2)),
        )
        for index, (at_ms, each) in enumerate(found)
    ]


def _is_midnight(time: datetime) -> bool:
    return time.hour == time.minute == 0


def local_time(time_ms: int) -> datetime:
    """Return a time in the local time zone, without the zone: hours and days are added to it as on a clock."""
    return datetime.fromtimestamp(time_ms / 1_000).astimezone().replace(tzinfo=None)


def _zone_ms(time_ms: int) -> int:
    """Return the offset of the local time zone from UTC at a time."""
    offset = datetime.fromtimestamp(time_ms / 1_000).astimezone().utcoffset()
    return 0 if offset is None else round(offset.total_seconds() * 1_000)


_SAMPLE = 500
_MAX_TOPICS = 5


def pending_topics(site: Site, wait_s: float | None) -> Mapping[str, Mapping[int, int]] | None:
    """Return counts of the topics with the most of the next pending messages; None if they are not known yet.

    Only these topics are counted, one after the other: a count of each of thousands of topics would take too long.

    Args:
        wait_s: Time to wait for the counts; they are read further. None: do not start to read them.
    """
    found = site.cache.get("pending messages by topic", lambda: _count_topics(site), wait_s)
    return None if found is None else found.value


def _count_topics(site: Site) -> dict[str, Mapping[int, int]]:
    return {name: _read(site, PendingQuery(topic=name), _UNITS_MS)[0].buckets for name in _next_topics(site)}


def _next_topics(site: Site) -> list[str]:
    with site.reading() as access:
        found = access.broker.delayed.pending(PendingQuery(), _SAMPLE).messages
    return [name for name, _ in Counter(each.topic for each in found).most_common(_MAX_TOPICS)]


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


def _read(site: Site, query: PendingQuery, units: Sequence[int]) -> tuple[PendingCounts, int]:
    with site.reading() as access:
        for unit_ms in units[:-1]:
            try:
                counts = access.broker.delayed.count_pending(query, unit_ms)
            except MessageError:  # a server refuses more spans than fit into a response
                continue
            if len(counts.buckets) <= _MAX_SPANS:
                return counts, unit_ms
        return access.broker.delayed.count_pending(query, units[-1]), units[-1]
