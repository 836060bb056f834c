"""Fixtures for pytest, which loads this plugin wherever mqtemplate is installed.

Each fixture imports what it needs when it is used, so that other test runs stay fast. All fixtures of one test share
one broker and one clock.

==========================  =======================================================================================
``mqtemplate_clock``        a `VirtualClock` at 2026-01-01T00:00:00Z
``mqtemplate_broker``       a started `EmbeddedBroker` in memory, on that clock
``mqtemplate_template``     a `RecordingTemplate` over that broker: it sends, and records the calls in ``sent``
``mqtemplate_harness``      a `Harness` over that broker: ``advance("3h")``
``mqtemplate_app``          a function that starts an `MQApplication` of the given components, over the broker and
                            template of the test; ``mqtemplate_harness`` steps its listeners, too
==========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.clock import VirtualClock
    from mqtemplate.context import MQApplication
    from mqtemplate.testing.harness import Harness
    from mqtemplate.testing.recording import RecordingTemplate

    StartApp: TypeAlias = Callable[..., MQApplication]


@pytest.fixture
def mqtemplate_clock() -> VirtualClock:
    """A clock that only the test moves, usually with ``mqtemplate_harness``."""
    from mqtemplate.clock import VirtualClock

    return VirtualClock()


@pytest.fixture
def mqtemplate_broker(mqtemplate_clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    """A broker in memory without threads: the harness steps its services."""
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker

    with EmbeddedBroker(None, clock=mqtemplate_clock) as broker:
        yield broker


@pytest.fixture
def mqtemplate_template(mqtemplate_broker: EmbeddedBroker) -> Iterator[RecordingTemplate]:
    """A template that records its calls, and can receive from ``mqtemplate-test-topic``."""
    from mqtemplate.testing.recording import RecordingTemplate

    with RecordingTemplate(
        mqtemplate_broker,
        producer_group="mqtemplate-test-producer",
        consumer_group="mqtemplate-test-group",
        consumer_topic="mqtemplate-test-topic",
    ) as template:
        yield template


@pytest.fixture
def mqtemplate_harness(mqtemplate_broker: EmbeddedBroker) -> Harness:
    """A harness that moves the clock and steps the broker."""
    from mqtemplate.testing.harness import Harness

    return Harness(mqtemplate_broker)


@pytest.fixture
def mqtemplate_app(
    mqtemplate_broker: EmbeddedBroker, mqtemplate_template: RecordingTemplate, mqtemplate_harness: Harness
) -> Iterator[StartApp]:
    """``app = mqtemplate_app(Listener, Service, settings={...})``, arguments as `MQApplication`; stopped at the end."""
    from mqtemplate.broker import Broker
    from mqtemplate.context import MQApplication
    from mqtemplate.template import RocketMQTemplate

    with ExitStack() as running:

        def start(*components: object, overrides: Mapping[type, object] | None = None, **options: Any) -> MQApplication:
            ours: dict[type, object] = {Broker: mqtemplate_broker, RocketMQTemplate: mqtemplate_template}
            app = running.enter_context(MQApplication(*components, overrides=ours | dict(overrides or {}), **options))
            for container in app.containers:
                mqtemplate_harness.add(container)
            return app

        yield start
