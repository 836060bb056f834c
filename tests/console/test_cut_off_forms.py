"""Changes never reach more messages than their preview showed: forms that are cut off, and counts that have grown."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode
from wsgiref.util import setup_testing_defaults

import pytest

from mqtemplate.console import DashboardServer, dashboard_asgi_app, dashboard_wsgi_app
from mqtemplate.console.rendering import environment
from mqtemplate.console.site import FORM_END
from mqtemplate.http.server import HttpServer
from tests.console.pages import HOST, Answer, Shop

pytestmark = pytest.mark.feature("14.2")

CHANGE = "/delayed/change"
FORM = "application/x-www-form-urlencoded"
Carrier = Callable[[Shop, bytes, int], None]
"""Sends the first bytes of a form that is announced with its whole length."""


def cookie(shop: Shop) -> str:
    return "; ".join(f"{name}={value}" for name, value in shop.cookies.items())


def own_server(shop: Shop, body: bytes, length: int) -> None:
    server = DashboardServer(shop.dashboard, "127.0.0.1", 0)
    HttpServer.start(server)
    lines = f"POST {CHANGE} HTTP/1.1\r\nHost: {HOST}\r\nCookie: {cookie(shop)}\r\nContent-Type: {FORM}\r\n"
    try:
        with socket.create_connection((server.address.ip, server.address.port), timeout=30) as client:
            client.sendall(f"{lines}Content-Length: {length}\r\n\r\n".encode() + body)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65_536):
                continue
    finally:
        HttpServer.stop(server)


def asgi(shop: Shop, body: bytes, length: int) -> None:
    headers = {"host": HOST, "cookie": cookie(shop), "content-type": FORM, "content-length": str(length)}
    scope = {"type": "http", "method": "POST", "path": CHANGE} | {
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()]
    }
    rest = {"type": "http.disconnect"} if len(body) < length else {"type": "http.request", "body": b""}
    messages = [{"type": "http.request", "body": body, "more_body": True}, rest]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        pass

    asyncio.run(dashboard_asgi_app(shop.dashboard)(scope, receive, send))


def wsgi(shop: Shop, body: bytes, length: int) -> None:
    environ: dict[str, Any] = {
        "REQUEST_METHOD": "POST", "PATH_INFO": CHANGE, "HTTP_HOST": HOST, "HTTP_COOKIE": cookie(shop),
        "CONTENT_TYPE": FORM, "CONTENT_LENGTH": str(length), "wsgi.input": io.BytesIO(body),
    }  # fmt: skip
    setup_testing_defaults(environ)
    b"".join(dashboard_wsgi_app(shop.dashboard)(environ, lambda *_: None))


def previewed(shop: Shop, **query: str) -> list[tuple[str, str]]:
    """Return the form of a preview that cancels messages, in the order in which a browser sends it."""
    page = shop.page("/delayed", **query)
    preview = shop.post("/delayed/preview", page.form("/delayed/preview", "Cancel all") | {"action": "cancel"})
    assert preview.status == 200, preview.text
    return [(name, value) for name, values in preview.form(CHANGE).items() for value in values]


def fill(shop: Shop) -> None:
    for number in range(20):
        shop.send_due(number + 1, f"due-{number}", tag="trial" if number < 2 else "paid")


@pytest.mark.parametrize("carrier", [own_server, asgi, wsgi])
def test_a_form_that_is_cut_off_at_any_byte_changes_nothing(shop: Shop, carrier: Carrier) -> None:
    """Without its last fields, which are the filter, it would cancel all 20 instead of 2."""
    fill(shop)
    body = urlencode(previewed(shop, tag="trial")).encode()
    for sent in {*range(1, len(body), 9), len(body) - 1, body.index(b"&tag=")}:
        carrier(shop, body[:sent], len(body))
        assert len(shop.pending_keys()) == 20, body[:sent]

    carrier(shop, body, len(body))

    assert len(shop.pending_keys()) == 18


@pytest.mark.parametrize("carrier", [own_server, asgi, wsgi])
def test_a_form_without_its_last_field_changes_nothing_even_if_its_length_is_right(
    shop: Shop, carrier: Carrier
) -> None:
    """A proxy or a framework may cut a form off and correct its length."""
    fill(shop)
    body = urlencode(previewed(shop, tag="trial")).encode()
    for sent in range(1, len(body), 9):
        carrier(shop, body[:sent], sent)
        assert len(shop.pending_keys()) == 20, body[:sent]


def test_each_form_for_a_change_ends_with_the_closing_field() -> None:
    templates = environment()
    assert templates.loader is not None
    for name in templates.list_templates():
        text = templates.loader.get_source(templates, name)[0]
        for form in text.split("<form")[1:]:
            head, _, rest = form.partition(">")
            if 'method="post"' in head:
                inner = rest.partition("</form>")[0]
                assert inner.rstrip().endswith("{{ form_end }}"), name
                assert inner.count("form_end") == 1, name


@pytest.mark.parametrize(
    "path",
    [
        *("/delayed/preview", CHANGE, "/dead-letters/change", "/dead-letters/edit"),
        *("/listeners/change", "/listeners/seek", "/changes/undo", "/jobs/stop"),
    ],
)
def test_no_form_is_taken_without_its_closing_field(shop: Shop, path: str) -> None:
    form = {"form_token": shop.form_token(), "action": "cancel", "scope": "all"}

    answers = [shop.post(path, form), shop.post(path, form | {FORM_END[0]: FORM_END[1][:-1]})]

    assert {answer.status for answer in answers} == {400}
    assert "the end of the form is missing, so nothing was changed; reload the page" in answers[0].text


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["deliver", "shift", "cancel"])
def test_no_change_of_pending_messages_exceeds_its_preview(shop: Shop, action: str) -> None:
    fill(shop)
    page = shop.page("/delayed", tag="trial")
    form = page.form("/delayed/preview", "Cancel all") | {"action": action}
    preview = shop.post("/delayed/preview", form)
    fields = preview.form(CHANGE)

    wider = shop.post(CHANGE, {name: value for name, value in fields.items() if name != "tag"})
    other = shop.post(CHANGE, fields | {"tag": "paid"})

    assert (wider.status, other.status) == (409, 409)
    assert wider.form(CHANGE)["expected"] == ["20"], "it is the preview of the wider change"
    assert "the preview showed 2, and the change would reach 20; nothing was changed, make a new preview" in wider.text
    assert "would reach 18" in other.text
    assert len(shop.pending_keys()) == 20


@pytest.mark.parametrize("action", ["resend", "purge"])
def test_no_change_of_dead_letters_exceeds_its_preview(shop: Shop, action: str) -> None:
    for number in range(5):
        shop.send("orders", b"refused", f"order-{number}", tag="trial" if number < 2 else "paid")
    shop.harness.advance("1h")
    page = shop.page("/dead-letters", group="billing", tag="trial")
    form = page.form("/dead-letters/preview", "Resend all") | {"action": action}
    fields = shop.post("/dead-letters/preview", form).form("/dead-letters/change")

    wider = shop.post("/dead-letters/change", {name: value for name, value in fields.items() if name != "tag"})
    still = shop.page("/dead-letters", group="billing").html.count(">order-")
    done = shop.change("/dead-letters/change", fields)

    assert wider.status == 409
    assert "the preview showed 2, and the change would reach 5; nothing was changed" in wider.text
    assert still == 5
    assert "sent 2 messages to orders" in done.text or "purged 2 dead letters" in done.text


@pytest.mark.parametrize("expected", ["", "0", "-1", "+2", "\u0662", "9" * 5_000, None])
def test_a_change_needs_the_count_of_its_preview(shop: Shop, expected: str | None) -> None:
    fill(shop)
    fields = [
        (name, value if name != "expected" else expected)
        for name, value in previewed(shop, tag="trial")
        if name != "expected" or expected is not None
    ]

    answer = shop.post(CHANGE, fields)

    refused = 409 if expected == "0" else 400
    assert (answer.status, len(shop.pending_keys())) == ((refused, 20) if expected != "+2" else (303, 18))


def test_a_field_that_is_given_twice_is_refused(shop: Shop) -> None:
    fill(shop)
    fields = previewed(shop, tag="trial")

    answers: list[Answer] = [shop.post(CHANGE, [*fields, (name, "")]) for name, _ in fields]

    assert {answer.status for answer in answers} == {400}
    assert "the form has tag 2 times, allowed is once" in " ".join(answer.text for answer in answers)
    assert len(shop.pending_keys()) == 20
