"""``listeners``: the listeners of a running application, through its actuator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from mqtemplate.actuator.client import ActuatorClient
from mqtemplate.cli.invocation import Invocation, command
from mqtemplate.cli.output import Columns
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
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="actuator of the application (default: mqtemplate.management.address and port of application.yml)",
    ),
]
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


TokenFile = Annotated[Path | None, typer.Option(metavar="FILE", help=TOKEN_FILE_HELP)]
Token = Annotated[str | None, typer.Option(hidden=True, callback=_refuse_token)]
"""The option of earlier versions: it is refused with what to do instead."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    group = typer.Typer(help="Show and change the listeners of a running application.", no_args_is_help=True)
    without = ("name_server",)
    command(group, "ls", "listeners ls", "listeners ls --url http://127.0.0.1:9090 --json", without=without)(ls)
    command(group, "pause", "listeners pause shop.app.bill", without=without)(pause)
    command(group, "resume", "listeners resume shop.app.bill", without=without)(resume)
    command(
        group,
        "seek",
        "listeners seek shop.app.bill --to first",
        "listeners seek shop.app.bill --to 2026-01-31T08:00:00+01:00",
        "listeners seek shop.app.bill --back 2h",
        "listeners seek shop.app.bill --topic orders --queue 2 --offset 4711",
        without=without,
    )(seek)
    command(group, "concurrency", "listeners concurrency shop.app.bill 4", without=without)(concurrency)
    app.add_typer(group, name="listeners")


def ls(call: Invocation, url: Url = None, token_file: TokenFile = None, token: Token = None) -> None:
    """Show the listeners with their states and lags."""
    found = actuator_of(call, url, token_file).get("listeners")["listeners"]
    call.output.table(found, _COLUMNS, "the application has no listeners")


def pause(
    call: Invocation, listener: Listener, url: Url = None, token_file: TokenFile = None, token: Token = None
) -> None:
    """Pause a listener: its handlers finish, and no further one starts. Its queues stay assigned."""
    _change(call, listener, {"action": "pause"}, url, token_file)


def resume(
    call: Invocation, listener: Listener, url: Url = None, token_file: TokenFile = None, token: Token = None
) -> None:
    """Resume a paused listener."""
    _change(call, listener, {"action": "resume"}, url, token_file)


def concurrency(
    call: Invocation,
    listener: Listener,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="handlers at a time: 1 to its consume_thread_max")],
    url: Url = None,
    token_file: TokenFile = None,
    token: Token = None,
) -> None:
    """Change how many handlers of a listener run at a time, until the process ends. Running handlers finish."""
    _change(call, listener, {"action": "concurrency", "number": number}, url, token_file)


def seek(
    call: Invocation,
    listener: Listener,
    to: Annotated[
        str | None, typer.Option(metavar="PLACE", help="first, latest, an ISO time with a zone, or epoch milliseconds")
    ] = None,
    back: Annotated[str | None, typer.Option(metavar="DURATION", help="handle the last 2h, 30m, … again")] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="with --queue and --offset")] = None,
    queue: Annotated[int | None, typer.Option(metavar="ID", help="one queue of the topic")] = None,
    offset: Annotated[int | None, typer.Option(metavar="OFFSET", help="the next message of the queue")] = None,
    broker: Annotated[str | None, typer.Option(metavar="NAME", help="if several brokers have the queue")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    token: Token = None,
) -> None:
    """Continue a listener at another position, in the queues that this application has."""
    given = {"to": to, "back": back, "topic": topic, "queue": queue, "offset": offset, "broker": broker}
    change = {"action": "seek", **{key: value for key, value in given.items() if value is not None}}
    _change(call, listener, change, url, token_file)


def _change(call: Invocation, listener: str, change: dict[str, Any], url: str | None, token_file: Path | None) -> None:
    record = actuator_of(call, url, token_file).post(f"listeners/{quote(listener, safe='')}", change)
    call.output.document(record)
    threads = f", {record['threads']} handlers at a time" if change["action"] == "concurrency" else ""
    call.output.line(
        f"{record['id']} is {record['state']}; lag {record['lag']}, in flight {record['inFlight']}{threads}"
    )


def token_of(call: Invocation, file: Path | None) -> str | None:
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


def actuator_of(call: Invocation, url: str | None, token_file: Path | None) -> ActuatorClient:
    """Return the client of the actuator that the options or the configuration name.

    Raises:
        ConfigurationError: Neither names one.
    """
    management = call.settings().mqtemplate.management
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
    return ActuatorClient(url, token_of(call, token_file))
