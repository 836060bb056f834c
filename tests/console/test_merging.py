"""The documents of several processes of one application as one, and changes that reach all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqtemplate import MQApplication, message_listener
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Actuator, ActuatorSources
from mqtemplate.console.merging import NO_ANSWER, NO_PROCESS, ActuatorCall, MergedDocuments, WorkerAnswer, merged_health
from mqtemplate.http import HttpRequest
from mqtemplate.listener import ListenerRegistry
from mqtemplate.metrics import MetricKind, Metrics, MetricSample
from mqtemplate.observability import ComponentHealth, HealthChecks, Status
from mqtemplate.testing import Harness
from tests.console.actuators import BEARER, KEYS, TOKEN, respond


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


class Processes:
    """Actuators that are asked as processes are.

    Attributes:
        ended: Worker -> status of its answer that did not come.
    """

    def __init__(self, actuators: dict[str, Actuator]) -> None:
        self.is_alone = False
        self.ended: dict[str, int] = {}
        self._actuators = actuators

    def names(self) -> Sequence[str]:
        return list(self._actuators)

    def ask(self, call: ActuatorCall, names: Sequence[str] = ()) -> Sequence[WorkerAnswer]:
        return [self._ask(name, call) for name in names or self.names()]

    def _ask(self, name: str, call: ActuatorCall) -> WorkerAnswer:
        if name in self.ended:
            return WorkerAnswer(name, self.ended[name], {"error": "process 4302 does not answer"})
        actuator = self._actuators[name]
        kind, _, rest = call.path.partition("/")
        if call.method == "GET" and kind not in (*actuator.endpoints, "samples"):
            return WorkerAnswer(name, 404, {"error": "there is no such endpoint"})
        if call.method == "POST" and kind not in actuator.endpoints:
            return WorkerAnswer(name, 405, {"error": "POST is not allowed here"})
        request = HttpRequest(method=call.method, path="", body=call.body, remote=call.remote)
        response = actuator.read(kind, rest, ()) if call.method == "GET" else actuator.change(kind, rest, request)
        assert isinstance(response.body, bytes)
        return WorkerAnswer(name, response.status, json.loads(response.body))


class Fleet:
    """Two workers of an application, each on a broker of its own, and their parent, which has no listeners."""

    def __init__(self, apps: Sequence[MQApplication]) -> None:
        self.apps = apps
        self.harnesses = [Harness(app) for app in apps]
        workers = {str(number): app.get(Actuator) for number, app in enumerate(apps, 1)}
        self.parent_metrics = Metrics()
        self.parent = Actuator(
            ActuatorSources(health=HealthChecks({}, is_virtual=True), metrics=self.parent_metrics), token=TOKEN
        )
        self.processes = Processes({**workers, "parent": self.parent})
        self.parent.documents = MergedDocuments(self.parent, self.processes)

    def answer(self, method: str, path: str, **change: object) -> tuple[int, Any]:
        body = json.dumps(change).encode() if change else b""
        response = respond(self.parent, method, path, BEARER, body)
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)

    def get(self, path: str) -> Any:
        status, document = self.answer("GET", path)
        assert status == 200, document
        return document

    def series(self) -> dict[tuple[str, str, str], float]:
        """Name, worker and group of each series -> its value."""
        body = respond(self.parent, "GET", "/prometheus").body
        assert isinstance(body, bytes)
        return {
            (each.name, each.labels.get("mqtemplate_worker", ""), each.labels.get("messaging_consumer_group_name", "")):
            each.value
            for family in text_string_to_metric_families(body.decode())
            for each in family.samples
        }  # fmt: skip

    def states(self) -> list[str]:
        return [container.state.value for app in self.apps for container in app.get(ListenerRegistry).containers]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with (
        MQApplication(bill, settings=KEYS, clock=VirtualClock()) as one,
        MQApplication(bill, settings=KEYS, clock=VirtualClock()) as two,
    ):
        yield Fleet([one, two])


# --- health -------------------------------------------------------------------------------------


def test_health_is_the_worst_and_names_the_worker(fleet: Fleet) -> None:
    fleet.apps[1].get(HealthChecks).add("database", lambda: ComponentHealth(Status.DOWN, {"error": "refused"}))
    status, document = fleet.answer("GET", "/health")

    assert (status, document["status"]) == (503, "DOWN")
    assert document["components"]["database"] == {
        "status": "DOWN",
        "components": {"2": {"status": "DOWN", "details": {"error": "refused"}}},
    }
    assert document["components"]["broker"]["components"].keys() == {"1", "2"}
    assert fleet.get("/health/broker")["status"] == "UP"
    assert fleet.answer("GET", "/health/database")[0] == 503


def test_a_worker_that_does_not_answer_is_down_and_needs_no_restart_of_all(fleet: Fleet) -> None:
    fleet.processes.ended["2"] = NO_ANSWER

    status, document = fleet.answer("GET", "/health/readiness")

    assert status == 503
    assert document["components"]["workers"]["components"] == {
        "1": {"status": "UP"},
        "2": {"status": "DOWN", "details": {"error": "process 4302 does not answer"}},
        "parent": {"status": "UP"},
    }
    assert fleet.get("/health/liveness")["status"] == "UP"


def test_a_worker_that_starts_is_not_ready(fleet: Fleet) -> None:
    fleet.apps[1].is_ready.clear()
    fleet.apps[1].context.is_ready.clear()

    status, document = fleet.answer("GET", "/health/readiness")

    assert (status, document["status"]) == (503, "OUT_OF_SERVICE")
    assert fleet.answer("GET", "/health")[1]["groups"] == ["liveness", "readiness"]


def test_an_unknown_component_is_an_error_with_the_known_ones(fleet: Fleet) -> None:
    status, document = fleet.answer("GET", "/health/disc")

    assert status == 404
    assert document["error"].startswith("there is no component 'disc'; there is: broker, ")


def test_health_without_an_answer_is_down() -> None:
    document = merged_health([WorkerAnswer("1", NO_PROCESS, {"error": "gone"})])

    assert document["status"] == "DOWN"
    assert document["components"]["workers"]["components"]["1"]["details"] == {"error": "gone"}


# --- metrics ------------------------------------------------------------------------------------


def test_series_have_the_worker_as_label(fleet: Fleet) -> None:
    fleet.apps[0].template.sync_send("orders", "a")
    for order in "bc":
        fleet.apps[1].template.sync_send("orders", order)
    fleet.parent_metrics.counter("server.requests").add(7)

    series = fleet.series()

    assert series["messaging_client_sent_messages_total", "1", ""] == 1
    assert series["messaging_client_sent_messages_total", "2", ""] == 2
    assert series["messaging_client_operation_duration_seconds_count", "2", ""] == 2
    assert series["mqtemplate_server_requests_total", "parent", ""] == 7
    document = fleet.get("/metrics/messaging.client.sent.messages")
    assert document["measurements"] == [{"statistic": "COUNT", "value": 3}]
    assert {"tag": "mqtemplate.worker", "values": ["1", "2"]} in document["availableTags"]


def test_a_worker_without_an_answer_is_a_series_that_is_0(fleet: Fleet) -> None:
    """The sum over the workers falls, and this series tells why."""
    fleet.apps[1].template.sync_send("orders", "a")
    fleet.processes.ended["2"] = NO_PROCESS

    series = fleet.series()

    assert ("messaging_client_sent_messages_total", "2", "") not in series
    assert [series["mqtemplate_worker_up_ratio", worker, ""] for worker in ("1", "2", "parent")] == [1, 0, 1]


def test_the_lag_of_a_group_is_exported_once(fleet: Fleet) -> None:
    """Each worker reads it, and the process with the broker too: for all groups, without the name of its broker."""
    queue = {"group": "billing", "topic": "orders", "queue": "0"}
    fleet.parent_metrics.add_collector(
        lambda: [
            MetricSample("group.lag", MetricKind.GAUGE, 5, queue),
            MetricSample("delay.pending", MetricKind.GAUGE, 40, {"horizon": "1m"}),
        ]
    )
    for app in fleet.apps:
        observed = app.get(Actuator).sources.metrics
        assert observed is not None
        observed.add_collector(lambda: [MetricSample("group.lag", MetricKind.GAUGE, 4, queue | {"broker": "broker-a"})])
    body = respond(fleet.parent, "GET", "/prometheus").body
    assert isinstance(body, bytes)

    lags = [
        each.value
        for family in text_string_to_metric_families(body.decode())
        for each in family.samples
        if each.name == "mqtemplate_group_lag"
        and each.labels["messaging_destination_name"] == "orders"
        and each.labels["messaging_destination_partition_id"] == "0"
    ]

    assert lags == [5]
    pending = fleet.get("/metrics/mqtemplate.delay.pending")
    assert [tag["tag"] for tag in pending["availableTags"]] == ["mqtemplate.horizon"]


# --- listeners ----------------------------------------------------------------------------------


def test_a_listener_is_shown_once_with_its_workers(fleet: Fleet) -> None:
    [listener] = fleet.get("/listeners")["listeners"]

    assert (listener["id"], listener["state"]) == ("bill", "running")
    assert [(each["worker"], each["state"]) for each in listener["workers"]] == [("1", "running"), ("2", "running")]
    assert {queue["worker"] for queue in listener["queues"]} <= {"1", "2"}


def test_a_pause_reaches_all_workers(fleet: Fleet) -> None:
    status, document = fleet.answer("POST", "/listeners/bill", action="pause")

    assert (status, document["state"]) == (200, "paused")
    assert [(each["worker"], each["state"]) for each in document["workers"]] == [("1", "paused"), ("2", "paused")]
    assert fleet.states() == ["paused", "paused"]


def test_a_change_that_one_worker_did_not_make_says_which(fleet: Fleet) -> None:
    fleet.processes.ended["2"] = NO_ANSWER

    status, document = fleet.answer("POST", "/listeners/bill", action="pause")

    assert status == 409
    assert document["error"] == (
        "bill was changed in worker 1, and not in worker 2: process 4302 does not answer; send the change again"
    )
    assert document["workers"] == [
        {"worker": "1", "changed": True},
        {"worker": "2", "changed": False, "error": "process 4302 does not answer"},
    ]
    assert fleet.get("/listeners/bill")["state"] == "paused"
    del fleet.processes.ended["2"]
    assert fleet.get("/listeners/bill")["state"] == "paused, running"


def test_a_seek_moves_all_and_one_of_a_queue_the_worker_that_has_it(fleet: Fleet) -> None:
    for app, harness in zip(fleet.apps, fleet.harnesses, strict=True):
        app.template.sync_send("orders", "a")
        harness.advance("1s")
    unconfirmed = fleet.answer("POST", "/listeners/bill", action="seek", to="first")
    shown = fleet.answer("POST", "/listeners/bill", action="seek", to="first", dryRun=True)[1]["preview"]
    moved = fleet.answer("POST", "/listeners/bill", action="seek", to="first", confirm=shown["count"])
    lag = fleet.get("/listeners/bill")["lag"]
    [other] = fleet.apps[1].get(ListenerRegistry).containers
    other.pause()
    queue = next(iter(other.positions()))
    of_queue = fleet.answer("POST", "/listeners/bill", action="seek", topic="orders", queue=queue.queue_id, offset=0)

    assert (unconfirmed[0], shown["again"]) == (409, 2)
    assert "0 messages would be skipped, 2 delivered again: look at the preview with dryRun" in unconfirmed[1]["error"]
    assert moved[0] == 200
    assert lag >= 1
    assert of_queue[0] == 200


def test_a_seek_of_all_workers_is_undone_as_one(fleet: Fleet) -> None:
    for app, harness in zip(fleet.apps, fleet.harnesses, strict=True):
        app.template.sync_send("orders", "a")
        harness.advance("1s")
    containers = [each for app in fleet.apps for each in app.get(ListenerRegistry).containers]
    for each in containers:
        each.pause()
    before = [each.positions() for each in containers]

    moved = fleet.answer("POST", "/listeners/bill", action="seek", to="first", confirm=2)[1]
    between = [sum(at or 0 for at in each.positions().values()) for each in containers]
    listed = fleet.get("/changes")["changes"]
    unknown = fleet.answer("POST", "/changes/0123456789", action="undo")
    undone = fleet.answer("POST", f"/changes/{moved['change']}", action="undo", confirm=2)

    assert between == [0, 0]
    assert {each["id"] for each in listed} == set(moved["change"].split(","))
    assert unknown[0] == 404
    assert "there is no change '0123456789' in the memory of this process" in unknown[1]["error"]
    assert undone[0] == 200
    assert [each.positions() for each in containers] == before


@pytest.mark.parametrize(
    ("path", "change", "status", "text"),
    [
        ("/listeners/bill", {"action": "stop"}, 400, "action must be one of pause, resume, seek, concurrency"),
        ("/listeners/ship", {"action": "pause"}, 404, "there is no listener 'ship'; there is: bill"),
    ],
)
def test_a_change_that_no_worker_takes_is_the_error_of_one(
    fleet: Fleet, path: str, change: dict[str, str], status: int, text: str
) -> None:
    answer = fleet.answer("POST", path, **change)

    assert answer[0] == status
    assert text in answer[1]["error"]


def test_a_body_that_is_not_json_changes_nothing(fleet: Fleet) -> None:
    response = respond(fleet.parent, "POST", "/listeners/bill", BEARER, b"pause")

    assert response.status == 400
    assert fleet.states() == ["running", "running"]


def test_a_change_needs_the_token(fleet: Fleet) -> None:
    response = respond(fleet.parent, "POST", "/listeners/bill", "", b'{"action": "pause"}')

    assert response.status == 401
    assert fleet.states() == ["running", "running"]


# --- others -------------------------------------------------------------------------------------


def test_a_document_of_the_application_comes_from_the_first_worker_that_has_it(fleet: Fleet) -> None:
    fleet.processes.ended["1"] = NO_PROCESS

    assert fleet.get("/conditions")["contexts"]["application"]["positiveMatches"]
    assert fleet.get("/schedules") == {"schedules": []}
    assert fleet.answer("POST", "/schedules/nightly", action="trigger")[0] == 409


def test_info_has_the_processes_and_lateness_the_worker(fleet: Fleet) -> None:
    assert [each["worker"] for each in fleet.get("/info")["workers"]] == ["1", "2", "parent"]
    assert fleet.get("/lateness") == {"deliveries": []}


def test_the_index_has_the_endpoints_of_all(fleet: Fleet) -> None:
    assert {"listeners", "lateness", "prometheus"} <= fleet.get("/")["_links"].keys()
    assert fleet.answer("GET", "/samples")[0] == 404


def test_one_process_alone_answers_as_without_the_others(fleet: Fleet) -> None:
    """Its metrics have no label, and its health no workers."""
    fleet.processes.is_alone = True

    assert fleet.get("/health") == {"status": "UP", "components": {}, "groups": ["liveness", "readiness"]}
    assert fleet.answer("POST", "/listeners/bill", action="pause")[0] == 405
