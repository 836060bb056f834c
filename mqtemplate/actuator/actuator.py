"""The actuator of an application: it answers requests by path, and knows no web framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from mqtemplate.actuator import documents
from mqtemplate.actuator.changes import InvalidChangeError, change_listener, change_schedule, parse_change
from mqtemplate.actuator.response import Response, error_response
from mqtemplate.errors import ConfigurationError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.http.exchange import host_name, is_private_name
from mqtemplate.http.tokens import TokenAnswer, TokenCheck, checked_token
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.metrics import Metrics
from mqtemplate.observability.collectors import GroupLags
from mqtemplate.observability.health import ApplicationHealth, HealthChecks, Status
from mqtemplate.observability.lateness import LatenessRecorder
from mqtemplate.observability.settings import ENDPOINTS, OPEN_ENDPOINTS
from mqtemplate.scheduling.schedules import Schedules

_log = get_logger("mqtemplate.actuator")

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

    The open endpoints can be read without the token: probes and scrapers have none. The others tell what an application
    is configured with and works on, so reading them needs it, as a change does.

    Args:
        token: Token of reads and changes, as ``Authorization: Bearer <token>``; None refuses them.
        endpoints: Names of the endpoints to expose; by default all that have a source.
        open_endpoints: Names of those that can be read without the token.
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

    def respond(
        self,
        method: str,
        path: str,
        query: Query = (),
        authorization: str = "",
        body: bytes = b"",
        remote: str = "",
        host: str | None = None,
    ) -> Response:
        """Return the response to a request.

        Args:
            path: The path below ``/actuator``, such as ``/health/readiness``.
            authorization: The header ``Authorization``.
            remote: Address of the client, for the log of changes.
            host: The header ``Host``; None for a call in this process.
        """
        name, *rest = [unquote(part) for part in path.strip("/").split("/")]
        # A probe may use any name: the health is no secret.
        if host is not None and name != "health" and not self._is_host_allowed(host):
            return error_response(
                421, f"host {host[:100]!r} is not allowed; name it in mqtemplate.management.allowed-hosts"
            )
        if method in ("GET", "HEAD"):
            if not name:
                return _document(documents.links_document("/actuator", self.endpoints))
            if name not in self.endpoints:
                return error_response(404, f"there is no endpoint {name!r}; there is: {', '.join(self.endpoints)}")
            refusal = None if name in self._open else self._refusal(authorization, remote, f"reading {name}")
            return self._read(name, "/".join(rest), query) if refusal is None else refusal
        if method == "POST" and name in ("listeners", "schedules") and name in self.endpoints and rest:
            return self._change(name, "/".join(rest), authorization, body, remote)
        return error_response(
            405, f"{method} is not allowed here; GET reads, and POST on listeners/<id> or schedules/<name> changes one"
        )

    def _is_host_allowed(self, host: str) -> bool:
        """Return False for a public name that is not allowed: the page of another site may have one (DNS rebinding)."""
        name = host_name(host)
        return name is not None and (name in self._allowed_hosts or is_private_name(name))

    def _refusal(self, authorization: str, remote: str, what: str) -> Response | None:
        """Return the response to a request without the token; None if it has it."""
        if self._check is None:
            return error_response(403, f"{what} is off; set mqtemplate.management.token, and send it")
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and given.strip():
            answer = self._check.check(given.strip(), remote)
            if answer is TokenAnswer.RIGHT:
                return None
            if answer is TokenAnswer.TOO_MANY:
                return error_response(429, "the token is wrong, as many before it; the right one works")
            _log.warning("management.token_refused", remote=remote)
        return error_response(401, f"{what} needs the header 'Authorization: Bearer <mqtemplate.management.token>'")

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
        refusal = self._refusal(authorization, remote, f"a change of {kind}")
        if refusal is not None:
            return refusal
        apply: Callable[[dict[str, Any], str], object]
        if kind == "listeners":
            container = self._container(name)
            if container is None:
                return self._no_listener(name)
            apply, shown = partial(change_listener, container), name
        else:
            apply, shown = partial(change_schedule, _given(self.sources.schedules), name), ""
        try:
            apply(parse_change(body), remote)
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
