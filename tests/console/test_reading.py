"""Pages that show a broker and an application."""

from __future__ import annotations

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.console.application import _reach_of
from mqtemplate.console.rendering import environment, with_breaks
from mqtemplate.console.site import time_of
from mqtemplate.message import Property
from mqtemplate.selectors.tags import TagSelector
from tests.console.pages import SCRIPT, Shop

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


def test_causes_of_dead_letters_are_counted_on_all_pages(shop: Shop) -> None:
    for number in range(60):
        shop.send("orders", f"refused {number}".encode())
    shop.harness.advance("1h")

    page = shop.page("/dead-letters?group=billing")

    assert "Next page" in page.text
    assert "CardRefusedError · 60" in page.text


def test_old_figures_are_shown_with_their_age() -> None:
    age = environment().get_template("parts.html").module.age  # type: ignore[attr-defined]

    assert "As of 13m ago; newer figures are being read." in age(780.2)
    assert age(2.0).strip() == ""


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


# --- foreign text -------------------------------------------------------------------------------


@pytest.mark.feature("14.2")
def test_text_of_messages_is_escaped_on_every_page(shop: Shop) -> None:
    sent = shop.send_due(1, SCRIPT, tag=SCRIPT, body=SCRIPT.encode())
    shop.broker.sends.send(_hostile("orders"))
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
    letter = shop.broker.sends.send(dead)
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


def test_a_large_body_is_cut_and_can_be_downloaded(shop: Shop) -> None:
    """At a character, not inside of one. The file has all bytes."""
    body = ("x" * (64 * 1_024 - 1) + "é" + "y" * 9_000).encode()
    sent = shop.send("orders", body, "large")

    page = shop.page("/message", id=sent.msg_id, topic="orders")
    file = shop.get(page.link("Download the whole body"))

    assert "The first 64.0 KiB of 72.8 KiB." in page.text
    assert "x" * (64 * 1_024 - 1) + "…</pre>" in page.html
    assert file.response.body == body
    assert file.headers["Content-Disposition"] == f'attachment; filename="{sent.msg_id}.txt"'
    assert file.headers["Content-Type"] == "application/octet-stream"
    assert shop.get("/message/body", id="nothing", topic="orders").status == 404


def test_the_body_of_a_pending_message_and_of_a_dead_letter_can_be_downloaded(shop: Shop) -> None:
    shop.send("orders", b"refused", "lost")
    due = shop.send_due(30, "due", body=b'{"total": 30}')
    shop.harness.advance("1h")

    pending = shop.page("/message", id=due.msg_id, topic="reminders")
    letter = shop.page(shop.page("/dead-letters", group="billing").link("lost"))

    assert [shop.get(page.link("Download")).response.body for page in (pending, letter)] == [
        b'{"total": 30}',
        b"refused",
    ]


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        (f"<td>{'a' * 32}</td>", f"<td>{'a' * 32}</td>"),
        (f"<td>{'a' * 33} b</td>", f"<td>{'<wbr>'.join(['a' * 10] * 2 + ['a' * 13])} b</td>"),
        (
            f"<td>{'tests.console-page_' * 2}Error</td>",
            "<td>tests.<wbr>console-<wbr>page_<wbr>tests.<wbr>console-<wbr>page_<wbr>Error</td>",
        ),
        (f"<td>{'&amp;' * 33}</td>", f"<td>{'<wbr>'.join(['&amp;' * 10] * 2 + ['&amp;' * 13])}</td>"),
        (f'<a href="{"a" * 40}">x</a>', f'<a href="{"a" * 40}">x</a>'),
        (f"<pre>{'a' * 40}\n</pre>", f"<pre>{'a' * 40}\n</pre>"),
        (f'<option value="1">{"a" * 40}</option>', f'<option value="1">{"a" * 40}</option>'),
        (f"<title>{'a' * 40}</title>{'b' * 20}", f"<title>{'a' * 40}</title>{'b' * 20}"),
    ],
)
def test_a_word_that_is_longer_than_an_id_may_be_broken(page: str, shown: str) -> None:
    """Not in an attribute, nor where a reader or a form takes each character."""
    assert with_breaks(page) == shown


def test_times_in_a_sentence_are_elements() -> None:
    timed = environment().filters["timed"]

    assert "<time" not in timed("due 2026-02-31 08:00:00 <b>")
    assert timed("<b> at 2026-01-31 08:00:00.").startswith('&lt;b&gt; at <time datetime="2026-01-31T08:00:00.000')


