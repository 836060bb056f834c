"""Topics and groups that administrators create and delete, and messages that operators send: forms and previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mqtemplate.console.site import Call, Page, Routes, Site
from mqtemplate.errors import MessageError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import parse_span
from mqtemplate.operations.changes import Change
from mqtemplate.operations.creation import GroupCreated, MessageDraft, MessageSent, TopicCreated, TopicDeleted
from mqtemplate.operations.offsets import GroupForgotten, OffsetPosition

_QUEUES = 4
_POSITIONS = {"first": OffsetPosition.EARLIEST, "latest": OffsetPosition.LATEST}


@dataclass(frozen=True, slots=True)
class _Plan:
    """A change that a form describes.

    Attributes:
        build: Returns the change as it is now.
        heading: Title of the preview, and its button.
        fields: Names of the fields of the form.
        back: Address of the page to go back to.
        after: Address of the page after the change.
    """

    build: Callable[[BrokerAccess], Change]
    heading: str
    fields: Sequence[str]
    back: str
    after: str


def _needed(call: Call, name: str) -> str:
    value = call.field(name).strip()
    if not value:
        raise MessageError(f"the field {name} is empty; fill it in")
    return value


# --- topics and groups --------------------------------------------------------------------------


def _new_topic(call: Call) -> _Plan:
    topic, count = _needed(call, "topic"), call.number_field("queues") or _QUEUES
    after = call.url("/topics", name=topic)
    create = "/topics/create"
    return _Plan(
        lambda access: TopicCreated(access, topic, count), "Create topic", ("topic", "queues"), call.url(create), after
    )


def _gone_topic(call: Call) -> _Plan:
    topic = _needed(call, "topic")
    back = call.url("/topics", name=topic)
    return _Plan(lambda access: TopicDeleted(access, topic), "Delete topic", ("topic",), back, call.url("/topics"))


def _new_group(call: Call) -> _Plan:
    group, topic, position = _needed(call, "group"), _needed(call, "topic"), call.field("position")
    if position not in _POSITIONS:
        raise MessageError(f"position must be one of {', '.join(_POSITIONS)}, got {position!r}")

    def build(access: BrokerAccess) -> Change:
        return GroupCreated(access, group, topic, _POSITIONS[position])

    after = call.url("/groups", name=group)
    return _Plan(build, "Create group", ("group", "topic", "position"), call.url("/groups/create"), after)


def _gone_group(call: Call) -> _Plan:
    group = _needed(call, "group")
    back = call.url("/groups", name=group)
    return _Plan(lambda access: GroupForgotten(access, group), "Delete group", ("group",), back, call.url("/groups"))


def topic_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a new topic."""
    return site.page(call, "topic_new.html", queues=_QUEUES)


def group_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a new group."""
    with site.reading() as access:
        names = access.admin.readable_topics()
    return site.page(call, "group_new.html", topics=names)


# --- messages -----------------------------------------------------------------------------------

_OF_MESSAGE = ("topic", "tag", "keys", "properties", "delay", "at", "body")


def message_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a message."""
    with site.reading() as access:
        names = access.admin.readable_topics()
    return site.page(call, "message_new.html", topics=names)


def _new_message(call: Call) -> _Plan:
    topic, delay_ms, at_ms = _needed(call, "topic"), _delay_ms(call.field("delay").strip()), call.time_field("at")
    if delay_ms is not None and at_ms is not None:
        raise MessageError("give a delay or a time to deliver the message at, not both")
    properties = _properties(call.field("properties"))
    # A browser sends each end of a line as CR LF.
    body = call.field("body").replace("\r\n", "\n").encode()

    def build(access: BrokerAccess) -> Change:
        due_ms = at_ms if delay_ms is None else access.broker.clock.now_ms() + delay_ms
        draft = MessageDraft(
            topic=topic,
            body=body,
            tag=call.field("tag").strip(),
            keys=call.field("keys").split(),
            properties=properties,
            due_ms=due_ms,
        )
        return MessageSent(access, draft)

    return _Plan(
        build, "Send message", _OF_MESSAGE, call.url("/messages/send", topic=topic), call.url("/messages", topic=topic)
    )


def _delay_ms(text: str) -> int | None:
    span_ms = parse_span(text) if text else None
    if text and (span_ms is None or span_ms <= 0):
        raise MessageError(f"delay must be a duration such as 90s or 3h, got {text[:40]!r}")
    return span_ms


def _properties(text: str) -> dict[str, str]:
    """Return the properties of a text that has one in each line, as ``name=value``."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise MessageError(f"a property must be name=value, one in a line, got {line[:40]!r}")
        if name.strip() in found:
            raise MessageError(f"property {name.strip()!r} is given twice; give it once")
        found[name.strip()] = value.strip()
    return found


# --- previews -----------------------------------------------------------------------------------


def _preview(site: Site, call: Call, plan: _Plan, target: str, problem: str = "") -> HttpResponse:
    with site.reading() as access:
        change = plan.build(access)
        shown, title = change.preview, change.title
    return site.page(
        call,
        "change_preview.html",
        409 if problem else 200,
        heading=plan.heading,
        request=title,
        preview=shown,
        problem=problem,
        address=call.url(target),
        fields=call.given_fields(*plan.fields),
        button=plan.heading,
        back=plan.back,
    )


def _pages(path: str, plan_of: Callable[[Call], _Plan]) -> Routes:
    """Return the preview of a change and the change itself."""

    def preview(site: Site, call: Call) -> HttpResponse:
        return _preview(site, call, plan_of(call), path)

    def apply(site: Site, call: Call) -> HttpResponse:
        plan = plan_of(call)
        return site.start_change(
            call, plan.build, plan.after, lambda problem: _preview(site, call, plan, path, problem)
        )

    pages: dict[str, Page] = {f"{path}/preview": preview, path: apply}
    return {("POST", each): page for each, page in pages.items()}


ROUTES: Routes = {
    ("GET", "/topics/create"): topic_form,
    ("GET", "/groups/create"): group_form,
    ("GET", "/messages/send"): message_form,
    **_pages("/topics/create", _new_topic),
    **_pages("/topics/delete", _gone_topic),
    **_pages("/groups/create", _new_group),
    **_pages("/groups/delete", _gone_group),
    **_pages("/messages/send", _new_message),
}
