"""Creation of the client of a cluster.

A module of its own: the application reads the annotated return type, so it imports the broker, and the module that the
entry point names must not.
"""

from __future__ import annotations

from mqtemplate import Clock, RemoteBroker
from mqtemplate.context import AppSettings, remote_settings


def remote_broker(settings: AppSettings, clock: Clock) -> RemoteBroker:
    """Return the broker for the settings."""
    return RemoteBroker(remote_settings(settings), clock)
