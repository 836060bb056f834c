"""Messages by id, by key and by time; one message with its body and its path; the search; a new
message; the live tail of a topic."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote

from mqtemplate.console.rendering import exact_time, render
from mqtemplate.console.site import HTML, Call, ChangeForm, Routes, Site, change_pages
from mqtemplate.converters.readable import body_text, short_body, time_text
from mqtemplate.errors import MessageError, MQTemplateError, UnknownNameError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.bulk import parse_span
from mqtemplate.operations.changes import Change
from mqtemplate.operations.creation import MessageDraft, MessageSent
from mqtemplate.operations.message_path import MessagePath, StepKind, message_path
from mqtemplate.operations.messages import MessageSearch, Tail, cursor_of, first_of, is_after, parse_cursor
from mqtemplate.operations.search import is_property, origin_topic, search
from mqtemplate.operations.why_late import ListenerReport, RateOf, measured_rate, why_late
from mqtemplate.pending import PendingQuery
from mqtemplate.selectors.tags import Selector, TagSelector

_PAGE = 50
_LATENESS_S, _PATIENT_S = 0.1, 5.0
"""Time that a page waits for the documents of the application, and that a part of it waits."""


def messages(site: Site, call: Call) -> HttpResponse:
    """Return the form for a search, and what it finds."""
    topic, key, msg_id = call.text("topic"), call.text("key"), call.text("id")
    if msg_id is not None:
        return site.redirect(call.url("/message", id=msg_id, topic=topic))
    cursor = call.text("cursor")
    begin_ms, end_ms = call.time_ms("from"), call.time_ms("to")
    found: list[MessageExt] = []
    has_more = False
    with site.reading() as access:
        names = access.admin.readable_topics()
        by = MessageSearch(access)
        if topic is None:
            pass
        elif key is not None:
            found = by.by_key(topic, key, _PAGE, begin_ms or 0, end_ms)
        elif begin_ms is None and end_ms is None and cursor is None:
            found = by.newest(topic, _PAGE)[::-1]
        else:
            after = parse_cursor(cursor)
            start_ms = max(begin_ms or 0, after[0])
            matching = (each for each in by.by_time(topic, start_ms, end_ms) if is_after(each, after))
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


# --- one message --------------------------------------------------------------------------------


def message(site: Site, call: Call) -> HttpResponse:
    """Return one message, by the id of its producer or of the broker."""
    msg_id, topic = call.needed("id"), call.text("topic")
    with site.reading() as access:
        shown = _stored(access, msg_id, topic)
        origin = topic if shown is None else origin_topic(shown)
        path = _path(access, msg_id if shown is None else shown.msg_id, origin)
        if shown is None and path is None:
            raise UnknownNameError(f"message {msg_id!r} does not exist; it was deleted, or the id is another one")
        now_ms = access.broker.clock.now_ms()
        state = _application(site, _LATENESS_S)
        findings = [] if path is None else why_late(access, path, state, _known_rate(site))
    if shown is None and path is not None:
        shown = _last_record(path)
    pending = [] if path is None else [step for step in path.steps if step.kind is StepKind.PENDING]
    # A rate that is not known yet is measured after the page is shown.
    part = call.url("/message/why", id=msg_id, topic=topic) if any(each.lacks_rate for each in findings) else None
    return site.page(
        call,
        "message.html",
        message=shown,
        topic=origin or "",
        path=path,
        pending=pending,
        now_ms=now_ms,
        findings=findings,
        findings_part=part,
        late=[] if shown is None else [each for each in state.deliveries if each["msgId"] == shown.msg_id],
    )


def body_file(site: Site, call: Call) -> HttpResponse:
    """Return the body of a message as a file: its bytes as they are stored."""
    msg_id, topic = call.needed("id"), call.text("topic")
    with site.reading() as access:
        found = _stored(access, msg_id, topic)
    if found is None:
        raise UnknownNameError(f"message {msg_id!r} does not exist; it was deleted, or the id is another one")
    text = body_text(found.body)
    kind = "bin" if text is None else "json" if text[:1] in ("{", "[") else "txt"
    name = "".join(char for char in found.msg_id if char.isascii() and char.isalnum()) or "body"
    headers = (("Content-Disposition", f'attachment; filename="{name}.{kind}"'),)
    return HttpResponse(200, found.body, "application/octet-stream", headers)


def why_part(site: Site, call: Call) -> HttpResponse:
    """Return why a message is late, as a part of its page: with the rates of its groups, which take seconds."""
    msg_id, topic = call.needed("id"), call.text("topic")
    with site.reading() as access:
        shown = _stored(access, msg_id, topic)
        origin = topic if shown is None else origin_topic(shown)
        path = _path(access, msg_id if shown is None else shown.msg_id, origin)
        state = _application(site, _PATIENT_S)
        findings = [] if path is None else why_late(access, path, state, measured_rate(access))
    return HttpResponse(200, render("message_why.html", {"findings": findings, "url": call.url}), HTML)


def _known_rate(site: Site) -> RateOf:
    return site.rates.consumed().get


def _application(site: Site, wait_s: float) -> ListenerReport:
    """Return the application; without an answer in time what the log of the dashboard has."""
    try:
        cached = site.cache.get("why", lambda: ListenerReport.read(site.document, site.audit), wait_s)
    except MQTemplateError:  # the page shows the path all the same
        cached = None
    return ListenerReport.read(None, site.audit) if cached is None else cached.value


def _stored(access: BrokerAccess, msg_id: str, topic: str | None) -> MessageExt | None:
    """Return the stored message, or the record of a pending one; None if there are no messages."""
    try:
        return MessageSearch(access).by_id(msg_id, topic)
    except UnknownNameError:
        pass  # it may be pending
    found = access.broker.delayed.pending(PendingQuery(key=msg_id, topic=topic), 1).messages
    if not found:
        return None
    path = _path(access, found[0].msg_id, found[0].topic)
    return None if path is None else _last_record(path)


def _path(access: BrokerAccess, msg_id: str, topic: str | None) -> MessagePath | None:
    try:
        return None if topic is None else message_path(access, msg_id, topic)
    except UnknownNameError:
        return None


def _last_record(path: MessagePath) -> MessageExt | None:
    """Return the last record that has the body: a delete marker has no body."""
    records = [step.record for step in path.steps if step.record is not None and step.kind is not StepKind.CANCELLED]
    return records[-1] if records else None


# --- one search for everything ------------------------------------------------------------------


def find(site: Site, call: Call) -> HttpResponse:
    """Return what a text finds, by kind; if only one thing has exactly this name, its page."""
    text = call.text("q")
    if text is None:
        return site.redirect(call.url("/messages"))
    with site.reading() as access:
        result = search(access, text)
    listeners = [each["id"] for each in _application(site, _LATENESS_S).listeners if text.lower() in each["id"].lower()]
    exact = [
        *(call.url("/topics", name=each) for each in result.topics if each == text),
        *(call.url("/groups", name=each) for each in result.groups if each == text),
        *(call.url("/listeners") + f"#{quote(each)}" for each in listeners if each == text),
        *(call.url("/message", id=each.msg_id, topic=each.topic) for each in result.messages),
    ]
    if len(exact) == 1 and result.is_complete:
        return site.redirect(exact[0])
    return site.page(call, "search.html", text=text, result=result, listeners=listeners, is_property=is_property(text))


# --- the live tail ------------------------------------------------------------------------------


_MAX_STREAMS = 8
_INTERVAL_S = 1.0
_MAX_SECONDS = 600.0
"""A stream ends after this time; the browser connects again."""
_MAX_EVENTS = 200
"""Most messages of one interval; further ones are counted only."""

_places = threading.BoundedSemaphore(_MAX_STREAMS)


def tail(site: Site, call: Call) -> HttpResponse:
    """Return the page. Its script reads the stream."""
    with site.reading() as access:
        names = access.admin.readable_topics()
    topic = call.text("topic")
    stream = None if topic is None else call.url("/tail/stream", topic=topic, tag=call.text("tag"))
    return site.page(call, "tail.html", topics=names, stream=stream)


def stream(site: Site, call: Call) -> HttpResponse:
    """Return new messages as events."""
    topic, tag = call.needed("topic"), call.text("tag")
    selector = TagSelector(tag) if tag else None
    with site.reading() as access:
        positions = Tail.from_end(access, topic, selector).positions
    if not _places.acquire(blocking=False):
        raise MessageError(f"{_MAX_STREAMS} pages follow topics already; close one")
    headers = (("X-Accel-Buffering", "no"),)
    found = events(site, topic, selector, positions, time.sleep, time.monotonic)
    return HttpResponse(200, _Placed(found), "text/event-stream", headers)


class _Placed(Iterator[bytes]):
    """Events of a stream that has one of the places. `close` frees it, also if no event was read."""

    def __init__(self, found: Iterator[bytes]) -> None:
        self._found = found
        self._has_place = True

    def __next__(self) -> bytes:
        return next(self._found)

    def close(self) -> None:
        """Free the place."""
        if self._has_place:
            self._has_place = False
            _places.release()


def events(
    site: Site,
    topic: str,
    selector: Selector | None,
    positions: dict[MessageQueue, int],
    pause: Callable[[float], object],
    now_s: Callable[[], float],
) -> Iterator[bytes]:
    """Yield an event for each new message, and a comment in each second without one.

    Args:
        positions: Queue offset of the next message by queue.
        pause: Waits for some seconds.
        now_s: Returns seconds since any moment.
    """
    end_s = now_s() + _MAX_SECONDS
    yield b"retry: 2000\n\n"
    while now_s() < end_s:
        try:
            with site.reading() as access:
                found = Tail(access, topic, selector, positions).poll()
        except MQTemplateError as exc:
            yield _event("failed", {"text": str(exc)})
            return
        for message in found[:_MAX_EVENTS]:
            yield _event("message", _fields(message))
        if len(found) > _MAX_EVENTS:
            yield _event("skipped", {"count": len(found) - _MAX_EVENTS})
        # A comment lets the server notice that the browser is away.
        yield b": \n\n"
        pause(_INTERVAL_S)


def _event(name: str, fields: dict[str, object]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(fields)}\n\n".encode()


def _fields(message: MessageExt) -> dict[str, object]:
    return {
        "time": time_text(message.store_timestamp),
        "exact": exact_time(message.store_timestamp) or "",
        "topic": message.topic,
        "id": message.msg_id,
        "tag": message.tags or "",
        "keys": message.keys or "",
        "queue": f"{message.broker_name}/{message.queue_id}",
        "body": short_body(message.body),
        "is_text": body_text(message.body) is not None,
    }


# --- a new message ------------------------------------------------------------------------------

_OF_MESSAGE = ("topic", "tag", "keys", "properties", "delay", "at", "body")


def message_form(site: Site, call: Call) -> HttpResponse:
    """Return the form for a message."""
    with site.reading() as access:
        names = access.admin.readable_topics()
    return site.page(call, "message_new.html", topics=names)


def _new_message(call: Call) -> ChangeForm:
    topic, delay_ms, at_ms = call.needed_field("topic"), _delay_ms(call.field("delay").strip()), call.time_field("at")
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

    return ChangeForm(
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


ROUTES: Routes = {
    ("GET", "/messages"): messages,
    ("GET", "/message"): message,
    ("GET", "/message/body"): body_file,
    ("GET", "/message/why"): why_part,
    ("GET", "/search"): find,
    ("GET", "/tail"): tail,
    ("GET", "/tail/stream"): stream,
    ("GET", "/messages/send"): message_form,
    **change_pages("/messages/send", _new_message),
}
