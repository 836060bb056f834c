"""Fixtures for pytest, found by themselves once mqtemplate is installed.

The library is imported when the first fixture is asked for, so that other test suites on the same machine pay nothing.

==========================  =======================================================================================
``mqtemplate_clock``        a `VirtualClock` at 2026-01-01T00:00:00Z
``mqtemplate_broker``       a started `EmbeddedBroker` in memory, on that clock
``mqtemplate_template``     a `RecordingTemplate` over that broker: sends as ever, and keeps ``sent``
``mqtemplate_harness``      a `Harness` over that broker: ``advance("3h")``
``mqtemplate_app``          a function that starts an `MQApplication` of given components, in memory, on that clock
==========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mqtemplate.brokers import EmbeddedBroker
    from mqtemplate.clock import VirtualClock
    from mqtemplate.testing.harness import Harness
    from mqtemplate.testing.recording import RecordingTemplate

__all__ = ["mqtemplate_broker", "mqtemplate_clock", "mqtemplate_harness", "mqtemplate_template"]


@pytest.fixture
def mqtemplate_clock() -> VirtualClock:
    """A clock that stands still until the test moves it, best by ``mqtemplate_harness``."""
    from mqtemplate.clock import VirtualClock

    return VirtualClock()


@pytest.fixture
def mqtemplate_broker(mqtemplate_clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    """The real engine over memory. It has no threads: its work is done when the harness steps it."""
    from mqtemplate.brokers import EmbeddedBroker

    with EmbeddedBroker(None, clock=mqtemplate_clock) as broker:
        yield broker


@pytest.fixture
def mqtemplate_template(mqtemplate_broker: EmbeddedBroker) -> Iterator[RecordingTemplate]:
    from mqtemplate.testing.recording import RecordingTemplate

    with RecordingTemplate(
        mqtemplate_broker, consumer_group="mqtemplate-test-group", consumer_topic="mqtemplate-test-topic"
    ) as template:
        yield template


@pytest.fixture
def mqtemplate_harness(mqtemplate_broker: EmbeddedBroker) -> Harness:
    from mqtemplate.testing.harness import Harness

    return Harness(mqtemplate_broker)
