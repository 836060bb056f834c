"""Messages by id, by key and by time; one message with its body and its path."""

from __future__ import annotations

from mqtemplate.admin.broker_admin import BrokerAdmin
from mqtemplate.admin.message_path import MessagePath, StepKind, message_path
from mqtemplate.admin.messages import MessageSearch
from mqtemplate.admin.values import TopicKind
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.positions import cursor_of, first_of, is_after, parse_cursor
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.errors import UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.message import MessageExt, Property
from mqtemplate.pending import PendingQuery

_PAGE = 50


def messages(site: Site, call: Call) -> HttpResponse:
    """Return the form for a search, and what it finds."""
    topic, key, msg_id = call.text("topic"), call.text("key"), call.text("id")
    if msg_id is not None:
        return site.redirect(call.url("/message", id=msg_id, topic=topic))
    cursor = call.text("cursor")
    begin_ms, end_ms = call.time_ms("from"), call.time_ms("to")
    found: list[MessageExt] = []
    has_more = False
    with site.reading() as admin:
        names = _names(admin)
        search = MessageSearch(admin)
        if topic is None:
            pass
        elif key is not None:
            found = search.by_key(topic, key, _PAGE, begin_ms or 0, end_ms)
        elif begin_ms is None and end_ms is None and cursor is None:
            found = search.newest(topic, _PAGE)[::-1]
        else:
            after = parse_cursor(cursor)
            start_ms = max(begin_ms or 0, after[0])
            matching = (each for each in search.by_time(topic, start_ms, end_ms) if is_after(each, after))
            found, has_more = first_of(matching, _PAGE)
    return site.page(
        call,
        "messages.html",
        topics=names,
        messages=found,
        next=call.same_page(cursor=cursor_of(found[-1])) if has_more else None,
        begin_ms=begin_ms,
        end_ms=end_ms,
    )


def _names(admin: BrokerAdmin) -> list[str]:
    kinds = admin.topic_kinds()
    return [name for name, kind in kinds.items() if kind is not TopicKind.SYSTEM]


# --- one message --------------------------------------------------------------------------------


def message(site: Site, call: Call) -> HttpResponse:
    """Return one message, by the id of its producer or of the broker."""
    msg_id, topic = call.needed("id"), call.text("topic")
    with site.reading() as admin:
        shown = _stored(admin, msg_id, topic)
        origin = topic if shown is None else origin_topic(shown)
        path = _path(admin, msg_id if shown is None else shown.msg_id, origin)
        if shown is None and path is None:
            raise UnknownNameError(f"message {msg_id!r} does not exist; it was deleted, or the id is another one")
        now_ms = admin.broker.clock.now_ms()
    if shown is None and path is not None:
        shown = _last_record(path)
    pending = [] if path is None else [step for step in path.steps if step.kind is StepKind.PENDING]
    return site.page(call, "message.html", message=shown, topic=origin or "", path=path, pending=pending, now_ms=now_ms)


def _stored(admin: BrokerAdmin, msg_id: str, topic: str | None) -> MessageExt | None:
    """Return the stored message, or the record of a pending one; None if there is none."""
    search = MessageSearch(admin)
    try:
        return search.by_id(msg_id, topic)
    except UnknownNameError:
        pass  # it may be pending
    found = admin.broker.pending(PendingQuery(key=msg_id, topic=topic), 1).messages
    if not found:
        return None
    path = _path(admin, found[0].msg_id, found[0].topic)
    return None if path is None else _last_record(path)


def _path(admin: BrokerAdmin, msg_id: str, topic: str | None) -> MessagePath | None:
    try:
        return None if topic is None else message_path(admin, msg_id, topic)
    except UnknownNameError:
        return None


def _last_record(path: MessagePath) -> MessageExt | None:
    """Return the last record that has the body: a delete marker has none."""
    records = [step.record for step in path.steps if step.record is not None and step.kind is not StepKind.CANCELLED]
    return records[-1] if records else None


def origin_topic(message: MessageExt) -> str:
    """Return the topic that a message was sent to."""
    found = message.properties
    by_retry = found.get(Property.DLQ_ORIGIN_TOPIC) or found.get(Property.RETRY_TOPIC)
    return by_retry or found.get(Property.REAL_TOPIC) or message.topic


ROUTES: Routes = {("GET", "/messages"): messages, ("GET", "/message"): message}
