"""``dashboard``: pages in a browser for a broker, an application, or both; ``listeners`` and ``schedules`` of a running
application, through its actuator; ``changes`` and ``undo``.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from mqtemplate.cli.formats import preview_lines, record_of
from mqtemplate.cli.invocation import TOP, CommandCall, Confirmation, cluster_of, command, command_group
from mqtemplate.cli.output import Columns, print_line
from mqtemplate.console.client import ActuatorClient
from mqtemplate.context.config.masking import masked_text
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import BrokerError, ConfigurationError, UnknownNameError

if TYPE_CHECKING:
    from mqtemplate.console.access import Access
    from mqtemplate.console.dashboard import DashboardServer
    from mqtemplate.console.sources import BrokerSource
    from mqtemplate.operations.audit import LoggedChange
    from mqtemplate.operations.changes import ChangePreview
    from mqtemplate.operations.why_late import ListenerReport


_LOOPBACK = "127.0.0.1"
_TOKEN_FILE_HELP = "file with the token, - for standard input (default: mqtemplate.management.token)"


def _refuse_token(option: typer.CallbackParam, value: str | None) -> None:
    """Refuse a token among the arguments, as earlier versions had it."""
    if value is not None:
        raise typer.BadParameter(
            f"all users of this machine see the arguments of its processes: give {option.opts[0]}-file FILE, or set "
            "MQTEMPLATE_MANAGEMENT_TOKEN"
        )


@command(
    TOP,
    "dashboard",
    "dashboard --store ./data",
    "dashboard --name-server 10.0.0.1:9876 --allow-changes",
    "dashboard --app http://127.0.0.1:9090 --store ./data",
)
def dashboard(
    call: CommandCall,
    store: Annotated[
        str | None, typer.Option("--store", metavar="FOLDER", help="store directory; the same as -n embedded:FOLDER")
    ] = None,
    application: Annotated[
        str | None, typer.Option("--app", metavar="URL", help="actuator of a running application: listeners, lateness")
    ] = None,
    application_token_file: Annotated[
        Path | None,
        typer.Option("--app-token-file", metavar="FILE", help=f"for the application: {_TOKEN_FILE_HELP}"),
    ] = None,
    application_token: Annotated[str | None, typer.Option("--app-token", hidden=True, callback=_refuse_token)] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="numeric address to listen on")] = _LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 for a free one")] = 8090,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="allow changes too, after the sign-in")
    ] = False,
    allowed_host: Annotated[
        list[str], typer.Option(metavar="NAME", help="further name of this machine in addresses; may be repeated")
    ] = [],  # noqa: B006 - typer copies it
    audit_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="log of changes (default: ~/.local/state/mqtemplate/audit.jsonl)"),
    ] = None,
) -> None:
    """Serve pages that show a broker, an application, or both, in a browser."""
    from mqtemplate.clock import SystemClock
    from mqtemplate.console.server import check_installed

    check_installed()
    is_loopback = _is_loopback(host)
    if ipaddress.ip_address(host).is_unspecified and not allowed_host:
        raise typer.BadParameter(
            f"with {host} the dashboard cannot know its names: give those that browsers use with --allowed-host, such "
            "as --allowed-host 10.0.0.5",
            param_hint="--host",
        )
    if store is not None:
        if call.name_server is not None:
            raise typer.BadParameter("give --store or --name-server, not both", param_hint="--store")
        call = dataclasses.replace(call, folder=store)
    from mqtemplate.console.access import Access
    from mqtemplate.console.dashboard import Dashboard, DashboardServer, dashboard_audit
    from mqtemplate.operations.audit import default_audit_path

    audit_path = audit_log or (default_audit_path() if allow_changes else None)
    audit = dashboard_audit(audit_path, SystemClock())
    access = Access(
        allow_changes=allow_changes,
        allowed_hosts=(*allowed_host, *(() if is_loopback else (host,))),
    )
    with _source(call, needed=application is None) as source:
        documents = None if application is None else _actuator(call, application, application_token_file)
        pages = Dashboard(source, documents, access=access, audit=audit, title=_title(source, application))
        _serve(DashboardServer(pages, host, port), access, is_loopback=is_loopback, audit=audit_path)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise typer.BadParameter(
            f"must be a numeric address, such as 127.0.0.1 or ::1, got {host!r}", param_hint="--host"
        ) from None


@contextmanager
def _source(call: CommandCall, *, needed: bool) -> Iterator[BrokerSource | None]:
    """Yield the broker that the options name; None if they name none and only an application is shown."""
    if call.name_server is None and call.folder is None and not needed:
        yield None
        return
    from mqtemplate.console.sources import FolderSource, OpenSource
    from mqtemplate.operations import BrokerAccess

    settings = call.settings()
    cluster = cluster_of(settings)
    if cluster is not None:
        with cluster:
            label = call.name_server or settings.rocketmq.name_server or "cluster"
            yield OpenSource(BrokerAccess(cluster), str(label))
        return
    if settings.store_path is None:
        raise ConfigurationError(
            "the broker in memory ends with its process, so the dashboard cannot see it; give --store FOLDER, "
            "--name-server host:port, or --app URL"
        )
    yield FolderSource(Path(settings.store_path), settings.mqtemplate.broker)


def _title(source: BrokerSource | None, application: str | None) -> str:
    return masked_text(" · ".join(part for part in (None if source is None else source.label, application) if part))


def _actuator(call: CommandCall, url: str, token_file: Path | None) -> ActuatorClient:
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must be http://host:port, got {masked_text(url)!r}", param_hint="--app")
    return ActuatorClient(url, _token_of(call, token_file))


def _serve(server: DashboardServer, access: Access, *, is_loopback: bool, audit: Path | None) -> None:
    from mqtemplate.context.signals import StopRequests
    from mqtemplate.processes import prompt_threads

    stop_requests = StopRequests()
    # A count of a million messages must not delay the pages beside it.
    with prompt_threads(), stop_requests.from_signals():
        server.start()
        try:
            print_line(f"dashboard: http://{server.address}/sign-in?token={access.token}")
            if audit is not None:
                print_line(f"changes are logged to {audit}")
            if not is_loopback:
                print_line(
                    f"warning: other machines can connect to {server.address} without encryption, so the token and "
                    "messages can be read on the way; put a proxy with TLS before it, or use a tunnel",
                    sys.stderr,
                )
            print_line("press Ctrl-C to stop")
            stop_requests.wait()
        finally:
            server.stop()


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

_OFFSETS = ("topic", "broker", "queue", "before", "after", "skipped", "again")
_OFFSET_COLUMNS: Columns = {name.upper(): name for name in _OFFSETS}

Listener = Annotated[str, typer.Argument(metavar="LISTENER", help="id of the listener; see 'listeners ls'")]


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
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help=_TOKEN_FILE_HELP)] = None
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
        return ActuatorClient(url, _token_of(call, self.token_file))


# --- why ----------------------------------------------------------------------------------------


@command(TOP, "why", "why 4466", "why 7F0000010000000000000000000000A1 --topic orders", "why HANDLE --json")
def why(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="ID|HANDLE|KEY")],
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="the topic that it was sent to")] = None,
    actuator: ActuatorOptions = ActuatorOptions(),
) -> None:
    """Say why a message is late: pending, a paused listener, a backlog, a retry, a slow handler.

    Paused listeners and slow handlers are known with the actuator of the application: --url, or the address and port
    of application.yml. Of several messages with a key the newest is taken.
    """
    from mqtemplate.operations.message_path import message_path
    from mqtemplate.operations.search import messages_named
    from mqtemplate.operations.why_late import measured_rate, why_late

    with call.access() as access:
        found = messages_named(access, name, topic)
        path = message_path(access, found[0].msg_id, found[0].topic)
        findings = why_late(access, path, _application_state(call, actuator), measured_rate(access))
    if len(found) > 1:
        call.output.note(f"this is the newest of {len(found)} messages; see them with: mqtemplate messages TOPIC --key")
    record = record_of(found[0], "msg_id", "topic", "keys")
    names = ("text", "is_cause", "group", "listener", "change")
    call.output.document({**record, "findings": [record_of(each, *names) for each in findings]})
    call.output.line(f"message {record['keys'] or record['msg_id']} of topic {record['topic']}")
    for each in findings:
        call.output.line(f"{'*' if each.is_cause else '-'} {each.text}")


def _application_state(call: CommandCall, actuator: ActuatorOptions) -> ListenerReport:
    """Return the listeners of the application, if one is named and answers, and who has paused them."""
    from mqtemplate.operations.why_late import ListenerReport

    audit = call.audit()
    if actuator.url is None and not call.settings().mqtemplate.management.port:
        return ListenerReport.read(None, audit)
    try:
        return ListenerReport.read(actuator.client(call).get, audit)
    except BrokerError as exc:
        call.output.note(f"the listeners are unknown: {exc}")
        return ListenerReport.read(None, audit)


# --- listeners ----------------------------------------------------------------------------------

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
    *,
    confirmation: Confirmation,
) -> None:
    """Continue a listener at another position, in the queues that this application has.

    If several messages are skipped or delivered again, the command shows how many, and asks.
    """
    given = {"to": to, "back": back, "topic": topic, "queue": queue, "offset": offset, "broker": broker}
    change = {"action": "seek", **{key: value for key, value in given.items() if value is not None}}
    _seek(call, f"listeners/{quote(listener, safe='')}", change, actuator, confirmation)


def _seek(
    call: CommandCall, path: str, change: dict[str, Any], actuator: ActuatorOptions, confirmation: Confirmation
) -> None:
    """Show what a seek or the undoing of one does, ask, and make it.

    Args:
        path: Path of the document to change, below the actuator.
    """
    from mqtemplate.operations.changes import ChangePreview

    client = actuator.client(call)
    preview = ChangePreview.of(client.post(path, {**change, "dryRun": True})["preview"])
    needs_answer = preview.count > 1 and not confirmation.yes
    if confirmation.dry_run or (needs_answer and not call.as_json):
        _show_offsets(call, preview)
        for line in preview_lines(preview) if preview.offsets else preview.notes:
            call.output.note(line)
    if confirmation.dry_run:
        call.output.note("nothing was changed")
        return
    question = f"Move the listener: skip {preview.skipped:,} messages, deliver {preview.again:,} again?"
    call.confirm(question, yes=not needs_answer)
    record = client.post(path, {**change, "confirm": preview.count})
    if record["change"] is not None:
        hint = f"mqtemplate undo {record['change']} --url {client.address}"
        call.output.note(f"this is change {record['change']} of the application; undo it with: {hint}")
    _print_listener(call, record, change)


def _show_offsets(call: CommandCall, preview: ChangePreview) -> None:
    call.output.table(preview.document()["offsets"], _OFFSET_COLUMNS, "all offsets are there already")


def _change(call: CommandCall, listener: str, change: dict[str, Any], actuator: ActuatorOptions) -> None:
    _print_listener(call, actuator.client(call).post(f"listeners/{quote(listener, safe='')}", change), change)


def _print_listener(call: CommandCall, record: dict[str, Any], change: dict[str, Any]) -> None:
    call.output.document(record)
    threads = f", {record['threads']} handlers at a time" if change["action"] == "concurrency" else ""
    workers = [each["worker"] for each in record.get("workers", ())]
    where = f" in {'workers' if len(workers) > 1 else 'worker'} {', '.join(workers)}" if workers else ""
    call.output.line(
        f"{record['id']} is {record['state']}{where}; lag {record['lag']}, in flight {record['inFlight']}{threads}"
    )


def _token_of(call: CommandCall, file: Path | None) -> str | None:
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


# --- changes and undo ---------------------------------------------------------------------------

_CHANGE_COLUMNS: Columns = {
    "TIME": lambda record: time_text(record["time_ms"]),
    "ID": "id",
    "CHANGE": "action",
    "OF": "target",
    "MESSAGES": "messages",
    "BY": "author",
    "STATE": "state",
    "UNDO": "undo",
}
_OF = ("listener", "group", "topic", "name", "filter", "undo_of")


@command(TOP, "changes", "changes", "changes --max-count 5 --json", "changes --url http://127.0.0.1:9090")
def changes(
    call: CommandCall,
    max_count: Annotated[int, typer.Option(min=1, help="most changes")] = 20,
    actuator: ActuatorOptions = ActuatorOptions(),
) -> None:
    """List the last changes of this user from the audit log, the newest first; with --url those of an application."""
    from mqtemplate.operations.undo import why_not_undone

    if actuator.url is not None:
        found = actuator.client(call).get("changes")["changes"][:max_count]
        undone = "it was undone already, by change {undoneBy}"
        records = [
            _change_record(each, None if each["undoneBy"] is None else undone.format_map(each)) for each in found
        ]
    else:
        names = ("id", "time", "action", "state", "author", "facts")
        logged = call.audit().recent(max_count)
        records = [_change_record(record_of(each, *names), why_not_undone(each)) for each in logged]
    call.output.table(records, _CHANGE_COLUMNS, "no changes")


def _change_record(change: dict[str, Any], why_not: str | None) -> dict[str, Any]:
    """Return a row: a change, and the reason why it cannot be undone."""
    from mqtemplate.operations.bulk import parse_time

    facts, time_ms = change["facts"], parse_time(change["time"])
    target = " ".join(f"{name}={facts[name]}" for name in _OF if facts.get(name))
    undo = "yes" if why_not is None else f"no: {why_not}"
    return {**change, "time_ms": time_ms, "target": target, "messages": facts.get("shown", ""), "undo": undo}


@command(TOP, "undo", "undo 3f9a12bc70", "undo 3f9a12bc70 --dry-run", "undo 3f9a12bc70 --url http://127.0.0.1:9090")
def undo(
    call: CommandCall,
    change: Annotated[str, typer.Argument(metavar="ID", help="id of the change; see 'mqtemplate changes'")],
    actuator: ActuatorOptions = ActuatorOptions(),
    *,
    confirmation: Confirmation,
) -> None:
    """Undo a change of the audit log, after a preview: old offsets, old deliver times, copies of cancelled messages.

    With --url a seek of a listener is undone by its application. What was sent again stays sent.
    """
    from mqtemplate.operations.undo import undo_change

    if actuator.url is not None:
        _seek(call, f"changes/{quote(change, safe=',')}", {"action": "undo"}, actuator, confirmation)
        return
    logged = call.audit().get(change)
    with call.access() as access:
        if not confirmation.dry_run:
            access.open_for_changes()
        undoing = undo_change(access, logged)
        _introduce(call, logged)
        if undoing.preview.is_empty:
            why = " ".join(undoing.preview.notes) or "all is as before it"
            raise UnknownNameError(f"nothing is left to undo of change {change}: {why}")
        if undoing.preview.offsets and not call.as_json:
            _show_offsets(call, undoing.preview)
        made = call.make(undoing, confirmation, "undoing")
    if made is not None:
        call.output.document({"change": made.id, **made.facts})
        call.output.line(made.text)


def _introduce(call: CommandCall, logged: LoggedChange) -> None:
    """Say which change is undone, and warn if that happened on another broker."""
    call.output.note(f"change {logged.id}: {logged.action} by {logged.author} at {logged.time}")
    place = logged.facts.get("broker")
    if place not in (None, call.place):
        call.output.note(f"warning: it is a change of {place}, and this is {call.place}; see --name-server")
