"""The actuator of an application: a function from a request to a response, for any server and web framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.console import documents
from mqtemplate.errors import ConfigurationError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.http.bridges import AsgiApp, WsgiApp, asgi_application, wsgi_application
from mqtemplate.http.exchange import HttpRequest, HttpResponse, below, host_name, is_private_name
from mqtemplate.http.tokens import TokenAnswer, TokenCheck, checked_token
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.metrics import Metrics
from mqtemplate.observability.collectors import GroupLag, GroupLags
from mqtemplate.observability.health import ApplicationHealth, HealthChecks, Status
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.settings import ENDPOINTS, OPEN_ENDPOINTS
from mqtemplate.operations.application import (
    InvalidChangeError,
    change_listener,
    change_schedule,
    parse_change,
    undo_seek,
)
from mqtemplate.operations.audit import AuditLog, LoggedChange
from mqtemplate.operations.changes import UnconfirmedChangeError
from mqtemplate.operations.offsets import LISTENER_SEEK
from mqtemplate.scheduling.schedules import Schedules

if TYPE_CHECKING:
    from mqtemplate.context.settings.features import ManagementSettings

_log = get_logger("mqtemplate.actuator")

MAX_BODY_BYTES = 64 * 1_024
_JSON = "application/json"
_HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))

_LIVENESS: frozenset[str] = frozenset({"flush", "handlers"})
"""Components that a restart of the process may repair; the others make it not ready."""

_SOURCES = {
    # endpoint -> attribute of `ActuatorSources`
    "metrics": "metrics",
    "prometheus": "metrics",
    "listeners": "listeners",
    "schedules": "schedules",
    "changes": "audit",
    "lateness": "lateness",
    "conditions": "conditions",
    "configprops": "settings",
}

_CHANGED = ("listeners", "schedules", "changes")
"""Endpoints that take changes."""
_RECENT = 100

Query = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorSources:
    """Sources of the documents. A source that is None has no endpoint.

    Attributes:
        listeners: The registry of the listeners.
        schedules: The schedules of the application.
        settings: Returns all settings, secrets hidden.
        audit: The log of seeks, and of their undoing.
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
    audit: AuditLog | None = None
    name: str | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    is_ready: Callable[[], bool] = lambda: True


