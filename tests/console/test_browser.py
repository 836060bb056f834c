"""The dashboard in a real browser: headless Chromium. Set ``DASHBOARD_SHOTS`` to a folder to get screenshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import message_listener
from mqtemplate.broker import ConsumerSpec
from mqtemplate.message import Property
from mqtemplate.pending import PendingQuery
from mqtemplate.scheduling import scheduled
from mqtemplate.selectors.tags import TagSelector
from tests.console.browser import Visitor, chromium, served
from tests.console.pages import SCRIPT, TOKEN, CardRefusedError, Shop, bill, open_shop, report

pytestmark = [pytest.mark.feature("14.2"), pytest.mark.slow]

SHOTS = Path(os.environ["DASHBOARD_SHOTS"]) if "DASHBOARD_SHOTS" in os.environ else None
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard that allows changes, over a broker with messages of each kind."""
    with open_shop(tmp_path, components=(bill, report)) as shop:
        for number in range(60):
            shop.send_due(number, f"due-{number}", tag="trial" if number % 2 else "paid", body=b'{"total": 30}')
        for number in range(3):
            shop.send("orders", f"refused {number}".encode(), f"lost-{number}", note="gift")
        shop.send("orders", SCRIPT.encode(), "hostile", tag=SCRIPT, **{SCRIPT: SCRIPT})
        shop.harness.advance("30m")
        late(shop)
        shop.sign_in()
        yield shop


def late(shop: Shop, topic: str = "orders") -> None:
    """Have the listener handle a delayed message late."""
    shop.app.containers[0].pause()
    shop.send_due(0.001, "late", topic=topic)
    shop.harness.advance("1m")
    shop.app.containers[0].resume()
    shop.harness.advance("1s")


def visitor(browser: Any, base: str, **context: Any) -> Visitor:
    return Visitor(browser.new_context(**context).new_page(), base)


