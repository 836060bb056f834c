"""Live tail of a topic, by server-sent events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

from mqtemplate.admin.messages import Tail
from mqtemplate.admin.values import TopicKind
from mqtemplate.converters.readable import body_text, short_body, time_text
from mqtemplate.dashboard.call import Call
from mqtemplate.dashboard.site import Routes, Site
from mqtemplate.errors import MessageError, MQTemplateError
from mqtemplate.http.exchange import HttpResponse
from mqtemplate.message import MessageExt, MessageQueue
from mqtemplate.selectors.tags import Selector, TagSelector

_MAX_STREAMS = 8
_INTERVAL_S = 1.0
_MAX_SECONDS = 600.0
"""A stream ends after this time; the browser connects again."""
_MAX_EVENTS = 200
"""Most messages of one interval; further ones are counted only."""

_places = threading.BoundedSemaphore(_MAX_STREAMS)


def tail(site: Site, call: Call) -> HttpResponse:
    """Return the page. Its script reads the stream."""
    with site.reading() as admin:
        names = [name for name, kind in admin.topic_kinds().items() if kind is not TopicKind.SYSTEM]
    topic = call.text("topic")
    stream = None if topic is None else call.url("/tail/stream", topic=topic, tag=call.text("tag"))
    return site.page(call, "tail.html", topics=names, stream=stream)


def stream(site: Site, call: Call) -> HttpResponse:
    """Return new messages as events."""
    topic, tag = call.needed("topic"), call.text("tag")
    selector = TagSelector(tag) if tag else None
    with site.reading() as admin:
        positions = Tail.from_end(admin, topic, selector).positions
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
            with site.reading() as admin:
                found = Tail(admin, topic, selector, positions).poll()
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
        "topic": message.topic,
        "id": message.msg_id,
        "tag": message.tags or "",
        "keys": message.keys or "",
        "queue": f"{message.broker_name}/{message.queue_id}",
        "body": short_body(message.body),
        "is_text": body_text(message.body) is not None,
    }


ROUTES: Routes = {("GET", "/tail"): tail, ("GET", "/tail/stream"): stream}
