"""Pages that show a broker and an application."""

from __future__ import annotations

import pytest

from mqtemplate.console.site import time_of
from mqtemplate.message import Property
from tests.console.pages import HOUR_MS, SCRIPT, Shop

PAGES = (
    "/",
    "/delayed",
    "/messages",
    "/topics",
    "/groups",
    "/dead-letters",
    "/tail",
    "/levels",
    "/listeners",
    "/schedules",
    "/lateness",
    "/configuration",
)


@pytest.mark.feature("14.2")
@pytest.mark.parametrize("path", PAGES)
def test_each_page_of_the_menu_opens(shop: Shop, path: str) -> None:
    page = shop.page(path)

    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert f'href="{path}" aria-current="page"' in page.html


@pytest.mark.feature("14.2")
def test_the_overview_has_pending_messages_rates_lag_and_dead_letters(shop: Shop) -> None:
    [listener] = shop.app.containers
    listener.pause()
    shop.send("orders", b"first")
    shop.page("/")
    shop.harness.advance("10s")
    for _ in range(20):
        shop.send("orders", b"x")
    shop.send_due(2, "due", topic="orders")

    page = shop.page("/")

    assert "1 pending messages" in page.text
    assert "2.0 stored per second, 1 topic" in page.text
    assert "21 lag of all groups" in page.text
    assert "0 dead letters in 0 groups" in page.text
    assert "UP 1 listener, 0 recent late deliveries" in page.text


def test_topics_are_listed_by_kind_and_name(shop: Shop) -> None:
    shop.send("orders")
    shop.send("invoices")

    assert "orders" in shop.page("/topics").text
    assert "SCHEDULE_TOPIC_XXXX" not in shop.page("/topics").text
    assert "SCHEDULE_TOPIC_XXXX" in shop.page("/topics", kind="system").text
    assert "invoices" not in shop.page("/topics", search="ORD").text


def test_a_topic_has_queues_and_groups(shop: Shop) -> None:
    shop.send("orders")
    shop.harness.advance("1s")

    page = shop.page("/topics", name="orders")

    assert "Groups Group Lag in this topic billing 0" in page.text
    assert "broker-a" in page.text


def test_a_missing_topic_is_named(shop: Shop) -> None:
    shop.send("orders")

    page = shop.get("/topics", name="order")

    assert page.status == 404
    assert "topic 'order' does not exist; did you mean 'orders'?" in page.text


@pytest.mark.feature("14.2")
def test_a_group_has_members_subscriptions_and_lag(shop: Shop) -> None:
    shop.app.containers[0].pause()
    shop.send("orders")

    page = shop.page("/groups", name="billing")

    assert "this process PYTHON" in page.text
    assert "Subscriptions Topic Selector orders *" in page.text
    assert "1 lag" in page.text


@pytest.mark.feature("14.2")
def test_messages_are_found_by_topic_key_and_time(shop: Shop) -> None:
    for number in range(3):
        shop.send("orders", b'{"number": %d}' % number, f"order-{number}")
        shop.harness.advance("1h")
    middle_ms = shop.broker.clock.now_ms() - 2 * HOUR_MS

    newest = shop.page("/messages", topic="orders")
    by_key = shop.page("/messages", topic="orders", key="order-1")
    by_time = shop.page("/messages", topic="orders", **{"from": middle_ms})

    assert newest.html.index("order-2") < newest.html.index("order-0")
    assert "order-1" in by_key.html
    assert "order-2" not in by_key.html
    assert "order-0" not in by_time.html
    assert by_time.html.index("order-1") < by_time.html.index("order-2")


def test_messages_come_in_pages(shop: Shop) -> None:
    for number in range(120):
        shop.send("orders", b"x", f"order-{number:03}")

    address, seen = "/messages?topic=orders&from=0", []
    for _ in range(3):
        page = shop.page(address)
        seen += [f"order-{number:03}" for number in range(120) if f">order-{number:03}<" in page.html]
        address = page.link("Later messages") if "Later messages" in page.html else ""

    assert seen == [f"order-{number:03}" for number in range(120)]
    assert address == ""


@pytest.mark.feature("14.2")
def test_a_message_has_its_decoded_body_and_its_path(shop: Shop) -> None:
    sent = shop.send_due(1, "key-1", topic="orders", body=b'{"card":"refused","total":30}')
    shop.harness.advance("3h")

    page = shop.page("/message", id=sent.msg_id, topic="orders")

    steps = ["sent", "delayed", "delivered", "retry delayed", "retry delivered", "dead letter"]
    assert [step for step in steps if f"<h3>{step}" in page.html] == steps
    assert "on time" in page.text
    assert "billing: consumed" in page.text
    assert '{ "card": "refused", "total": 30 }' in page.text


