"""``dlq``: dead letters."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import (
    body_fields,
    body_text,
    message_fields,
    named_values,
    past_time,
    pretty_body,
    properties_text,
    time_text,
)
from mqtemplate.cli.invocation import DryRun, Invocation, Yes, command, existing_file
from mqtemplate.cli.output import Columns
from mqtemplate.processes import is_terminal

if TYPE_CHECKING:
    from mqtemplate.admin import BrokerAdmin, DeadLetter, DeadLetters, LetterEdit, LetterFilter

_GROUP_COLUMNS: Columns = {"GROUP": "group", "DEAD LETTERS": "count"}
_COLUMNS: Columns = {
    "STORED": lambda record: time_text(record["store_timestamp"]),
    "STATE": "state",
    "TOPIC": "origin_topic",
    "KEYS": "keys",
    "ATTEMPTS": "attempts",
    "CAUSE": "cause",
    "ID": "id",
}
_FIELDS: Columns = {
    "id": "id",
    "message id": "msg_id",
    "group": "group",
    "state": lambda record: f"{record['state']} {time_text(record['state_ms'])}".strip(),
    "topic": "origin_topic",
    "tag": "tags",
    "keys": "keys",
    "attempts": "attempts",
    "failed at": "failed_at",
    "listener": "listener",
    "cause": "cause",
    "stack": "stack",
    "born": lambda record: time_text(record["born_timestamp"]),
    "stored": lambda record: time_text(record["store_timestamp"]),
    "properties": lambda record: properties_text(record["properties"]),
    "body": lambda record: pretty_body(record["body"].encode()) if "body" in record else record.get("body_base64"),
}

Group = Annotated[str, typer.Argument(metavar="GROUP", help="the consumer group")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="ids of dead letters, or of their messages")]
Letter = Annotated[str, typer.Argument(metavar="ID", help="id of the dead letter, or of its message")]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="stored since: 2h (ago), a time")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="stored before: 1h (ago), a time")]
Cause = Annotated[str | None, typer.Option(metavar="TEXT", help="part of the exception or its text")]
Topic = Annotated[str | None, typer.Option(metavar="TOPIC", help="the topic that the message was sent to")]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="a key of the message")]
Tag = Annotated[str | None, typer.Option(metavar="TAG", help="the tag of the message")]
All = Annotated[bool, typer.Option("--all", help="all that are neither sent again nor purged")]
Rate = Annotated[float | None, typer.Option(help="most messages per second")]
OnlyGroup = Annotated[
    bool, typer.Option("--only-group", help="send to the retry topic: other groups of the topic do not get it again")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    dlq = typer.Typer(help="Show dead letters with their causes, and send them again.", no_args_is_help=True)
    command(dlq, "ls", "dlq ls", "dlq ls billing", "dlq ls billing --cause TimeoutError --since 24h --json")(ls)
    command(dlq, "show", "dlq show billing 7F00000100002A9F000000000000041B")(show)
    command(dlq, "diff", "dlq diff billing ID", "dlq diff billing ID OTHER-ID")(diff)
    command(
        dlq,
        "edit",
        "dlq edit billing ID",
        "dlq edit billing ID --body-file order.json --yes",
        "dlq edit billing ID --set region=eu --unset card --yes",
    )(edit)
    command(
        dlq,
        "resend",
        "dlq resend billing ID",
        "dlq resend billing --cause TimeoutError --since 2h --dry-run",
        "dlq resend billing --all --rate 50 --yes",
    )(resend)
    command(dlq, "purge", "dlq purge billing ID", "dlq purge billing --until 24h --yes")(purge)
    app.add_typer(dlq, name="dlq")


# --- reading ------------------------------------------------------------------------------------


def ls(
    call: Invocation,
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]")] = None,
    since: Since = None,
    until: Until = None,
    cause: Cause = None,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    any_state: Annotated[bool, typer.Option("--all", help="show those that were sent again or purged too")] = False,
    max_count: Annotated[int, typer.Option(min=1, help="most dead letters")] = 100,
) -> None:
    """List the groups that have dead letters, or the dead letters of one group."""
    from mqtemplate.admin import DeadLetters

    with call.admin() as admin:
        letters = DeadLetters(admin)
        if group is None:
            counts = [{"group": name, "count": count} for name, count in letters.groups().items()]
            call.output.table(counts, _GROUP_COLUMNS, "no dead letters")
            return
        wanted = _filter(admin, since, until, cause, topic, key, tag, any_state=any_state)
        found = [each for each, _ in zip(letters.find(group, wanted), range(max_count + 1), strict=False)]
    call.output.table([_record(each) for each in found[:max_count]], _COLUMNS, "no dead letters")
    if len(found) > max_count:
        call.output.note(f"there are more than {max_count}; see more with --max-count, or filter")


def show(call: Invocation, group: Group, letter_id: Letter) -> None:
    """Show one dead letter: cause, stack, properties and body."""
    from mqtemplate.admin import DeadLetters

    with call.admin() as admin:
        letter = DeadLetters(admin).get(group, letter_id)
    call.output.fields(_record(letter), _FIELDS)


def diff(
    call: Invocation,
    group: Group,
    letter_id: Letter,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER-ID]", help="another dead letter of the group")] = None,
) -> None:
    """Show how a dead letter differs from the message that was sent, or from another dead letter."""
    from mqtemplate.admin import DeadLetters
    from mqtemplate.admin.messages import property_differences
    from mqtemplate.errors import UnknownNameError

    with call.admin() as admin:
        letters = DeadLetters(admin)
        letter = letters.get(group, letter_id)
        before = letters.original(letter) if other is None else letters.get(group, other).message
    if before is None:
        raise UnknownNameError(
            f"the message that became dead letter {letter.id} was deleted; compare it with another dead letter"
        )
    properties = property_differences(before.properties, letter.message.properties)
    body = _body_diff(before.body, letter.message.body)
    record: dict[str, Any] = {
        "before": message_fields(before),
        "after": message_fields(letter.message),
        "properties": {name: {"before": old, "after": new} for name, (old, new) in properties.items()},
        "same_body": before.body == letter.message.body,
    }
    call.output.document(record)
    rows = [{"name": name, "before": old, "after": new} for name, (old, new) in properties.items()]
    if not call.as_json:
        call.output.table(rows, {"PROPERTY": "name", "BEFORE": "before", "AFTER": "after"}, "equal properties")
        for line in ["equal bodies"] if before.body == letter.message.body else body:
            call.output.line(line)


def _body_diff(before: bytes, after: bytes) -> list[str]:
    texts = (pretty_body(before).splitlines(), pretty_body(after).splitlines())
    return list(difflib.unified_diff(*texts, "before", "after", lineterm=""))


def _filter(
    admin: BrokerAdmin,
    since: str | None,
    until: str | None,
    cause: str | None,
    topic: str | None,
    key: str | None,
    tag: str | None,
    *,
    any_state: bool = False,
) -> LetterFilter:
    from mqtemplate.admin import LetterFilter, LetterState

    now_ms = admin.broker.clock.now_ms()
    return LetterFilter(
        state=None if any_state else LetterState.OPEN,
        after_ms=past_time(since, now_ms, "--since"),
        before_ms=past_time(until, now_ms, "--until"),
        cause=cause,
        topic=topic,
        key=key,
        tag=tag,
    )


def _record(letter: DeadLetter) -> dict[str, Any]:
    message = letter.message
    return {
        "id": letter.id,
        "msg_id": message.msg_id,
        "group": letter.group,
        "state": letter.state.value,
        "state_ms": letter.state_ms,
        "origin_topic": letter.origin_topic,
        "origin_msg_id": letter.origin_msg_id,
        "tags": message.tags,
        "keys": message.keys,
        "attempts": letter.attempts,
        "failed_at": letter.failed_at,
        "listener": letter.listener,
        "cause": letter.cause,
        "stack": letter.stack,
        "born_timestamp": message.born_timestamp,
        "store_timestamp": message.store_timestamp,
        "properties": dict(message.properties),
        **body_fields(message.body),
    }


# --- changes ------------------------------------------------------------------------------------


def edit(
    call: Invocation,
    group: Group,
    letter_id: Letter,
    body: Annotated[str | None, typer.Option(metavar="TEXT", help="the new body")] = None,
    body_file: Annotated[Path | None, typer.Option(metavar="PATH", help="file with the new body")] = None,
    assign: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="set a property; may be repeated")
    ] = [],  # noqa: B006
    unset: Annotated[list[str], typer.Option(metavar="NAME", help="remove a property; may be repeated")] = [],  # noqa: B006
    only_group: OnlyGroup = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Change body or properties of a dead letter, and send it again. Without an option $EDITOR opens the body."""
    from mqtemplate.admin import DeadLetters, LetterEdit

    if body is not None and body_file is not None:
        raise typer.BadParameter("give --body or --body-file, not both", param_hint="--body")
    with call.admin() as admin:
        letters = DeadLetters(admin)
        letter = letters.get(group, letter_id)
        new_body = body.encode() if body is not None else None
        new_body = existing_file(body_file) if body_file is not None else new_body
        properties: dict[str, str | None] = {**named_values(assign, "--set"), **dict.fromkeys(unset)}
        if new_body is None and not properties:
            new_body = _edited(letter.message.body)
        changes = LetterEdit(new_body, properties)
        _show_edit(call, letter, changes)
        _resend(call, letters, [letter], changes, only_group=only_group, yes=yes, dry_run=dry_run)


