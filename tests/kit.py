"""The fixtures of the test kit in one: template, broker, harness, and a function that starts applications."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.testing import Harness, RecordingTemplate
from mqtemplate.testing.harness import StartApp


@dataclass(frozen=True)
class Kit:
    """What most tests of sends and handlers use, on one virtual clock."""

    start: StartApp
    template: RecordingTemplate
    broker: EmbeddedBroker
    harness: Harness


@pytest.fixture
def kit(
    mqtemplate_app: StartApp,
    mqtemplate_template: RecordingTemplate,
    mqtemplate_broker: EmbeddedBroker,
    mqtemplate_harness: Harness,
) -> Kit:
    """The fixtures of the test kit."""
    return Kit(mqtemplate_app, mqtemplate_template, mqtemplate_broker, mqtemplate_harness)
