"""Health of an application for the probes of an orchestrator, as web applications show it."""

from __future__ import annotations

from dataclasses import dataclass

from mqtemplate.context.application import MQApplication

_OK, _UNAVAILABLE = 200, 503


@dataclass(frozen=True, slots=True)
class Health:
    """Answer to a probe.

    Attributes:
        status_code: Status of HTTP: 200 or 503.
        body: The answer as JSON.
    """

    status_code: int
    body: dict[str, str]


def health_of(app: MQApplication | None) -> Health:
    """Return the readiness of an application; None: this process has started none yet.

    503 during start and stop, and while a part that has failed keeps the application from working.
    """
    if app is None:
        return Health(_UNAVAILABLE, {"status": "DOWN", "reason": "the application is not started"})
    if not app.is_ready.is_set():
        return Health(_UNAVAILABLE, {"status": "DOWN", "reason": "the application is not ready"})
    return Health(_OK, {"status": "UP", "broker": app.broker.name})
