"""The example shop: its HTTP interface with FastAPI's test client, and its messages in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from examples.shop.app import web
from examples.shop.mailing import MailServer
from examples.shop.warehouse import Warehouse
from mqtemplate import MQApplication
from mqtemplate.testing import Harness, RecordingTemplate, messages_in
from tests.programs import run_python


class Shop:
    """The running shop: its client, its clock, and the mails of its customers."""

    def __init__(self, client: TestClient, app: MQApplication, harness: Harness) -> None:
        self.client = client
        self.app = app
        self.harness = harness

    def order(self, customer: str, article: str, quantity: int = 1) -> int:
        """Place an order over HTTP, and let its messages be handled. Return its number."""
        answer = self.client.post("/orders", json={"customer": customer, "article": article, "quantity": quantity})
        assert answer.status_code == 201, answer.text
        self.harness.run_until_idle()
        number: int = answer.json()["id"]
        return number

    def state(self, order: int) -> str:
        state: str = self.client.get(f"/orders/{order}").json()["state"]
        return state

    def stock(self, article: str) -> int:
        [found] = [each for each in self.client.get("/articles").json() if each["id"] == article]
        stock: int = found["stock"]
        return stock

    @property
    def mails(self) -> list[str]:
        return [f"{mail.to}: {mail.text}" for mail in self.app.get(MailServer).sent]


@pytest.fixture
def shop(
    mqtemplate_applications: list[MQApplication],
    mqtemplate_harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shop]:
    """The shop on a virtual clock, with an empty database."""
    monkeypatch.setenv("SHOP_DATABASE", f"sqlite:///{tmp_path}/shop.db")
    with TestClient(web) as client:
        [app] = mqtemplate_applications
        yield Shop(client, app, mqtemplate_harness)


def test_an_order_reserves_its_stock(shop: Shop) -> None:
    before = shop.stock("tea")

    order = shop.order("Ada", "tea", 2)

    assert shop.state(order) == "reserved"
    assert shop.stock("tea") == before - 2


def test_orders_of_one_article_are_reserved_in_their_order(shop: Shop) -> None:
    """Three customers want the last two; each message of an article is handled after the one before it."""
    stock = shop.stock("kettle")
    orders = []
    for number in range(stock + 1):
        placed = shop.client.post("/orders", json={"customer": f"c{number}", "article": "kettle", "quantity": 1})
        orders.append(placed.json()["id"])

    shop.harness.run_until_idle()

    assert len({message.queue_id for message in messages_in(shop.app.broker, "orders")}) == 1
    assert [shop.state(order) for order in orders] == ["reserved"] * stock + ["rejected"]
    assert shop.stock("kettle") == 0
    assert shop.mails[-1] == f"c{stock}: Sorry, order {orders[-1]} is cancelled: the kettle is sold out."


def test_an_unpaid_order_is_reminded_and_then_cancelled(shop: Shop) -> None:
    """After 15 minutes, after another day, and then it ends: the article is back in stock."""
    before = shop.stock("tea")
    order = shop.order("Ada", "tea")
    shop.harness.advance("14m 59s")
    early = list(shop.mails)
    shop.harness.advance("1s")
    first = list(shop.mails)
    shop.harness.advance("1d")
    second = list(shop.mails)
    shop.harness.advance("1d")

    assert early == []
    assert first == [f"Ada: Please pay order {order}: 3.20 EUR."]
    assert second == [*first, f"Ada: Please pay order {order}: 3.20 EUR. This is the last reminder."]
    assert shop.mails == [*second, f"Ada: Order {order} was not paid in time and is cancelled."]
    assert shop.state(order) == "cancelled"
    assert shop.stock("tea") == before


def test_a_payment_cancels_the_reminder(shop: Shop) -> None:
    """The delayed message itself is gone: it is found by its key, and never delivered."""
    order = shop.order("Ada", "tea")
    pending = [message.keys for message in shop.app.template.pending(topic="reminders").messages]

    paid = shop.client.post(f"/orders/{order}/payment")
    shop.harness.advance("3d")

    assert pending == [f"order-{order}"]
    assert paid.json()["reminder"] == "cancelled"
    assert shop.state(order) == "paid"
    assert messages_in(shop.app.broker, "reminders") == []
    assert shop.mails == []


def test_a_reminder_that_cannot_be_cancelled_any_more_does_nothing(shop: Shop) -> None:
    """It is delivered in the moment of the payment; then its handler finds the order paid."""
    order = shop.order("Ada", "tea")
    shop.client.post(f"/orders/{order}/payment")
    shop.app.template.sync_send("reminders:unpaid", {"order": order, "number": 1})

    shop.harness.advance("3d")

    assert shop.mails == []


def test_an_order_is_paid_once(shop: Shop) -> None:
    order = shop.order("Ada", "tea")
    first = shop.client.post(f"/orders/{order}/payment")
    second = shop.client.post(f"/orders/{order}/payment")

    assert (first.status_code, second.status_code) == (200, 409)
    assert second.json() == {"detail": f"order {order} is paid; only a reserved order can be paid"}


def test_a_receipt_is_a_reply_to_a_request(shop: Shop) -> None:
    order = shop.order("Ada", "tea", 3)
    unpaid = shop.client.get(f"/orders/{order}/receipt")
    shop.client.post(f"/orders/{order}/payment")

    receipt = shop.client.get(f"/orders/{order}/receipt")

    assert unpaid.status_code == 409
    assert receipt.json() == {"order": order, "customer": "Ada", "lines": ["3 x tea at 3.20 EUR"], "total": "9.60 EUR"}


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_an_order_that_the_warehouse_cannot_read_is_a_dead_letter(shop: Shop) -> None:
    """No retry can help, so the order is rejected at once, with the reason for the customer."""
    order = shop.order("Ada", "unicorn")

    assert shop.state(order) == "rejected"
    assert shop.mails == [f"Ada: Sorry, order {order} is cancelled: there is no article 'unicorn'."]
    assert len(messages_in(shop.app.broker, "%DLQ%warehouse")) == 1


def test_the_report_of_a_day_is_written_in_the_night(shop: Shop) -> None:
    """The clock starts at one o'clock in Berlin; the report of each day is written at two."""
    shop.harness.advance("12h")
    for customer in ("Ada", "Bob"):
        shop.client.post(f"/orders/{shop.order(customer, 'tea', 2)}/payment")
    shop.order("Eve", "tea")
    before = shop.client.get("/reports").json()
    shop.harness.advance("13h")

    assert [report["day"] for report in before] == ["2025-12-31"]
    assert shop.client.get("/reports").json()[-1] == {"day": "2026-01-01", "orders": 2, "cents": 1280}


