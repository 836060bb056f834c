"""``delayed``: pending messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import (
    body_fields,
    duration,
    future_time,
    pretty_body,
    properties_text,
    size_text,
    span_text,
    time_text,
)
from mqtemplate.cli.invocation import DryRun, Invocation, Yes, command
from mqtemplate.cli.output import Columns

if TYPE_CHECKING:
    from mqtemplate.admin import BulkChange
    from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChange

_BAR = 40
_COLUMNS: Columns = {
    "DUE": lambda record: time_text(record["deliver_ms"]),
    "IN": lambda record: span_text(record["in_ms"]),
    "TOPIC": "topic",
    "TAG": "tags",
    "KEYS": "keys",
    "LEVEL": lambda record: record["delay_level"] or "",
    "SIZE": lambda record: size_text(record["body_size"]),
    "ID": "msg_id",
}
_FIELDS: Columns = {
    "id": "msg_id",
    "topic": "topic",
    "tag": "tags",
    "keys": "keys",
    "due": lambda record: f"{time_text(record['deliver_ms'])} (in {span_text(record['in_ms'])})",
    "delay level": lambda record: record["delay_level"] or "",
    "born": lambda record: time_text(record["born_timestamp"]),
    "stored": lambda record: time_text(record["store_timestamp"]),
    "handle": "handle",
    "properties": lambda record: properties_text(record.get("properties", {})),
    "body": lambda record: pretty_body(record["body"].encode()) if "body" in record else record.get("body_base64"),
}

Topic = Annotated[str | None, typer.Option(metavar="TOPIC", help="only messages for this topic")]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="only messages with this key or id")]
Tag = Annotated[str | None, typer.Option(metavar="TAG", help="only messages with this tag")]
After = Annotated[str | None, typer.Option(metavar="TIME", help="due at this time or later: 2h (from now), a time")]
Before = Annotated[str | None, typer.Option(metavar="TIME", help="due before this time: 2h (from now), a time")]
Rate = Annotated[float | None, typer.Option(help="most messages per second")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    delayed = typer.Typer(help="Show, cancel and reschedule pending messages.", no_args_is_help=True)
    command(delayed, "ls", "delayed ls", "delayed ls --topic reminders --before 2h", "delayed ls --key 4466 --json")(ls)
    command(delayed, "show", "delayed show 4466", "delayed show HANDLE --json")(show)
    command(delayed, "cancel", "delayed cancel 4466", "delayed cancel HANDLE")(cancel)
    command(
        delayed,
        "reschedule",
        "delayed reschedule 4466 --to 2h",
        "delayed reschedule HANDLE --now",
        "delayed reschedule --topic reminders --before 1h --shift 30m --dry-run",
    )(reschedule)
    command(
        delayed,
        "purge",
        "delayed purge --topic reminders --dry-run",
        "delayed purge --tag trial --after 24h --rate 500 --yes",
    )(purge)
    command(delayed, "histogram", "delayed histogram", "delayed histogram --by 1h --before 48h --topic reminders")(
        histogram
    )
    app.add_typer(delayed, name="delayed")


# --- queries ------------------------------------------------------------------------------------


def ls(
    call: Invocation,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    after: After = None,
    before: Before = None,
    max_count: Annotated[int, typer.Option(min=1, help="most messages")] = 100,
) -> None:
    """List pending messages in the order of their deliver times."""
    from mqtemplate.admin import PendingMessages

    with call.admin() as admin:
        pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
        query = _query(now_ms, topic, key, tag, after, before)
        found = list(pending.all(query, max_count + 1))
    records = [_record(each, now_ms) for each in found[:max_count]]
    call.output.table(records, _COLUMNS, "no pending messages")
    if len(found) > max_count:
        call.output.note(f"there are more than {max_count}; see more with --max-count, or filter")


def show(
    call: Invocation,
    name: Annotated[str, typer.Argument(metavar="HANDLE|KEY|ID")],
    topic: Topic = None,
) -> None:
    """Show pending messages with properties and body, by handle, key or id."""
    from mqtemplate.admin import PendingMessages

    with call.admin() as admin:
        pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
        records = []
        for each in pending.find(name, topic):
            stored = pending.stored(each)
            body = {} if stored is None else {"properties": dict(stored.properties), **body_fields(stored.body)}
            records.append(_record(each, now_ms) | body)
    if call.as_json:
        call.output.document(records)
        return
    for number, record in enumerate(records):
        if number:
            call.output.line("")
        call.output.fields(record, _FIELDS)


def histogram(
    call: Invocation,
    topic: Topic = None,
    tag: Tag = None,
    after: After = None,
    before: Before = None,
    by: Annotated[str, typer.Option(metavar="DURATION", help="length of a time span")] = "1h",
) -> None:
    """Show the number of pending messages that are due in each time span."""
    from mqtemplate.admin import PendingMessages

    bucket_ms = duration(by, "--by")
    if bucket_ms < 1:
        raise typer.BadParameter("it must be longer than 0", param_hint="--by")
    with call.admin() as admin:
        query = _query(admin.broker.clock.now_ms(), topic, None, tag, after, before)
        counts = PendingMessages(admin).counts(query, bucket_ms)
    top = max(counts.buckets.values(), default=1)
    records = [{"start_ms": start, "count": count} for start, count in counts.buckets.items()]
    if call.as_json:
        call.output.document({"total": counts.total, "bucket_ms": bucket_ms, "buckets": records})
        return
    columns: Columns = {
        "FROM": lambda record: time_text(record["start_ms"]),
        "MESSAGES": "count",
        "": lambda record: "#" * max(1, round(record["count"] * _BAR / top)),
    }
    call.output.table(records, columns, "no pending messages")
    call.output.line(f"{counts.total} messages")


def _query(
    now_ms: int, topic: str | None, key: str | None, tag: str | None, after: str | None, before: str | None
) -> PendingQuery:
    from mqtemplate.pending import PendingQuery

    return PendingQuery(
        topic=topic,
        key=key,
        tag=tag,
        after_ms=future_time(after, now_ms, "--after"),
        before_ms=future_time(before, now_ms, "--before"),
    )


def _record(message: PendingMessage, now_ms: int) -> dict[str, Any]:
    return {
        "msg_id": message.msg_id,
        "topic": message.topic,
        "tags": message.tags,
        "keys": message.keys,
        "deliver_ms": message.deliver_ms,
        "in_ms": message.deliver_ms - now_ms,
        "delay_level": message.delay_level,
        "born_timestamp": message.born_timestamp,
        "store_timestamp": message.store_timestamp,
        "body_size": message.body_size,
        "handle": message.handle,
    }


# --- changes ------------------------------------------------------------------------------------


def cancel(
    call: Invocation,
    name: Annotated[str, typer.Argument(metavar="HANDLE|KEY|ID")],
    topic: Topic = None,
) -> None:
    """Cancel pending messages by handle, key or id. A cancelled message is never delivered."""
    from mqtemplate.admin import PendingMessages

    with call.admin() as admin:
        change = PendingMessages(admin).cancel(name, topic)
    _print_change(call, name, change)


def reschedule(
    call: Invocation,
    name: Annotated[str | None, typer.Argument(metavar="[HANDLE|KEY|ID]")] = None,
    to: Annotated[str | None, typer.Option(metavar="TIME", help="new deliver time: 2h (from now), a time")] = None,
    now: Annotated[bool, typer.Option("--now", help="deliver now")] = False,
    shift: Annotated[str | None, typer.Option(metavar="DURATION", help="later by this, or earlier: -30m")] = None,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    after: After = None,
    before: Before = None,
    rate: Rate = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Change the deliver time of pending messages: of one by handle, key or id, or of all that match, by --shift."""
    from mqtemplate.admin import PendingMessages

    if [to is not None, now, shift is not None].count(True) != 1:
        raise typer.BadParameter("give one of --to, --now and --shift", param_hint="--to")
    with call.admin() as admin:
        pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
        if name is not None and shift is None:
            deliver_ms = now_ms if now else future_time(to, now_ms, "--to") or now_ms
            _print_change(call, name, pending.reschedule(name, deliver_ms, topic))
            return
        if shift is None:
            raise typer.BadParameter(
                "name one message, or move all that match with --shift", param_hint="HANDLE|KEY|ID"
            )
        found = (
            list(pending.all(_query(now_ms, topic, key, tag, after, before)))
            if name is None
            else pending.find(name, topic)
        )
        shift_ms = duration(shift, "--shift")
        question = f"Move the deliver times of {len(found)} pending messages by {shift}?"
        if _may_change(call, found, now_ms, question, yes=yes, dry_run=dry_run):
            with call.output.progress("rescheduling", len(found)) as advance:
                changed = pending.shift_all(found, shift_ms, rate, advance)
            _print_bulk(call, changed)


