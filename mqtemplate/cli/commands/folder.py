"""``doctor`` and ``simulate``: look into a store directory without changing it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import duration, named_values, record_of
from mqtemplate.cli.invocation import TOP, CommandCall, Yes, command
from mqtemplate.cli.output import ExitCode
from mqtemplate.converters.readable import size_text, span_text, time_text

if TYPE_CHECKING:
    from mqtemplate.engine.settings import EmbeddedSettings
    from mqtemplate.operations.doctor import FolderReport
    from mqtemplate.operations.simulation import Simulation


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="a store directory, of this library or of RocketMQ")]
Assignments = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="a key of application.yml; may be repeated")
]


# --- doctor -------------------------------------------------------------------------------------


@command(
    TOP,
    "doctor",
    "doctor ./data",
    "doctor /var/lib/rocketmq/store --json",
    "doctor ./data --repair --copy-to /backup/data",
    without=("name_server",),
)
def doctor(
    call: CommandCall,
    folder: Folder,
    repair: Annotated[
        bool, typer.Option("--repair", help="keep a copy, and rebuild what the commit log determines")
    ] = False,
    copy_to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder of the copy (default: beside the directory)")
    ] = None,
    yes: Yes = False,
) -> None:
    """Check a store directory: sizes, damage by file and byte, pending messages, groups, and what a start would do.

    Without --repair it changes nothing, and another process may have the directory open. The exit code is 6 after
    damage. With --repair it copies the directory first, and checks it again afterwards. Damaged records stay damaged.
    """
    from mqtemplate.operations.doctor import examine, part_sizes

    if repair:
        _repair(call, folder, copy_to, yes=yes)
    settings = _settings(call, [])
    log_bytes = sum(part.byte_count for part in part_sizes(folder) if part.name == "commitlog")
    with call.output.progress("reading the commit log", log_bytes) as advance:
        report = examine(folder, settings, advance)
    call.output.document(_report_record(report))
    if not call.as_json:
        _print_report(call, report)
    if report.is_damaged:
        raise typer.Exit(ExitCode.DAMAGED)


def _repair(call: CommandCall, folder: Path, copy_to: Path | None, *, yes: bool) -> None:
    from mqtemplate.operations.doctor import part_sizes
    from mqtemplate.operations.repair import repair

    real = folder.resolve()
    copy = copy_to or real.with_name(f"{real.name}.copy-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
    call.confirm(f"Copy {folder} to {copy}, and rebuild its consume queues, index and timers?", yes=yes)
    size = sum(part.byte_count for part in part_sizes(folder))
    with call.output.progress("copying", size) as advance:
        done = repair(folder, copy, _settings(call, []), advance)
    for action in done.actions:
        call.output.note(action)


def _settings(call: CommandCall, assignments: list[str]) -> EmbeddedSettings:
    from mqtemplate.context.settings.source import load_settings

    return load_settings(call.config, call.profile, arguments=named_values(assignments, "--set")).mqtemplate.broker


def _report_record(report: FolderReport) -> dict[str, Any]:
    log = report.log
    return {
        "path": str(report.path),
        "used_by": report.used_by,
        "was_closed": report.was_closed,
        "verdict": report.verdict.value,
        "is_damaged": report.is_damaged,
        "problem": report.problem,
        "free_bytes": report.free_bytes,
        "parts": [asdict(each) for each in report.parts],
        "log": None
        if log is None
        else record_of(log, "start_offset", "end_offset", "record_count", "oldest_ms")
        | {"newest_ms": max(log.newest_ms.values(), default=None)},
        "damages": [asdict(each) for each in (log.damages if log else ())],
        "topics": report.message_counts,
        "retention_holds": [asdict(each) for each in report.holds],
        "pending": report.pending,
        "groups": [asdict(each) for each in report.groups],
        "start": report.start,
        "warnings": report.warnings,
        "losses": report.losses,
    }


def _print_report(call: CommandCall, report: FolderReport) -> None:
    out = call.output
    known = report.used_by is not None and report.used_by[0].isdigit()
    owner = f"in use by {'process ' if known else ''}{report.used_by}" if report.used_by else "not in use"
    closed = "" if report.was_closed else ", and its last owner did not close it"
    out.line(f"{report.path}: {owner}{closed}; {size_text(report.free_bytes)} free on the disk")
    record = _report_record(report)
    columns: dict[str, Any] = {
        "PART": "name",
        "FILES": "file_count",
        "SIZE": lambda part: size_text(part["byte_count"]),
        "ON DISK": lambda part: size_text(part["disk_bytes"]),
    }
    out.line("")
    out.table(record["parts"], columns, "the directory is empty")
    if report.log is not None:
        newest_ms = record["log"]["newest_ms"]
        out.line(
            f"\n{report.log.record_count} records, physical offsets {report.log.start_offset} to "
            f"{report.log.end_offset}, {time_text(report.log.oldest_ms)} to {time_text(newest_ms)}"
        )
    _print_contents(call, report)
    _print_holds(call, report)
    _print_findings(call, report)


def _print_contents(call: CommandCall, report: FolderReport) -> None:
    lines = {
        "topics": [f"{name} {count}" for name, count in report.message_counts.items()],
        "pending": [f"{count} {name}" for name, count in report.pending.items() if count],
        "groups": [f"{each.name} lag {each.lag}" for each in report.groups],
    }
    for title, parts in lines.items():
        call.output.line(f"{title.ljust(8)}  {', '.join(parts) or 'none'}")


def _print_holds(call: CommandCall, report: FolderReport) -> None:
    for each in report.holds:
        kind = "dead letters that are not old" if each.topic.startswith("%DLQ%") else "unread messages"
        call.output.line(
            f"kept      {size_text(each.byte_count)} older than file-reserved-time since {time_text(each.since_ms)}: "
            f"group {each.group} has {each.message_count} {kind} in {each.topic}"
        )


_VERDICTS = {
    "STARTS": "no damage",
    "REPAIRS": "no damage that a start does not repair",
    "LOSES": "DAMAGE: messages are lost or cannot be read; a start delivers the others",
    "REFUSES": "DAMAGE: no broker can open it: {problem}",
}


def _print_findings(call: CommandCall, report: FolderReport) -> None:
    out = call.output
    for each in report.log.damages if report.log else ():
        kind = "incomplete tail" if each.is_tail else "DAMAGE"
        out.line(f"{kind}: {each.file} from byte {each.file_offset} on, {each.size} bytes: {each.reason}")
    for warning in report.warnings:
        out.line(f"{'error' if warning in report.losses else 'warning'} of a start: {warning}")
    for action in report.start:
        out.line(f"a start would {action}")
    out.line(_VERDICTS[report.verdict.name].format(problem=report.problem))


# --- simulate -----------------------------------------------------------------------------------


@command(
    TOP,
    "simulate",
    "simulate ./data --for 24h",
    "simulate ./data --consume-rate 50 --json",
    "simulate ./data --stopped 2h --set mqtemplate.broker.flush-disk-type=ASYNC_FLUSH",
    without=("name_server",),
)
def simulate(
    call: CommandCall,
    folder: Folder,
    span: Annotated[str, typer.Option("--for", metavar="DURATION", help="length of the simulated time")] = "24h",
    assign: Assignments = [],  # noqa: B006
    consume_rate: Annotated[
        float | None, typer.Option(help="messages per second that the consumers of each topic handle")
    ] = None,
    stopped: Annotated[str, typer.Option(metavar="DURATION", help="time from now on in which no broker runs")] = "0s",
) -> None:
    """Run the pending messages of a store directory forward in virtual time: load and lateness by minute.

    The broker of the simulation works on a copy in memory, under the settings of application.yml and of --set. Nothing
    on the disk changes.
    """
    from mqtemplate.clock import SystemClock
    from mqtemplate.operations.simulation import Consumption
    from mqtemplate.operations.simulation import simulate as run

    settings, span_ms = _settings(call, assign), duration(span, "--for")
    start_ms = SystemClock().now_ms() + duration(stopped, "--stopped")
    with call.output.progress("simulating", span_ms) as advance:
        result = run(
            folder,
            settings,
            span_ms=span_ms,
            consumption=Consumption(rate=consume_rate),
            start_ms=start_ms,
            on_progress=advance,
        )
    _print_simulation(call, result)


def _print_simulation(call: CommandCall, result: Simulation) -> None:
    records = [asdict(each) for each in result.minutes]
    if call.as_json:
        percentiles = {f"p{each}": value for each, value in result.lateness_ms.items()}
        record = record_of(result, "start_ms", "delivered", "undelivered")
        call.output.document(record | {"lateness_ms": percentiles, "minutes": records})
        return
    columns: dict[str, Any] = {
        "MINUTE": lambda record: time_text(record["start_ms"]),
        "DUE": "due",
        "DELIVERED": "delivered",
        "CONSUMED": "consumed",
        "BACKLOG": "backlog",
        "LATEST": lambda record: span_text(record["lateness_ms"]),
    }
    call.output.table(records, columns, "no message is due in this time")
    late = ", ".join(f"p{each} {span_text(value)}" for each, value in result.lateness_ms.items())
    call.output.line(f"{result.delivered} delivered, {result.undelivered} due later; lateness {late or 'none'}")
