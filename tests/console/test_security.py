"""Access to the dashboard: hosts, token, cookie, forged forms, headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.console import Access
from mqtemplate.console.dashboard import _ROUTES
from mqtemplate.errors import ConfigurationError
from mqtemplate.http import HttpRequest
from tests.console.pages import COMPLETE, HOST, TOKEN, Shop, open_shop

CHANGE = "/delayed/preview"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard that only reads, behind something else that protects it."""
    with open_shop(tmp_path, allow_changes=False, reads_need_token=False) as shop:
        yield shop


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard that allows changes; the user is not signed in."""
    with open_shop(tmp_path, reads_need_token=False) as shop:
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


def test_wrong_tokens_are_limited_for_their_address_and_the_right_one_always_passes(guest: Shop) -> None:
    """Users of one machine or one proxy have one address: one that guesses must not lock out the others."""
    statuses = [guest.get("/sign-in", token=f"guess {number}").status for number in range(11)]
    right = guest.get("/sign-in", token=TOKEN).status
    guest.remote = "10.0.0.8"
    elsewhere = guest.get("/sign-in", token="guess").status
    guest.remote = "10.0.0.7"
    guest.harness.advance("61s")

    assert statuses == [403] * 10 + [429]
    assert (right, elsewhere) == (303, 403)
    assert guest.get("/sign-in", token="guess").status == 403


def test_sign_ins_from_another_site_are_refused_and_not_counted(guest: Shop) -> None:
    for origin in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}):
        for _ in range(10):
            assert guest.post("/sign-in", {"token": "guess"}, **origin).status == 403

    assert guest.post("/sign-in", {"token": "guess"}).status == 403
    assert guest.post("/sign-in", {"token": TOKEN}).status == 303


@pytest.mark.parametrize("token", ["", "short", "a" * 40, "with-a-line\n0123456789", " open-sesame-0123456789"])
def test_a_token_that_can_be_guessed_or_not_sent_is_refused_at_the_start(token: str) -> None:
    with pytest.raises(ConfigurationError, match="the token of the dashboard must"):
        Access(token)


def test_the_refusal_of_a_short_token_says_how_to_create_one() -> None:
    with pytest.raises(ConfigurationError, match=r"at least 16 characters.*python -c .*secrets\.token_urlsafe\(32\)"):
        Access("open sesame")


# --- sessions -----------------------------------------------------------------------------------


def test_a_session_ends_with_the_sign_out_also_for_a_copied_cookie(shop: Shop) -> None:
    copied = dict(shop.cookies)
    shop.post("/sign-in", shop.page("/").form("/sign-in"))
    shop.cookies = copied

    assert shop.get("/topics").status == 401


def test_each_sign_in_has_another_session_and_other_form_tokens(shop: Shop) -> None:
    first, first_form = dict(shop.cookies), shop.form_token()
    shop.cookies.clear()
    shop.sign_in()
    form = {"action": "cancel", "scope": "all", **COMPLETE}

    assert shop.cookies.keys() == first.keys()
    assert shop.cookies != first
    assert shop.post(CHANGE, form | {"form_token": first_form}).status == 403
    assert shop.post(CHANGE, form | {"form_token": shop.form_token()}).status == 200


def test_a_session_ends_four_hours_after_its_last_request(shop: Shop) -> None:
    shop.harness.advance("239m")
    used = shop.get("/levels").status
    shop.harness.advance("239m")
    used_again = shop.get("/levels").status
    shop.harness.advance("241m")

    assert (used, used_again, shop.get("/levels").status) == (200, 200, 401)


def test_a_session_ends_after_twelve_hours_however_much_it_is_used(shop: Shop) -> None:
    statuses = []
    for _ in range(13):
        shop.harness.advance("59m")
        statuses.append(shop.get("/levels").status)

    assert statuses == [200] * 12 + [401]


def test_only_a_hundred_sessions_are_kept_and_the_oldest_ends(shop: Shop) -> None:
    oldest = dict(shop.cookies)
    for _ in range(100):
        shop.cookies.clear()
        shop.sign_in()
    newest = dict(shop.cookies)
    shop.cookies = oldest

    assert shop.get("/levels").status == 401
    shop.cookies = newest
    assert shop.get("/levels").status == 200


def test_a_cookie_is_for_one_port_and_with_tls_for_one_host(tmp_path: Path) -> None:
    """Browsers send a cookie to each port of its host: two dashboards of one machine are two cookies."""
    access = Access(TOKEN)

    def cookie(host: str, **more: Any) -> str:
        found = access.sign_in(TOKEN, HttpRequest(method="GET", path="/", headers={"host": host}, **more))
        assert isinstance(found, str)
        return found

    assert cookie("127.0.0.1:8090").startswith("mqtemplate_dashboard_8090=")
    assert cookie("127.0.0.1:8091").startswith("mqtemplate_dashboard_8091=")
    assert cookie("dash.example", is_secure=True).startswith("__Host-mqtemplate_dashboard_443=")
    assert "; Secure" in cookie("dash.example", is_secure=True)
    assert cookie("dash.example", is_secure=True, mount="/ops").startswith("__Secure-mqtemplate_dashboard_443=")


def test_the_session_of_one_dashboard_is_unknown_to_another_with_the_same_token(shop: Shop, tmp_path: Path) -> None:
    with open_shop(tmp_path / "other") as other:
        other.cookies = dict(shop.cookies)

        assert other.get("/topics").status == 401


@pytest.mark.feature("14.2")
def test_the_link_can_lead_to_any_page_and_the_token_leaves_the_address(tmp_path: Path) -> None:
    with open_shop(tmp_path) as shop:
        answer = shop.get("/topics", token=TOKEN, kind="all")

        assert (answer.status, answer.headers["Location"]) == (303, "/topics?kind=all")
        assert shop.get("/topics").status == 200


@pytest.mark.feature("14.2")
def test_a_form_of_another_site_changes_nothing(shop: Shop) -> None:
    shop.send_due(1, "first")
    form = shop.page("/delayed").form(CHANGE, "Cancel all") | {"action": "cancel"}

    without = shop.post(CHANGE, {**form, "form_token": ""})
    foreign = shop.post(CHANGE, form, origin="http://evil.example")
    others = [
        shop.post(CHANGE, form, **headers)
        for headers in (
            {"origin": "null"},
            {"origin": "http://127.0.0.1:9999"},
            {"origin": f"http://{HOST}.evil.example"},
            {"origin": f"ftp://{HOST}"},
            {"origin": "http://[::1"},
            {"sec_fetch_site": "cross-site"},
            {"sec_fetch_site": "same-site"},  # another port of this host
        )
    ]
    own = shop.post(CHANGE, form, origin=f"http://{HOST}", sec_fetch_site="same-origin")

    assert (without.status, foreign.status, own.status) == (403, 403, 200)
    assert {answer.status for answer in others} == {403}
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
        ("mine.localhost:8090", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("user@localhost", 421),
        ("localhost, evil.example", 421),
        ("localhost:99999", 421),
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
    with open_shop(tmp_path, allowed_hosts=["dash.example"], reads_need_token=False) as shop:
        assert shop.request("GET", "/", host="dash.example:443").status == 200


@pytest.mark.feature("14.2")
def test_by_default_reading_needs_the_token_too(tmp_path: Path) -> None:
    with open_shop(tmp_path, allow_changes=False) as shop:
        shop.send("orders", b"the body", "secret-key")
        pages = [route for method, route in _ROUTES if method == "GET"]
        assert {shop.get(page).status for page in pages} == {401}
        assert not any("secret-key" in shop.get(page).html for page in pages)
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
    folder = Path(__file__).parents[2] / "mqtemplate" / "console"
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