class Actuator:
    """Answers requests for the documents, and takes changes of listeners and schedules behind a token.

    The open endpoints can be read without the token, for probes and scrapers. The others tell what an application
    is configured with and works on, so reading them needs it, as a change does.

    Args:
        token: Token of reads and changes, as ``Authorization: Bearer <token>``; None refuses them.
        endpoints: Names of the endpoints to expose; by default all that have a source.
        open_endpoints: Names of the endpoints that can be read without the token.
        allowed_hosts: Public names in the header ``Host``. Addresses and private names are always allowed.

    Raises:
        ConfigurationError: An endpoint is unknown, or the token can be guessed.
    """

    def __init__(
        self,
        sources: ActuatorSources,
        *,
        token: str | None = None,
        endpoints: Sequence[str] = ENDPOINTS,
        open_endpoints: Sequence[str] = OPEN_ENDPOINTS,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        for name in (*endpoints, *open_endpoints):
            if name not in ENDPOINTS:
                raise ConfigurationError(f"there is no endpoint {name!r}; there is: {', '.join(ENDPOINTS)}")
        self.sources = sources
        self._check = None if token is None else TokenCheck(checked_token(token, "mqtemplate.management.token"))
        self._open = frozenset(open_endpoints)
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)
        available = _available(sources)
        self.endpoints: Sequence[str] = tuple(name for name in ENDPOINTS if name in endpoints and name in available)

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request. Its path is below ``/actuator``, or with it, as frameworks mount it.

        Without the header ``Host`` it comes from this process, or from another program than a browser.
        """
        path = request.path if (rest_of := below(request.path, "/actuator")) is None else rest_of
        name, *rest = path.strip("/").split("/")
        host = request.headers.get("host")
        # A probe may use any name: the health is not secret.
        if host is not None and name != "health" and not self._is_host_allowed(host):
            return _error(421, f"host {host[:100]!r} is not allowed; name it in mqtemplate.management.allowed-hosts")
        if request.method in ("GET", "HEAD"):
            if not name:
                return _document(documents.links_document("/actuator", self.endpoints))
            if name not in self.endpoints:
                return _error(404, f"there is no endpoint {name!r}; there is: {', '.join(self.endpoints)}")
            refusal = None if name in self._open else self._refusal(request, f"reading {name}")
            return self._read(name, "/".join(rest), request.query) if refusal is None else refusal
        if request.method == "POST" and name in _CHANGED and name in self.endpoints and rest:
            return self._change(name, "/".join(rest), request)
        return _error(
            405,
            f"{request.method} is not allowed here; "
            "GET reads, and POST on listeners/<id>, schedules/<name> or changes/<id> changes one",
        )

    def _is_host_allowed(self, host: str) -> bool:
        """Return False for a public name that is not allowed: the page of another site may have one (DNS rebinding)."""
        name = host_name(host)
        return name is not None and (name in self._allowed_hosts or is_private_name(name))

    def _refusal(self, request: HttpRequest, what: str) -> HttpResponse | None:
        """Return the response to a request without the token; None if it has it."""
        if self._check is None:
            return _error(403, f"{what} is off; set mqtemplate.management.token, and send it")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            answer = self._check.check(given.strip(), request.remote)
            if answer is TokenAnswer.RIGHT:
                return None
            if answer is TokenAnswer.TOO_MANY:
                return _error(429, "the token is wrong, as many before it; the right one works")
            _log.warning("management.token_refused", remote=request.remote)
        return _error(401, f"{what} needs the header 'Authorization: Bearer <mqtemplate.management.token>'")

    # --- reading -------------------------------------------------------------------------------

    def _read(self, name: str, rest: str, query: Query) -> HttpResponse:
        try:
            return self._answers()[name](rest, query)
        except MQTemplateError as exc:
            return _error(503, str(exc))

    def _answers(self) -> dict[str, Callable[[str, Query], HttpResponse]]:
        return {
            "health": lambda rest, _: self._health(rest),
            "info": lambda _, __: self._info(),
            "metrics": self._metrics,
            "prometheus": lambda _, __: self._prometheus(),
            "listeners": lambda rest, _: self._listeners(rest),
            "schedules": lambda _, __: _document(documents.schedules_document(_given(self.sources.schedules))),
            "changes": lambda rest, _: self._changes(rest),
            "lateness": lambda _, __: _document(documents.lateness_document(_given(self.sources.lateness).recent())),
            "conditions": lambda _, __: _document(documents.conditions_document(_given(self.sources.conditions))),
            "configprops": lambda _, __: _document(documents.configprops_document(_given(self.sources.settings)())),
        }

    def _health(self, part: str) -> HttpResponse:
        health = self.sources.health.read()
        if part in ("", "readiness", "liveness"):
            return self._health_of_group(part, health)
        component = health.components.get(part)
        if component is None:
            return _error(404, f"there is no component {part!r}; there is: {', '.join(health.components)}")
        return _document(documents.component_document(component), component.status)

    def _health_of_group(self, group: str, health: ApplicationHealth) -> HttpResponse:
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

    def _info(self) -> HttpResponse:
        return _document(documents.info_document(self.sources.name, version("mqtemplate"), **dict(self.sources.info)))

    def _metrics(self, name: str, query: Query) -> HttpResponse:
        metrics = _given(self.sources.metrics)
        if not name:
            return _document(documents.metric_names_document(metrics))
        tags = [tuple(value.split(":", 1)) for key, value in query if key == "tag"]
        if any(len(tag) != 2 for tag in tags):
            return _error(400, "a tag is name:value, such as tag=messaging.destination.name:orders")
        document = documents.metric_document(metrics, name, [(tag[0], tag[-1]) for tag in tags])
        return _error(404, f"there is no metric {name!r} with these tags") if document is None else _document(document)

    def _prometheus(self) -> HttpResponse:
        from mqtemplate.observability.prometheus import CONTENT_TYPE, prometheus_text

        return HttpResponse(200, prometheus_text(_given(self.sources.metrics)), CONTENT_TYPE, _HEADERS)

    def _listeners(self, listener_id: str) -> HttpResponse:
        lags = self._lags()
        if not listener_id:
            return _document(documents.listeners_document(_given(self.sources.listeners), lags))
        container = self._container(listener_id)
        return (
            self._no_listener(listener_id)
            if container is None
            else _document(documents.listener_document(container, lags))
        )

    def _lags(self) -> Sequence[GroupLag]:
        return [] if self.sources.lags is None else self.sources.lags.read(_given(self.sources.listeners))

    def _container(self, listener_id: str) -> ListenerContainer | None:
        return next((each for each in _given(self.sources.listeners) if each.endpoint.id == listener_id), None)

    def _no_listener(self, listener_id: str) -> HttpResponse:
        known = ", ".join(each.endpoint.id for each in _given(self.sources.listeners)) or "none"
        return _error(404, f"there is no listener {listener_id!r}; there is: {known}")

    # --- changes -------------------------------------------------------------------------------

    def _changes(self, change_id: str) -> HttpResponse:
        audit: AuditLog = _given(self.sources.audit)
        try:
            found = [audit.get(change_id)] if change_id else audit.recent(_RECENT)
        except UnknownNameError as exc:
            return _error(404, str(exc))
        return _document(documents.changes_document(found))

    def _change(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
        refusal = self._refusal(request, f"a change of {kind}")
        if refusal is not None:
            return refusal
        try:
            if kind == "schedules":
                change_schedule(_given(self.sources.schedules), name, parse_change(request.body), request.remote)
                return self._read(kind, "", ())
            return self._change_of_listener(kind, name, request)
        except UnconfirmedChangeError as exc:
            return _response(409, {"status": 409, "error": str(exc), "preview": exc.preview.document()})
        except InvalidChangeError as exc:
            return _error(400, str(exc))
        except UnknownNameError as exc:
            return _error(404, str(exc))
        except MQTemplateError as exc:
            return _error(409, str(exc))

    def _change_of_listener(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
        """Change a listener, or undo a change of one. The document of a preview has nothing else."""
        audit: AuditLog = _given(self.sources.audit)
        logged: LoggedChange | None = None
        if kind == "changes":
            logged = audit.get(name)
            if logged.action != LISTENER_SEEK:
                raise InvalidChangeError(
                    f"change {name} is {logged.action}; here a {LISTENER_SEEK} is undone, others with: mqtemplate undo"
                )
            name = str(logged.facts.get("listener"))
        container = self._container(name)
        if container is None:
            return self._no_listener(name)
        change = parse_change(request.body)
        if logged is None:
            found = change_listener(container, change, request.remote, audit)
        else:
            found = undo_seek(container, logged, change, request.remote, audit)
        if "preview" in found:
            return _document(found)
        return _document(documents.listener_document(container, self._lags()) | found)


def _available(sources: ActuatorSources) -> set[str]:
    """Return the endpoints that have a source."""
    found = {name for name, attribute in _SOURCES.items() if getattr(sources, attribute) is not None}
    return {"health", "info"} | (found if find_spec("prometheus_client") is not None else found - {"prometheus"})


def _given(source: Any) -> Any:
    assert source is not None, "an endpoint without a source is not exposed"
    return source


def _document(document: Mapping[str, Any], health: Status = Status.UP) -> HttpResponse:
    return _response(503 if health is Status.DOWN else 200, document)


def _error(status: int, text: str) -> HttpResponse:
    """Return the response to a request that is refused."""
    return _response(status, {"status": status, "error": text})


def _response(status: int, document: Mapping[str, Any]) -> HttpResponse:
    body = json.dumps(document, ensure_ascii=False, default=str).encode()
    return HttpResponse(status, body, _JSON, _HEADERS)


def managed_actuator(sources: ActuatorSources, settings: ManagementSettings, clock: Clock = SystemClock()) -> Actuator:
    """Return the actuator of an application or of a server, as ``mqtemplate.management`` sets it up.

    Changes of listeners are logged to the file of the settings, or kept in memory if they name none.

    Raises:
        ConfigurationError: The audit log cannot be written.
    """
    if sources.listeners is not None:
        path = None if settings.audit_log is None else Path(settings.audit_log)
        sources = replace(sources, audit=AuditLog(path, clock))
    return Actuator(
        sources,
        token=None if settings.token is None else settings.token.get_secret_value(),
        endpoints=settings.endpoints,
        open_endpoints=settings.open_endpoints,
        allowed_hosts=settings.allowed_hosts,
    )


def wsgi_app(actuator: Actuator) -> WsgiApp:
    """Return the actuator as a WSGI application: Flask, Django, gunicorn. Mount it at ``/actuator``."""
    return wsgi_application(actuator.handle, MAX_BODY_BYTES)


def asgi_app(actuator: Actuator) -> AsgiApp:
    """Return the actuator as an ASGI application: FastAPI, Starlette, uvicorn. Mount it at ``/actuator``.

    The documents are created in a thread: a health check may wait for a broker.
    """
    return asgi_application(actuator.handle, MAX_BODY_BYTES)