def test_an_id_finds_a_pending_message(shop: Shop) -> None:
    sent = shop.send_due(1, "key-1", body=b"later")

    page = shop.page("/message", id=sent.msg_id)

    assert "Pending: due" in page.text
    assert "(in 1h)" in page.text
    assert "later" in page.text


def test_a_missing_message_is_named(shop: Shop) -> None:
    page = shop.get("/message", id="nothing")

    assert page.status == 404
    assert "message 'nothing' does not exist" in page.text


# --- the delay timeline -------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_the_histogram_zooms_from_days_over_hours_to_minutes(shop: Shop) -> None:
    for days in range(10):
        shop.send_due(24 * days + 1, f"day-{days}")

    days = shop.page("/delayed")
    hours = shop.page(shop_link(days.html, 5))
    minutes = shop.page(shop_link(hours.html, 0))

    assert "10 due in this span of 10 counted" in days.text
    assert "by day, at most" in days.text
    assert "by hour, at most 1" in hours.text
    assert "1 due in this span" in hours.text
    assert "by minute, at most 1" in minutes.text
    assert "1 due in this span" in minutes.text


def shop_link(html: str, number: int) -> str:
    """Return the address of a bar."""
    import re
    from html import unescape

    return unescape(re.findall(r'<a href="([^"]*)" aria-label="[^"]* messages from', html)[number])


@pytest.mark.feature("14.2")
def test_pending_messages_are_searched_by_topic_key_tag_and_time(shop: Shop) -> None:
    shop.send_due(1, "first", tag="trial")
    shop.send_due(2, "second", topic="invoices")
    shop.send_due(30, "third", tag="trial")
    now_ms = shop.broker.clock.now_ms()

    def listed(**query: object) -> list[str]:
        html = shop.page("/delayed/list", **query).html
        return [key for key in ("first", "second", "third") if f">{key}<" in html]

    assert listed() == ["first", "second", "third"]
    assert listed(tag="trial") == ["first", "third"]
    assert listed(topic="invoices") == ["second"]
    assert listed(key="third") == ["third"]
    assert listed(**{"from": now_ms + HOUR_MS + 1, "to": now_ms + 3 * HOUR_MS}) == ["second"]


def test_pending_messages_come_in_pages(shop: Shop) -> None:
    for number in range(70):
        shop.send_due(1 + number / 100, f"due-{number:02}")

    first = shop.page("/delayed")
    second = shop.page(first.link("Next page"))

    assert ">due-49<" in first.html
    assert ">due-50<" not in first.html
    assert ">due-50<" in second.html
    assert "Next page" not in second.html


def test_a_search_that_takes_long_comes_after_the_first_paint(shop: Shop) -> None:
    """A tag is in each record: with a million messages the page must not wait for it."""
    page = shop.page("/delayed", tag="trial")

    assert 'data-src="/delayed/list?tag=trial"' in page.html


def test_a_time_that_cannot_be_read_is_named(shop: Shop) -> None:
    page = shop.get("/delayed", **{"from": "soon"})
    far = shop.get("/delayed", **{"from": "9" * 30})

    assert page.status == 400
    assert "from must be a time such as 2026-01-31T08:00, or epoch milliseconds, got 'soon'" in page.text
    assert (far.status, "from must be a time such as" in far.text) == (400, True)
    assert shop.page("/delayed", **{"from": "9" * 14, "to": "1"}).status == 200
    assert time_of("2026-01-31T08:00:00+00:00", "from") == 1_769_846_400_000


# --- dead letters, levels, the application ------------------------------------------------------


@pytest.mark.feature("14.2")
def test_dead_letters_have_their_cause(shop: Shop) -> None:
    shop.send("orders", b"refused 1", "order-1")
    shop.harness.advance("1h")

    groups = shop.page("/dead-letters")
    letters = shop.page("/dead-letters", group="billing")
    letter = shop.page(letters.link("order-1"))

    assert "billing 1" in groups.text
    assert "CardRefusedError: card of refused 1" in letters.text
    assert "Attempts 2" in letter.text
    assert "Listener bill" in letter.text
    assert "Body: the same" in letter.text
    assert "order-1" not in shop.page("/dead-letters", group="billing", cause="TimeoutError").text
    assert "order-1" not in shop.page("/dead-letters", group="billing", state="purged").text


def test_an_unknown_state_is_named(shop: Shop) -> None:
    shop.send("orders", b"refused 1")
    shop.harness.advance("1h")

    page = shop.get("/dead-letters", group="billing", state="lost")

    assert page.status == 400
    assert "state must be one of open, resent, purged and all, got 'lost'" in page.text


def test_delay_levels_have_delays_and_counts(shop: Shop) -> None:
    shop.send("orders", **{Property.DELAY: "3"})

    assert "3 10s 1 " in shop.page("/levels").text
    assert "18 2h 0" in shop.page("/levels").text


