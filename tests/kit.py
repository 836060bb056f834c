"""The fixtures of the test kit in one, applications in memory, handlers that are plain or async, and a timed clock."""

from __future__ import annotations

from asyncio import sleep as virtual_sleep
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from mqtemplate import MQApplication, VirtualClock
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.testing import Harness, RecordingTemplate
from mqtemplate.testing.harness import StartApp


class TimedClock(VirtualClock):
    """A clock that only a test, or a wait, moves, for code that does something else on a virtual clock."""

    is_virtual = False


@dataclass(frozen=True)
class Kit:
    """What most tests of sends and handlers use, on one virtual clock."""

    start: StartApp
    template: RecordingTemplate
    broker: EmbeddedBroker
    harness: Harness

    def handle(self, *orders: object, span: str = "0s") -> None:
        """Send orders, and let time pass and the listeners handle what is due."""
        for order in orders:
            self.template.sync_send("orders", order)
        self.harness.advance(span)


@pytest.fixture
def kit(
    mqtemplate_app: StartApp,
    mqtemplate_template: RecordingTemplate,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_harness: Harness,
) -> Kit:
    """The fixtures of the test kit."""
    return Kit(mqtemplate_app, mqtemplate_template, mqtemplate_broker, mqtemplate_harness)


IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}
both_kinds = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


def application(*components: Any, **options: Any) -> MQApplication:
    """Return an application over a broker in memory, on a virtual clock unless *clock* says otherwise."""
    settings = IN_MEMORY | options.pop("settings", {})
    return MQApplication(*components, settings=settings, environment={}, **{"clock": VirtualClock(), **options})


@contextmanager
def harnessed(*components: Any, raise_handler_errors: bool = True) -> Iterator[tuple[MQApplication, Harness]]:
    """Run an application, and yield it with its harness."""
    with application(*components) as app:
        yield app, Harness(app, raise_handler_errors=raise_handler_errors)


def handler_of(handle: Callable[[str], object], is_async: bool) -> Callable[..., Any]:
    """Return a plain or an async handler of text that calls a function."""

    def plain(order: str) -> object:
        return handle(order)

    async def awaiting(order: str) -> object:
        await virtual_sleep(0)
        return handle(order)

    return awaiting if is_async else plain
