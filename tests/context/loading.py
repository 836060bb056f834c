"""Types of the fixtures of the configuration tests, and the applications of the other tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqtemplate.clock import VirtualClock
from mqtemplate.context import AppSettings, MQApplication
from mqtemplate_starter_embedded import EmbeddedAutoConfiguration

__all__ = ["IN_MEMORY", "AppOf", "Load", "Refusal", "app_with"]

Load = Callable[..., AppSettings]
Refusal = Callable[..., str]
AppOf = Callable[..., MQApplication]

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}


def app_with(*components: object, **options: Any) -> MQApplication:
    """Return an application with a virtual clock, a store in memory, no environment, and the embedded starter only."""
    given = {
        "settings": IN_MEMORY,
        "environment": {},
        "clock": VirtualClock(),
        "starters": [EmbeddedAutoConfiguration],
    }
    return MQApplication(*components, **{**given, **options})
