"""``listeners`` and ``schedules`` of a running application, through its actuator."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from mqtemplate.cli.invocation import CommandCall, command, command_group
from mqtemplate.cli.output import Columns
from mqtemplate.console.client import ActuatorClient
from mqtemplate.errors import ConfigurationError

_MAX_TOKEN = 4_096
_COLUMNS: Columns = {
    "LISTENER": "id",
    "GROUP": "group",
    "TOPICS": lambda record: ", ".join(record["topics"]),
    "STATE": "state",
    "THREADS": "threads",
    "IN FLIGHT": "inFlight",
    "HANGING": "hanging",
    "LAG": "lag",
}

Listener = Annotated[str, typer.Argument(metavar="LISTENER", help="id of the listener; see 'listeners ls'")]
TOKEN_FILE_HELP = "file with the token, - for standard input (default: mqtemplate.management.token)"


def _refuse_token(value: str | None) -> None:
    _refuse(value, "--token-file")


def refuse_app_token(value: str | None) -> None:
    """Refuse a token among the arguments of ``dashboard``."""
    _refuse(value, "--app-token-file")


def _refuse(value: str | None, option: str) -> None:
    if value is not None:
        raise typer.BadParameter(
            f"all users of this machine see the arguments of its processes: give {option} FILE, or set "
            "MQTEMPLATE_MANAGEMENT_TOKEN"
        )


@dataclass(frozen=True, slots=True)
class ActuatorOptions:
    """Options that name the actuator of an application.

    Attributes:
        token: The option of earlier versions: it is refused with what to do instead.
    """

    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="actuator of the application (default: mqtemplate.management.address and port of application.yml)",
        ),
    ] = None
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help=TOKEN_FILE_HELP)] = None
    token: Annotated[str | None, typer.Option(hidden=True, callback=_refuse_token)] = None

    def client(self, call: CommandCall) -> ActuatorClient:
        """Return the client of the actuator that the options or the configuration name.

        Raises:
            ConfigurationError: Neither names one.
        """
        management, url = call.settings().mqtemplate.management, self.url
        if url is None:
            if not management.port:
                raise ConfigurationError(
                    "the application is not known: give --url http://host:port, or set mqtemplate.management.port in "
                    "application.yml"
                )
            host = f"[{management.address}]" if ":" in management.address else management.address
            url = f"http://{host}:{management.port}"
        elif urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise typer.BadParameter(f"must be http://host:port, got {url!r}", param_hint="--url")
        return ActuatorClient(url, token_of(call, self.token_file))


_LISTENERS = command_group("listeners", "Show and change the listeners of a running application.")


@command(_LISTENERS, "ls", "listeners ls", "listeners ls --url http://127.0.0.1:9090 --json", without=("name_server",))
def ls(call: CommandCall, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """Show the listeners with their states and lags."""
    found = actuator.client(call).get("listeners")["listeners"]
    call.output.table(found, _COLUMNS, "the application has no listeners")


@command(_LISTENERS, "pause", "listeners pause shop.app.bill", without=("name_server",))
def pause(call: CommandCall, listener: Listener, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """Pause a listener: its handlers finish, and no further one starts. Its queues stay assigned."""
    _change(call, listener, {"action": "pause"}, actuator)


@command(_LISTENERS, "resume", "listeners resume shop.app.bill", without=("name_server",))
def resume(call: CommandCall, listener: Listener, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """Resume a paused listener."""
    _change(call, listener, {"action": "resume"}, actuator)


@command(_LISTENERS, "concurrency", "listeners concurrency shop.app.bill 4", without=("name_server",))
def concurrency(
    call: CommandCall,
    listener: Listener,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="handlers at a time: 1 to its consume_thread_max")],
    actuator: ActuatorOptions = ActuatorOptions(),
) -> None:
    """Change how many handlers of a listener run at a time, until the process ends. Running handlers finish."""
    _change(call, listener, {"action": "concurrency", "number": number}, actuator)


@command(
    _LISTENERS,
    "seek",
    "listeners seek shop.app.bill --to first",
    "listeners seek shop.app.bill --to 2026-01-31T08:00:00+01:00",
    "listeners seek shop.app.bill --back 2h",
    "listeners seek shop.app.bill --topic orders --queue 2 --offset 4711",
    without=("name_server",),
)
def seek(
    call: CommandCall,
    listener: Listener,
    to: Annotated[
        str | None, typer.Option(metavar="PLACE", help="first, latest, an ISO time with a zone, or epoch milliseconds")
    ] = None,
    back: Annotated[str | None, typer.Option(metavar="DURATION", help="handle the last 2h, 30m, … again")] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="with --queue and --offset")] = None,
    queue: Annotated[int | None, typer.Option(metavar="ID", help="one queue of the topic")] = None,
    offset: Annotated[int | None, typer.Option(metavar="OFFSET", help="the next message of the queue")] = None,
    broker: Annotated[str | None, typer.Option(metavar="NAME", help="if several brokers have the queue")] = None,
    actuator: ActuatorOptions = ActuatorOptions(),
) -> None:
    """Continue a listener at another position, in the queues that this application has."""
    given = {"to": to, "back": back, "topic": topic, "queue": queue, "offset": offset, "broker": broker}
    change = {"action": "seek", **{key: value for key, value in given.items() if value is not None}}
    _change(call, listener, change, actuator)


def _change(call: CommandCall, listener: str, change: dict[str, Any], actuator: ActuatorOptions) -> None:
    record = actuator.client(call).post(f"listeners/{quote(listener, safe='')}", change)
    call.output.document(record)
    threads = f", {record['threads']} handlers at a time" if change["action"] == "concurrency" else ""
    call.output.line(
        f"{record['id']} is {record['state']}; lag {record['lag']}, in flight {record['inFlight']}{threads}"
    )


def token_of(call: CommandCall, file: Path | None) -> str | None:
    """Return the token of a file, or of the configuration; None without one.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    if file is None:
        token = call.settings().mqtemplate.management.token
        return None if token is None else token.get_secret_value()
    try:
        text = sys.stdin.read(_MAX_TOKEN) if str(file) == "-" else _text_of(file)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"the token cannot be read from {file}: {exc}") from exc
    if not text.strip():
        raise ConfigurationError(f"{file} contains no token; write the value of mqtemplate.management.token into it")
    return text.strip()


