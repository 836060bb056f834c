"""The documents of several processes of one application as one, and changes that reach all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol
from urllib.parse import quote

from mqtemplate.console.actuator import (
    SAMPLES,
    Actuator,
    Query,
    account_of,
    document_response,
    error_response,
    metrics_response,
    prometheus_response,
)
from mqtemplate.console.documents import RELOADED, samples_of
from mqtemplate.http.exchange import ACCOUNT, HttpRequest, HttpResponse
from mqtemplate.metrics import MetricKind, Metrics, MetricSample
from mqtemplate.observability.health import Status
from mqtemplate.operations.application import InvalidChangeError, parse_change
from mqtemplate.operations.changes import ChangePreview, UnconfirmedChangeError, check_preview

WORKER = "worker"
"""Label of each value with the name of its process."""

_SHARED = ("group.lag", "group.committed", "group.behind_ms", "group.dead_letters", "delay.pending")
"""Metrics of a broker or a group, which each process reads: they are exported once, and not for each process."""

_MAX_SERIES = 1_000_000
"""Each process has limited its series already."""

_OK, _BAD_REQUEST, _NOT_FOUND, _NOT_ALLOWED, _CONFLICT = 200, 400, 404, 405, 409
NO_PROCESS, NO_ANSWER = 502, 504
"""Status of an answer that did not come: nothing was done there; it is not known what was done."""

_OUT_OF_SERVICE = "OUT_OF_SERVICE"
_SEVERITY = (Status.DOWN.value, _OUT_OF_SERVICE, Status.UNKNOWN.value, Status.UP.value)
_SUMS = ("inFlight", "hanging", "renewed", "expired")


@dataclass(frozen=True, slots=True)
class ActuatorCall:
    """A request to the actuators of several processes.

    Attributes:
        path: Path below ``/actuator``, not quoted.
        remote: Address of the client who sent it.
        account: Account that changes something.
        wait_s: Most time to wait for a process; None for that of the kind of request. No time is longer than that.
    """

    method: str
    path: str
    body: bytes = b""
    remote: str = ""
    account: str | None = None
    wait_s: float | None = None

    @property
    def target(self) -> str:
        """The path, quoted."""
        return f"/{quote(self.path)}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request."""
        return {} if self.account is None else {ACCOUNT: quote(self.account)}


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answer of one process.

    Attributes:
        worker: Name of the process.
        status: Status of HTTP; `NO_PROCESS` or `NO_ANSWER` if there was no answer.
        document: The document; one with ``error`` if the call failed.
    """

    worker: str
    status: int
    document: Mapping[str, Any]

    @property
    def is_missing(self) -> bool:
        """True if the process did not answer."""
        return self.status in (NO_PROCESS, NO_ANSWER)

    @property
    def error(self) -> str:
        """The reason of a failure."""
        return str(self.document.get("error", f"status {self.status}"))


class Processes(Protocol):
    """The processes of one application, each with an actuator of its own."""

    @property
    def is_alone(self) -> bool:
        """True if the application has this process only, and never had another one."""

    def names(self) -> Sequence[str]: ...

    def ask(self, call: ActuatorCall, names: Sequence[str] = ()) -> Sequence[WorkerAnswer]:
        """Send a call to these processes, or to all, at the same time."""


class MergedDocuments:
    """The documents of all processes of one application.

    - Health: the worst of all; each component has the components of the processes.
    - Metrics: the series of all, with the name of the process as label ``worker``. A sum would fall when a process
      ends, and Prometheus would take that for a restart of all; a series of one process starts again at 0, which
      ``rate`` and ``increase`` know.
    - Listeners: one for each id, with the processes that have it. A change reaches all of them.
    - Schedules belong to all processes: one answers.

    While the process is the only one, its own documents are the answer.

    Args:
        own: The actuator of this process.
    """

    def __init__(self, own: Actuator, processes: Processes) -> None:
        self._own = own
        self._processes = processes

    @property
    def endpoints(self) -> Sequence[str]:
        """Names of the endpoints."""
        return self._own.endpoints if self._processes.is_alone else self._own.exposed

    def read(self, name: str, rest: str, query: Query, wait_s: float | None = None) -> HttpResponse:
        """Return the document of an endpoint."""
        if self._processes.is_alone:
            return self._own.read(name, rest, query)
        if name == "health":
            return self._health(rest)
        if name == "metrics":
            return metrics_response(self._metrics(wait_s), rest, query)
        if name == "prometheus":
            return prometheus_response(self._metrics(wait_s))
        if name == "listeners":
            return self._listeners(rest)
        if name in _MERGES:
            return self._merged(name, _MERGES[name])
        if name == "changes":
            return self._merged(f"changes/{rest}" if rest else name, _merged_changes)
        return self._first(ActuatorCall("GET", name))

    def change(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
        """Change a listener in all processes that have it, or a schedule."""
        if self._processes.is_alone:
            return self._own.change(kind, name, request)
        call = ActuatorCall("POST", f"{kind}/{name}", request.body, request.remote, account_of(request))
        if kind in ("schedules", "handover"):
            return self._first(call)
        if kind == "configprops":
            return self._reload(call)
        try:
            change = parse_change(request.body)
        except InvalidChangeError as exc:
            return error_response(_BAD_REQUEST, str(exc))
        if kind == "changes" or change.get("action") == "seek":
            return self._seek(kind, name, change, call)
        return _changed(name, self._processes.ask(call), is_of_one_queue=False)

    def _reload(self, call: ActuatorCall) -> HttpResponse:
        """Let all processes read their configuration again. A process without its own one has none to read."""
        answers = self._processes.ask(call)
        found = _successful(answers)
        failed = [each for each in answers if each.status not in (_OK, _NOT_FOUND, _NOT_ALLOWED)]
        if not found:
            return _response_of((failed or answers)[0])
        merged = {
            name: list(dict.fromkeys(each for document in found.values() for each in document[name]))
            for name in RELOADED
        }
        merged["problems"] += [f"worker {each.worker}: {each.error}" for each in failed]
        return document_response(merged)

    def _seek(self, kind: str, name: str, change: Mapping[str, Any], call: ActuatorCall) -> HttpResponse:
        """Let a listener continue elsewhere in all processes, or undo that. Preview and confirmation are of all."""
        names = name.split(",") if kind == "changes" else [name]

        def ask(**more: object) -> list[WorkerAnswer]:
            body = json.dumps({**change, **more}).encode()
            calls = [replace(call, path=f"{kind}/{each}", body=body) for each in names]
            return [answer for each in calls for answer in self._processes.ask(each)]

        shown, is_of_one_queue = ask(dryRun=True), "offset" in change
        previews = [ChangePreview.of(each.document["preview"]) for each in shown if each.status == _OK]
        if not previews:
            return _changed(name, shown, is_of_one_queue=is_of_one_queue)
        preview = reduce(ChangePreview.merged, previews)
        if change.get("dryRun"):
            return document_response({"preview": preview.document()})
        if preview.count > 1 or change.get("confirm") is not None:
            title = f"{preview.skipped:,} messages would be skipped, {preview.again:,} delivered again"
            try:
                check_preview(preview, title, change.get("confirm"), is_by_queue=True)
            except UnconfirmedChangeError as exc:
                return error_response(_CONFLICT, str(exc), preview=preview.document())
        return _changed(name, ask(confirm=preview.count), is_of_one_queue=is_of_one_queue)

    def _first(self, call: ActuatorCall) -> HttpResponse:
        """Return the answer of the first process that has the endpoint."""
        answers = []
        for name in self._processes.names():
            [answer] = self._processes.ask(call, [name])
            if answer.status not in (NO_PROCESS, _NOT_FOUND, _NOT_ALLOWED):
                return _response_of(answer)
            answers.append(answer)
        return _response_of(answers[-1])

    def _merged(self, name: str, merge: Callable[[Mapping[str, Any]], dict[str, Any]]) -> HttpResponse:
        answers = self._processes.ask(ActuatorCall("GET", name))
        found = _successful(answers)
        return document_response(merge(found)) if found else _response_of(answers[0])

    # --- health --------------------------------------------------------------------------------

    def _health(self, part: str) -> HttpResponse:
        group = part if part in ("", "readiness", "liveness") else ""
        answers = self._processes.ask(ActuatorCall("GET", f"health/{group}" if group else "health"))
        document = merged_health(answers, with_workers=group != "liveness")
        if part == group:
            return document_response(document, _http_status(document))
        component = document["components"].get(part)
        if component is None:
            known = ", ".join(document["components"])
            return error_response(_NOT_FOUND, f"there is no component {part!r}; there is: {known}")
        return document_response(component, _http_status(component))

    # --- metrics -------------------------------------------------------------------------------

    def _metrics(self, wait_s: float | None) -> Metrics:
        answers = self._processes.ask(ActuatorCall("GET", SAMPLES, wait_s=wait_s))
        merged = Metrics(_MAX_SERIES)
        merged.add_collector(lambda: merged_samples(answers))
        return merged

    # --- listeners -----------------------------------------------------------------------------

    def _listeners(self, listener_id: str) -> HttpResponse:
        answers = self._processes.ask(ActuatorCall("GET", f"listeners/{listener_id}" if listener_id else "listeners"))
        found = _successful(answers)
        if not found:
            return _response_of(next((each for each in answers if each.status == _NOT_FOUND), answers[0]))
        return document_response(merged_listener(found) if listener_id else merged_listeners(found))


def _successful(answers: Iterable[WorkerAnswer]) -> dict[str, Mapping[str, Any]]:
    return {each.worker: each.document for each in answers if each.status == _OK}


def _response_of(answer: WorkerAnswer) -> HttpResponse:
    if answer.status == _OK:
        return document_response(answer.document)
    return error_response(answer.status, answer.error)


def _http_status(document: Mapping[str, Any]) -> Status:
    return Status.DOWN if document["status"] in (Status.DOWN.value, _OUT_OF_SERVICE) else Status.UP


def _changed(listener: str, answers: Sequence[WorkerAnswer], *, is_of_one_queue: bool) -> HttpResponse:
    """Return the response to a change of a listener: which processes did it, and which did not."""
    done = _successful(answers)
    failed = [each for each in answers if each.status not in (_OK, _NOT_FOUND, _NOT_ALLOWED)]
    if is_of_one_queue and done:  # the queue belongs to one process
        failed = [each for each in failed if each.status != _BAD_REQUEST]
    if not done and not failed:
        return _response_of(next((each for each in answers if each.status == _NOT_FOUND), answers[0]))
    if not failed:
        return document_response(merged_listener(done))
    if not done and len({(each.status, each.error) for each in failed}) == 1:
        return error_response(failed[0].status, failed[0].error)
    outcomes = [
        {"worker": each.worker, "changed": each.status == _OK} | ({} if each.status == _OK else {"error": each.error})
        for each in answers
        if each.worker in done or each in failed
    ]
    did = f"{listener} was changed in {_named(done)}, and not in" if done else f"{listener} was not changed in"
    reasons = "; ".join((f"{each.worker}: " if len(failed) > 1 else "") + each.error for each in failed)
    text = f"{did} {_named(each.worker for each in failed)}: {reasons}; send the change again"
    return error_response(_CONFLICT, text, workers=outcomes)


def _named(workers: Iterable[str]) -> str:
    names = list(workers)
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(names)}"


def merged_health(answers: Sequence[WorkerAnswer], *, with_workers: bool = True) -> dict[str, Any]:
    """Return one health document of several: each component has the components of the processes.

    Args:
        with_workers: The component ``workers`` shows the processes; it is ``DOWN`` if one does not answer.
    """
    components: dict[str, dict[str, Any]] = {}
    statuses: list[str] = []
    groups: dict[str, Any] = {}
    for each in answers:
        if "components" not in each.document:
            continue
        statuses.append(each.document["status"])
        groups = {"groups": each.document["groups"]} if "groups" in each.document else groups
        for name, component in each.document["components"].items():
            components.setdefault(name, {})[each.worker] = component
    if with_workers:
        components["workers"] = {each.worker: _worker_component(each) for each in answers}
    merged = {name: {"status": _worst(found.values()), "components": found} for name, found in components.items()}
    worst = _worst([*merged.values(), *({"status": status} for status in statuses)])
    return {"status": worst, "components": merged, **groups}


def _worker_component(answer: WorkerAnswer) -> dict[str, Any]:
    if "components" in answer.document:
        return {"status": Status.UP.value}
    return {"status": Status.DOWN.value, "details": {"error": answer.error}}


def _worst(components: Iterable[Mapping[str, Any]]) -> str:
    found = {component["status"] for component in components}
    return next((status for status in _SEVERITY if status in found), Status.UP.value)


def merged_samples(answers: Sequence[WorkerAnswer]) -> list[MetricSample]:
    """Return the values of all processes, with the label ``worker``, and ``worker.up`` for each.

    The lag of a queue and the number of pending messages are no property of a process: they have no such label, and of
    several values of the same the largest is taken. The process that has the broker has these values for all groups.
    """
    found: list[MetricSample] = []
    shared: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSample] = {}
    for each in answers:
        is_up = each.status == _OK
        found.append(MetricSample("worker.up", MetricKind.GAUGE, int(is_up), {WORKER: each.worker}))
        for sample in samples_of(each.document) if is_up else ():
            if sample.name not in _SHARED:
                labels = {**sample.labels, WORKER: each.worker}
                found.append(MetricSample(sample.name, sample.kind, sample.value, labels))
                continue
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if key not in shared or _number(sample) > _number(shared[key]):
                shared[key] = sample
    return [*found, *(sample for (name, labels), sample in shared.items() if not _is_repeated(name, labels, shared))]


def _is_repeated(name: str, labels: tuple[tuple[str, str], ...], shared: Mapping[Any, object]) -> bool:
    """Return True if the process with the broker has the value: its own broker has no name in the labels there."""
    without = tuple(pair for pair in labels if pair[0] != "broker")
    return without != labels and (name, without) in shared


def _number(sample: MetricSample) -> float:
    assert isinstance(sample.value, int | float), "a gauge has a number"
    return sample.value


def merged_listeners(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document of several of ``/actuator/listeners``: worker -> document."""
    by_id: dict[str, dict[str, Mapping[str, Any]]] = {}
    for worker, document in found.items():
        for listener in document["listeners"]:
            by_id.setdefault(listener["id"], {})[worker] = listener
    return {"listeners": [merged_listener(each) for each in by_id.values()]}


