"""The actuator of an application: it answers requests by path, and knows no web framework."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from mqtemplate.actuator import documents
from mqtemplate.actuator.changes import InvalidChangeError, change_listener, change_schedule
from mqtemplate.actuator.response import Response, error_response
from mqtemplate.errors import ConfigurationError, MQTemplateError
from mqtemplate.listener.consuming.container import ListenerContainer
from mqtemplate.metrics import Metrics
from mqtemplate.observability.collectors import GroupLags
from mqtemplate.observability.health import ApplicationHealth, HealthChecks, Status
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.settings import ENDPOINTS
from mqtemplate.scheduling.schedules import Schedules

_LIVENESS: frozenset[str] = frozenset({"flush", "handlers"})
"""Components that a restart of the process may repair; the others make it not ready."""

Query = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorSources:
    """Sources of the documents. Those that are None have no endpoint.

    Attributes:
        listeners: The registry of the listeners.
        schedules: The schedules of the application.
        settings: Returns all settings, secrets hidden.
        is_ready: Returns True while the application is ready.
    """

    health: HealthChecks
    metrics: Metrics | None = None
    listeners: Iterable[ListenerContainer] | None = None
    schedules: Schedules | None = None
    lags: GroupLags | None = None
    lateness: LatenessRecorder | None = None
    conditions: Sequence[documents.StarterOutcome] | None = None
    settings: Callable[[], Iterable[documents.Setting]] | None = None
    name: str | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    is_ready: Callable[[], bool] = lambda: True


class Actuator:
    """Answers requests for the documents, and takes changes of listeners and schedules behind a token.

    Args:
        token: Token that a change must have, as ``Authorization: Bearer <token>``; None refuses changes.
        endpoints: Names of the endpoints to expose; by default all that have a source.

    Raises:
        ConfigurationError: An endpoint is unknown.
    """

    def __init__(
        self, sources: ActuatorSources, *, token: str | None = None, endpoints: Sequence[str] = ENDPOINTS
    ) -> None:
        for name in endpoints:
            if name not in ENDPOINTS:
                raise ConfigurationError(f"there is no endpoint {name!r}; there is: {', '.join(ENDPOINTS)}")
        self.sources = sources
        self._token = token
        available = _available(sources)
        self.endpoints: Sequence[str] = tuple(name for name in ENDPOINTS if name in endpoints and name in available)

    def respond(
        self,
        method: str,
        path: str,
        query: Query = (),
        authorization: str = "",
        body: bytes = b"",
        remote: str = "",
    ) -> Response:
        """Return the response to a request.

        Args:
            path: The path below ``/actuator``, such as ``/health/readiness``.
            authorization: The header ``Authorization``.
            remote: Address of the client, for the log of changes.
        """
        name, *rest = [unquote(part) for part in path.strip("/").split("/")]
        if method in ("GET", "HEAD"):
            if not name:
                return _document(documents.links_document("/actuator", self.endpoints))
            if name not in self.endpoints:
                return error_response(404, f"there is no endpoint {name!r}; there is: {', '.join(self.endpoints)}")
            return self._read(name, "/".join(rest), query)
        if method == "POST" and name in ("listeners", "schedules") and name in self.endpoints and rest:
            return self._change(name, "/".join(rest), authorization, body, remote)
        return error_response(
            405, f"{method} is not allowed here; GET reads, and POST on listeners/<id> or schedules/<name> changes one"
        )

    # --- reading -------------------------------------------------------------------------------

    def _read(self, name: str, rest: str, query: Query) -> Response:
        try:
            return self._answers()[name](rest, query)
        except MQTemplateError as exc:
            return error_response(503, str(exc))

    def _answers(self) -> dict[str, Callable[[str, Query], Response]]:
        return {
            "health": lambda rest, _: self._health(rest),
            "info": lambda _, __: self._info(),
            "metrics": self._metrics,
            "prometheus": lambda _, __: self._prometheus(),
            "listeners": lambda rest, _: self._listeners(rest),
            "schedules": lambda _, __: _document(documents.schedules_document(_given(self.sources.schedules))),
            "lateness": lambda _, __: _document(documents.lateness_document(_given(self.sources.lateness).recent())),
            "conditions": lambda _, __: _document(documents.conditions_document(_given(self.sources.conditions))),
            "configprops": lambda _, __: _document(documents.configprops_document(_given(self.sources.settings)())),
        }

    def _health(self, part: str) -> Response:
        health = self.sources.health.read()
        if part in ("", "readiness", "liveness"):
            return self._health_of_group(part, health)
        component = health.components.get(part)
        if component is None:
            return error_response(404, f"there is no component {part!r}; there is: {', '.join(health.components)}")
        return _document(documents.component_document(component), component.status)

    def _health_of_group(self, group: str, health: ApplicationHealth) -> Response:
        if group == "liveness":
            health = ApplicationHealth({name: each for name, each in health.components.items() if name in _LIVENESS})
        document = documents.health_document(health)
        status = health.status
        if group == "readiness" and not self.sources.is_ready():
            status = Status.DOWN
            document |= {"status": "OUT_OF_SERVICE"}
        if not group:
            document |= {"groups": ["liveness", "readiness"]}
        return _document(document, status)

    def _info(self) -> Response:
        return _document(documents.info_document(self.sources.name, version("mqtemplate"), **dict(self.sources.info)))

    def _metrics(self, name: str, query: Query) -> Response:
        metrics = _given(self.sources.metrics)
        if not name:
            return _document(documents.metric_names_document(metrics))
        tags = [tuple(value.split(":", 1)) for key, value in query if key == "tag"]
        if any(len(tag) != 2 for tag in tags):
            return error_response(400, "a tag is name:value, such as tag=messaging.destination.name:orders")
        document = documents.metric_document(metrics, name, [(tag[0], tag[-1]) for tag in tags])
        return (
            error_response(404, f"there is no metric {name!r} with these tags")
            if document is None
            else _document(document)
        )

    def _prometheus(self) -> Response:
        from mqtemplate.observability.prometheus import CONTENT_TYPE, prometheus_text

        return Response(200, prometheus_text(_given(self.sources.metrics)), CONTENT_TYPE)

    def _listeners(self, listener_id: str) -> Response:
        lags = [] if self.sources.lags is None else self.sources.lags.read(_given(self.sources.listeners))
        if not listener_id:
            return _document(documents.listeners_document(_given(self.sources.listeners), lags))
        container = self._container(listener_id)
        return (
            self._no_listener(listener_id)
            if container is None
            else _document(documents.listener_document(container, lags))
        )

    def _container(self, listener_id: str) -> ListenerContainer | None:
        return next((each for each in _given(self.sources.listeners) if each.endpoint.id == listener_id), None)

    def _no_listener(self, listener_id: str) -> Response:
        known = ", ".join(each.endpoint.id for each in _given(self.sources.listeners)) or "none"
        return error_response(404, f"there is no listener {listener_id!r}; there is: {known}")

    # --- changes -------------------------------------------------------------------------------

    def _change(self, kind: str, name: str, authorization: str, body: bytes, remote: str) -> Response:
        if self._token is None:
            return error_response(403, "changes are off; set mqtemplate.management.token, and send it with the change")
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return error_response(
                401, "a change needs the header 'Authorization: Bearer <mqtemplate.management.token>'"
            )
        apply: Callable[[dict[str, Any], str], object]
        if kind == "listeners":
            container = self._container(name)
            if container is None:
                return self._no_listener(name)
            apply, shown = partial(change_listener, container), name
        else:
            apply, shown = partial(change_schedule, _given(self.sources.schedules), name), ""
        try:
            change = json.loads(body)
            if not isinstance(change, dict):
                raise InvalidChangeError(f"the body must be a JSON object, got {type(change).__name__}")
            apply(change, remote)
        except ValueError:
            return error_response(400, 'the body must be a JSON object, such as {"action": "pause"}')
        except InvalidChangeError as exc:
            return error_response(400, str(exc))
        except MQTemplateError as exc:
            return error_response(409, str(exc))
        return self._read(kind, shown, ())


def _available(sources: ActuatorSources) -> set[str]:
    """Return the endpoints that have a source."""
    has_prometheus = find_spec("prometheus_client") is not None
    return {
        "health",
        "info",
        *(("metrics",) if sources.metrics is not None else ()),
        *(("prometheus",) if sources.metrics is not None and has_prometheus else ()),
        *(("listeners",) if sources.listeners is not None else ()),
        *(("schedules",) if sources.schedules is not None else ()),
        *(("lateness",) if sources.lateness is not None else ()),
        *(("conditions",) if sources.conditions is not None else ()),
        *(("configprops",) if sources.settings is not None else ()),
    }


def _given(source: Any) -> Any:
    assert source is not None, "an endpoint without a source is not exposed"
    return source


def _document(document: Mapping[str, Any], health: Status = Status.UP) -> Response:
    status = 503 if health is Status.DOWN else 200
    return Response(status, json.dumps(document, ensure_ascii=False, default=str).encode())
