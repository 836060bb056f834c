"""Dead letters with their causes: edit, resend, purge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mqtemplate.console.histogram import DAY_MS, HOUR_MS
from mqtemplate.console.rendering import MAX_SHOWN_BODY
from mqtemplate.console.site import Call, Routes, Site, time_of
from mqtemplate.converters.readable import body_text
from mqtemplate.errors import MessageError, UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import parse_property, parse_rate, parse_time, yesterday_of
from mqtemplate.operations.changes import Change, carry_out
from mqtemplate.operations.dead_letters import (
    DeadLetterMessage,
    DeadLetters,
    LetterEdit,
    LetterFilter,
    LetterState,
    resent_message,
)
from mqtemplate.operations.letter_changes import LetterAction, LettersChange
from mqtemplate.operations.messages import cursor_of, first_of, is_after, parse_cursor, property_differences

_PAGE = 50
_SHOWN = 20
_CHIPS = 5
_COUNT_S = 0.3
"""Time that a page waits for the causes of all dead letters that match."""
_FILTERS = ("topic", "key", "tag", "property", "cause", "state", "from", "to")
_ACTIONS = {"resend": "Resend", "purge": "Purge"}


# --- lists --------------------------------------------------------------------------------------


def dead_letters(site: Site, call: Call) -> HttpResponse:
    """Return the groups with dead letters, or the dead letters of one group."""
    group = call.text("group")
    if group is None:
        with site.reading() as access:
            groups = DeadLetters(access).summaries()
            by_name = dict(_spans(access.broker.clock.now_ms()))
        return site.page(call, "letter_groups.html", groups=groups, spans=by_name)
    after = parse_cursor(call.text("cursor"))
    wanted = _filter(dict(call.query), after[0])
    with site.reading() as access:
        matching = (each for each in DeadLetters(access).find(group, wanted) if is_after(each.message, after))
        found, has_more = first_of(matching, _PAGE)
        spans = _spans(access.broker.clock.now_ms())
    return site.page(
        call,
        "letters.html",
        spans=spans,
        group=group,
        letters=found,
        causes=_causes(site, group, _filter(dict(call.query))),
        states=["open", "resent", "purged", "all"],
        filters=[(name, call.query[name]) for name in _FILTERS if name in call.query],
        next=call.same_page(cursor=cursor_of(found[-1].message)) if has_more else None,
        after_ms=call.time_ms("from"),
        before_ms=call.time_ms("to"),
    )


def _spans(now_ms: int) -> list[tuple[str, tuple[int, int | None]]]:
    """Return spans of time to filter by: name, start and end (epoch ms)."""
    start_ms, end_ms = yesterday_of(now_ms)
    return [
        ("last hour", (now_ms - HOUR_MS, None)),
        ("last day", (now_ms - DAY_MS, None)),
        ("today", (end_ms, None)),
        ("yesterday", (start_ms, end_ms)),
    ]


def _causes(site: Site, group: str, wanted: LetterFilter) -> list[tuple[str, int]]:
    """Return the most frequent causes on all pages; none while they are counted for the first time."""

    def read() -> Counter[str]:
        with site.reading() as access:
            return DeadLetters(access).causes(group, wanted)

    cached = site.cache.get(("causes", group, wanted), read, _COUNT_S)
    return [] if cached is None else cached.value.most_common(_CHIPS)


def _filter(given: dict[str, str], after_ms: int = 0) -> LetterFilter:
    text = given.get("state") or "open"
    known = {state.value: state for state in LetterState}
    if text != "all" and text not in known:
        raise MessageError(f"state must be one of {', '.join(known)} and all, got {text!r}")
    begin_ms = max(time_of(given.get("from"), "from") or 0, after_ms)
    return LetterFilter(
        state=known.get(text),
        after_ms=begin_ms or None,
        before_ms=time_of(given.get("to"), "to"),
        cause=given.get("cause") or None,
        topic=given.get("topic") or None,
        key=given.get("key") or None,
        tag=given.get("tag") or None,
        with_property=parse_property(given.get("property")),
    )


# --- one dead letter ----------------------------------------------------------------------------


def letter(site: Site, call: Call) -> HttpResponse:
    """Return one dead letter with its cause, and the difference from the message that was sent."""
    group, letter_id = call.needed("group"), call.needed("id")
    with site.reading() as access:
        letters = DeadLetters(access)
        found = letters.get(group, letter_id)
        original = letters.original(found)
    text = body_text(found.message.body)
    can_edit = text is not None and len(found.message.body) <= MAX_SHOWN_BODY
    return site.page(
        call,
        "letter.html",
        letter=found,
        failed_ms=parse_time(found.failed_at or ""),
        original=original,
        differences=None
        if original is None
        else property_differences(original.properties, resent_message(found).properties),
        same_body=original is not None and original.body == found.message.body,
        text=text if can_edit else None,
        properties=_own_properties(found),
    )


def _own_properties(found: DeadLetterMessage) -> dict[str, str]:
    """Return the properties that a resend keeps."""
    kept = resent_message(found).properties
    return {name: value for name, value in found.message.properties.items() if kept.get(name) == value}


# --- changes ------------------------------------------------------------------------------------


def preview(site: Site, call: Call) -> HttpResponse:
    """Show what a change of dead letters would do."""
    return _preview(site, call)


def _preview(site: Site, call: Call, problem: str = "") -> HttpResponse:
    group, action = call.field("group"), call.action_field(_ACTIONS)
    with site.reading() as access:
        change = _plan(access, call, None)
        now_ms = access.broker.clock.now_ms()
    return site.page(
        call,
        "letters_preview.html",
        409 if problem else 200,
        group=group,
        name=_ACTIONS[action],
        action=action,
        preview=change.preview,
        total=change.preview.count,
        shown=change.letters[:_SHOWN],
        problem=problem,
        fields=call.given_fields("action", "scope", "group", *_FILTERS),
        ids=call.fields("letter"),
        now_ms=now_ms,
        back=call.url("/dead-letters", group=group),
    )


def apply(site: Site, call: Call) -> HttpResponse:
    """Resend or purge the dead letters that were shown before."""
    until_ms = call.time_field("until")
    if until_ms is None:
        raise MessageError("a change needs its preview first")

    def build(access: BrokerAccess) -> Change:
        return _plan(access, call, until_ms)

    back = call.url("/dead-letters", group=call.field("group"))
    return site.start_change(call, build, back, lambda problem: _preview(site, call, problem))


def _plan(access: BrokerAccess, call: Call, until_ms: int | None) -> LettersChange:
    """Return the change of a form as it is now.

    Args:
        until_ms: Dead letters that were stored later are left alone: the user has not seen them.
    """
    chosen = [each for each in _chosen(access, call) if until_ms is None or each.message.store_timestamp <= until_ms]
    return LettersChange(
        access,
        call.field("group"),
        chosen,
        LetterAction(call.action_field(_ACTIONS)),
        only_group=call.field("only_group") == "1",
        rate=parse_rate(call.field("rate")),
        target={"filter": dict(call.given_fields(*_FILTERS)) or None},
    )


def edit(site: Site, call: Call) -> HttpResponse:
    """Send one dead letter again, with another body or other properties."""
    group, letter_id = call.field("group"), call.field("id")
    with site.changing() as access:
        found = DeadLetters(access).get(group, letter_id)
        changes = _edit(call, found)
        changed = {"body": changes.body is not None, "properties": sorted(changes.properties or {})}
        change = LettersChange(
            access,
            group,
            [found],
            LetterAction.EDIT,
            edit=changes,
            only_group=call.field("only_group") == "1",
            target={"changed": changed},
            is_named=True,
        )
        [sent] = carry_out(change, site.audit, call.request.remote, place=_label(site)).details
    site.cache.clear()
    return site.redirect(call.url("/message", id=sent.offset_msg_id))


def _label(site: Site) -> str | None:
    return None if site.source is None else site.source.label


def _edit(call: Call, found: DeadLetterMessage) -> LetterEdit:
    """Return the changes of a form, relative to the dead letter."""
    names = call.fields("name")
    values = call.fields("value")
    if len(names) != len(values):
        raise MessageError("the form lacks a name or a value of a property")
    given = {name.strip(): value for name, value in zip(names, values, strict=True) if name.strip()}
    before = _own_properties(found)
    properties: dict[str, str | None] = {name: None for name in before if name not in given}
    properties |= {name: value for name, value in given.items() if before.get(name) != value}
    body = None
    if any(name == "body" for name, _ in call.form):
        body = _body(call.field("body"), found.message.body)
    return LetterEdit(body, properties or None)


def _body(text: str, before: bytes) -> bytes | None:
    """Return the new body; None if it is the same.

    A browser sends each end of a line in a form as CR LF.
    """
    after = text.encode() if b"\r\n" in before else text.replace("\r\n", "\n").encode()
    return None if after == before else after


def _chosen(access: BrokerAccess, call: Call) -> Iterator[DeadLetterMessage]:
    """Yield the dead letters of a form: the ticked ones, or all that match."""
    letters, group = DeadLetters(access), call.field("group")
    if call.scope_field() == "chosen":
        ids = call.fields("letter")
        if not ids:
            raise MessageError("no dead letter is chosen; tick some, or change all that match")
        yield from _existing(letters, group, ids)
        return
    yield from letters.find(group, _filter(dict(call.given_fields(*_FILTERS))))


def _existing(letters: DeadLetters, group: str, ids: Sequence[str]) -> list[DeadLetterMessage]:
    try:
        return letters.get_all(group, ids)
    except UnknownNameError as exc:
        raise MessageError(f"{exc}; reload the list") from exc


ROUTES: Routes = {
    ("GET", "/dead-letters"): dead_letters,
    ("GET", "/dead-letters/letter"): letter,
    ("POST", "/dead-letters/preview"): preview,
    ("POST", "/dead-letters/change"): apply,
    ("POST", "/dead-letters/edit"): edit,
}
