"""``delayed``: pending messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import body_fields, duration, future_time, property_option, record_body, record_of
from mqtemplate.cli.invocation import CommandCall, Confirmation, command, command_group, topic_names
from mqtemplate.cli.output import Columns, Shown
from mqtemplate.converters.readable import properties_text, size_text, span_text, time_text

if TYPE_CHECKING:
    from mqtemplate.operations import BrokerAccess, BulkChange, DelayedOperations, PendingChange
    from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChangeStatus
    from mqtemplate.template import Send

_BAR = 40
_MOST_SHOWN = 1_000
"""Messages in the table of a dry run: a table of a million takes half an hour."""
_DOING = {"cancel": "cancelling", "shift": "rescheduling", "move": "rescheduling", "deliver": "rescheduling"}
_PENDING_KEY = "PENDING KEY"
_COLUMNS: Columns = {
    "DUE": lambda record: time_text(record["deliver_ms"]),
    "IN": Shown("in_ms", span_text),
    "TOPIC": "topic",
    "TAG": "tags",
    "KEYS": "keys",
    _PENDING_KEY: lambda record: record["pending_key"] or "",
    "LEVEL": lambda record: record["delay_level"] or "",
    "SIZE": Shown("body_size", size_text),
    "ID": "msg_id",
}
_FIELDS: Columns = {
    "id": "msg_id",
    "topic": "topic",
    "tag": "tags",
    "keys": "keys",
    "pending key": lambda record: record["pending_key"] or "",
    "due": lambda record: f"{time_text(record['deliver_ms'])} (in {span_text(record['in_ms'])})",
    "delay level": lambda record: record["delay_level"] or "",
    "born": lambda record: time_text(record["born_timestamp"]),
    "stored": lambda record: time_text(record["store_timestamp"]),
    "handle": "handle",
    "properties": lambda record: properties_text(record.get("properties", {})),
    "body": record_body,
}

Topic = Annotated[
    str | None, typer.Option(metavar="TOPIC", autocompletion=topic_names, help="only messages for this topic")
]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="only messages with this key or id")]
Property = Annotated[
    str | None, typer.Option("--property", metavar="NAME=VALUE", help="only messages with this property")
]
Rate = Annotated[float | None, typer.Option(help="most messages per second")]


@dataclass(frozen=True, slots=True)
class DueOptions:
    """Options that filter pending messages by topic, tag, property and deliver time."""

    topic: Topic = None
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="only messages with this tag")] = None
    prop: Property = None
    after: Annotated[
        str | None, typer.Option(metavar="TIME", help="due at this time or later: 2h (from now), a time")
    ] = None
    before: Annotated[str | None, typer.Option(metavar="TIME", help="due before this time: 2h (from now), a time")] = (
        None
    )

    def query(self, now_ms: int, key: str | None = None) -> PendingQuery:
        """Return the filter."""
        from mqtemplate.pending import PendingQuery

        return PendingQuery(
            topic=self.topic,
            key=key,
            tag=self.tag,
            with_property=property_option(self.prop),
            after_ms=future_time(self.after, now_ms, "--after"),
            before_ms=future_time(self.before, now_ms, "--before", is_end=True),
        )


_DELAYED = command_group("delayed", "Show, cancel and reschedule pending messages.")


# --- queries ------------------------------------------------------------------------------------


@command(
    _DELAYED,
    "ls",
    "delayed ls",
    "delayed ls --topic reminders --before 2h",
    "delayed ls --key 4466 --json",
    is_list=True,
)
def ls(
    call: CommandCall,
    options: DueOptions = DueOptions(),
    key: Key = None,
    max_count: Annotated[int, typer.Option(min=1, help="most messages")] = 100,
) -> None:
    """List pending messages in the order of their deliver times."""
    from mqtemplate.operations import DelayedOperations

    with call.access() as access:
        pending, now_ms = DelayedOperations(access), access.broker.clock.now_ms()
        query = options.query(now_ms, key)
        found = _all(call, pending, query, max_count + 1)
    records = [_record(each, now_ms) for each in found[:max_count]]
    call.output.table(records, _columns(records), "no pending messages")
    if len(found) > max_count:
        call.output.note(f"there are more than {max_count}; see more with --max-count, or filter")


@command(_DELAYED, "show", "delayed show 4466", "delayed show HANDLE --json")
def show(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="HANDLE|KEY|ID")],
    topic: Topic = None,
) -> None:
    """Show pending messages with properties and body, by handle, key or id."""
    from mqtemplate.operations import DelayedOperations

    with call.access() as access:
        pending, now_ms = DelayedOperations(access), access.broker.clock.now_ms()
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


@command(_DELAYED, "histogram", "delayed histogram", "delayed histogram --by 1h --before 48h --topic reminders")
def histogram(
    call: CommandCall,
    options: DueOptions = DueOptions(),
    by: Annotated[str, typer.Option(metavar="DURATION", help="length of a time span")] = "1h",
) -> None:
    """Show the number of pending messages that are due in each time span."""
    bucket_ms = duration(by, "--by")
    if bucket_ms < 1:
        raise typer.BadParameter("it must be longer than 0", param_hint="--by")
    with call.access() as access:
        query = options.query(access.broker.clock.now_ms())
        with call.output.progress("comparing", None) as advance:
            counts = access.broker.delayed.count_pending(query, bucket_ms, on_compared=advance)
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


@command(_DELAYED, "status", "delayed status --name-server mq1:9876", "delayed status --topic orders --json")
def status(
    call: CommandCall,
    topic: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", autocompletion=topic_names, help="with the late deliveries of a topic"),
    ] = None,
) -> None:
    """Show the timers and delay levels of a RocketMQ cluster: which broker is late, and why."""
    from dataclasses import asdict

    from mqtemplate.errors import UnsupportedError
    from mqtemplate.operations.why_late import delivery_lateness

    with call.access() as access:
        console = access.broker.delay_console
        if console is None:
            raise UnsupportedError("this is no cluster of RocketMQ; see mqtemplate status and mqtemplate why")
        brokers = console.brokers()
        late = None if topic is None else delivery_lateness(access, topic)
    found = [asdict(each) | {"late_ms": each.late_ms, "causes": each.causes} for each in brokers]
    call.output.document({"brokers": found, "topic": topic, "lateness": None if late is None else asdict(late)})
    for each in brokers:
        state = each.problem or "; ".join(each.causes) or "on time"
        call.output.line(f"{each.broker}: {state}")
        if each.has_timers:
            call.output.line(
                f"  timers: {each.timer_pending:,} on the wheel, {each.timer_unread:,} not on it yet, the slot that it "
                f"delivers now is {span_text(each.timer_behind_ms)} old"
            )
        for level in each.levels:
            delay = "unknown" if level.delay_ms is None else span_text(level.delay_ms)
            late_by = "unknown" if level.late_ms is None else span_text(level.late_ms)
            call.output.line(f"  level {level.level} ({delay}): {level.pending:,} pending, late by {late_by}")
    if late is not None:
        call.output.line(
            f"{topic}: of the last {late.count:,} delayed messages {late.late:,} were late; median "
            f"{span_text(late.median_ms)}, 99 % {span_text(late.p99_ms)}, most {span_text(late.max_ms)}"
        )


def _all(
    call: CommandCall, pending: DelayedOperations, query: PendingQuery, max_count: int | None = None
) -> list[PendingMessage]:
    """Return the messages that match. Show the progress of a long scan, which has no time limit."""
    with call.output.progress("comparing", None) as advance:
        return list(pending.all(query, max_count, advance))


def _columns(records: Sequence[Mapping[str, Any]]) -> Columns:
    """Return the columns: the one of pending keys only if a message has one."""
    has_keys = any(record["pending_key"] for record in records)
    return {title: cell for title, cell in _COLUMNS.items() if has_keys or title != _PENDING_KEY}


def _record(message: PendingMessage, now_ms: int) -> dict[str, Any]:
    return {
        **record_of(message, "msg_id", "topic", "tags", "keys", "deliver_ms"),
        "in_ms": message.deliver_ms - now_ms,
        **record_of(message, "delay_level", "born_timestamp", "store_timestamp", "body_size", "handle", "pending_key"),
    }


# --- changes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThenOptions:
    """Options of a message that is sent together with a cancel."""

    then: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="TOPIC[:TAG] BODY", help="send this message in the same step, if a message is cancelled"),
    ] = None
    then_delay: Annotated[str | None, typer.Option(metavar="DURATION", help="with --then: deliver it later")] = None
    then_key: Annotated[str | None, typer.Option(metavar="KEY", help="with --then: its business key")] = None

    def sends(self) -> list[Send]:
        """Return the message; empty without one."""
        from mqtemplate.template import Send

        if self.then is None:
            for value, name in ((self.then_delay, "--then-delay"), (self.then_key, "--then-key")):
                if value is not None:
                    raise typer.BadParameter("it describes the message of --then; give that, too", param_hint=name)
            return []
        destination, body = self.then
        delay = None
        if self.then_delay is not None:
            delay = timedelta(milliseconds=duration(self.then_delay, "--then-delay"))
        return [Send(destination, body.encode(), delay=delay, keys=self.then_key or ())]


@command(
    _DELAYED,
    "cancel",
    "delayed cancel 4466",
    "delayed cancel HANDLE",
    "delayed cancel 4466 --dry-run",
    "delayed cancel 4466 --then mails:thanks 'invoice 4466 is paid' --then-delay 1h",
)
def cancel(
    call: CommandCall,
    name: Annotated[str, typer.Argument(metavar="HANDLE|KEY|ID")],
    topic: Topic = None,
    options: ThenOptions = ThenOptions(),
    *,
    confirmation: Confirmation,
) -> None:
    """Cancel pending messages by handle, key or id. A cancelled message is never delivered.

    If the key names several messages, the command shows how many, and asks. With --then, the cancel and the new message
    are stored together or not at all: nothing is sent if no message was pending any more.
    """
    from mqtemplate.operations import PendingAction, PendingChange

    then = options.sends()
    with call.access() as access:
        _change_named(call, access, name, topic, PendingChange(PendingAction.CANCEL), confirmation, then=then)


@command(
    _DELAYED,
    "reschedule",
    "delayed reschedule 4466 --to 2h",
    "delayed reschedule HANDLE --now",
    "delayed reschedule --topic reminders --before 1h --shift 30m --dry-run",
)
def reschedule(
    call: CommandCall,
    name: Annotated[str | None, typer.Argument(metavar="[HANDLE|KEY|ID]")] = None,
    to: Annotated[str | None, typer.Option(metavar="TIME", help="new deliver time: 2h (from now), a time")] = None,
    now: Annotated[bool, typer.Option("--now", help="deliver now")] = False,
    shift: Annotated[str | None, typer.Option(metavar="DURATION", help="later by this, or earlier: -30m")] = None,
    options: DueOptions = DueOptions(),
    key: Key = None,
    rate: Rate = None,
    *,
    confirmation: Confirmation,
) -> None:
    """Change the deliver time of pending messages: by handle, key or id, or of all that match, by --shift.

    If they are several, the command shows how many, and asks.
    """
    from mqtemplate.operations import DelayedOperations, PendingAction, PendingChange

    if [to is not None, now, shift is not None].count(True) != 1:
        raise typer.BadParameter("give one of --to, --now and --shift", param_hint="--to")
    with call.access() as access:
        now_ms = access.broker.clock.now_ms()
        if shift is not None:
            change = PendingChange(PendingAction.SHIFT, duration(shift, "--shift"))
        else:
            deliver_ms = now_ms if now else future_time(to, now_ms, "--to") or now_ms
            change = PendingChange(PendingAction.DELIVER if now else PendingAction.MOVE, to_ms=deliver_ms)
        if name is None and shift is None:
            raise typer.BadParameter(
                "name one message, or move all that match with --shift", param_hint="HANDLE|KEY|ID"
            )
        if name is None:
            query = options.query(now_ms, key)
            found = _all(call, DelayedOperations(access), query)
            _change_found(call, access, found, change, _filter_of(query), rate, confirmation)
        else:
            _change_named(call, access, name, options.topic, change, confirmation, rate)


@command(
    _DELAYED,
    "purge",
    "delayed purge --topic reminders --dry-run",
    "delayed purge --tag trial --after 24h --rate 500 --yes",
    "delayed purge --property tenant=T",
)
def purge(
    call: CommandCall,
    options: DueOptions = DueOptions(),
    key: Key = None,
    all_messages: Annotated[bool, typer.Option("--all", help="cancel all pending messages")] = False,
    rate: Rate = None,
    *,
    confirmation: Confirmation,
) -> None:
    """Cancel all pending messages that match. The command shows them first, and asks."""
    from mqtemplate.operations import DelayedOperations, PendingAction, PendingChange

    if not all_messages and not any((*astuple(options), key)):
        raise typer.BadParameter("give a filter such as --topic, or --all", param_hint="--all")
    with call.access() as access:
        query = options.query(access.broker.clock.now_ms(), key)
        found = _all(call, DelayedOperations(access), query)
        change = PendingChange(PendingAction.CANCEL)
        _change_found(call, access, found, change, _filter_of(query), rate, confirmation)


def _filter_of(query: PendingQuery) -> dict[str, object]:
    """Return a filter for the audit log."""
    given = {name: getattr(query, name) for name in ("topic", "key", "tag", "after_ms", "before_ms")}
    if query.with_property is not None:
        given["property"] = "=".join(query.with_property)
    return {"filter": {name: value for name, value in given.items() if value is not None}}


def _change_named(
    call: CommandCall,
    access: BrokerAccess,
    name: str,
    topic: str | None,
    change: PendingChange,
    confirmation: Confirmation,
    rate: float | None = None,
    then: Sequence[Send] = (),
) -> None:
    """Change the messages with a handle, a key or an id, and print the result.

    Args:
        then: Messages to send in the same step as a cancel.

    Raises:
        UnknownNameError: No message was changed.
    """
    from mqtemplate.errors import UnknownNameError
    from mqtemplate.message import split_keys
    from mqtemplate.operations import DelayedOperations, PendingAction

    pending = DelayedOperations(access)
    try:
        found = pending.find(name, topic, with_retries=False)
    except UnknownNameError:
        if confirmation.dry_run:
            raise
        # Nothing is pending, so this changes nothing: it says what became of the message.
        deliver_ms = change.to_ms or access.broker.clock.now_ms()
        is_cancel = change.action is PendingAction.CANCEL
        state = pending.cancel(name, topic, then) if is_cancel else pending.reschedule(name, deliver_ms, topic)
        _check_changed(call, name, state.status, state.count)
        return
    # A key may look like the beginning of an id: a message that is found by that is shown, and confirmed.
    is_beginning = all(
        each.msg_id.startswith(name) and name not in (each.msg_id, *split_keys(each.keys)) for each in found
    )
    target: dict[str, object] = {"name": name, "topic": topic}
    named = None if is_beginning else name
    _change_found(call, access, found, change, target, rate, confirmation, named, then)


def _change_found(
    call: CommandCall,
    access: BrokerAccess,
    found: list[PendingMessage],
    change: PendingChange,
    target: dict[str, object],
    rate: float | None,
    confirmation: Confirmation,
    name: str | None = None,
    then: Sequence[Send] = (),
) -> None:
    """Change pending messages after a preview; with *name* as the ones that the user has named."""
    from mqtemplate.operations.delayed import CancelAndSend, PendingMessagesChange

    now_ms = access.broker.clock.now_ms()
    if confirmation.dry_run or not found:
        shown = found if call.as_json else found[:_MOST_SHOWN]
        records = [_record(each, now_ms) for each in shown]
        call.output.table(records, _columns(records), "no pending message matches")
        if len(shown) < len(found):
            call.output.note(f"these are the first {len(shown)} of {len(found):,}; see all with --json")
    elif not confirmation.yes:
        for each in found[:5] if len(found) > 1 or name is None else []:
            call.output.note(f"  {time_text(each.deliver_ms)}  {each.topic}  {each.keys or each.msg_id}")
    wanted = PendingMessagesChange(access, lambda _: found, change, target, rate=rate, is_named=name is not None)
    if then:
        wanted = CancelAndSend(access, lambda _: found, then, target, is_named=name is not None)
    made = call.make(wanted, confirmation, _DOING[change.action.value])
    if made is None:
        return
    done: BulkChange = made.details
    if name is None:
        _print_bulk(call, done)
        return
    record = {"status": done.status.value, "count": done.changed, "handles": list(done.handles), **_sent_fields(done)}
    call.output.document(record)
    if done.changed == 0:
        _check_changed(call, name, done.status, 0, is_printed=True)
    call.output.line(f"{done.changed} {done.status.value}")
    for handle in done.handles:
        call.output.line(f"new handle {handle}")
    _print_sent(call, done)


def _sent_fields(change: BulkChange) -> dict[str, Any]:
    """Return what was sent together with a cancel; empty without such a message."""
    sent = [record_of(each, "msg_id", "message_queue.topic", "handle") for each in change.sent]
    return {"sent": sent} if sent else {}


def _print_sent(call: CommandCall, change: BulkChange) -> None:
    for each in change.sent:
        call.output.line(f"sent {each.msg_id} to {each.message_queue.topic}")


def _print_bulk(call: CommandCall, change: BulkChange) -> None:
    record: dict[str, Any] = {
        "total": change.total,
        "counts": {status.value: count for status, count in change.counts.items()},
        "unsupported": change.unsupported,
        "handles": list(change.handles),
        **_sent_fields(change),
    }
    call.output.document(record)
    call.output.line(f"{change.total} messages: {change.text}")
    _print_sent(call, change)


def _check_changed(
    call: CommandCall, name: str, status: ScheduleChangeStatus, count: int, *, is_printed: bool = False
) -> None:
    """Check that named messages were changed.

    Raises:
        UnknownNameError: None was.
    """
    from mqtemplate.errors import UnknownNameError

    if not is_printed:
        call.output.document({"status": status.value, "count": count, "handles": []})
    if not count:
        raise UnknownNameError(
            f"{name!r}: no pending message was changed, its state is: {status.value}; see delayed ls"
        )
