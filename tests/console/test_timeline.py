"""The timeline of delayed messages: its axes, its stacks by topic, the mark of now, and the spans to choose."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest

from mqtemplate.console import delayed
from mqtemplate.console.histogram import DAY_MS, HEIGHT, HOUR_MS, MINUTE_MS, TOP, DueHistogram, histogram
from tests.console.pages import Shop

pytestmark = pytest.mark.usefixtures("utc")

START_MS = 1_767_225_600_000  # 2026-01-01, a Thursday


def drawn(
    buckets: Mapping[int, int],
    span_ms: int = 3 * HOUR_MS,
    start_ms: int = START_MS,
    by_topic: Mapping[str, Mapping[int, int]] | None = None,
    now_ms: int | None = None,
) -> DueHistogram:
    return histogram(buckets, start_ms, start_ms + span_ms, lambda start, end: f"{start}..{end}", by_topic, now_ms)


# --- axes ---------------------------------------------------------------------------------------


def test_bars_start_at_full_hours() -> None:
    found = drawn({START_MS + HOUR_MS: 1}, start_ms=START_MS + 20 * MINUTE_MS)

    assert [bar.start_ms for bar in found.bars] == [START_MS + hours * HOUR_MS for hours in range(4)]


def test_two_days_have_a_mark_each_six_hours_and_the_date_at_midnight() -> None:
    ticks = drawn({}, 2 * DAY_MS).ticks

    assert [tick.text for tick in ticks] == [
        "1 Jan", "06:00", "12:00", "18:00", "2 Jan", "06:00", "12:00", "18:00", "3 Jan",
    ]  # fmt: skip
    assert [tick.left for tick in ticks] == [12.5 * number for number in range(9)]
    assert [tick.text for tick in ticks if tick.is_midnight] == ["1 Jan", "2 Jan", "3 Jan"]
    assert [tick.text for tick in ticks if not tick.is_minor] == ["1 Jan", "2 Jan", "3 Jan"], "on a phone"
    assert [tick.anchor for tick in ticks] == ["start", *["middle"] * 7, "end"], "no text is cut at an edge"


def test_a_phone_has_space_for_each_second_mark_of_an_hour() -> None:
    ticks = drawn({}, HOUR_MS).ticks

    assert [tick.text for tick in ticks][:3] == ["1 Jan", "00:05", "00:10"]
    assert [tick.text for tick in ticks if not tick.is_minor] == [
        "1 Jan", "00:10", "00:20", "00:30", "00:40", "00:50", "01:00",
    ]  # fmt: skip


def test_marks_stay_at_full_hours_when_the_clocks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2026-03-29 the clocks in Berlin skip from two to three."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    midnight_ms = round(datetime(2026, 3, 28, 23, tzinfo=UTC).timestamp() * 1_000)

    ticks = drawn({}, 47 * HOUR_MS, start_ms=midnight_ms).ticks

    assert [tick.text for tick in ticks][:5] == ["29 Mar", "06:00", "12:00", "18:00", "30 Mar"]
    assert round(ticks[1].left * 47 / 100) == 5, "an hour is missing before six"


@pytest.mark.parametrize(
    ("count", "scale"),
    [
        (0, []),
        (1, [(1, TOP)]),
        (3, [(3, TOP), (1, TOP + HEIGHT * 2 / 3)]),
        (1_000, [(1_000, TOP), (500, TOP + HEIGHT / 2)]),
    ],
)
def test_the_scale_has_the_largest_count_and_a_whole_half(count: int, scale: list[tuple[int, float]]) -> None:
    assert drawn({START_MS: count}).scale == [(number, pytest.approx(at)) for number, at in scale]


def test_now_is_marked_where_it_is_in_the_span() -> None:
    assert drawn({}, now_ms=START_MS + 90 * MINUTE_MS).now_left == 50
    assert drawn({}, now_ms=START_MS - 1).now_left is None


def test_each_of_few_bars_has_its_count_and_of_many_the_highest() -> None:
    buckets = {START_MS: 2, START_MS + HOUR_MS: 5}

    assert [bar.has_count for bar in drawn(buckets).bars] == [True, True, False]
    assert [bar.count for bar in drawn(buckets, 4 * DAY_MS).bars if bar.has_count] == [5]


def test_counts_that_would_overlap_are_left_out() -> None:
    """Of a day by hour there is room for each, of two days for short ones."""

    def counted(count: int, days: int) -> int:
        buckets = {START_MS + number * HOUR_MS: count + number for number in range(24 * days)}
        return sum(bar.has_count for bar in drawn(buckets, days * DAY_MS).bars)

    assert [counted(41_667, 1), counted(41_667, 2), counted(1, 2)] == [24, 1, 48]


# --- stacks -------------------------------------------------------------------------------------


def test_a_bar_is_stacked_by_topic_with_the_other_topics_on_top() -> None:
    found = drawn({START_MS: 10}, by_topic={"orders": {START_MS: 5}, "invoices": {START_MS + MINUTE_MS: 3}})

    bottom, middle, top = found.bars[0].parts
    assert (bottom.number, middle.number, top.number) == (0, 1, 2)
    assert (bottom.height, middle.height, top.height) == pytest.approx((60, 36, 24))
    assert bottom.top + bottom.height == TOP + HEIGHT
    assert (middle.top + middle.height, top.top) == pytest.approx((bottom.top, TOP))
    assert found.topics == (("orders", 5), ("invoices", 3))
    assert found.others == 2


def test_a_stack_is_as_high_as_its_bar_although_the_counts_of_topics_are_newer() -> None:
    bar = drawn({START_MS: 2, START_MS + HOUR_MS: 4}, by_topic={"orders": {START_MS: 6}}).bars[0]

    assert [(part.number, part.height) for part in bar.parts] == [(0, pytest.approx(HEIGHT / 2))]


def test_the_page_has_a_legend_with_a_link_to_each_topic(shop: Shop) -> None:
    shop.send_due(1, "first")
    shop.send_due(1, "second", topic="invoices")
    shop.send_due(2, "third", topic="invoices")

    page = shop.page("/delayed")

    assert "invoices 2" in page.text
    assert 'class="fill stack-0"' in page.html
    assert 'class="fill stack-1"' in page.html
    only = shop.page(page.link("invoices 2"))
    assert "2 due in this span of 2 counted" in only.text


def test_the_bars_do_not_wait_for_their_topics(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic is counted for itself, which takes seconds with a million messages: they come as a part."""
    counted = delayed.pending_topics
    monkeypatch.setattr(delayed, "pending_topics", lambda site, wait_s: counted(site, wait_s) if wait_s else None)
    shop.send_due(1, "first")
    shop.send_due(30, "second", topic="invoices")

    page = shop.page("/delayed", span="all")
    [address] = re.findall(r'data-src="([^"]*)"', page.html)
    part = shop.page(unescape(address))

    assert "2 due in this span of 2 counted" in page.text
    assert "reminders 1 invoices 1" not in page.text
    assert "reminders 1 invoices 1" in part.text
    assert "data-src" not in part.html
    assert "stacks=" not in part.html