def test_the_page_of_listeners_says_which_processes_a_pause_of_the_group_reaches() -> None:
    listener = {"id": "bill", "group": "billing"}
    workers = [{"worker": str(number), "state": "running"} for number in (1, 2)]

    reach = [_reach_of([listener]), _reach_of([listener | {"workers": workers}, listener | {"workers": workers[1:]}])]

    assert reach == [(1, []), (2, ["1", "2"])]


def test_a_dead_letter_with_a_body_that_is_nested_deeply_is_shown(shop: Shop) -> None:
    shop.send("orders", b'"refused"'.join((b"[" * 50_000, b"]" * 50_000)), "hard")
    shop.harness.advance("1h")

    letters = shop.page("/dead-letters", group="billing")

    assert "[[[[[[" in shop.page(letters.link("hard")).html


@pytest.mark.feature("14.2")
def test_a_search_opens_the_page_of_its_only_exact_hit(shop: Shop) -> None:
    """A message by key, by property or by handle; a group and a listener by name. Other names are only listed."""
    sent = shop.send("orders", b"x", "key-1", region="north")
    due = shop.send_due(3, "later")
    texts = {"key-1": sent, "region=north": sent, sent.msg_id: sent, due.handle: due, "later": due}

    opened = {text: shop.get("/search", q=text).headers["Location"] for text in texts}
    names = [shop.get("/search", q=name).headers["Location"] for name in ("billing", "bill")]

    topics = {sent.msg_id: "orders", due.msg_id: "reminders"}
    assert opened == {
        text: f"/message?id={result.msg_id}&topic={topics[result.msg_id]}" for text, result in texts.items()
    }
    assert names == ["/groups?name=billing", "/listeners#bill"]
    assert "Listeners bill" in shop.page("/search", q="il").text
    assert 'role="search"' in shop.page("/levels").html


# --- lists of many rows -------------------------------------------------------------------------


def test_topics_come_in_pages_of_a_hundred(shop: Shop) -> None:
    for number in range(120):
        shop.broker.create_topic(f"topic-{number:03}")

    first = shop.page("/topics", search="topic-")
    second = shop.page(first.link("Next page"))

    assert "1 to 100 of 120 topics" in first.text
    assert "topic-099" in first.text
    assert "topic-100" not in first.text
    assert "101 to 120 of 120 topics" in second.text
    assert "topic-119" in second.text
    assert "Next page" not in second.text
    assert "1 to 100 of 120 topics" in shop.page(second.link("Previous page")).text
    assert "101 to 120" in shop.page("/topics", search="topic-", page=99).text


def test_the_groups_with_the_largest_lag_come_first(shop: Shop) -> None:
    shop.send("orders", b"x")
    queues = shop.broker.queues("orders")
    for name in ("archive", "mails"):
        shop.broker.groups.commit_offset(name, queues[0], 0)
    for queue in queues:
        shop.broker.groups.commit_offset("archive", queue, shop.broker.reader.max_offset(queue))
        shop.broker.groups.commit_offset("mails", queue, 0)

    text = shop.page("/groups").text

    assert text.index("mails") < text.index("archive")


# --- a group that receives by POP --------------------------------------------------------------------


def test_the_page_of_a_group_shows_which_message_is_stuck_who_has_it_since_when_and_until_when(shop: Shop) -> None:
    shop.broker.create_topic("parcels", 1)
    shop.broker.pop.join(ConsumerSpec(group="shipping", subscriptions={"parcels": TagSelector()}))
    for number in range(3):
        shop.send("parcels", b"x", f"parcel-{number}", **{Property.SHARDING_KEY: "berlin"})
    [received] = shop.broker.pop.receive("shipping", "parcels", 1, 600_000, 0, None, is_ordered=True)
    shop.broker.pop.receive("shipping", "parcels", 1, 600_000, 0, None, is_ordered=True)
    shop.harness.advance("5m")

    page = shop.page("/groups", name="shipping")

    assert "1 in flight: received by POP and not acknowledged" in page.text
    assert "5m time for which a member has the oldest of them" in page.text
    assert "2 messages that wait for earlier ones of their order" in page.text
    assert "0 receives wait for messages; 0 deliveries expired since the start of the broker." in page.text
    row = page.text.partition("Blocks")[2].partition("Progress")[0].split()
    assert row[:2] == [received.message.msg_id, "parcel-0"]
    assert " ".join(row[2:5]) == "parcels this process"
    assert row[-3:] == ["1", "berlin", "2"]
    assert shop.page(page.link(received.message.msg_id)).status == 200


def test_the_page_of_a_group_that_pulls_shows_nothing_in_flight(shop: Shop) -> None:
    assert "in flight" not in shop.page("/groups", name="billing").text.lower()