def test_a_bar_of_the_timeline_is_reached_with_the_keyboard_and_a_message_is_cancelled(
    browser: Any, shop: Shop
) -> None:
    """The short form of the walk below: zoom, choose, preview, cancel, without a mouse."""
    with served(shop) as base:
        user = visitor(browser, base, **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")
        user.go("/delayed")
        bar = user.page.locator("svg.histogram a").first
        bar.focus()
        with user.page.expect_navigation():
            user.page.keyboard.press("Enter")
        # The list of a zoomed span is a part that comes after the first paint.
        box = user.page.locator("tbody input[type=checkbox]").first
        box.wait_for()
        box.focus()
        user.page.keyboard.press("Space")
        key = box.get_attribute("aria-label")
        with user.page.expect_navigation():
            user.page.get_by_role("button", name="Cancel", exact=True).press("Enter")
        user.press("Cancel 1 message")

        assert "1 cancelled" in user.text
        assert key not in shop.pending_keys()
        assert len(shop.pending_keys()) == 59
        assert user.problems == []


@pytest.mark.parametrize("look", ["light", "dark"])
def test_a_seek_is_shown_confirmed_and_undone_on_a_phone(browser: Any, shop: Shop, look: str) -> None:
    """It has no position by default, so a second finger on Seek drops no backlog."""
    shop.app.containers[0].pause()
    for number in range(40):
        shop.send("orders", b"x", f"order-{number}")
    with served(shop) as base:
        user = visitor(browser, base, color_scheme=look, **PHONE)
        user.go(f"/sign-in?token={TOKEN}")
        user.go("/listeners")
        user.open_menu("bill")
        user.press("Seek …")
        assert "choose the first message, the latest, or a duration to go back; one of them" in user.text
        user.go("/listeners")
        user.open_menu("bill")
        user.screenshot(SHOTS, f"phone-menu-{look}")
        user.page.get_by_label("Continue at").first.select_option("latest")
        user.press("Seek …")
        user.screenshot(SHOTS, f"phone-seek-{look}")
        assert "Skipped\n40" in user.text
        user.press("Move listener bill")
        user.go("/changes")
        user.screenshot(SHOTS, f"phone-changes-{look}")
        user.press("Undo …")
        user.screenshot(SHOTS, f"phone-undo-{look}")
        assert "Delivered again\n40" in user.text
        user.press("Undo the move of listener bill")

        assert [each for each in user.problems if "400" not in each] == []
    lags = {each.queue.queue_id: each.lag for each in shop.broker.admin().progress("billing", "orders")}
    assert sum(lags.values()) == 40


PAGES = {
    "overview": "/",
    "delayed": "/delayed",
    "delayed-by-tag": "/delayed?tag=trial",
    "messages": "/messages?topic=orders",
    "topics": "/topics?kind=all",
    "topic": "/topics?name=orders",
    "groups": "/groups",
    "group": "/groups?name=billing",
    "dead-letter-groups": "/dead-letters",
    "dead-letters": "/dead-letters?group=billing",
    "levels": "/levels",
    "changes": "/changes",
    "listeners": "/listeners",
    "schedules": "/schedules",
    "hand-over": "/hand-over",
    "copy": "/copy",
    "lateness": "/lateness",
    "configuration": "/configuration?defaults=1",
    "sign-in": "/sign-in",
}


@pytest.mark.thorough
@pytest.mark.parametrize("look", ["light", "dark", "phone", "phone-dark"])
def test_every_page_is_shown_without_an_error(browser: Any, shop: Shop, look: str) -> None:
    sent = shop.page("/messages", topic="orders", key="hostile").link("hostile")
    letter = shop.page("/dead-letters", group="billing").link("lost-1")
    due = shop.broker.delayed.pending(PendingQuery(key="due-40")).messages[0]
    pages = PAGES | {"message": sent, "dead-letter": letter, "pending": f"/message?id={due.msg_id}&topic=reminders"}
    context = PHONE if look.startswith("phone") else DESKTOP
    with served(shop) as base:
        user = visitor(browser, base, color_scheme="dark" if look.endswith("dark") else "light", **context)
        user.go(f"/sign-in?token={TOKEN}")
        for name, path in pages.items():
            user.go(path)
            user.await_parts()
            user.check_width(name)
            assert user.page.get_by_role("heading", level=1).count() == 1, name
            user.screenshot(SHOTS, f"{look}-{name}")

        assert user.problems == []


@pytest.mark.thorough
def test_every_change_is_made_once(browser: Any, shop: Shop) -> None:
    with served(shop) as base:
        user = visitor(browser, base, **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")

        user.go("/delayed?tag=trial")
        user.press("Shift all")
        user.screenshot(SHOTS, "change-shift")
        user.press("Shift 30 messages")
        assert "30 rescheduled" in user.text
        user.screenshot(SHOTS, "change-job")

        user.go("/delayed?key=due-40")
        user.page.locator("[data-tick-all]").check()
        user.press("Deliver now")
        user.press("Deliver now 1 message")
        assert "1 rescheduled" in user.text

        user.go("/delayed?key=due-42")
        user.page.get_by_role("link", name="due-42").click()
        user.press("Cancel")
        user.press("Cancel 1 message")
        assert "1 cancelled" in user.text

        user.go("/dead-letters?group=billing")
        user.page.get_by_role("link", name="lost-0").click()
        user.page.get_by_label("Body").fill("accepted\nin two lines")
        user.page.get_by_role("button", name="remove note").click()
        user.page.get_by_label("name of a new property").fill("reviewed")
        user.page.get_by_label("value of a new property").fill("yes")
        user.press("Resend")
        assert "accepted\nin two lines" in user.text
        assert "reviewed" in user.text

        user.go("/dead-letters?group=billing")
        user.page.get_by_label("lost-1").check()
        user.press("Resend")
        user.page.get_by_label("only to group billing").check()
        user.press("Resend 1 dead letter")
        assert "sent 1 messages to %RETRY%billing" in user.text
        user.go("/dead-letters?group=billing")
        user.press("Purge all")
        user.press("Purge 1 dead letter")
        assert "purged 1 dead letters" in user.text

        user.go("/listeners")
        user.open_menu("bill")
        user.press("Pause")
        assert "paused" in user.text
        user.open_menu("bill")
        user.page.get_by_label("or back by").first.fill("2h")
        user.press("Seek …")
        user.press("Move listener bill")
        user.open_menu("bill")
        user.press("Resume")
        assert "running" in user.text
        user.open_menu("bill")
        user.page.get_by_label("Handlers at a time").first.fill("3")
        user.page.keyboard.press("Enter")  # not the button that is first on the page: it pauses
        user.page.wait_for_selector("td[data-title=Handlers]:text-is('3')")
        assert "running" in user.text
        user.screenshot(SHOTS, "change-concurrency")

        user.go("/schedules")
        user.press("pause report")
        assert "paused" in user.text
        user.press("run report now")
        user.press("resume report")
        assert "active" in user.text

        user.press("Sign out")
        assert "read only" in user.page.inner_text("body")
        assert user.problems == []
    shop.harness.advance("1s")
    accepted = [each for each in shop.harness.assert_received("bill") if each.body == b"accepted\nin two lines"]
    assert [each.properties.get("note") for each in accepted] == [None]
    assert accepted[0].properties["reviewed"] == "yes"


@pytest.mark.thorough
def test_the_live_tail_the_theme_and_the_keys_work(browser: Any, shop: Shop) -> None:
    with served(shop) as base:
        user = visitor(browser, base, color_scheme="light", **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")
        user.go("/tail?topic=orders")
        user.page.locator("#tail-state.good").wait_for()
        shop.send("orders", SCRIPT.encode(), "live-1", tag=SCRIPT)
        user.page.locator("table.tail tbody tr").wait_for()
        assert SCRIPT in user.text
        user.screenshot(SHOTS, "tail")
        background = "getComputedStyle(document.body).backgroundColor"
        light = user.page.evaluate(background)
        user.page.locator("[data-do=theme]").click()
        dark = user.page.evaluate(background)
        user.page.keyboard.press("g")
        with user.page.expect_navigation():
            user.page.keyboard.press("t")
        user.page.keyboard.press("j")
        focused = user.page.evaluate("document.activeElement.textContent")
        user.page.keyboard.press("?")

        assert user.page.url.endswith("/topics")
        assert light != dark
        assert user.page.evaluate(background) == dark
        assert focused in shop.broker.topics.names()
        assert user.page.get_by_role("dialog").is_visible()
        assert user.problems == []


def test_times_are_in_the_zone_that_is_chosen(browser: Any, shop: Shop) -> None:
    """On all pages, and in the fields of a filter: what is typed is in the zone that is shown."""
    times = [f"2026-01-01 {hour}:00:00" for hour in ("01", "06")]
    with served(shop) as base:
        user = visitor(browser, base, timezone_id="Asia/Karachi", **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")
        user.go("/delayed?key=due-1")
        assert times[0] in user.text
        for _ in ("UTC", "browser"):
            user.page.locator("[data-do=times]").click()

        assert (times[0] in user.text, times[1] in user.text) == (False, True)
        assert "Times: Asia/Karachi (this browser)" in user.page.inner_text("body")
        user.page.get_by_label("Due from").fill("2026-01-01T06:00:00")
        user.page.get_by_label("to", exact=True).fill("2026-01-01T06:00:01")
        with user.page.expect_navigation():
            user.page.get_by_role("button", name="Search", exact=True).click()
        user.await_parts()
        assert (times[1] in user.text, "from=1767229200000" in user.page.url) == (True, True)
        assert user.page.get_by_label("Due from").input_value().startswith("2026-01-01T06:00")
        assert user.problems == []


# --- long names ---------------------------------------------------------------------------------

LETTERS = "".join("abcdefghijklmnopqrstuvwxyz0123456789"[number * 7 % 36] for number in range(250))
LONG_TOPIC, LONG_GROUP = f"orders{LETTERS}"[:127], f"billing{LETTERS}"[:127]
LONG_LISTENER, LONG_KEY, LONG_TAG = f"bill{LETTERS}"[:100], f"key{LETTERS}", f"tag{LETTERS}"[:120]


@message_listener(topic=LONG_TOPIC, consumer_group=LONG_GROUP, id=LONG_LISTENER, max_reconsume_times=1)
def bill_long_names(order: str) -> None:
    if "refused" in order:
        raise CardRefusedError(f"card of {LETTERS}")


@scheduled(every="1d", name=f"report{LETTERS}"[:64])
def report_long_names() -> None: ...


CUT_TABLES = """() => [...document.querySelectorAll(".table")]
    .filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.innerText.slice(0, 60))"""


@pytest.fixture
def long_shop(tmp_path: Path) -> Iterator[Shop]:
    """A dashboard over messages whose names, keys and tags are as long as they may be, each of one word."""
    with open_shop(tmp_path, components=(bill_long_names, report_long_names)) as shop:
        for number in range(4):
            tag = LONG_TAG if number % 2 else "paid"
            shop.send_due(
                number + 1, LONG_KEY, topic=LONG_TOPIC, tag=tag, **{Property.PENDING_KEY: f"{number}{LONG_KEY}"}
            )
        for number in range(2):
            shop.send(LONG_TOPIC, f"refused {number}".encode(), LONG_KEY, LONG_TAG, **{f"name{LETTERS}"[:90]: LETTERS})
        shop.harness.advance("30m")
        late(shop, LONG_TOPIC)
        shop.sign_in()
        yield shop


def find_cut_tables(user: Visitor, pages: dict[str, str], width: int) -> dict[str, list[str]]:
    """Visit pages, and return the tables of each that are wider than their place."""
    found = {}
    for name, path in pages.items():
        user.go(path)
        user.await_parts()
        user.check_width(name)
        user.screenshot(SHOTS, f"long-{width}-{name}")
        found[name] = user.page.evaluate(CUT_TABLES)
    return {name: tables for name, tables in found.items() if tables}


def test_long_names_push_no_column_out_of_sight(browser: Any, long_shop: Shop) -> None:
    names = ("overview", "groups", "listeners")
    with served(long_shop) as base:
        user = visitor(browser, base, **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")

        assert find_cut_tables(user, {name: PAGES[name] for name in names}, 1280) == {}
        assert user.problems == []


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_no_page_is_cut_by_long_names(browser: Any, long_shop: Shop, width: int) -> None:
    sent = long_shop.page("/messages", topic=LONG_TOPIC).link(LONG_KEY)
    due = long_shop.broker.delayed.pending(PendingQuery(topic=LONG_TOPIC)).messages[0]
    pages = PAGES | {
        "delayed-by-tag": f"/delayed?tag={LONG_TAG}",
        "status": f"/delayed/status?topic={LONG_TOPIC}",
        "messages": f"/messages?topic={LONG_TOPIC}",
        "send": f"/messages/send?topic={LONG_TOPIC}",
        "topic": f"/topics?name={LONG_TOPIC}",
        "new-topic": "/topics/create",
        "group": f"/groups?name={LONG_GROUP}",
        "new-group": "/groups/create",
        "dead-letters": f"/dead-letters?group={LONG_GROUP}",
        "search": f"/search?q={LONG_TOPIC[:30]}",
        "message": sent,
        "pending": f"/message?id={due.msg_id}&topic={LONG_TOPIC}",
        "dead-letter": long_shop.page("/dead-letters", group=LONG_GROUP).link(LONG_KEY),
    }
    with served(long_shop) as base:
        user = visitor(browser, base, **PHONE if width < 400 else {"viewport": {"width": width, "height": 900}})
        user.go(f"/sign-in?token={TOKEN}")
        assert find_cut_tables(user, pages, width) == {}
        for name, path, buttons in (
            ("change", "/delayed", ["Cancel all"]),
            ("purge", f"/dead-letters?group={LONG_GROUP}", ["Purge all", "Purge 2 dead letters"]),
            ("delete-topic", f"/topics?name={LONG_TOPIC}", ["Delete"]),
            ("delete-group", f"/groups?name={LONG_GROUP}", ["Delete"]),
            ("changes", "/changes", []),
        ):
            user.go(path)
            user.await_parts()
            for button in buttons:
                user.press(button)
            user.screenshot(SHOTS, f"long-{width}-{name}")
            assert user.page.evaluate(CUT_TABLES) == [], name

        assert user.problems == []


def test_a_page_without_scripts_shows_the_same_list(browser: Any, shop: Shop) -> None:
    with served(shop) as base:
        user = visitor(browser, base, java_script_enabled=False, **DESKTOP)
        user.go(f"/sign-in?token={TOKEN}")
        user.go("/delayed?tag=trial")
        user.page.get_by_role("link", name="Show the list").click()

        assert "due-1" in user.page.inner_text("body")
        assert "due-2" not in user.page.inner_text("body").split()


def test_the_page_of_a_group_by_pop_fits_each_screen_in_both_colours(browser: Any, shop: Shop) -> None:
    """Which message is stuck, who has it, since when and until when."""
    shop.broker.create_topic("parcels", 1)
    shop.broker.pop.join(ConsumerSpec(group="shipping", subscriptions={"parcels": TagSelector()}))
    for number in range(6):
        shop.send("parcels", b"x", f"parcel-{number}", __SHARDINGKEY="berlin" if number < 4 else f"key-{number}")
    for _ in range(2):
        shop.broker.pop.receive("shipping", "parcels", 1, 600_000, 0, None, is_ordered=True)
        shop.harness.advance("4m")

    with served(shop) as base:
        for kind, context in (("desktop", DESKTOP), ("phone", PHONE)):
            for colours in ("light", "dark"):
                user = visitor(browser, base, color_scheme=colours, **context)
                user.go(f"/sign-in?token={TOKEN}")
                user.go("/groups?name=shipping")
                assert "In flight" in user.text
                user.screenshot(SHOTS, f"group-pop-{kind}-{colours}")
                assert user.problems == []
