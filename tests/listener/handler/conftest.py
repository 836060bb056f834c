"""An application with the broker, the clock and the template of the test."""

from __future__ import annotations

import pytest

from mqtemplate.testing import Harness, RecordingTemplate
from mqtemplate.testing.harness import StartApp


class Shop:
    """The fixtures of the test kit that a test of a handler needs.

    Attributes:
        start: Starts an application with components.
    """

    def __init__(self, start: StartApp, template: RecordingTemplate, harness: Harness) -> None:
        self.start = start
        self.template = template
        self.harness = harness

    def handle(self, *orders: object) -> None:
        """Send orders, and let the application handle all that is due."""
        for order in orders:
            self.template.sync_send("orders", order)
        self.harness.run_until_idle()


@pytest.fixture
def shop(mqtemplate_app: StartApp, mqtemplate_template: RecordingTemplate, mqtemplate_harness: Harness) -> Shop:
    return Shop(mqtemplate_app, mqtemplate_template, mqtemplate_harness)
