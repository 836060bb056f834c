"""``backup``, ``restore``, ``promote`` and ``copy``: backups of store directories, and continuous copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqtemplate.cli.formats import record_of
from mqtemplate.cli.invocation import TOP, CommandCall, command, command_group
from mqtemplate.cli.output import ExitCode
from mqtemplate.converters.readable import count_text, size_text, time_text

if TYPE_CHECKING:
    from mqtemplate.copy.backup import StoreSummary
    from mqtemplate.copy.restore import RestoreReport


Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="place of a copy: file:///folder, s3://bucket/prefix, gs://…, az://…")
]


# --- backup -------------------------------------------------------------------------------------


@command(
    TOP,
    "backup",
    "backup ./data /backup/data",
    "backup ./data /backup/data --json",
    without=("name_server",),
)
def backup(
    call: CommandCall,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a store directory, also one in use")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="folder of the backup: missing or empty")],
) -> None:
    """Write a consistent backup of a store directory, while its owner goes on.

    The backup is a store directory. It has each message that was acknowledged before the command began.
    "mqtemplate doctor TARGET" verifies it.
    """
    from mqtemplate.copy.backup import backup_store
    from mqtemplate.operations.doctor import part_sizes

    size = sum(part.byte_count for part in part_sizes(folder) if part.name == "commitlog")
    with call.output.progress("copying the commit log", size) as advance:
        summary = backup_store(folder, target, call.settings().mqtemplate.broker, advance)
    call.output.document({"path": str(target), **record_of(summary, *_SUMMARY)})
    _print_summary(call, target, summary)


_SUMMARY = ("start_offset", "end_offset", "message_count", "pending_count", "overdue_count", "actions")


def _print_summary(call: CommandCall, path: Path, summary: StoreSummary) -> None:
    call.output.line(
        f"{path}: {count_text(summary.message_count, 'message')} in topics, {summary.pending_count} pending, "
        f"physical offsets {summary.start_offset} to {summary.end_offset}"
    )
    if summary.overdue_count:
        call.output.line(f"{summary.overdue_count} of the pending messages are due: the next start releases them")
    for action in summary.actions:
        call.output.line(action)


# --- restore ------------------------------------------------------------------------------------


@command(
    TOP,
    "restore",
    "restore s3://bucket/shop ./data",
    "restore file:///mnt/copy ./data --until 2026-12-01T09:30+01:00",
    "restore s3://bucket/shop ./test-data --fork",
    without=("name_server",),
)
def restore(
    call: CommandCall,
    source: Source,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the new store directory: missing or empty")],
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="the moment, such as 2026-12-01T09:30+01:00 or 2h for ago")
    ] = None,
    fork: Annotated[
        bool, typer.Option("--fork", help="the original goes on: give the directory a history of its own")
    ] = False,
) -> None:
    """Write a store directory with the state of a moment, by default the last one of a copy.

    What was cancelled or released by then stays so. The report says what happened after that moment and will
    happen again. Credentials of an object store come from mqtemplate.copy.options, or from its environment.
    """
    from mqtemplate.cli.formats import past_time
    from mqtemplate.clock import SystemClock
    from mqtemplate.copy.restore import list_copy, restore_store

    until_ms = past_time(until, SystemClock().now_ms(), "--until")
    settings = call.settings().mqtemplate
    size = list_copy(source, settings.copy_.options).log_bytes
    with call.output.progress("restoring the commit log", size) as advance:
        report = restore_store(
            source,
            folder,
            until_ms,
            fork=fork,
            options=settings.copy_.options,
            settings=settings.broker,
            on_progress=advance,
        )
    call.output.document(
        {
            "path": str(folder),
            **record_of(report, "moment_ms", "released_later", "cancelled_later", "is_fork"),
            **record_of(report.store, *_SUMMARY),
        }
    )
    _print_restored(call, folder, report)


def _print_restored(call: CommandCall, folder: Path, report: RestoreReport) -> None:
    out = call.output
    out.line(f"restored the state of {time_text(report.moment_ms)}")
    _print_summary(call, folder, report.store)
    if report.released_later:
        out.line(
            f"{count_text(report.released_later, 'message was', 'messages were')} released after that moment, and will "
            "be released again"
        )
    if report.cancelled_later:
        out.line(
            f"{count_text(report.cancelled_later, 'message was', 'messages were')} cancelled after that moment, and "
            "will be released"
        )
    if report.is_fork:
        out.line("the directory has a history of its own: give mqtemplate.copy.to another place before it is copied")


# --- promote ------------------------------------------------------------------------------------


@command(TOP, "promote", "promote ./standby", "promote ./standby --force", without=("name_server",))
def promote(
    call: CommandCall,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a store directory that follows a copy")],
    force: Annotated[
        bool, typer.Option("--force", help="the owner has ended for certain: do not wait for its lease or its silence")
    ] = False,
) -> None:
    """Let a store directory that follows a copy take over from its owner.

    If "mqtemplate broker --follow" runs there, that process becomes the broker. Otherwise the directory
    becomes a store, on which a broker or an application can be started.

    If the owner has a lease (mqtemplate.copy.lease), the command waits until it is over; from then on the owner
    refuses messages by itself. Without one, make sure that the owner has ended: it must have been silent for a minute.
    """
    from mqtemplate.copy.follower import Follower, is_running, request_promotion

    settings = call.settings().mqtemplate
    if is_running(folder):
        call.output.line(f"the process that keeps {folder} current takes over ...")
        request_promotion(folder, force=force)
        call.output.document({"path": str(folder), "is_running": True})
        call.output.line(f"{folder} has taken over, and that process is its broker now")
        return
    with Follower(None, folder, settings.copy_.options, settings.broker) as follower:
        found = follower.promote(
            force=force,
            on_wait=lambda milliseconds: call.output.note(f"waiting for the owner's end, {milliseconds / 1_000:.0f} s"),
        )
    record = {"path": str(folder), "is_running": False, "moment_ms": found.moment_ms}
    call.output.document({**record, **record_of(found.store, *_SUMMARY)})
    call.output.line(f"took over with everything that was copied until {time_text(found.moment_ms)}")
    _print_summary(call, folder, found.store)


# --- copy ---------------------------------------------------------------------------------------

_COPY = command_group("copy", "Contents of a continuous copy of a store directory, and the check of its objects.")


@command(_COPY, "ls", "copy ls s3://bucket/shop", "copy ls file:///mnt/copy --json", without=("name_server",))
def ls(call: CommandCall, source: Source) -> None:
    """Show which moments can be restored, who copied, and how much there is. Only names are read."""
    from mqtemplate.copy.restore import list_copy

    found = list_copy(source, call.settings().mqtemplate.copy_.options)
    record = record_of(
        found, "url", "history", "first_ms", "last_ms", "is_alive", "segment_count", "log_bytes", "stored_bytes"
    )
    processes = [record_of(each, "number", "time_ms", "start", "host", "pid", "folder") for each in found.epochs]
    snapshots = [record_of(each, "time_ms", "log_start", "end") for each in found.snapshots]
    call.output.document({**record, "processes": processes, "snapshots": snapshots})
    if call.as_json:
        return
    moments = "none yet: the first snapshot is not complete"
    if found.first_ms is not None:
        moments = f"{time_text(found.first_ms)} to {time_text(found.last_ms)}"
    call.output.line(f"moments    {moments}")
    call.output.line(
        f"contents   {size_text(found.log_bytes)} of commit log in {count_text(found.segment_count, 'segment')}, "
        f"{count_text(len(snapshots), 'snapshot')}; {size_text(found.stored_bytes)} stored"
    )
    if processes:
        last = found.epochs[-1]
        state = "is alive" if found.is_alive else "has ended, or is silent"
        call.output.line(
            f"process    {last.pid} on {last.host} with {last.folder}, since {time_text(last.time_ms)}: {state}"
        )


@command(
    _COPY, "verify", "copy verify s3://bucket/shop", "copy verify file:///mnt/copy --json", without=("name_server",)
)
def verify(call: CommandCall, source: Source) -> None:
    """Read each object, verify its checksums, and check that no bytes are missing. The exit code is 6 after damage."""
    from mqtemplate.copy.restore import list_copy, verify_copy

    options = call.settings().mqtemplate.copy_.options
    found = list_copy(source, options)
    with call.output.progress("reading", found.segment_count + len(found.snapshots)) as advance:
        check = verify_copy(source, options, advance)
    call.output.document(record_of(check, "object_count", "problems"))
    for problem in check.problems:
        call.output.line(f"DAMAGE: {problem}")
    if check.problems:
        raise typer.Exit(ExitCode.DAMAGED)
    call.output.line(f"{count_text(check.object_count, 'object')} read, no damage")
