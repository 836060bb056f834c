"""Access to the dashboard: hosts, token, cookie, forged forms, headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.pages import HOST, TOKEN, Shop, open_shop

CHANGE = "/delayed/preview"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard as it is by default: it only reads."""
    with open_shop(tmp_path, allow_changes=False) as shop:
        yield shop


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard that allows changes; the user is not signed in."""
    with open_shop(tmp_path) as shop:
        yield shop


@pytest.mark.feature("14.2")
def test_by_default_the_dashboard_only_reads(reader: Shop) -> None:
    reader.send_due(1, "first")
    reader.sign_in()

    page = reader.page("/delayed")
    answer = reader.post(CHANGE, page.form("/sign-in") | {"action": "cancel", "scope": "all"})

    assert "read only" in page.text
    assert "Cancel" not in page.text
    assert answer.status == 403
    assert "this dashboard only reads; start it with --allow-changes" in answer.text


@pytest.mark.feature("14.2")
def test_a_change_needs_the_token(guest: Shop) -> None:
    guest.send_due(1, "first")

    page = guest.page("/delayed")
    answer = guest.post(CHANGE, {"action": "cancel", "scope": "all", "form_token": "guess"})

    assert "Cancel" not in page.text
    assert answer.status == 403
    assert "a change needs the token; open the link that was printed at the start" in answer.text
    assert guest.pending_keys() == ["first"]


@pytest.mark.feature("14.2")
def test_the_link_of_the_start_signs_in(guest: Shop) -> None:
    answer = guest.get("/sign-in", token=TOKEN)

    cookie = answer.headers["Set-Cookie"]
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert "; Path=/; HttpOnly; SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert "changes allowed" in guest.page("/").text


def test_the_token_can_be_entered_and_the_user_can_sign_out(guest: Shop) -> None:
    assert guest.post("/sign-in", {"token": TOKEN}).status == 303
    page = guest.page("/")

    forged = guest.post("/sign-in", {"action": "sign-out", "form_token": "guess"})
    guest.post("/sign-in", page.form("/sign-in"))

    assert forged.status == 403
    assert "changes allowed" in page.text
    assert "read only" in guest.page("/").text


def test_wrong_tokens_are_limited(guest: Shop) -> None:
    for number in range(10):
        assert guest.get("/sign-in", token=f"guess {number}").status == 403

    blocked = guest.get("/sign-in", token=TOKEN).status
    guest.harness.advance("61s")

    assert blocked == 403
    assert guest.get("/sign-in", token=TOKEN).status == 303


@pytest.mark.feature("14.2")
def test_a_form_of_another_site_changes_nothing(shop: Shop) -> None:
    shop.send_due(1, "first")
    form = shop.page("/delayed").form(CHANGE, "Cancel all") | {"action": "cancel"}

    without = shop.post(CHANGE, {**form, "form_token": ""})
    foreign = shop.post(CHANGE, form, origin="http://evil.example")
    opaque = shop.post(CHANGE, form, origin="null")
    own = shop.post(CHANGE, form, origin=f"http://{HOST}")

    assert (without.status, foreign.status, opaque.status, own.status) == (403, 403, 403, 200)
    assert "the form is not from this dashboard" in without.text
    assert "the form was sent by another site, http://evil.example" in foreign.text


@pytest.mark.feature("14.2")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8090", 200),
        ("localhost:8090", 200),
        ("LOCALHOST", 200),
        ("[::1]:8090", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8090", 421),
        ("evil.example#localhost", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
def test_a_request_must_name_a_known_host(reader: Shop, host: str, status: int) -> None:
    """DNS rebinding: the page of another site points its own name to this address."""
    answer = reader.request("GET", "/topics", host=host)

    assert answer.status == status
    if status != 200:
        assert f"host {host!r} is not allowed; name it with --allowed-host" in answer.html


def test_further_hosts_can_be_allowed(tmp_path: Path) -> None:
    with open_shop(tmp_path, allowed_hosts=["dash.example"]) as shop:
        assert shop.request("GET", "/", host="dash.example:443").status == 200


@pytest.mark.feature("14.2")
def test_reading_can_need_the_token_too(tmp_path: Path) -> None:
    with open_shop(tmp_path, allow_changes=False, reads_need_token=True) as shop:
        closed = shop.get("/topics")
        stream = shop.get("/tail/stream", topic="orders")
        shop.sign_in()
        opened = shop.get("/topics")

    assert (closed.status, stream.status, opened.status) == (401, 401, 200)
    assert "Open the link that mqtemplate dashboard printed" in closed.text


@pytest.mark.feature("14.2")
def test_nothing_runs_that_is_not_of_this_site(shop: Shop) -> None:
    headers = shop.page("/").headers

    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "form-action")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


def test_pages_have_no_scripts_or_styles_inside_and_nothing_from_elsewhere() -> None:
    """The policy would block them in a browser; here it is seen without one."""
    folder = Path(__file__).parents[2] / "mqtemplate" / "dashboard"
    for template in sorted((folder / "templates").glob("*.html")):
        text = template.read_text("utf-8")
        assert " style=" not in text, template
        assert "|safe" not in text.replace(" ", ""), template
        assert "autoescape" not in text, template
        assert not [part for part in text.split("<script")[1:] if not part.startswith(' src="{{ url(')], template
        assert "//" not in text.replace("http://host:port", ""), template


def test_scripts_and_styles_may_be_kept_and_nothing_else_is_served(shop: Shop) -> None:
    script = shop.get("/static/app.js")

    assert script.status == 200
    assert script.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert shop.get("/static/../dashboard.py").status == 404
    assert shop.get("/static/nothing.js").status == 404


def test_other_methods_and_paths_are_refused(shop: Shop) -> None:
    assert shop.get("/delayed/change").status == 405
    assert shop.request("PUT", "/topics").status == 405
    assert shop.get("/nothing").status == 404


def test_a_cookie_that_cannot_be_read_signs_nobody_in(guest: Shop) -> None:
    answer = guest.request("GET", "/", cookie='mqtemplate_dashboard="\x00; =;;')

    assert answer.status == 200
    assert "read only" in answer.text