def _text_of(file: Path) -> str:
    with file.open(encoding="utf-8") as opened:
        return opened.read(_MAX_TOKEN)


def _state(record: Any) -> str:
    if not record.get("paused"):
        return "active"
    return f"paused until {record['pausedUntil']}" if record["pausedUntil"] else "paused"


_SCHEDULE_COLUMNS: Columns = {
    "SCHEDULE": "name",
    "TRIGGER": lambda record: record["trigger"] or "in other processes",
    "NEXT RUN": lambda record: record["nextRun"] or "",
    "STATE": _state,
}

Name = Annotated[str, typer.Argument(metavar="SCHEDULE", help="name of the schedule; see 'schedules ls'")]


_SCHEDULES = command_group("schedules", "Show and change the schedules of a running application.")


@command(_SCHEDULES, "ls", "schedules ls", "schedules ls --url http://127.0.0.1:9090 --json", without=("name_server",))
def ls_schedules(call: CommandCall, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """Show the schedules with their next runs."""
    found = actuator.client(call).get("schedules")["schedules"]
    call.output.table(found, _SCHEDULE_COLUMNS, "the application has no schedules")


@command(
    _SCHEDULES,
    "pause",
    "schedules pause nightly",
    "schedules pause nightly --until 2026-01-31T08:00:00+01:00",
    without=("name_server",),
)
def pause_schedule(
    call: CommandCall,
    schedule: Name,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="ISO time with a zone; without it until 'schedules resume'")
    ] = None,
    actuator: ActuatorOptions = ActuatorOptions(),
) -> None:
    """Skip the runs of a schedule in all processes. Skipped runs are not caught up."""
    _change_schedule(call, schedule, {"action": "pause"} | ({} if until is None else {"until": until}), actuator)


@command(_SCHEDULES, "resume", "schedules resume nightly", without=("name_server",))
def resume_schedule(call: CommandCall, schedule: Name, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """End the pause of a schedule."""
    _change_schedule(call, schedule, {"action": "resume"}, actuator)


@command(_SCHEDULES, "trigger", "schedules trigger nightly", without=("name_server",))
def trigger_schedule(call: CommandCall, schedule: Name, actuator: ActuatorOptions = ActuatorOptions()) -> None:
    """Run a schedule now, in one of the processes that have it. Its next run is unchanged."""
    _change_schedule(call, schedule, {"action": "trigger"}, actuator)


def _change_schedule(call: CommandCall, schedule: str, change: dict[str, Any], actuator: ActuatorOptions) -> None:
    found = actuator.client(call).post(f"schedules/{quote(schedule, safe='')}", change)["schedules"]
    record = next((each for each in found if each["name"] == schedule), {"name": schedule})
    call.output.document(record)
    call.output.line(f"{schedule} is {_state(record)}; next run {record.get('nextRun') or 'unknown'}")
