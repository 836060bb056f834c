"""``listeners`` and ``schedules`` of a running application, through its actuator; ``why``; ``changes`` and ``undo``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from mqtemplate.cli.formats import preview_lines, record_of, zoned_text
from mqtemplate.cli.invocation import (
    FROM_CONFIGURATION,
    TOP,
    ActuatorOptions,
    CommandCall,
    Confirmation,
    command,
    command_group,
    completed,
)
from mqtemplate.cli.output import Columns
from mqtemplate.clock import SystemClock
from mqtemplate.converters.readable import time_text
from mqtemplate.errors import BrokerError, UnknownNameError

if TYPE_CHECKING:
    from mqtemplate.operations.audit import LoggedChange
    from mqtemplate.operations.changes import ChangePreview
    from mqtemplate.operations.why_late import ListenerReport


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


def _listener_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the listeners that begin with a text, for the completion of a shell."""
    return _completed(context, incomplete, "id")


def _groups_of_listeners(context: typer.Context, incomplete: str) -> list[str]:
    """Return the groups of listeners that begin with a text, for the completion of a shell."""
    return sorted(set(_completed(context, incomplete, "group")))


def _completed(context: typer.Context, incomplete: str, field: str) -> list[str]:
    given = {name: context.params.get(name) for name in ("url", "token_file")}
    call = CommandCall(config=context.params.get("config"), profile=context.params.get("profile") or ())

    def names() -> list[str]:
        return [each[field] for each in ActuatorOptions(**given).client(call).get("listeners")["listeners"]]

    return completed(incomplete, names)


_LISTENER_HELP = "id of the listener, the end of one, or a group"
Listener = Annotated[str, typer.Argument(metavar="LISTENER", autocompletion=_listener_names, help=_LISTENER_HELP)]
OneListener = Annotated[
    str | None, typer.Argument(metavar="[LISTENER]", autocompletion=_listener_names, help=_LISTENER_HELP)
]
ListenerGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="GROUP",
        autocompletion=_groups_of_listeners,
        help="all listeners of this group, in all processes of the application",
    ),
]


# --- why ----------------------------------------------------------------------------------------


@command(TOP, "why", "why 4466", "why 7F0000010000000000000000000000A1 --topic orders", "why HANDLE --json")
def why(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="ID|HANDLE|KEY")],
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="the topic that it was sent to")] = None,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
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


@command(_LISTENERS, "ls", "listeners ls", "listeners ls --sort=-lag --json", without=("name_server",), is_list=True)
def ls(call: CommandCall, actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
    """Show the listeners with their states and lags."""
    found = actuator.client(call).get("listeners")["listeners"]
    call.output.table(found, _COLUMNS, "the application has no listeners")


@command(_LISTENERS, "pause", "listeners pause bill", "listeners pause --group billing", without=("name_server",))
def pause(
    call: CommandCall,
    listener: OneListener = None,
    group: ListenerGroup = None,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
) -> None:
    """Pause a listener, or all of a group, in all processes: handlers finish, no further one starts, queues stay."""
    _change(call, listener, {"action": "pause"}, actuator, group)


@command(_LISTENERS, "resume", "listeners resume bill", "listeners resume --group billing", without=("name_server",))
def resume(
    call: CommandCall,
    listener: OneListener = None,
    group: ListenerGroup = None,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
) -> None:
    """Resume a paused listener, or all of a group, in all processes."""
    _change(call, listener, {"action": "resume"}, actuator, group)


@command(_LISTENERS, "concurrency", "listeners concurrency shop.app.bill 4", without=("name_server",))
def concurrency(
    call: CommandCall,
    listener: Listener,
    number: Annotated[int, typer.Argument(metavar="NUMBER", help="handlers at a time: 1 to its consume_thread_max")],
    actuator: ActuatorOptions = FROM_CONFIGURATION,
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
        str | None,
        typer.Option(metavar="PLACE", help="first, latest, yesterday, 20:00, an ISO time with a zone, or epoch ms"),
    ] = None,
    back: Annotated[str | None, typer.Option(metavar="DURATION", help="handle the last 2h, 30m, … again")] = None,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="with --queue and --offset")] = None,
    queue: Annotated[int | None, typer.Option(metavar="ID", help="one queue of the topic")] = None,
    offset: Annotated[int | None, typer.Option(metavar="OFFSET", help="the next message of the queue")] = None,
    broker: Annotated[str | None, typer.Option(metavar="NAME", help="if several brokers have the queue")] = None,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
    *,
    confirmation: Confirmation,
) -> None:
    """Continue a listener at another position, in the queues that this application has.

    If several messages are skipped or delivered again, the command shows how many, and asks.
    """
    from mqtemplate.operations.application import listeners_named
    from mqtemplate.operations.bulk import named_time

    given = {"to": to, "back": back, "topic": topic, "queue": queue, "offset": offset, "broker": broker}
    change = {"action": "seek", **{key: value for key, value in given.items() if value is not None}}
    if to is not None and (time_ms := named_time(to, SystemClock().now_ms(), -1)) is not None:
        call.output.note(f"--to is {zoned_text(time_ms)}")
        change["to"] = time_ms
    found = listeners_named(actuator.client(call).get("listeners")["listeners"], listener)
    if len(found) > 1:
        ids = ", ".join(each["id"] for each in found)
        raise typer.BadParameter(f"group {listener!r} has several listeners: {ids}; give one", param_hint="LISTENER")
    _seek(call, f"listeners/{quote(found[0]['id'], safe='')}", change, actuator, confirmation)


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
    call.output.document(record)
    _print_listener(call, record, change)