def merged_listener(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return one document of one listener: worker -> its document there.

    ``threads`` is the largest of the processes, as a change of it is for each; a queue belongs to one process.
    """
    documents = list(found.values())
    failed: Counter[str] = Counter()
    queues: dict[tuple[str, str, int], dict[str, Any]] = {}
    for worker, document in found.items():
        failed.update(document["failed"])
        for queue in document["queues"]:
            queues[queue["topic"], queue["broker"], queue["queue"]] = {**queue, WORKER: worker}
    return {
        **documents[0],
        "state": ", ".join(sorted({each["state"] for each in documents})),
        "threads": max(each["threads"] for each in documents),
        **{name: sum(each[name] for each in documents) for name in _SUMS},
        "failed": dict(failed),
        "lag": sum(queue["lag"] for queue in queues.values()),
        "queues": [queues[key] for key in sorted(queues)],
        "workers": [
            {WORKER: worker, **{name: each[name] for name in ("state", "threads", *_SUMS)}}
            for worker, each in found.items()
        ],
        **_merged_change(documents),
    }


def _merged_change(documents: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the id of a seek: of several processes all ids, which are undone together."""
    if not any("change" in each for each in documents):
        return {}
    return {"change": ",".join(each["change"] for each in documents if each.get("change")) or None}


def _merged_changes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of all processes, the newest first. With a file for all, each process has all."""
    by_id = {each["id"]: each for document in found.values() for each in document["changes"]}
    return {"changes": sorted(by_id.values(), key=lambda each: str(each["time"]), reverse=True)}


def _merged_lateness(found: Mapping[str, Any]) -> dict[str, Any]:
    deliveries = [
        {**delivery, WORKER: worker} for worker, document in found.items() for delivery in document["deliveries"]
    ]
    return {"deliveries": sorted(deliveries, key=lambda each: each["handledMs"], reverse=True)}


def _merged_info(found: Mapping[str, Any]) -> dict[str, Any]:
    first = next(iter(found.values()))
    return {**first, "workers": [{WORKER: worker, **each["process"]} for worker, each in found.items()]}


_MERGES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "info": _merged_info,
    "lateness": _merged_lateness,
}
