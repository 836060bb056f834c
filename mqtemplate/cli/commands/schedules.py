"""``schedules``: the schedules of a running application, through its actuator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from mqtemplate.cli.commands.listeners import Token, TokenFile, Url, actuator_of
from mqtemplate.cli.invocation import Invocation, command
from mqtemplate.cli.output import Columns


def _state(record: Any) -> str:
    if not record.get("paused"):
        return "active"
    return f"paused until {record['pausedUntil']}" if record["pausedUntil"] else "paused"


_COLUMNS: Columns = {
    "SCHEDULE": "name",
    "TRIGGER": lambda record: record["trigger"] or "in other processes",
    "NEXT RUN": lambda record: record["nextRun"] or "",
    "STATE": _state,
}

Name = Annotated[str, typer.Argument(metavar="SCHEDULE", help="name of the schedule; see 'schedules ls'")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    group = typer.Typer(help="Show and change the schedules of a running application.", no_args_is_help=True)
    without = ("name_server",)
    command(group, "ls", "schedules ls", "schedules ls --url http://127.0.0.1:9090 --json", without=without)(ls)
    command(
        group,
        "pause",
        "schedules pause nightly",
        "schedules pause nightly --until 2026-01-31T08:00:00+01:00",
        without=without,
    )(pause)
    command(group, "resume", "schedules resume nightly", without=without)(resume)
    command(group, "trigger", "schedules trigger nightly", without=without)(trigger)
    app.add_typer(group, name="schedules")


def ls(call: Invocation, url: Url = None, token_file: TokenFile = None, token: Token = None) -> None:
    """Show the schedules with their next runs."""
    found = actuator_of(call, url, token_file).get("schedules")["schedules"]
    call.output.table(found, _COLUMNS, "the application has no schedules")


def pause(
    call: Invocation,
    schedule: Name,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO time with a zone; without it until 'schedules resume'")
    ] = None,
    url: Url = None,
    token_file: TokenFile = None,
    token: Token = None,
) -> None:
    """Skip the runs of a schedule in all processes. Skipped runs are not caught up."""
    _change(call, schedule, {"action": "pause"} | ({} if until is None else {"until": until}), url, token_file)


def resume(
    call: Invocation, schedule: Name, url: Url = None, token_file: TokenFile = None, token: Token = None
) -> None:
    """End the pause of a schedule."""
    _change(call, schedule, {"action": "resume"}, url, token_file)


def trigger(
    call: Invocation, schedule: Name, url: Url = None, token_file: TokenFile = None, token: Token = None
) -> None:
    """Run a schedule now, in one of the processes that have it. Its next run is unchanged."""
    _change(call, schedule, {"action": "trigger"}, url, token_file)


def _change(call: Invocation, schedule: str, change: dict[str, Any], url: str | None, token_file: Path | None) -> None:
    found = actuator_of(call, url, token_file).post(f"schedules/{quote(schedule, safe='')}", change)["schedules"]
    record = next((each for each in found if each["name"] == schedule), {"name": schedule})
    call.output.document(record)
    call.output.line(f"{schedule} is {_state(record)}; next run {record.get('nextRun') or 'unknown'}")
