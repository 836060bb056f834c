"""Times of cron expressions, also on the days on which the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

from mqtemplate.scheduling.trigger import next_time, read_cron
from tests.golden import check_script
from tests.sessions import Session


class Times(Session):
    """``times``: an expression, the time after which its times are printed, a zone, and their number."""

    def __init__(self) -> None:
        super().__init__({"read_cron": read_cron})

    def times(self, expression: str, after: str, zone: str, count: str, *second: str) -> list[str]:
        tz = UTC if zone == "UTC" else ZoneInfo(zone)
        found = datetime.fromisoformat(after).replace(tzinfo=tz, fold=len(second))
        printed = []
        for _ in range(int(count)):
            following = next_time(read_cron(expression), found)
            assert following is not None
            printed.append(following.isoformat())
            found = following
        return printed


def test_cron_expressions_have_the_times_of_the_script() -> None:
    check_script(Path(__file__).parent / "cron.script", Times())
