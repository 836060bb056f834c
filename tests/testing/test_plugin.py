"""Fixtures of the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from unittest.mock import Mock

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.listener import message_listener
from mqtemplate.template import RocketMQTemplate
from mqtemplate.testing import Harness, Inbox, RecordingTemplate, StartApp
from mqtemplate.testing.plugin import pytest_addoption
from tests.kit import Kit


def test_loading_the_plugin_imports_nothing_else() -> None:
    """pytest loads it in every run, also of projects that use no fixture of it."""
    program = (
        "import sys, pytest, mqtemplate; before = set(sys.modules); import mqtemplate.testing.plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["mqtemplate.testing", "mqtemplate.testing.plugin"]


def test_pytest_compiles_only_the_contract_suite_of_the_library_again(request: pytest.FixtureRequest) -> None:
    """An installed wheel with a plugin is rewritten as a whole, which takes seconds in the first test."""
    hook = AssertionRewritingHook(request.config)
    hook._must_rewrite.update(["mqtemplate", "mqtemplate_starter_logging", "mqtemplate_plugin_of_others"])

    pytest_addoption(Mock(rewrite_hook=hook))

    is_rewritten = partial(hook._is_marked_for_rewrite, state=Mock())
    assert is_rewritten("mqtemplate.testing.contract.sends")
    assert not is_rewritten("mqtemplate.engine.engine")
    assert not is_rewritten("mqtemplate_starter_logging.autoconfiguration")
    assert is_rewritten("mqtemplate_plugin_of_others")


@pytest.mark.feature("C9")
def test_the_fixtures_of_one_test_share_broker_and_clock(
    mqtemplate_clock: VirtualClock,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_template: RecordingTemplate,
    mqtemplate_harness: Harness,
) -> None:
    assert mqtemplate_broker.clock is mqtemplate_clock
    assert mqtemplate_template.broker is mqtemplate_broker
    assert mqtemplate_harness.broker is mqtemplate_broker
    assert mqtemplate_harness.clock is mqtemplate_clock


def test_a_broker_in_a_test_starts_no_thread(request: pytest.FixtureRequest) -> None:
    before = set(threading.enumerate())

    request.getfixturevalue("mqtemplate_broker")

    assert set(threading.enumerate()) <= before


def test_the_template_of_a_test_can_receive(mqtemplate_template: RecordingTemplate) -> None:
    mqtemplate_template.sync_send("mqtemplate-test-topic", "hello")

    assert mqtemplate_template.receive(str) == ["hello"]


class OrderService:
    """Service of an application, with the template injected."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self.template = template

    def place(self, text: str) -> None:
        self.template.sync_send("orders:paid", text, delay_level=3)


@message_listener(topic="orders", consumer_group="billing", selector_expression="paid")
class Billing:
    def __init__(self) -> None:
        self.received: list[str] = []

    def on_message(self, message: str) -> None:
        self.received.append(message)


@pytest.mark.feature("C9", "X4")
def test_an_application_runs_on_the_broker_of_the_test(kit: Kit) -> None:
    inbox = Inbox()
    app = kit.start(OrderService, Billing, inbox.listener("orders", "audit"), starters=())

    app.get(OrderService).place("hello")
    kit.harness.advance("10s")

    assert app.template is kit.template
    assert [(sent.destination, sent.payload) for sent in kit.template.sent] == [("orders:paid", "hello")]
    assert app.get(Billing).received == ["hello"]
    assert inbox.bodies == [b"hello"]


def test_the_harness_steps_the_listeners_and_brokers_that_an_application_has_later(
    mqtemplate_app: StartApp, mqtemplate_harness: Harness
) -> None:
    """A listener on the broker of a further template, and one that is registered after the start."""
    inbox, later = Inbox(), Inbox()
    settings = {"rocketmq.templates.audit.name-server": "embedded:memory"}
    app = mqtemplate_app(inbox.listener("entries", "audit", broker="audit"), settings=settings)
    [container] = app.listeners.register(later.listener("orders", "billing", id="later"))
    container.start()

    app.get(RocketMQTemplate, "audit").sync_send("entries", "entry", delay="3h")
    app.template.sync_send("orders", "order", delay="2h")
    mqtemplate_harness.advance("3h")

    assert inbox.bodies == [b"entry"]
    assert later.bodies == [b"order"]
