"""Creation of the embedded broker.

A module of its own: the application reads the annotated return type, so it imports the broker, and the module that the
entry point names must not.
"""

from __future__ import annotations

from mqtemplate import Clock, EmbeddedBroker
from mqtemplate.context import AppSettings


def embedded_broker(settings: AppSettings, clock: Clock) -> EmbeddedBroker:
    """Return the broker for the settings."""
    return EmbeddedBroker(settings.store_path, settings.mqtemplate.broker, clock)