@pytest.mark.feature("14.2")
def test_listeners_have_state_and_lag(shop: Shop) -> None:
    shop.app.containers[0].pause()
    shop.send("orders")

    page = shop.page("/listeners")

    assert "bill paused" in page.text
    assert "Lag 1" in page.text


@pytest.mark.feature("14.4")
def test_lateness_is_split_by_cause(shop: Shop) -> None:
    [listener] = shop.app.containers
    listener.pause()
    sent = shop.send_due(0.001, topic="orders")
    shop.harness.advance("35s")
    listener.resume()
    shop.harness.advance("1s")

    page = shop.page("/lateness")

    assert "consumer lag the listener did not fetch it" in page.text
    assert "100 %" in page.text
    assert sent.msg_id in page.text
    assert 'class="cause-consumer_lag"' in page.html


@pytest.mark.feature("14.2")
def test_the_configuration_has_origins_and_no_secrets(shop: Shop) -> None:
    page = shop.page("/configuration")

    assert "mqtemplate.management.name shop argument settings" in page.text
    assert "mqtemplate.management.token ********" in page.text
    assert "mqtemplate.management.address" not in page.text
    assert "mqtemplate.management.address 127.0.0.1 default" in shop.page("/configuration", defaults=1).text
    assert "rocketmq does not act" in page.text


# --- foreign text -------------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_text_of_messages_is_escaped_on_every_page(shop: Shop) -> None:
    sent = shop.send_due(1, SCRIPT, tag=SCRIPT, body=SCRIPT.encode())
    shop.broker.send(_hostile("orders"))
    shop.app.containers[0].pause()
    dead = _hostile("orders")
    dead.properties |= {
        "dead_letter_exception": SCRIPT,
        "dead_letter_message": SCRIPT,
        "dead_letter_stack": SCRIPT,
        "dead_letter_listener": SCRIPT,
        "DLQ_ORIGIN_TOPIC": "orders",
    }
    dead.topic = "%DLQ%billing"
    shop.broker.create_topic("%DLQ%billing", 1)
    letter = shop.broker.send(dead)
    addresses = [
        ("/delayed", {}),
        ("/delayed/list", {"tag": SCRIPT}),
        ("/delayed", {"topic": SCRIPT, "key": SCRIPT}),
        ("/messages", {"topic": "orders"}),
        ("/messages", {"topic": SCRIPT}),
        ("/message", {"id": sent.msg_id}),
        ("/message", {"id": SCRIPT}),
        ("/dead-letters", {"group": "billing"}),
        ("/dead-letters", {"group": SCRIPT}),
        ("/dead-letters/letter", {"group": "billing", "id": letter.offset_msg_id}),
        ("/topics", {"search": SCRIPT}),
        ("/topics", {"name": SCRIPT}),
        ("/groups", {"name": SCRIPT}),
        ("/configuration", {"search": SCRIPT}),
        ("/tail", {"topic": SCRIPT, "tag": SCRIPT}),
        (f"/{SCRIPT}", {}),
    ]

    pages = [shop.get(path, **query) for path, query in addresses]

    assert [page.html.count("<script>") for page in pages] == [0] * len(pages)
    assert sum("alert(1)" in page.text for page in pages) >= 10


def _hostile(topic: str):  # type: ignore[no-untyped-def]
    from mqtemplate.message import Message

    properties = {Property.KEYS: "hostile", Property.TAGS: SCRIPT, SCRIPT: SCRIPT}
    return Message(topic, SCRIPT.encode(), properties)


# --- bodies that are hard to show ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "[[[[[["),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "{&#34;a&#34;:{&#34;a&#34;:"),
        (b"[" * 100_000, "[[[[[["),
        (b'{"name": "\\ud800"}', "name"),
        (b'{"number": ' + b"9" * 5_000 + b"}", "9" * 100),
        (b'{"number": 1e999, "nan": NaN}', "number"),
    ],
)
def test_any_body_is_shown_on_each_page(shop: Shop, body: bytes, text: str) -> None:
    """JSON may be nested more deeply than Python's stack allows, and have half of a surrogate pair."""
    sent = shop.send("orders", body, "hard")
    shop.send_due(1, "hard-later", body=body)

    pages = [
        shop.page("/message", id=sent.msg_id, topic="orders"),
        shop.page("/messages", topic="orders"),
        shop.page("/delayed"),
    ]

    assert text in pages[0].html
    assert all("hard" in page.html for page in pages)


def test_a_dead_letter_with_a_body_that_is_nested_deeply_is_shown(shop: Shop) -> None:
    shop.send("orders", b'"refused"'.join((b"[" * 50_000, b"]" * 50_000)), "hard")
    shop.harness.advance("1h")

    letters = shop.page("/dead-letters", group="billing")

    assert "[[[[[[" in shop.page(letters.link("hard")).html
