"""A listener that stands beside the others and that no application was given never runs: a warning names it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.clock import Clock, SystemClock, VirtualClock
from mqtemplate.context import MQApplication
from mqtemplate.listener import message_listener
from mqtemplate.scheduling import scheduled
from tests.context.loading import IN_MEMORY


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with three listeners and a scheduled function."""
    module = ModuleType("listeners_of_a_shop")

    @message_listener("orders", "billing")
    def bill(order: str) -> None: ...

    @message_listener("orders", "shipping")
    def ship(order: str) -> None: ...

    @message_listener("orders", "audit")
    class Audit:
        def on_message(self, order: str) -> None: ...

    @scheduled(every="1h")
    def count() -> None: ...

    for each in (bill, ship, Audit, count):
        each.__module__ = module.__name__
        each.__qualname__ = each.__name__
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def warnings(*components: Any, clock: Clock = SystemClock()) -> list[str]:
    """Start an application and return the listeners that it warns of."""
    with capture_logs() as logs, MQApplication(*components, settings=IN_MEMORY, environment={}, clock=clock):
        pass
    found = [each for each in logs if each["event"] == "listener.not_in_application"]
    assert all("MQApplication(__name__)" in each["hint"] for each in found)
    return [each["listener"].removeprefix("listeners_of_a_shop.") for each in found]


def test_a_warning_names_the_listeners_of_the_module_that_were_not_given(shop: ModuleType) -> None:
    assert warnings(shop.bill) == ["ship", "Audit", "count"]


def test_a_listener_of_another_application_is_no_warning(shop: ModuleType) -> None:
    MQApplication(shop.ship, shop.Audit(), settings=IN_MEMORY, environment={})

    assert warnings(shop.bill, shop.count) == []


def test_the_listeners_of_a_module_are_all_given(shop: ModuleType) -> None:
    assert warnings(shop) == []


def test_a_test_on_a_virtual_clock_may_have_a_part_of_the_listeners(shop: ModuleType) -> None:
    assert warnings(shop.bill, clock=VirtualClock()) == []