def _show_offsets(call: CommandCall, preview: ChangePreview) -> None:
    call.output.table(preview.document()["offsets"], _OFFSET_COLUMNS, "all offsets are there already")


def _change(
    call: CommandCall,
    listener: str | None,
    change: dict[str, Any],
    actuator: ActuatorOptions,
    group: str | None = None,
) -> None:
    """Change a listener, or those of a group, in all processes of the application, and print them.

    Raises:
        BrokerError: One was not changed in all processes; the others were.
    """
    from mqtemplate.operations.application import change_each, listeners_named, listeners_of_group

    if (listener is None) == (group is None):
        raise typer.BadParameter("give a listener, or --group", param_hint="LISTENER")
    client = actuator.client(call)
    known = client.get("listeners")["listeners"]
    found = listeners_of_group(known, group) if listener is None and group else listeners_named(known, listener or "")
    records, failed = change_each(client.post, [each["id"] for each in found], change)
    call.output.document(records[0] if group is None and len(records) == 1 else records)
    for each in records:
        _print_listener(call, each, change)
    if group is not None:
        call.output.note(
            f"reached: all processes of the application at {client.address}; members of group {group} in other "
            f"applications go on, see them with: mqtemplate groups {group}"
        )
    if failed is not None:
        raise failed


def _print_listener(call: CommandCall, record: dict[str, Any], change: dict[str, Any]) -> None:
    threads = f", {record['threads']} handlers at a time" if change["action"] == "concurrency" else ""
    workers = [each["worker"] for each in record.get("workers", ())]
    where = f" in {'workers' if len(workers) > 1 else 'worker'} {', '.join(workers)}" if workers else ""
    call.output.line(
        f"{record['id']} is {record['state']}{where}; lag {record['lag']}, in flight {record['inFlight']}{threads}"
    )


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


@command(_SCHEDULES, "ls", "schedules ls", "schedules ls --json", without=("name_server",), is_list=True)
def ls_schedules(call: CommandCall, actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
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
        str | None, typer.Option(metavar="TIME", help="'tomorrow 08:00', ISO time with a zone; default: until 'resume'")
    ] = None,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
) -> None:
    """Skip the runs of a schedule in all processes. Skipped runs are not caught up."""
    from mqtemplate.operations.bulk import named_time

    if until is not None and (time_ms := named_time(until, SystemClock().now_ms(), 1)) is not None:
        call.output.note(f"--until is {zoned_text(time_ms)}")
        until = datetime.fromtimestamp(time_ms / 1_000).astimezone().isoformat()
    _change_schedule(call, schedule, {"action": "pause"} | ({} if until is None else {"until": until}), actuator)


@command(_SCHEDULES, "resume", "schedules resume nightly", without=("name_server",))
def resume_schedule(call: CommandCall, schedule: Name, actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
    """End the pause of a schedule."""
    _change_schedule(call, schedule, {"action": "resume"}, actuator)


@command(_SCHEDULES, "trigger", "schedules trigger nightly", without=("name_server",))
def trigger_schedule(call: CommandCall, schedule: Name, actuator: ActuatorOptions = FROM_CONFIGURATION) -> None:
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


@command(TOP, "changes", "changes", "changes --max-count 5 --json", "changes --url http://127.0.0.1:9090", is_list=True)
def changes(
    call: CommandCall,
    max_count: Annotated[int, typer.Option(min=1, help="most changes")] = 20,
    actuator: ActuatorOptions = FROM_CONFIGURATION,
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
    actuator: ActuatorOptions = FROM_CONFIGURATION,
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