def test_messages_leave_with_the_transaction_or_not_at_all(shop: Shop, mqtemplate_template: RecordingTemplate) -> None:
    """An order that cannot be stored sends nothing; one that is stored sends when the relay runs."""
    refused = shop.client.post("/orders", json={"customer": "Ada", "article": "tea", "quantity": 0})
    shop.harness.run_until_idle()
    nothing = messages_in(shop.app.broker, "orders")
    shop.order("Ada", "tea")

    assert refused.status_code == 422
    assert nothing == []
    assert [message.tags for message in messages_in(shop.app.broker, "orders")] == ["placed"]


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_a_mail_server_that_is_down_delays_mails_and_loses_none(shop: Shop) -> None:
    """The circuit breaker pauses the mailer, so retries are left after an hour; then each mail is sent once."""
    server = shop.app.get(MailServer)
    server.is_down = True
    orders = [shop.order("Ada", "unicorn") for _ in range(4)]
    shop.harness.advance("1h")
    down = list(shop.mails)
    server.is_down = False
    shop.harness.advance("30m")

    assert down == []
    assert sorted(shop.mails) == [
        f"Ada: Sorry, order {order} is cancelled: there is no article 'unicorn'." for order in orders
    ]


def test_a_repeated_message_has_its_effect_once(shop: Shop) -> None:
    """The warehouse gets the message of an order again; its inbox has the id already."""
    order = shop.order("Ada", "tea", 2)
    stock = shop.stock("tea")

    shop.app.listeners.container("examples.shop.warehouse.Warehouse").rewind()
    shop.harness.run_until_idle()
    repeats = shop.harness.assert_received(Warehouse, times=2)

    assert repeats[0].msg_id == repeats[1].msg_id
    assert shop.stock("tea") == stock
    assert shop.state(order) == "reserved"


@pytest.mark.slow
def test_the_demonstration_tells_its_story(tmp_path: Path) -> None:
    """With a real web server, a real clock and files. The program checks what it shows; the exit code is the result."""
    run = run_python(tmp_path, "-W", "error", "-m", "examples.shop", PYTHONUNBUFFERED="1")

    assert run.returncode == 0, run.stdout + run.stderr
    assert "mail to Bob: Order 2 was not paid in time and is cancelled." in run.stdout
    assert "receipt of order 1: 2 x tea at 3.20 EUR, total 6.40 EUR" in run.stdout
    assert "Traceback" not in run.stderr


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_spark_adds_up_the_sales(tmp_path: Path) -> None:
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # less to compile for a JVM that runs for seconds
    run = run_python(tmp_path, "-m", "examples.shop", "--with-spark", JDK_JAVA_OPTIONS=quick)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "sales of tea: 2 for 6.40 EUR" in run.stdout