def _edited(body: bytes) -> bytes:
    """Open the editor on a body, and return the new one.

    Raises:
        typer.BadParameter: There is no terminal, or the body is not text.
    """
    if not is_terminal(sys.stdin):
        raise typer.BadParameter("there is no terminal for an editor; give --body, --body-file, --set or --unset")
    if body_text(body) is None:
        raise typer.BadParameter("the body is not text; give the new one with --body-file")
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="mqtemplate-") as folder:
        path = Path(folder, "body")
        path.write_bytes(body)
        subprocess.run([*shlex.split(editor), str(path)], check=True)
        return path.read_bytes()


def _show_edit(call: Invocation, letter: DeadLetter, changes: LetterEdit) -> None:
    lines = [] if changes.body is None else _body_diff(letter.message.body, changes.body)
    for name, value in (changes.properties or {}).items():
        lines.append(f"{name}: {letter.message.properties.get(name)!r} -> {value!r}")
    for line in lines:
        call.output.note(line)


def resend(
    call: Invocation,
    group: Group,
    ids: Ids = None,
    since: Since = None,
    until: Until = None,
    cause: Cause = None,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    all_letters: All = False,
    only_group: OnlyGroup = False,
    rate: Rate = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Send dead letters to their original topics again: by id, or all that match.

    They are marked as sent again, so a second call leaves them out; an id sends one in any state.
    """
    from mqtemplate.admin import DeadLetters

    with call.admin() as admin:
        letters = DeadLetters(admin)
        wanted = _filter(admin, since, until, cause, topic, key, tag)
        found = _selected(letters, group, ids, wanted, all_letters=all_letters)
        _resend(call, letters, found, None, only_group=only_group, rate=rate, yes=yes, dry_run=dry_run)


def _resend(
    call: Invocation,
    letters: DeadLetters,
    found: list[DeadLetter],
    changes: LetterEdit | None,
    *,
    only_group: bool,
    yes: bool,
    dry_run: bool,
    rate: float | None = None,
) -> None:
    if dry_run or not found:
        _show_only(call, found)
        return
    target = "the retry topic of the group" if only_group else "their original topics"
    call.confirm(f"Send {len(found)} dead letters to {target} again?", yes=yes)
    with call.output.progress("sending", len(found)) as advance:
        results = letters.resend(found, changes, only_group=only_group, rate=rate, on_progress=advance)
    records = [
        {"id": letter.id, "topic": result.message_queue.topic, "msg_id": result.msg_id}
        for letter, result in zip(found, results, strict=True)
    ]
    call.output.document(records)
    topics = sorted({record["topic"] for record in records})
    call.output.line(f"sent {len(records)} messages to {', '.join(topics)}")


def purge(
    call: Invocation,
    group: Group,
    ids: Ids = None,
    since: Since = None,
    until: Until = None,
    cause: Cause = None,
    topic: Topic = None,
    key: Key = None,
    tag: Tag = None,
    all_letters: All = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Mark dead letters as purged: by id, or all that match. Lists leave them out, and retention deletes them."""
    from mqtemplate.admin import DeadLetters

    with call.admin() as admin:
        letters = DeadLetters(admin)
        wanted = _filter(admin, since, until, cause, topic, key, tag)
        found = _selected(letters, group, ids, wanted, all_letters=all_letters)
        if dry_run or not found:
            _show_only(call, found)
            return
        call.confirm(f"Purge {len(found)} dead letters?", yes=yes)
        with call.output.progress("purging", len(found)) as advance:
            count = letters.purge(found, advance)
    call.output.document({"purged": count})
    call.output.line(f"purged {count} dead letters")


def _selected(
    letters: DeadLetters, group: str, ids: list[str] | None, wanted: LetterFilter, *, all_letters: bool
) -> list[DeadLetter]:
    """Return the dead letters that the arguments name.

    Raises:
        typer.BadParameter: They name none, or ids and a filter.
    """
    from mqtemplate.admin import LetterFilter

    has_filter = wanted != LetterFilter()
    if sum((bool(ids), has_filter, all_letters)) != 1:
        raise typer.BadParameter("give ids, or a filter such as --cause, or --all", param_hint="[ID]...")
    return letters.get_all(group, ids) if ids else list(letters.find(group, wanted))


def _show_only(call: Invocation, found: list[DeadLetter]) -> None:
    call.output.table([_record(each) for each in found], _COLUMNS, "no dead letter matches")
    call.output.note(f"{len(found)} dead letters match; nothing was changed")