def test_the_list_does_not_compete_with_the_count(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed, "pending_counts", lambda *_: None)
    shop.send_due(1, "first")

    page = shop.page("/delayed", topic="reminders")

    parts = [unescape(address) for address in re.findall(r'data-src="([^"]*)"', page.html)]
    assert parts == ["/delayed/timeline?topic=reminders", "/delayed/list?topic=reminders"]
    assert "counting the pending messages … Show the histogram" in page.text
    assert "first" in shop.page(parts[1]).text


# --- spans --------------------------------------------------------------------------------------


def spans(shop: Shop) -> dict[str, tuple[int, int]]:
    """Return name -> start and end of the spans to choose, in hours since the start of the shop."""
    shop.sign_in()  # the session has ended meanwhile
    found = {}
    for address, name in re.findall(r'<a href="([^"]*)" data-span="([^"]*)"', shop.page("/delayed").html):
        query = parse_qs(urlsplit(unescape(address)).query)
        start, end = ((int(query[key][0]) - START_MS) / HOUR_MS for key in ("from", "to"))
        found[name] = round(start), round(end)
    return found


def test_the_spans_of_an_afternoon(shop: Shop) -> None:
    shop.harness.advance("14h")

    assert spans(shop) == {
        "next hour": (14, 15),
        "tonight": (18, 30),
        "tomorrow": (24, 48),
        "this week": (14, 96),
        "30 days": (14, 14 + 30 * 24),
    }


def test_before_six_tonight_is_the_night_that_is_on(shop: Shop) -> None:
    shop.harness.advance("27h")

    assert spans(shop)["tonight"] == (24, 30)


def test_a_chosen_span_is_marked_and_has_its_messages(shop: Shop) -> None:
    for hours in (0.5, 20, 30):
        shop.send_due(hours)
    shop.harness.advance("1m")

    page = shop.page(shop.page("/delayed").link("next hour"))

    assert "1 due in this span" in page.text
    assert re.findall(r'data-span="([^"]*)" aria-current="true"', page.html) == ["next hour"]