def purge(
    call: Invocation,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    after: After = None,
    before: Before = None,
    all_messages: Annotated[bool, typer.Option("--all", help="cancel all pending messages")] = False,
    rate: Rate = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Cancel all pending messages that match."""
    from mqtemplate.admin import PendingMessages

    if not all_messages and not any((topic, key, tag, after, before)):
        raise typer.BadParameter("give a filter such as --topic, or --all", param_hint="--all")
    with call.admin() as admin:
        pending, now_ms = PendingMessages(admin), admin.broker.clock.now_ms()
        found = list(pending.all(_query(now_ms, topic, key, tag, after, before)))
        question = f"Cancel {len(found)} pending messages?"
        if _may_change(call, found, now_ms, question, yes=yes, dry_run=dry_run):
            with call.output.progress("cancelling", len(found)) as advance:
                changed = pending.cancel_all(found, rate, advance)
            _print_bulk(call, changed)


def _may_change(
    call: Invocation, found: list[PendingMessage], now_ms: int, question: str, *, yes: bool, dry_run: bool
) -> bool:
    """Show the messages of a change, and ask. Return False if there is nothing to do."""
    if dry_run or not found:
        call.output.table([_record(each, now_ms) for each in found], _COLUMNS, "no pending message matches")
        call.output.note(f"{len(found)} pending messages match; nothing was changed")
        return False
    if not yes:
        for each in found[:5]:
            call.output.note(f"  {time_text(each.deliver_ms)}  {each.topic}  {each.keys or each.msg_id}")
    call.confirm(question, yes=yes)
    return True


def _print_bulk(call: Invocation, change: BulkChange) -> None:
    record: dict[str, Any] = {
        "total": change.total,
        "counts": {status.value: count for status, count in change.counts.items()},
        "unsupported": change.unsupported,
        "handles": list(change.handles),
    }
    call.output.document(record)
    parts = [f"{count} {status}" for status, count in record["counts"].items()]
    if change.unsupported:
        parts.append(f"{change.unsupported} that this broker cannot change")
    call.output.line(f"{change.total} messages: {', '.join(parts)}")


def _print_change(call: Invocation, name: str, change: ScheduleChange) -> None:
    """Print the result.

    Raises:
        UnknownNameError: No message was changed.
    """
    from mqtemplate.errors import UnknownNameError

    record = {"status": change.status.value, "count": change.count, "handles": list(change.handles)}
    if change.count == 0:
        call.output.document(record)
        raise UnknownNameError(
            f"{name!r}: no pending message was changed, its state is: {change.status.value}; see delayed ls"
        )
    call.output.document(record)
    call.output.line(f"{change.count} {change.status.value}")
    for handle in change.handles:
        call.output.line(f"new handle {handle}")
