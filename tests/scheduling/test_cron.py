"""Times of cron expressions, also on the days on which the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from mqtemplate.scheduling.trigger import next_time, read_cron

BERLIN = ZoneInfo("Europe/Berlin")


def times(expression: str, after: datetime, count: int) -> list[str]:
    found = []
    for _ in range(count):
        following = next_time(read_cron(expression), after)
        assert following is not None
        found.append(following.isoformat())
        after = following
    return found


def test_a_time_that_does_not_exist_runs_at_the_end_of_the_gap() -> None:
    """On 29 March 2026 the clocks of Berlin go from 02:00 to 03:00."""
    saturday = datetime(2026, 3, 28, 12, tzinfo=BERLIN)

    assert times("30 2 * * *", saturday, 2) == ["2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]


def test_a_time_that_exists_twice_runs_once() -> None:
    """On 25 October 2026 the hour from 02:00 to 03:00 repeats in Berlin; the search may start in either of the two."""
    first, second = (datetime(2026, 10, 25, 2, 10, tzinfo=BERLIN, fold=fold) for fold in (0, 1))

    assert times("30 2 * * *", first, 2) == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]
    assert times("30 2 * * *", second, 1) == ["2026-10-26T02:30:00+01:00"]


def test_an_expression_for_each_half_hour_follows_the_elapsed_time() -> None:
    before_gap = datetime(2026, 3, 29, 1, 15, tzinfo=BERLIN)
    before_overlap = datetime(2026, 10, 25, 2, 15, tzinfo=BERLIN)

    assert times("*/30 * * * *", before_gap, 3) == [
        "2026-03-29T01:30:00+01:00",
        "2026-03-29T03:00:00+02:00",
        "2026-03-29T03:30:00+02:00",
    ]
    assert times("*/30 * * * *", before_overlap, 4) == [
        "2026-10-25T02:30:00+02:00",
        "2026-10-25T02:00:00+01:00",
        "2026-10-25T02:30:00+01:00",
        "2026-10-25T03:00:00+01:00",
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("@daily", "0 0 * * *"),
        ("0 9 ? * mon-fri", "0 9 * * MON-FRI"),
        (" */10  * * * * * ", "*/10 * * * * *"),
        ("0 0 L * *", "0 0 L * *"),
    ],
)
def test_aliases_question_marks_and_seconds_are_read(given: str, read: str) -> None:
    assert read_cron(given) == read


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("0 9 * *", r"five fields 'minute hour day month weekday' such as '0 9 \* \* MON-FRI'.*got '0 9 \* \*'"),
        ("0 25 * * *", r"got '0 25 \* \* \*' \(Bad hour\)"),
        ("0 0 30 2 *", r"got '0 0 30 2 \*' \(Bad day-of-month\)"),
        ("0 0 */30 * MON#2", r"an expression that matches some day; '0 0 \*/30 \* MON#2' matches none"),
    ],
)
def test_an_expression_that_never_matches_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_cron(given)


def test_utc_has_no_gaps() -> None:
    assert times("30 2 * * *", datetime(2026, 3, 28, 12, tzinfo=UTC), 1) == ["2026-03-29T02:30:00+00:00"]
