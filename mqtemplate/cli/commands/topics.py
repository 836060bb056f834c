"""``status``, ``topics``, ``groups`` and ``offsets``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.broker import TopicMessageType
from mqtemplate.cli.formats import past_time, record_of
from mqtemplate.cli.invocation import (
    TOP,
    CommandCall,
    Confirmation,
    command,
    command_group,
    group_names,
    topic_names,
)
from mqtemplate.cli.output import Columns, Shown
from mqtemplate.converters.readable import span_text, time_text

if TYPE_CHECKING:
    from mqtemplate.broker import GroupDeliveries, GroupInfo, TopicInfo
    from mqtemplate.operations import BrokerAccess, OffsetChange, OffsetTarget
    from mqtemplate.operations.changes import Change

_QUEUE_KEY = ("queue.broker_name", "queue.queue_id")
_QUEUE = (*_QUEUE_KEY, "min_offset", "max_offset", "message_count", "last_stored_ms")
_PROGRESS = ("queue.topic", *_QUEUE_KEY, "committed", "max_offset", "lag", "last_consumed_ms")
_CHANGE = ("queue.topic", *_QUEUE_KEY, "before", "after", "skipped", "again")
_TOPIC_COLUMNS: Columns = {
    "TOPIC": "name",
    "KIND": "kind",
    "QUEUES": "queue_count",
    "MESSAGES": "message_count",
    "LAST STORED": lambda record: time_text(record["last_stored_ms"]),
}
_QUEUE_COLUMNS: Columns = {
    "BROKER": "broker_name",
    "QUEUE": "queue_id",
    "FIRST": "min_offset",
    "END": "max_offset",
    "MESSAGES": "message_count",
    "LAST STORED": lambda record: time_text(record["last_stored_ms"]),
}
_GROUP_COLUMNS: Columns = {
    "GROUP": "name",
    "MEMBERS": lambda record: len(record["members"]),
    "LAG": "lag",
    "BEHIND": Shown("behind_ms", lambda value: span_text(value) if value else ""),
    "MODEL": "message_model",
    "TOPICS": lambda record: ", ".join(record["topics"]),
}
_PROGRESS_COLUMNS: Columns = {
    "TOPIC": "topic",
    "BROKER": "broker_name",
    "QUEUE": "queue_id",
    "COMMITTED": "committed",
    "END": "max_offset",
    "LAG": "lag",
    "LAST CONSUMED": lambda record: time_text(record["last_consumed_ms"]),
}
_IN_FLIGHT = (
    *("topic", "msg_id", "keys", "client", "since_ms", "until_ms", "is_renewed", "attempt", "message_group", "blocked"),
    *("queue.broker_name", "queue.queue_id", "queue_offset"),
)
_IN_FLIGHT_COLUMNS: Columns = {
    "IN FLIGHT": lambda record: record["msg_id"] or f"queue {record['queue_id']} offset {record['queue_offset']}",
    "TOPIC": "topic",
    "KEYS": "keys",
    "HELD BY": lambda record: record["client"] or "unknown",
    "SINCE": lambda record: time_text(record["since_ms"]),
    "UNTIL": lambda record: time_text(record["until_ms"]) + (" at most" if record["is_renewed"] else ""),
    "ATTEMPT": "attempt",
    "ORDER": lambda record: record["message_group"] or "",
    "BLOCKS": lambda record: record["blocked"] or "",
}
_CHANGE_COLUMNS: Columns = {
    "TOPIC": "topic",
    "BROKER": "broker_name",
    "QUEUE": "queue_id",
    "BEFORE": "before",
    "AFTER": "after",
    "SKIPPED": "skipped",
    "AGAIN": "again",
}


_PROBLEM_COLUMNS: Columns = {
    "SEVERITY": "severity",
    "PROBLEM": "text",
    "SEE": lambda record: f"mqtemplate {record['command']}" if record["command"] else "",
}
_COMMANDS = {
    # kind of a problem -> the command that shows its cause
    "disk": "topics",
    "retention": "groups {name}",
    "group": "groups {name}",
    "groups": "groups",
    "dead letters": "dlq ls {name}",
    "delayed": "delayed ls",
}


_TOPICS = command_group(
    "topics", "List topics with their messages, or show one topic; create and delete topics.", has_default=True
)
_OFFSETS = command_group("offsets", "Show or reset the committed offsets of a group.")


# --- status -------------------------------------------------------------------------------------


@command(TOP, "status", "status", "status --json --name-server 127.0.0.1:9876")
def status(call: CommandCall) -> None:
    """List what is wrong now: groups that are behind, dead letters, overdue messages, the disk.

    The exit code is 1 if one of the problems is an error.
    """
    from mqtemplate.operations.problems import Severity, broker_problems, read_broker

    with call.access() as access:
        found = broker_problems(read_broker(access, access.store_path))
    records = [
        {**record_of(each, "severity", "kind", "name", "text"), "command": _command_of(each.kind.value, each.name)}
        for each in found
    ]
    call.output.table(records, _PROBLEM_COLUMNS, "nothing is wrong now")
    if any(each.severity is Severity.ERROR for each in found):
        raise typer.Exit(1)


def _command_of(kind: str, name: str) -> str | None:
    """Return the command that shows the cause of a problem; None if there is none."""
    form = _COMMANDS.get(kind)
    return None if form is None else form.format(name=shlex.quote(name) if name else "").strip()


# --- topics -------------------------------------------------------------------------------------


@command(_TOPICS, "ls", "topics ls --all", "topics orders", "topics --sort=-messages", is_list=True)
def topics(
    call: CommandCall,
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", autocompletion=topic_names, help="show the queues of this topic")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="show retry, dead-letter and system topics too")] = False,
) -> None:
    """List topics with their messages, or the queues and groups of one topic. The word 'ls' may be left out."""
    from mqtemplate.broker import TopicKind

    with call.access() as access:
        if topic is not None:
            _show_topic(call, access.admin.topic(topic))
            return
        found = [each for each in access.admin.topics() if show_all or each.kind is TopicKind.NORMAL]
    columns = {**_TOPIC_COLUMNS, **({"RELEASES": "shape"} if any(each.shape for each in found) else {})}
    call.output.table([_topic_record(each) for each in found], columns, "no topics")


def _show_topic(call: CommandCall, topic: TopicInfo) -> None:
    record = _topic_record(topic) | {
        "groups": list(topic.groups),
        "queues": [record_of(each, *_QUEUE) for each in topic.queues],
    }
    if call.as_json:
        call.output.document(record)
        return
    call.output.line(f"{topic.name}: {topic.message_count} messages, groups: {', '.join(topic.groups) or 'none'}")
    if topic.shape:
        call.output.line(f"releases of delayed messages: {topic.shape}")
    call.output.table(record["queues"], _QUEUE_COLUMNS, "no queues")


def _topic_record(topic: TopicInfo) -> dict[str, Any]:
    return {
        **record_of(topic, "name", "kind"),
        "queue_count": len(topic.queues),
        **record_of(topic, "message_count", "last_stored_ms", "shape"),
    }


@command(
    _TOPICS,
    "create",
    "topics create orders",
    "topics create reminders --type DELAY --queues 8",
    "topics create orders --queues 16 --dry-run",
)
def create_topic(
    call: CommandCall,
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    queues: Annotated[int, typer.Option(metavar="N", help="queues on each broker")] = 4,
    message_type: Annotated[
        TopicMessageType | None,
        typer.Option("--type", case_sensitive=False, help="messages that proxies of RocketMQ 5 accept for the topic"),
    ] = None,
    *,
    confirmation: Confirmation,
) -> None:
    """Create a topic, or give it more queues.

    Without --type a topic takes all messages by the remoting protocol, and normal ones by gRPC. 'mqtemplate undo'
    deletes the topic again; queues that a topic got cannot be removed.
    """
    from mqtemplate.operations.creation import TopicCreated

    with call.access() as access:
        change = TopicCreated(access, topic, queues, message_type=message_type)
        _make(call, change, confirmation, {"topic": topic, "queues": queues})


@command(_TOPICS, "delete", "topics delete orders --dry-run", "topics delete orders --yes")
def delete_topic(
    call: CommandCall,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)],
    *,
    confirmation: Confirmation,
) -> None:
    """Delete a topic with its messages, and the offsets of its groups in it.

    The command shows first how many messages the topic has, and which groups read it, and asks. 'mqtemplate undo'
    creates the topic again, without the messages.
    """
    from mqtemplate.operations.creation import TopicDeleted

    with call.access() as access:
        change = TopicDeleted(access, topic)
        _make(call, change, confirmation, {"topic": topic, "messages": change.preview.count})


def _make(call: CommandCall, change: Change, confirmation: Confirmation, record: dict[str, Any]) -> None:
    """Make a change of one topic, and write what was done."""
    made = call.make(change, confirmation)
    if made is not None:
        call.output.note(made.text)
    if call.as_json:
        call.output.document({**record, "changed": made is not None})


# --- groups -------------------------------------------------------------------------------------


@command(TOP, "groups", "groups", "groups billing", "groups --sort=-lag --json", is_list=True)
def groups(
    call: CommandCall,
    group: Annotated[
        str | None,
        typer.Argument(metavar="[GROUP]", autocompletion=group_names, help="show members and queues of this group"),
    ] = None,
) -> None:
    """List consumer groups with their lag, or members, subscriptions and queues of one group.

    For a group that receives by POP, one group also shows the messages that members have: since when, until when they
    are invisible to others, and how many messages of the same order each one blocks.

    BEHIND is the age of the oldest message that the group has not consumed. Groups of schedules are not listed: see
    'mqtemplate schedules ls'.
    """
    from mqtemplate.topics import is_schedule_group

    with call.access() as access:
        if group is not None:
            _show_group(call, access.admin.group(group), access)
            return
        found = [each for each in access.admin.groups() if not is_schedule_group(each.name)]
        records = [_group_record(each, access) for each in found]
    call.output.table(records, _GROUP_COLUMNS, "no groups")


def _show_group(call: CommandCall, group: GroupInfo, access: BrokerAccess) -> None:
    deliveries = access.admin.deliveries(group.name)
    record = _group_record(group, access) | {"deliveries": _deliveries_record(deliveries)}
    if call.as_json:
        call.output.document(record)
        return
    out = call.output
    behind = f" ({span_text(record['behind_ms'])} behind)" if record["behind_ms"] else ""
    out.line(
        f"{group.name}: lag {group.lag}{behind}, {len(group.members)} members, {group.message_model or 'not connected'}"
    )
    if group.members:
        columns: Columns = {"MEMBER": "client_id", "ADDRESS": "address", "LANGUAGE": "language"}
        out.table(record["members"], columns, "no members")
    if group.subscriptions:
        columns = {"SUBSCRIPTION": "topic", "TYPE": "expression_type", "EXPRESSION": "expression"}
        out.table(record["subscriptions"], columns, "no subscriptions")
    out.table(record["progress"], _PROGRESS_COLUMNS, "no offsets")
    if deliveries is not None:
        _show_deliveries(call, deliveries, access.broker.clock.now_ms())


def _show_deliveries(call: CommandCall, deliveries: GroupDeliveries, now_ms: int) -> None:
    """Print the messages of a group that members have received by POP."""
    text = f"{deliveries.in_flight} in flight"
    if deliveries.messages:
        text += f", the oldest for {span_text(max(0, now_ms - deliveries.messages[0].since_ms))}"
    if deliveries.waiting:
        text += f"; {deliveries.waiting} wait for their order"
    if deliveries.held is not None:
        text += (
            f"; {deliveries.held} receives wait for messages; {deliveries.expired} deliveries expired since the start"
        )
    call.output.line(text)
    if deliveries.messages:
        records = [record_of(each, *_IN_FLIGHT) for each in deliveries.messages]
        call.output.table(records, _IN_FLIGHT_COLUMNS, "none")


def _deliveries_record(deliveries: GroupDeliveries | None) -> dict[str, Any] | None:
    if deliveries is None:
        return None
    messages = [record_of(each, *_IN_FLIGHT) for each in deliveries.messages]
    return {**record_of(deliveries, "in_flight", "waiting", "expired", "held"), "messages": messages}


def _group_record(group: GroupInfo, access: BrokerAccess) -> dict[str, Any]:
    from mqtemplate.operations.progress import behind_ms

    return {
        **record_of(group, "name", "lag"),
        "behind_ms": behind_ms(access.broker, group.progress, access.broker.clock.now_ms()),
        **record_of(group, "message_model", "consume_from_where"),
        "topics": list(group.topics),
        "members": [record_of(each, "client_id", "address", "language") for each in group.members],
        "subscriptions": [record_of(each, "topic", "expression", "expression_type") for each in group.subscriptions],
        "progress": [record_of(each, *_PROGRESS) for each in group.progress],
    }


# --- offsets ------------------------------------------------------------------------------------


@command(_OFFSETS, "show", "offsets show billing", "offsets show billing orders --json", is_list=True)
def show_offsets(
    call: CommandCall,
    group: Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names)],
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", autocompletion=topic_names)] = None,
) -> None:
    """Show the committed offsets of a group in all queues, or in the queues of one topic."""
    with call.access() as access:
        progress = access.admin.progress(group, topic)
    call.output.table([record_of(each, *_PROGRESS) for each in progress], _PROGRESS_COLUMNS, "no offsets")


@command(
    _OFFSETS,
    "reset",
    "offsets reset billing orders --to earliest --dry-run",
    "offsets reset billing orders --to 2h --yes",
    "offsets reset billing orders --to 2026-01-31T08:00",
    "offsets reset billing orders --offset 4711 --queue 2",
    "offsets reset billing orders --shift -100",
)
def reset_offsets(
    call: CommandCall,
    group: Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=topic_names)],
    to: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="'earliest', 'latest', or a time: '2h' (ago), 2026-01-31T08:00, epoch ms"),
    ] = None,
    offset: Annotated[int | None, typer.Option(help="a queue offset")] = None,
    shift: Annotated[int | None, typer.Option(help="messages to go forward, or back if negative")] = None,
    queue: Annotated[int | None, typer.Option(help="only this queue of each broker")] = None,
    *,
    confirmation: Confirmation,
) -> None:
    """Set the committed offsets of a group in a topic. Connected members continue at the new offsets.

    Offsets that a queue does not have become the nearest that it has. The command shows first how many messages are
    skipped or delivered again, and asks. 'mqtemplate undo' sets the old offsets again.
    """
    from mqtemplate.operations import plan_reset
    from mqtemplate.operations.offsets import reset_change

    with call.access() as access:
        target = _target(to, offset, shift, access.broker.clock.now_ms())
        changes = plan_reset(access, group, topic, target, queue)
        offsets_table(call, changes)
        made = call.make(reset_change(access, group, changes, topic=topic), confirmation)
        if made is not None:
            call.output.note(made.text)


def offsets_table(call: CommandCall, changes: Sequence[OffsetChange]) -> None:
    """Write old and new offsets."""
    call.output.table([record_of(each, *_CHANGE) for each in changes], _CHANGE_COLUMNS, "all offsets are there already")


@command(_OFFSETS, "forget", "offsets forget billing --dry-run", "offsets forget billing --yes")
def forget_offsets(
    call: CommandCall,
    group: Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names)],
    *,
    confirmation: Confirmation,
) -> None:
    """Delete the committed offsets of a group that is gone. Retention keeps no messages for it any more.

    If the group returns, it starts as a new group. A group with connected members is refused. On a server the settings
    of the group are deleted too. The command shows the offsets first.
    """
    from mqtemplate.operations.offsets import GroupForgotten

    with call.access() as access:
        change = GroupForgotten(access, group)
        used = [each for each in change.group.progress if each.committed or each.lag]  # not an empty retry topic
        call.output.table([record_of(each, *_PROGRESS) for each in used], _PROGRESS_COLUMNS, "no offsets")
        made = call.make(change, confirmation)
        if made is not None:
            call.output.note(made.text)


def _target(to: str | None, offset: int | None, shift: int | None, now_ms: int) -> OffsetTarget:
    from mqtemplate.operations import OffsetPosition, OffsetTarget

    if [to, offset, shift].count(None) != 2:
        raise typer.BadParameter("give one of --to, --offset and --shift", param_hint="--to")
    if to in ("earliest", "latest"):
        return OffsetTarget(position=OffsetPosition(to))
    return OffsetTarget(time_ms=past_time(to, now_ms, "--to"), queue_offset=offset, shift=shift)
