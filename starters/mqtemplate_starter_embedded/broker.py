"""Creation of the embedded broker."""

from __future__ import annotations

from mqtemplate import Clock, EmbeddedBroker
from mqtemplate.context import AppSettings


def embedded_broker(settings: AppSettings, clock: Clock) -> EmbeddedBroker:
    """Return the broker for the settings."""
    return EmbeddedBroker(settings.store_path, settings.mqtemplate.broker, clock)
