"""The example async_orders, with a virtual clock and as a program."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.async_orders.app import ARTICLES, COMPONENTS, order_and_wait
from examples.async_orders.order_listener import OrderListener, Receipt
from examples.async_orders.price_listener import PriceListener
from mqtemplate import MQApplication
from mqtemplate.testing import Harness, StartApp
from tests.programs import run_python

ROOT = Path(__file__).parents[2]
REMINDERS = {
    "please pay 320 cents for your tea",
    "please pay 410 cents for your coffee",
    "please pay 380 cents for your cocoa",
}


@pytest.fixture
def app(mqtemplate_app: StartApp) -> MQApplication:
    """The components and the configuration of the example, with a store in memory and a virtual clock."""
    return mqtemplate_app(*COMPONENTS, config_folder=ROOT / "examples" / "async_orders")


def test_an_order_is_replied_with_a_price(app: MQApplication) -> None:
    assert app.template.send_and_receive("orders", "tea", Receipt) == Receipt("tea", 320)


def test_every_order_is_reminded_after_its_delay(app: MQApplication, mqtemplate_harness: Harness) -> None:
    started_ms = mqtemplate_harness.clock.now_ms()

    reminded = asyncio.run(order_and_wait(app.template))

    assert set(reminded) == REMINDERS
    assert len(reminded) == len(ARTICLES)
    assert mqtemplate_harness.clock.now_ms() == started_ms + 2_000
    mqtemplate_harness.assert_received(OrderListener, times=len(ARTICLES))
    mqtemplate_harness.assert_sent("reminders", times=len(ARTICLES))


@pytest.mark.mqtemplate(raise_handler_errors=False)
def test_an_order_without_a_price_is_retried_and_then_a_dead_letter(
    app: MQApplication, mqtemplate_harness: Harness
) -> None:
    """Each try asks for the price again; the price listener retries none of these requests."""
    app.template.sync_send("orders", "wine")

    mqtemplate_harness.advance("1m")

    [order] = mqtemplate_harness.assert_dead_lettered(OrderListener, times=1)
    assert order.user_properties["dead_letter_attempts"] == "3"
    assert "RequestTimeoutError" in order.user_properties["dead_letter_exception"]
    mqtemplate_harness.assert_dead_lettered(PriceListener, times=3)
    mqtemplate_harness.assert_sent("reminders", times=0)


@pytest.mark.slow
def test_the_program_ends_by_itself_each_time(tmp_path: Path) -> None:
    """In an empty folder. A second run receives no reminder of the first one."""
    for _ in range(2):
        program = run_python(tmp_path, "-u", "-W", "error", "-m", "examples.async_orders", bare=True, PATH="")
        assert program.returncode == 0, program.stderr
        assert {
            line.removeprefix("Reminded: ") for line in program.stdout.splitlines() if "Reminded" in line
        } == REMINDERS
        assert program.stdout.count("Reminded") == len(ARTICLES)
