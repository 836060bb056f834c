"""Creation of the client of a cluster."""

from __future__ import annotations

from mqtemplate import Clock, RemoteBroker
from mqtemplate.context import AppSettings, remote_settings


def remote_broker(settings: AppSettings, clock: Clock) -> RemoteBroker:
    """Return the broker for the settings."""
    return RemoteBroker(remote_settings(settings), clock)
