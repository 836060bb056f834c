"""Fixtures for pytest, which loads this plugin wherever mqtemplate is installed.

Each fixture imports what it needs when it is used, so that other test runs stay fast. All fixtures of one test share
one broker and one clock.

==========================  =======================================================================================
``mqtemplate_clock``        a `VirtualClock` at 2026-01-01T00:00:00Z, or as ``@pytest.mark.mqtemplate(start=...)`` says
``mqtemplate_broker``       a started `EmbeddedBroker` in memory, on that clock
``mqtemplate_template``     a `RecordingTemplate` over that broker: it sends, and records the calls in ``sent``
``mqtemplate_harness``      a `Harness` over that broker: ``advance("3h")``
``mqtemplate_app``          a function that starts an `MQApplication` of the given components, over the broker and
                            template of the test; ``mqtemplate_harness`` steps its listeners, too
``mqtemplate_applications``  the applications that the tested code creates by itself, such as a lifespan of FastAPI; all
                            of them run over the broker, the clock and the template of the test
==========================  =======================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mqtemplate.brokers.embedded.broker import EmbeddedBroker
    from mqtemplate.clock import VirtualClock
    from mqtemplate.context import MQApplication
    from mqtemplate.testing.harness import Harness, StartApp
    from mqtemplate.testing.recording import RecordingTemplate


_MARKER = "mqtemplate"
_MARKER_HELP = "start of the virtual clock ('now', a datetime, epoch ms); False: handlers may raise"
_OURS = re.compile(r"mqtemplate(_starter_\w+)?(\.|$)")
_OPTIONS = frozenset({"start", "raise_handler_errors"})


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Keep pytest from compiling the library again.

    pytest rewrites the assertions in all modules of a distribution that has a plugin. Here only the contract suite has
    assertions for users, and compiling the other modules would take seconds in the first test.
    """
    marked = getattr(pluginmanager.rewrite_hook, "_must_rewrite", None)  # there is no public way to end a mark
    if isinstance(marked, set):
        marked.difference_update([name for name in marked if _OURS.match(name)])
        marked.add("mqtemplate.testing.contract")
        getattr(pluginmanager.rewrite_hook, "_marked_for_rewrite_cache", {}).clear()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, so that ``--strict-markers`` knows it."""
    config.addinivalue_line("markers", f"{_MARKER}(start=..., raise_handler_errors=True): {_MARKER_HELP}")


def _option(request: pytest.FixtureRequest, name: str, default: Any) -> Any:
    """Return an option of the marker that is nearest to the test."""
    for marker in request.node.iter_markers(_MARKER):
        unknown = marker.kwargs.keys() - _OPTIONS
        if marker.args or unknown:
            raise pytest.UsageError(
                f"@pytest.mark.{_MARKER} has the options {', '.join(sorted(_OPTIONS))}, by name; "
                f"got {', '.join(map(repr, [*marker.args, *sorted(unknown)]))}"
            )
        if name in marker.kwargs:
            return marker.kwargs[name]
    return default


@pytest.fixture
def mqtemplate_clock(request: pytest.FixtureRequest) -> VirtualClock:
    """A clock that only the test moves, usually with ``mqtemplate_harness``.

    ``@pytest.mark.mqtemplate(start="now")``, or an aware datetime or epoch milliseconds, is another start.
    """
    from mqtemplate.clock import SystemClock, VirtualClock

    start = _option(request, "start", None)
    if start is None:
        return VirtualClock()
    if start == "now":
        return VirtualClock(SystemClock().now_ms())
    if isinstance(start, datetime) and start.utcoffset() is not None:
        return VirtualClock(int(start.timestamp() * 1_000))
    if isinstance(start, int) and not isinstance(start, bool):
        return VirtualClock(start)
    raise pytest.UsageError(
        f"@pytest.mark.{_MARKER}(start=...) must be 'now', an aware datetime or epoch milliseconds, got {start!r}"
    )


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
def mqtemplate_harness(request: pytest.FixtureRequest, mqtemplate_broker: EmbeddedBroker) -> Iterator[Harness]:
    """A harness that moves the clock and steps the broker. A handler that raises fails the test.

    ``@pytest.mark.mqtemplate(raise_handler_errors=False)`` lets handlers raise; the failures are in ``failures``.
    """
    from mqtemplate.testing.harness import Harness

    harness = Harness(mqtemplate_broker, raise_handler_errors=_option(request, "raise_handler_errors", True))
    yield harness
    harness.raise_failures()


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
            mqtemplate_harness.add(app)
            return app

        yield start


@pytest.fixture
def mqtemplate_applications(
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_template: RecordingTemplate,
    mqtemplate_harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[MQApplication]]:
    """The applications that the tested code creates by itself: in a lifespan, in an application factory, in a view.

    Whatever broker their configuration names, they run over the broker, the clock and the template of the test, and
    the harness steps their listeners. Those that still run at the end of the test are stopped.
    """
    from mqtemplate.broker import Broker
    from mqtemplate.context import MQApplication
    from mqtemplate.template import RocketMQTemplate

    created: list[MQApplication] = []
    ours: dict[type, object] = {Broker: mqtemplate_broker, RocketMQTemplate: mqtemplate_template}
    construct = MQApplication.__init__

    def construct_for_test(
        app: MQApplication, *components: object, overrides: Mapping[type, object] | None = None, **options: Any
    ) -> None:
        options.pop("clock", None)  # the broker of the test has one
        construct(app, *components, overrides=dict(overrides or {}) | ours, **options)
        created.append(app)
        mqtemplate_harness.add(app)

    monkeypatch.setattr(MQApplication, "__init__", construct_for_test)
    yield created
    for app in reversed(created):
        app.stop()
