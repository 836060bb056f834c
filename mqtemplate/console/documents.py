"""The documents of the actuator, in the shapes of Spring Boot's endpoints. Each function returns what JSON has."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import MAXYEAR
from typing import TYPE_CHECKING, Any, Protocol

from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.metrics import HistogramSnapshot, MetricKind, Metrics, MetricSample
from mqtemplate.observability.catalogue import Instrument, Point, points
from mqtemplate.observability.collectors import GroupLag
from mqtemplate.observability.health import ApplicationHealth, ComponentHealth
from mqtemplate.observability.lateness import LateDelivery
from mqtemplate.operations.audit import LoggedChange
from mqtemplate.scheduling.schedules import Schedules, ScheduleState

if TYPE_CHECKING:
    from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig

_CONTEXT = "application"
_LATENESS_TIMES = ("due", "released", "started", "handled", "late")


class StarterOutcome(Protocol):
    """The outcome of a starter; see `mqtemplate.context.ConditionOutcome`."""

    @property
    def starter(self) -> str: ...

    @property
    def applied(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def is_installed(self) -> bool: ...


class Setting(Protocol):
    """A setting with its origin; see `mqtemplate.context.settings.source.ExplainedSetting`."""

    @property
    def key(self) -> str: ...

    @property
    def value(self) -> Any: ...

    @property
    def origin(self) -> str: ...

    @property
    def is_default(self) -> bool: ...


def health_document(health: ApplicationHealth) -> dict[str, Any]:
    """Return the document of ``/actuator/health``."""
    components = {name: component_document(component) for name, component in health.components.items()}
    return {"status": health.status.value, "components": components}


def component_document(component: ComponentHealth) -> dict[str, Any]:
    """Return the document of ``/actuator/health/<component>``."""
    details = {"details": dict(component.details)} if component.details else {}
    return {"status": component.status.value} | details


def info_document(name: str | None, version: str, **more: object) -> dict[str, Any]:
    """Return the document of ``/actuator/info``."""
    return {
        "app": {"name": name},
        "mqtemplate": {"version": version},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "os": {"name": platform.system(), "version": platform.release(), "arch": platform.machine()},
        "process": {"pid": os.getpid(), "cpus": os.cpu_count()},
        **more,
    }


# --- metrics ------------------------------------------------------------------------------------


def metric_names_document(metrics: Metrics) -> dict[str, Any]:
    """Return the document of ``/actuator/metrics``: the names."""
    return {"names": sorted({point.instrument.name for point in points(metrics.samples())})}


def metric_document(metrics: Metrics, name: str, tags: Sequence[tuple[str, str]] = ()) -> dict[str, Any] | None:
    """Return the document of ``/actuator/metrics/<name>``; None if there is no such metric.

    Args:
        tags: Only series with these attributes. Several series are added up.
    """
    found = [
        point
        for point in points(metrics.samples())
        if point.instrument.name == name and all(point.attributes.get(key) == value for key, value in tags)
    ]
    if not found:
        return None
    instrument = found[0].instrument
    chosen = {key for key, _ in tags}
    keys = sorted({key for point in found for key in point.attributes} - chosen)
    return {
        "name": name,
        "description": instrument.description,
        "baseUnit": "seconds" if instrument.unit == "s" else instrument.unit.strip("{}") or None,
        "measurements": _measurements(found, instrument),
        "availableTags": [
            {"tag": key, "values": sorted({point.attributes[key] for point in found if key in point.attributes})}
            for key in keys
        ],
    }


def _measurements(found: Sequence[Point], instrument: Instrument) -> list[dict[str, Any]]:
    histograms = [point.value for point in found if isinstance(point.value, HistogramSnapshot)]
    if histograms:
        largest = max((max(each.buckets, default=1) - 1 for each in histograms), default=0)
        return [
            {"statistic": "COUNT", "value": sum(each.count for each in histograms)},
            {"statistic": "TOTAL_TIME", "value": sum(each.total for each in histograms) * instrument.factor},
            {"statistic": "MAX", "value": largest * instrument.factor},
        ]
    total = sum(point.value for point in found if not isinstance(point.value, HistogramSnapshot))
    return [{"statistic": "COUNT" if instrument.kind is MetricKind.COUNTER else "VALUE", "value": total}]


def samples_document(metrics: Metrics | None) -> dict[str, Any]:
    """Return the values of all metrics as they are counted, for another process; `samples_of` reads it."""
    return {"samples": [] if metrics is None else [_sample_document(each) for each in metrics.samples()]}


def _sample_document(sample: MetricSample) -> dict[str, Any]:
    value: Any = sample.value
    if isinstance(value, HistogramSnapshot):
        value = {"count": value.count, "total": value.total, "buckets": sorted(value.buckets.items())}
    return {"name": sample.name, "kind": sample.kind.value, "value": value, "labels": dict(sample.labels)}


def samples_of(document: Mapping[str, Any]) -> list[MetricSample]:
    """Return the values in a document of another process."""
    return [
        MetricSample(each["name"], MetricKind(each["kind"]), _value_of(each["value"]), each["labels"])
        for each in document["samples"]
    ]


def _value_of(value: Any) -> int | float | HistogramSnapshot:
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]  # a number
    return HistogramSnapshot(value["count"], value["total"], dict(value["buckets"]))


# --- listeners ----------------------------------------------------------------------------------


def listeners_document(listeners: Iterable[ListenerContainer], lags: Sequence[GroupLag]) -> dict[str, Any]:
    """Return the document of ``/actuator/listeners``."""
    return {"listeners": [listener_document(container, lags) for container in listeners]}


def listener_document(container: ListenerContainer, lags: Sequence[GroupLag]) -> dict[str, Any]:
    """Return the document of ``/actuator/listeners/<id>``. It has the queues of this process."""
    settings = container.endpoint.settings
    own = container.positions()
    found = [each for each in lags if each.is_of(container)]
    return {
        "id": container.endpoint.id,
        "group": settings.group,
        "topics": list(settings.topics),
        "selector": settings.selector.expression,
        "state": container.state.value,
        "consumeMode": settings.consume_mode.value,
        "messageModel": settings.message_model.value,
        "requestMode": settings.request_mode.value,
        "invisibleMillis": settings.invisible_duration if settings.is_pop else None,
        "threads": container.concurrency,
        "maxThreads": settings.consume_thread_max,
        "autoStartup": settings.auto_startup,
        "inFlight": container.in_flight,
        "hanging": container.hanging_count,
        "renewed": container.renewals[0],
        "expired": container.renewals[1],
        "failed": dict(container.outcomes),
        "lag": sum(each.lag for each in found),
        "queues": [
            {
                "topic": each.queue.topic,
                "broker": each.queue.broker_name,
                "queue": each.queue.queue_id,
                "committed": each.committed,
                "lag": each.lag,
            }
            for each in found
            if each.queue in own
        ],
    }


def lateness_document(deliveries: Iterable[LateDelivery]) -> dict[str, Any]:
    """Return the document of ``/actuator/lateness``: the recent late deliveries, the newest first."""
    return {
        "deliveries": [
            {
                "msgId": each.msg_id,
                **{name: getattr(each, name) for name in ("topic", "listener", "group")},
                **{f"{name}Ms": getattr(each, f"{name}_ms") for name in _LATENESS_TIMES},
                "mainCause": None if each.main_cause is None else each.main_cause.value,
                "causes": {cause.value: part_ms for cause, part_ms in each.causes.items()},
            }
            for each in deliveries
        ]
    }


def schedules_document(schedules: Schedules) -> dict[str, Any]:
    """Return the document of ``/actuator/schedules``."""
    return {"schedules": [_schedule_document(state) for state in schedules.list()]}


def _schedule_document(state: ScheduleState) -> dict[str, Any]:
    until = state.paused_until
    is_forever = until is not None and until.year == MAXYEAR
    return {
        "name": state.name,
        "trigger": state.trigger,
        "nextRun": None if state.next_run is None else state.next_run.isoformat(),
        "paused": until is not None,
        "pausedUntil": None if until is None or is_forever else until.isoformat(),
    }


# --- the application ----------------------------------------------------------------------------


RELOADED = ("changed", "needsRestart", "problems")
"""Lists of the document of a reload."""


def reload_document(reloaded: ReloadedConfig) -> dict[str, Any]:
    """Return the document of ``POST /actuator/configprops/reload``: keys, and reasons why something stays as it was."""
    return dict(zip(RELOADED, (reloaded.changed, reloaded.needs_restart, reloaded.problems), strict=True))


def changes_document(changes: Iterable[LoggedChange]) -> dict[str, Any]:
    """Return the document of ``/actuator/changes``: the last changes, the newest first."""
    return {"changes": [change_record(each) for each in changes]}


def change_record(change: LoggedChange) -> dict[str, Any]:
    """Return one change of an audit log."""
    return {
        "id": change.id,
        "time": change.time,
        "action": change.action,
        "state": change.state,
        "author": change.author,
        "undoneBy": change.undone_by,
        "facts": dict(change.facts),
    }


def conditions_document(outcomes: Iterable[StarterOutcome]) -> dict[str, Any]:
    """Return the document of ``/actuator/conditions``: the starters that acted, and the others."""
    positive: dict[str, Any] = {}
    negative: dict[str, Any] = {}
    for outcome in outcomes:
        line = {"condition": "condition" if outcome.is_installed else "requires", "message": outcome.reason}
        if outcome.applied:
            positive[outcome.starter] = [line]
        else:
            negative[outcome.starter] = {"notMatched": [line], "matched": []}
    found = {"positiveMatches": positive, "negativeMatches": negative, "unconditionalClasses": []}
    return {"contexts": {_CONTEXT: found}}


def configprops_document(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the document of ``/actuator/configprops``: the values and origins, secrets hidden."""
    beans: dict[str, dict[str, Any]] = {}
    for each in settings:
        prefix, _, name = each.key.rpartition(".")
        bean = beans.setdefault(prefix, {"prefix": prefix, "properties": {}, "inputs": {}})
        bean["properties"][name] = each.value
        if not each.is_default:
            bean["inputs"][name] = {"value": each.value, "origin": each.origin}
    return {"contexts": {_CONTEXT: {"beans": beans}}}


def links_document(base: str, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the document of ``/actuator``: the addresses of the endpoints."""
    return {"_links": {"self": {"href": base}, **{name: {"href": f"{base}/{name}"} for name in names}}}
