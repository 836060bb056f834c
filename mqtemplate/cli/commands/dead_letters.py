"""``dlq``: dead letters."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.formats import (
    body_fields,
    message_fields,
    named_values,
    past_time,
    property_option,
    record_body,
    record_of,
)
from mqtemplate.cli.invocation import CommandCall, Confirmation, command, command_group, existing_file, group_names
from mqtemplate.cli.output import Columns
from mqtemplate.converters.readable import body_text, pretty_body, properties_text, time_text
from mqtemplate.processes import is_terminal

if TYPE_CHECKING:
    from mqtemplate.operations import BrokerAccess, DeadLetterMessage, LetterEdit, LetterFilter
    from mqtemplate.operations.changes import ChangeResult
    from mqtemplate.operations.dead_letters import LetterSummary
    from mqtemplate.operations.letter_changes import LettersChange
    from mqtemplate.results import SendResult

_GROUP_COLUMNS: Columns = {
    "GROUP": "group",
    "OPEN": "open",
    "SENT AGAIN": "resent",
    "PURGED": "purged",
    "LAST DAY": "last_day",
    "YESTERDAY": "yesterday",
    "NEWEST": lambda record: time_text(record["newest_ms"]),
    "CAUSE OF THE NEWEST": "cause",
}
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
    "body": record_body,
}

Group = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=group_names, help="the consumer group")]
OneOrAll = Annotated[
    str | None,
    typer.Argument(metavar="[GROUP]", autocompletion=group_names, help="the consumer group; without it all groups"),
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="ids of dead letters, or of their messages")]
Letter = Annotated[str, typer.Argument(metavar="ID", help="id of the dead letter, or of its message")]
Rate = Annotated[float | None, typer.Option(help="most messages per second")]
OnlyGroup = Annotated[
    bool, typer.Option("--only-group", help="send to the retry topic: other groups of the topic do not get it again")
]


@dataclass(frozen=True, slots=True)
class LetterOptions:
    """Options that filter dead letters."""

    since: Annotated[str | None, typer.Option(metavar="TIME", help="stored since: 2h (ago), a time")] = None
    until: Annotated[str | None, typer.Option(metavar="TIME", help="stored before: 1h (ago), a time")] = None
    cause: Annotated[str | None, typer.Option(metavar="TEXT", help="part of the exception or its text")] = None
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="the topic that the message was sent to")] = None
    key: Annotated[str | None, typer.Option(metavar="KEY", help="a key of the message")] = None
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="the tag of the message")] = None
    prop: Annotated[str | None, typer.Option("--property", metavar="NAME=VALUE", help="a property of the message")] = (
        None
    )

    def wanted(self, access: BrokerAccess, *, any_state: bool = False) -> LetterFilter:
        """Return the filter."""
        from mqtemplate.operations import LetterFilter, LetterState

        now_ms = access.broker.clock.now_ms()
        return LetterFilter(
            state=None if any_state else LetterState.OPEN,
            after_ms=past_time(self.since, now_ms, "--since"),
            before_ms=past_time(self.until, now_ms, "--until", is_end=True),
            cause=self.cause,
            topic=self.topic,
            key=self.key,
            tag=self.tag,
            with_property=property_option(self.prop),
        )


@dataclass(frozen=True, slots=True)
class LetterChoice(LetterOptions):
    """Options that choose the dead letters of a change: by id, by a filter, or all."""

    all_letters: Annotated[bool, typer.Option("--all", help="all that are neither sent again nor purged")] = False

    def selected_of_groups(
        self, access: BrokerAccess, group: str | None, ids: list[str] | None
    ) -> list[tuple[str, list[DeadLetterMessage], dict[str, Any]]]:
        """Return the dead letters that the arguments name of one group, or by group: name and `selected`."""
        from mqtemplate.operations import DeadLetters

        groups = [group] if group is not None else sorted(DeadLetters(access).groups())
        found = [(name, *self.selected(access, name, ids)) for name in groups]
        return [each for each in found if each[1] or group is not None]

    def selected(
        self, access: BrokerAccess, group: str, ids: list[str] | None
    ) -> tuple[list[DeadLetterMessage], dict[str, Any]]:
        """Return the dead letters that the arguments name, and how: arguments of `LettersChange`.

        Raises:
            typer.BadParameter: They name none, or ids and a filter.
        """
        from mqtemplate.operations import DeadLetters, LetterFilter

        wanted = self.wanted(access)
        if sum((bool(ids), wanted != LetterFilter(), self.all_letters)) != 1:
            raise typer.BadParameter("give ids, or a filter such as --cause, or --all", param_hint="[ID]...")
        letters = DeadLetters(access)
        if ids:
            return letters.get_all(group, ids), {"is_named": True}
        names = {each.name: "property" if each.name == "prop" else each.name for each in fields(self)}
        given = {title: value for name, title in names.items() if isinstance(value := getattr(self, name), str)}
        return list(letters.find(group, wanted)), {"target": {"filter": given}}


_DLQ = command_group("dlq", "Show dead letters with their causes, and send them again.")


# --- reading ------------------------------------------------------------------------------------


@command(_DLQ, "ls", "dlq ls", "dlq ls billing", "dlq ls --since yesterday --sort cause", is_list=True)
def ls(
    call: CommandCall,
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", autocompletion=group_names)] = None,
    options: LetterOptions = LetterOptions(),
    any_state: Annotated[bool, typer.Option("--all", help="show those that were sent again or purged too")] = False,
    max_count: Annotated[int, typer.Option(min=1, help="most dead letters")] = 100,
) -> None:
    """List the groups that have dead letters; or the dead letters of one group, or of all that match a filter."""
    from mqtemplate.operations import DeadLetters, LetterFilter

    with call.access() as access:
        letters, wanted = DeadLetters(access), options.wanted(access, any_state=any_state)
        if group is None and wanted == LetterFilter():
            rows = [_group_record(name, each) for name, each in letters.summaries().items()]
            call.output.table(rows, _GROUP_COLUMNS, "no dead letters")
            return
        groups = [group] if group is not None else sorted(letters.groups())
        matching = chain.from_iterable(letters.find(name, wanted) for name in groups)
        found = list(islice(matching, max_count + 1))
    columns = _COLUMNS if group is not None else {"GROUP": "group", **_COLUMNS}
    call.output.table([_record(each) for each in found[:max_count]], columns, "no dead letters")
    if len(found) > max_count:
        call.output.note(f"there are more than {max_count}; see more with --max-count, or filter")


def _group_record(group: str, found: LetterSummary) -> dict[str, Any]:
    newest = found.newest
    return {
        "group": group,
        "count": found.counts.stored,
        **record_of(found.counts, "open", "resent", "purged"),
        **record_of(found, "last_day", "yesterday"),
        "newest_ms": None if newest is None else newest.message.store_timestamp,
        "cause": None if newest is None else newest.cause or "unknown",
    }


@command(_DLQ, "show", "dlq show billing 7F00000100002A9F000000000000041B")
def show(call: CommandCall, group: Group, letter_id: Letter) -> None:
    """Show one dead letter: cause, stack, properties and body."""
    from mqtemplate.operations import DeadLetters

    with call.access() as access:
        letter = DeadLetters(access).get(group, letter_id)
    call.output.fields(_record(letter), _FIELDS)


@command(_DLQ, "diff", "dlq diff billing ID", "dlq diff billing ID OTHER-ID")
def diff(
    call: CommandCall,
    group: Group,
    letter_id: Letter,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER-ID]", help="another dead letter of the group")] = None,
) -> None:
    """Show how a dead letter differs from the message that was sent, or from another dead letter."""
    from mqtemplate.errors import UnknownNameError
    from mqtemplate.operations import DeadLetters
    from mqtemplate.operations.messages import property_differences

    with call.access() as access:
        letters = DeadLetters(access)
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


def _record(letter: DeadLetterMessage) -> dict[str, Any]:
    message = letter.message
    return {
        **record_of(letter, "id", "message.msg_id", "group", "state", "state_ms", "origin_topic", "origin_msg_id"),
        **record_of(letter, "message.tags", "message.keys", "attempts", "failed_at", "listener", "cause", "stack"),
        **record_of(message, "born_timestamp", "store_timestamp"),
        "properties": dict(message.properties),
        **body_fields(message.body),
    }


# --- changes ------------------------------------------------------------------------------------


@command(
    _DLQ,
    "edit",
    "dlq edit billing ID",
    "dlq edit billing ID --body-file order.json --yes",
    "dlq edit billing ID --set region=eu --unset card --yes",
)
def edit(
    call: CommandCall,
    group: Group,
    letter_id: Letter,
    body: Annotated[str | None, typer.Option(metavar="TEXT", help="the new body")] = None,
    body_file: Annotated[Path | None, typer.Option(metavar="PATH", help="file with the new body")] = None,
    assign: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="set a property; may be repeated")
    ] = [],  # noqa: B006
    unset: Annotated[list[str], typer.Option(metavar="NAME", help="remove a property; may be repeated")] = [],  # noqa: B006
    only_group: OnlyGroup = False,
    *,
    confirmation: Confirmation,
) -> None:
    """Change body or properties of a dead letter, and send it again. Without an option $EDITOR opens the body."""
    from mqtemplate.operations import DeadLetters, LetterEdit
    from mqtemplate.operations.letter_changes import LetterAction, LettersChange

    if body is not None and body_file is not None:
        raise typer.BadParameter("give --body or --body-file, not both", param_hint="--body")
    with call.access() as access:
        letters = DeadLetters(access)
        letter = letters.get(group, letter_id)
        new_body = body.encode() if body is not None else None
        new_body = existing_file(body_file) if body_file is not None else new_body
        properties: dict[str, str | None] = {**named_values(assign, "--set"), **dict.fromkeys(unset)}
        if new_body is None and not properties:
            new_body = _edited(letter.message.body)
        changes = LetterEdit(new_body, properties)
        _show_edit(call, letter, changes)
        edited = LettersChange(
            access, group, [letter], LetterAction.EDIT, edit=changes, only_group=only_group, is_named=True
        )
        for _, made in _made(call, [edited], confirmation):
            call.output.document([_sent_record(letter, *made.details)])
            call.output.line(made.text)


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


def _show_edit(call: CommandCall, letter: DeadLetterMessage, changes: LetterEdit) -> None:
    lines = [] if changes.body is None else _body_diff(letter.message.body, changes.body)
    for name, value in (changes.properties or {}).items():
        lines.append(f"{name}: {letter.message.properties.get(name)!r} -> {value!r}")
    for line in lines:
        call.output.note(line)


@command(
    _DLQ,
    "resend",
    "dlq resend billing ID",
    "dlq resend billing --cause TimeoutError --since 2h --dry-run",
    "dlq resend billing --all --rate 50 --yes",
    "dlq resend --since yesterday --until yesterday",
)
def resend(
    call: CommandCall,
    group: OneOrAll = None,
    ids: Ids = None,
    choice: LetterChoice = LetterChoice(),
    only_group: OnlyGroup = False,
    rate: Rate = None,
    *,
    confirmation: Confirmation,
) -> None:
    """Send dead letters to their original topics again: by id, or all that match, of one group or of all.

    They are marked as sent again, so a second call leaves them out; an id sends one in any state.
    """
    from mqtemplate.operations.letter_changes import LetterAction, LettersChange

    with call.access() as access:
        changes = [
            LettersChange(access, name, found, LetterAction.RESEND, only_group=only_group, rate=rate, **named)
            for name, found, named in choice.selected_of_groups(access, group, ids)
        ]
        resent = []
        for change, made in _made(call, changes, confirmation):
            resent += [_sent_record(*pair) for pair in zip(change.letters, made.details, strict=True)]
            call.output.line(made.text)
        _print_document(call, changes, confirmation, resent)


def _made(
    call: CommandCall, changes: Sequence[LettersChange], confirmation: Confirmation
) -> Iterator[tuple[LettersChange, ChangeResult]]:
    """Make changes of dead letters after their previews, and yield those that have an effect."""
    letters = [each for change in changes for each in change.letters]
    if confirmation.dry_run or not letters:
        call.output.table([_record(each) for each in letters], _COLUMNS, "no dead letter matches")
    yield from call.make_all(changes, confirmation)


def _sent_record(letter: DeadLetterMessage, sent: SendResult) -> dict[str, Any]:
    return {"id": letter.id, "topic": sent.message_queue.topic, "msg_id": sent.msg_id}


def _print_document(
    call: CommandCall, changes: Sequence[LettersChange], confirmation: Confirmation, document: object
) -> None:
    """Write the result as JSON, unless the dead letters were written."""
    if not confirmation.dry_run and any(change.letters for change in changes):
        call.output.document(document)


@command(_DLQ, "purge", "dlq purge billing ID", "dlq purge billing --until 24h --yes")
def purge(
    call: CommandCall,
    group: OneOrAll = None,
    ids: Ids = None,
    choice: LetterChoice = LetterChoice(),
    *,
    confirmation: Confirmation,
) -> None:
    """Mark dead letters as purged: by id, or all that match, of one group or of all.

    Lists leave them out, and retention deletes them.
    """
    from mqtemplate.operations.letter_changes import LetterAction, LettersChange

    with call.access() as access:
        changes = [
            LettersChange(access, name, found, LetterAction.PURGE, **named)
            for name, found, named in choice.selected_of_groups(access, group, ids)
        ]
        purged = 0
        for _, made in _made(call, changes, confirmation):
            purged += made.facts["count"]
            call.output.line(made.text)
        _print_document(call, changes, confirmation, {"purged": purged})
