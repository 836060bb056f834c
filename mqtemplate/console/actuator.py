"""The actuator of an application: a function from a request to a response, for any server and web framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from mqtemplate.clock import Clock, SystemClock
from mqtemplate.console import documents
from mqtemplate.errors import ConfigurationError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.http.bridges import AsgiApp, WsgiApp, asgi_application, wsgi_application
from mqtemplate.http.exchange import ACCOUNT, HttpRequest, HttpResponse, below, host_name, is_private_name
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
from mqtemplate.operations.changes import LISTENER_SEEK, UnconfirmedChangeError
from mqtemplate.scheduling.schedules import Schedules

if TYPE_CHECKING:
    from mqtemplate.context.settings.features import ManagementSettings
    from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig

_log = get_logger("mqtemplate.actuator")

MAX_BODY_BYTES = 64 * 1_024
_JSON = "application/json"
_HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))

_LIVENESS: frozenset[str] = frozenset({"flush", "handlers"})
"""Components that a restart of the process may repair; the others make it not ready."""

SAMPLES = "samples"
"""Endpoint of the processes of one application for each other: the values of all metrics, as they are counted."""

_SOURCES = {
    # endpoint -> attribute of `ActuatorSources`
    "metrics": "metrics",
    "prometheus": "metrics",
    "listeners": "listeners",
    "schedules": "schedules",
    "handover": "hand_over",
    "changes": "audit",
    "lateness": "lateness",
    "conditions": "conditions",
    "configprops": "settings",
}

_CHANGED = ("listeners", "schedules", "handover", "changes", "configprops")
"""Endpoints that take changes; of the settings it is ``configprops/reload``."""
RELOAD = "reload"
_RECENT = 100
_MAX_ACCOUNT = 255
_SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"
_SCRAPE_PART, _SCRAPE_WAIT_S = 0.8, 2.0
"""Part of the timeout of a scrape, and time, after which a process that has not answered counts as one that hangs."""

Query = Sequence[tuple[str, str]]


class HandOverDocuments(Protocol):
    """The hand-over of an application; see `mqtemplate.handover.control.ApplicationHandOver`."""

    def document(self) -> dict[str, Any] | None: ...
    def change(self, name: str, remote: str, audit: AuditLog, *, is_dry_run: bool) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorSources:
    """Sources of the documents. A source that is None has no endpoint.

    Attributes:
        listeners: The registry of the listeners.
        schedules: The schedules of the application.
        hand_over: The hand-over of the application to another broker.
        settings: Returns all settings, secrets hidden.
        reload: Reads the configuration again, for a reason, and returns what has changed.
        audit: The log of seeks, and of their undoing.
        is_ready: Returns True while the application is ready.
    """

    health: HealthChecks
    metrics: Metrics | None = None
    listeners: Iterable[ListenerContainer] | None = None
    schedules: Schedules | None = None
    hand_over: HandOverDocuments | None = None
    lags: GroupLags | None = None
    lateness: LatenessRecorder | None = None
    conditions: Sequence[documents.StarterOutcome] | None = None
    settings: Callable[[], Iterable[documents.Setting]] | None = None
    reload: Callable[[str], ReloadedConfig] | None = None
    audit: AuditLog | None = None
    name: str | None = None
    info: Mapping[str, object] = field(default_factory=dict)
    is_ready: Callable[[], bool] = lambda: True


class ActuatorDocuments(Protocol):
    """The documents and changes behind an actuator: of this process, or of several."""

    @property
    def endpoints(self) -> Sequence[str]: ...

    def read(self, name: str, rest: str, query: Query, wait_s: float | None = None) -> HttpResponse:
        """Return the document of an endpoint. *wait_s* is the most time to wait for another process for metrics."""

    def change(self, kind: str, name: str, request: HttpRequest) -> HttpResponse: ...


class ActuatorAccess:
    """Rules of who may read documents and change listeners and schedules.

    Args:
        token: Token of reads and changes, as ``Authorization: Bearer <token>``; None refuses them.
        open_endpoints: Names of the endpoints that can be read without the token.
        allowed_hosts: Public names in the header ``Host``. Addresses and private names are always allowed.

    Raises:
        ConfigurationError: The token can be guessed.
    """

    def __init__(
        self, *, token: str | None = None, open_endpoints: Sequence[str] = (), allowed_hosts: Sequence[str] = ()
    ) -> None:
        self._check = None if token is None else TokenCheck(checked_token(token, "mqtemplate.management.token"))
        self._open = frozenset(open_endpoints)
        self._allowed_hosts = frozenset(name.lower() for name in allowed_hosts)

    def answer(self, source: ActuatorDocuments, request: HttpRequest) -> HttpResponse:
        """Return the response to a request, as `Actuator.handle`."""
        path = request.path if (rest_of := below(request.path, "/actuator")) is None else rest_of
        name, *rest = path.strip("/").split("/")
        host, endpoints = request.headers.get("host"), source.endpoints
        # A probe may use any name: the health is not secret.
        if host is not None and name != "health" and not self._is_host_allowed(host):
            return error_response(
                421, f"host {host[:100]!r} is not allowed; name it in mqtemplate.management.allowed-hosts"
            )
        if request.method in ("GET", "HEAD"):
            if not name:
                return document_response(documents.links_document("/actuator", endpoints))
            if name not in endpoints:
                return error_response(404, f"there is no endpoint {name!r}; there is: {', '.join(endpoints)}")
            refusal = None if name in self._open else self._refusal(request, f"reading {name}")
            wait_s = _scrape_wait_s(request)
            return source.read(name, "/".join(rest), request.query, wait_s) if refusal is None else refusal
        if request.method == "POST" and name in _CHANGED and name in endpoints and rest:
            return self._refusal(request, f"a change of {name}") or source.change(name, "/".join(rest), request)
        return error_response(
            405,
            f"{request.method} is not allowed here; "
            "GET reads, and POST on listeners/<id>, schedules/<name>, handover/<change>, changes/<id> or "
            "configprops/reload changes one",
        )

    def _is_host_allowed(self, host: str) -> bool:
        """Return False for a public name that is not allowed: the page of another site may have one (DNS rebinding)."""
        name = host_name(host)
        return name is not None and (name in self._allowed_hosts or is_private_name(name))

    def _refusal(self, request: HttpRequest, what: str) -> HttpResponse | None:
        """Return the response to a request without the token; None if it has it."""
        if self._check is None:
            return error_response(403, f"{what} is off; set mqtemplate.management.token, and send it")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            answer = self._check.check(given.strip(), request.remote)
            if answer is TokenAnswer.RIGHT:
                return None
            if answer is TokenAnswer.TOO_MANY:
                return error_response(429, "the token is wrong, as many before it; the right one works")
            _log.warning("management.token_refused", remote=request.remote)
        return error_response(401, f"{what} needs the header 'Authorization: Bearer <mqtemplate.management.token>'")


class Actuator:
    """Answers requests for the documents, and takes changes of listeners and schedules behind a token.

    The open endpoints can be read without the token, for probes and scrapers. The others tell what an application
    is configured with and works on, so reading them needs it, as a change does.

    Args:
        token: Token of reads and changes, as ``Authorization: Bearer <token>``; None refuses them.
        endpoints: Names of the endpoints to expose; by default all that have a source.
        open_endpoints: Names of the endpoints that can be read without the token.
        allowed_hosts: Public names in the header ``Host``. Addresses and private names are always allowed.

    Attributes:
        endpoints: Names of the endpoints of this process.
        exposed: Names of all endpoints that the settings expose, also those that other processes have.
        documents: What `handle` answers with: this object, or the documents of all processes of the application.

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
        self._access = ActuatorAccess(token=token, open_endpoints=open_endpoints, allowed_hosts=allowed_hosts)
        available = _available(sources)
        self.exposed: Sequence[str] = tuple(name for name in ENDPOINTS if name in endpoints and _is_installed(name))
        self.endpoints: Sequence[str] = tuple(name for name in self.exposed if name in available)
        self.documents: ActuatorDocuments = self

    def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request. Its path is below ``/actuator``, or with it, as frameworks mount it.

        Without the header ``Host`` it comes from this process, or from another program than a browser.
        """
        return self._access.answer(self.documents, request)

    # --- reading -------------------------------------------------------------------------------

    def read(self, name: str, rest: str, query: Query, wait_s: float | None = None) -> HttpResponse:
        """Return the document of an endpoint of this process, without waiting for another one."""
        try:
            return self._answers()[name](rest, query)
        except MQTemplateError as exc:
            return error_response(503, str(exc))

    def _answers(self) -> dict[str, Callable[[str, Query], HttpResponse]]:
        return {
            "health": lambda rest, _: self._health(rest),
            "info": lambda _, __: self._info(),
            "metrics": lambda name, query: metrics_response(_given(self.sources.metrics), name, query),
            "prometheus": lambda _, __: prometheus_response(_given(self.sources.metrics)),
            "listeners": lambda rest, _: self._listeners(rest),
            "schedules": lambda _, __: document_response(documents.schedules_document(_given(self.sources.schedules))),
            "handover": lambda _, __: document_response(_given(self.sources.hand_over).document() or {}),
            "changes": lambda rest, _: self._changes(rest),
            "lateness": lambda _, __: document_response(
                documents.lateness_document(_given(self.sources.lateness).recent())
            ),
            "conditions": lambda _, __: document_response(
                documents.conditions_document(_given(self.sources.conditions))
            ),
            "configprops": lambda _, __: document_response(
                documents.configprops_document(_given(self.sources.settings)())
            ),
            SAMPLES: lambda _, __: document_response(documents.samples_document(self.sources.metrics)),
        }

    def _health(self, part: str) -> HttpResponse:
        health = self.sources.health.read()
        if part in ("", "readiness", "liveness"):
            return self._health_of_group(part, health)
        component = health.components.get(part)
        if component is None:
            return error_response(404, f"there is no component {part!r}; there is: {', '.join(health.components)}")
        return document_response(documents.component_document(component), component.status)

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
        return document_response(document, status)

    def _info(self) -> HttpResponse:
        return document_response(
            documents.info_document(self.sources.name, version("mqtemplate"), **dict(self.sources.info))
        )

    def _listeners(self, listener_id: str) -> HttpResponse:
        lags = self._lags()
        if not listener_id:
            return document_response(documents.listeners_document(_given(self.sources.listeners), lags))
        container = self._container(listener_id)
        return (
            self._no_listener(listener_id)
            if container is None
            else document_response(documents.listener_document(container, lags))
        )

    def _lags(self) -> Sequence[GroupLag]:
        return [] if self.sources.lags is None else self.sources.lags.read(_given(self.sources.listeners))

    def _container(self, listener_id: str) -> ListenerContainer | None:
        return next((each for each in _given(self.sources.listeners) if each.endpoint.id == listener_id), None)

    def _no_listener(self, listener_id: str) -> HttpResponse:
        known = ", ".join(each.endpoint.id for each in _given(self.sources.listeners)) or "none"
        return error_response(404, f"there is no listener {listener_id!r}; there is: {known}")

    # --- changes -------------------------------------------------------------------------------

    def _changes(self, change_id: str) -> HttpResponse:
        audit: AuditLog = _given(self.sources.audit)
        try:
            found = [audit.get(change_id)] if change_id else audit.recent(_RECENT)
        except UnknownNameError as exc:
            return error_response(404, str(exc))
        return document_response(documents.changes_document(found))

    def change(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
        """Change a listener, a schedule or the configuration of this process, or undo a change; return its document."""
        try:
            if kind == "schedules":
                change_schedule(_given(self.sources.schedules), name, parse_change(request.body), request.remote)
                return self.read(kind, "", ())
            if kind == "configprops":
                return self._reload(name, request)
            if kind == "handover":
                return document_response(self._change_of_hand_over(name, request))
            return self._change_of_listener(kind, name, request)
        except UnconfirmedChangeError as exc:
            return error_response(409, str(exc), preview=exc.preview.document())
        except InvalidChangeError as exc:
            return error_response(400, str(exc))
        except UnknownNameError as exc:
            return error_response(404, str(exc))
        except MQTemplateError as exc:
            return error_response(409, str(exc))

    def _change_of_hand_over(self, name: str, request: HttpRequest) -> dict[str, Any]:
        audit = AuditLog(None, SystemClock()) if self.sources.audit is None else self.sources.audit
        account, change = account_of(request), parse_change(request.body) if request.body else {}
        audit = audit if account is None else audit.of(account)
        hand_over: HandOverDocuments = _given(self.sources.hand_over)
        return hand_over.change(name, request.remote, audit, is_dry_run=bool(change.get("dryRun")))

    def _reload(self, name: str, request: HttpRequest) -> HttpResponse:
        """Read the configuration again. What stays as it was is in the document, with the reason."""
        if name != RELOAD or self.sources.reload is None:
            return error_response(404, f"there is no {name!r} of the configuration of this process")
        found = self.sources.reload(f"request of {account_of(request) or request.remote}")
        return document_response(documents.reload_document(found))

    def _change_of_listener(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
        """Change a listener, or undo a change of one. The document of a preview has nothing else."""
        audit: AuditLog = _given(self.sources.audit)
        if (account := account_of(request)) is not None:
            audit = audit.of(account)
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
            return document_response(found)
        return document_response(documents.listener_document(container, self._lags()) | found)


def account_of(request: HttpRequest) -> str | None:
    """Return the account for which another program, such as a dashboard, makes a change; None if it names none."""
    return unquote(request.headers.get(ACCOUNT, ""))[:_MAX_ACCOUNT] or None


def _scrape_wait_s(request: HttpRequest) -> float | None:
    """Return how long a scrape of Prometheus leaves to wait for other processes; None if the request does not say."""
    try:
        timeout_s = float(request.headers.get(_SCRAPE_TIMEOUT, ""))
    except ValueError:
        return None
    return min(timeout_s * _SCRAPE_PART, _SCRAPE_WAIT_S) if timeout_s > 0 else None


def _available(sources: ActuatorSources) -> set[str]:
    """Return the endpoints that have a source."""
    return {"health", "info"} | {
        name for name, attribute in _SOURCES.items() if getattr(sources, attribute) is not None
    }


def _is_installed(endpoint: str) -> bool:
    return endpoint != "prometheus" or find_spec("prometheus_client") is not None


def _given(source: Any) -> Any:
    assert source is not None, "an endpoint without a source is not exposed"
    return source


def document_response(document: Mapping[str, Any], health: Status = Status.UP) -> HttpResponse:
    """Return the response with a document; its status is 503 if the health is ``DOWN``."""
    return _response(503 if health is Status.DOWN else 200, document)


def error_response(status: int, text: str, **more: object) -> HttpResponse:
    """Return the response to a request that is refused."""
    return _response(status, {"status": status, "error": text, **more})


def metrics_response(metrics: Metrics, name: str, query: Query) -> HttpResponse:
    """Return the response of ``/actuator/metrics``, or of one metric below it."""
    if not name:
        return document_response(documents.metric_names_document(metrics))
    tags = [tuple(value.split(":", 1)) for key, value in query if key == "tag"]
    if any(len(tag) != 2 for tag in tags):
        return error_response(400, "a tag is name:value, such as tag=messaging.destination.name:orders")
    document = documents.metric_document(metrics, name, [(tag[0], tag[-1]) for tag in tags])
    if document is None:
        return error_response(404, f"there is no metric {name!r} with these tags")
    return document_response(document)


def prometheus_response(metrics: Metrics) -> HttpResponse:
    """Return the response of ``/actuator/prometheus``."""
    from mqtemplate.observability.prometheus import CONTENT_TYPE, prometheus_text

    return HttpResponse(200, prometheus_text(metrics), CONTENT_TYPE, _HEADERS)


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
