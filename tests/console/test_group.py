"""The management address of several processes: the first one serves it, for all."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import MQApplication, message_listener
from mqtemplate.console import Actuator, ActuatorSources, ManagementAddress
from mqtemplate.console.actuator import SAMPLES, ActuatorDocuments, Query
from mqtemplate.console.client import ActuatorClient
from mqtemplate.console.group import LockedFile, ProcessGroup, private_folder, take_name
from mqtemplate.console.merging import NO_PROCESS, ActuatorCall, MergedDocuments
from mqtemplate.context.settings.features import ManagementSettings
from mqtemplate.errors import ConfigurationError
from mqtemplate.http import HttpRequest, HttpResponse
from mqtemplate.metrics import Metrics
from mqtemplate.observability import HealthChecks
from mqtemplate.remoting.protocol.bodies.own_requests import ReloadedConfig
from tests.console.actuators import BEARER, KEYS, TOKEN, respond
from tests.waiting import eventually


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the processes of this test find each other."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


Open = Callable[..., MQApplication]


@pytest.fixture
def opened(port: int) -> Iterator[Open]:
    """Starts an application with the same management port each time."""
    apps: list[MQApplication] = []

    def start(**more: object) -> MQApplication:
        keys = {f"mqtemplate.management.{name.replace('_', '-')}": value for name, value in more.items()}
        app = MQApplication(bill, settings=KEYS | {"mqtemplate.management.port": port} | keys)
        app.start()
        apps.append(app)
        return app

    yield start
    for app in apps:
        app.stop()


def fetch(port: int, path: str, body: bytes | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/actuator/{path}", body, {"Authorization": BEARER})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


def workers(port: int) -> list[str]:
    return list(fetch(port, "health")[1]["components"]["workers"]["components"])


# --- one address --------------------------------------------------------------------------------


@pytest.mark.feature("14.3")
def test_a_second_process_starts_and_is_shown_at_the_address_of_the_first(opened: Open, port: int) -> None:
    opened()
    alone = fetch(port, "health")[1]
    opened()
    health = fetch(port, "health/readiness")
    paused = fetch(port, "listeners/bill", b'{"action": "pause"}')

    assert "workers" not in alone["components"]
    assert health[0] == 200
    assert health[1]["components"]["listeners"]["components"].keys() == {"1", "2"}
    assert [each["state"] for each in paused[1]["workers"]] == ["paused", "paused"]


def test_all_processes_read_their_configuration_again(opened: Open, port: int) -> None:
    """One that was started by another program has none to read, and says so."""
    apps, reasons = [opened() for _ in range(3)], list[str]()

    def reload(reason: str) -> ReloadedConfig:
        reasons.append(reason)
        return ReloadedConfig(changed=["mqtemplate.logging.level"], needs_restart=["rocketmq.producer.group"])

    alone = fetch(port, "configprops/reload", b"{}")
    for app in apps[:2]:
        app.context.on_reload(reload)
    status, document = fetch(port, "configprops/reload", b"{}")

    assert (alone[0], "start it with mqtemplate run" in alone[1]["error"]) == (409, True)
    assert (status, len(reasons), set(reasons)) == (200, 2, {"request of 127.0.0.1"})
    assert document["changed"] == ["mqtemplate.logging.level"]
    assert document["needsRestart"] == ["rocketmq.producer.group"]
    assert len(document["problems"]) == 1
    assert document["problems"][0].startswith("worker 3: this application was started by a program that reads")


def test_the_account_of_a_change_is_in_the_logs_of_all_processes(opened: Open, port: int) -> None:
    opened(), opened()
    dashboard = ActuatorClient(f"http://127.0.0.1:{port}", TOKEN)

    dashboard.of("night-shift").post("listeners/bill", {"action": "pause"})
    dashboard.post("listeners/bill", {"action": "resume"})

    changes = fetch(port, "changes")[1]["changes"]
    assert sorted((each["action"], each["author"]) for each in changes) == [
        *[("listener.pause", "night-shift")] * 2, *[("listener.resume", "127.0.0.1")] * 2
    ]  # fmt: skip


def test_when_the_process_that_serves_ends_another_one_serves(opened: Open, port: int) -> None:
    first, _, _ = opened(), opened(), opened()
    assert workers(port) == ["1", "2", "3"]
    first.stop()

    def served() -> bool:
        try:
            return workers(port) == ["2", "3"]
        except urllib.error.URLError:
            return False

    eventually(served, "another process serves the address")
    opened()
    assert workers(port) == ["1", "2", "3"], "the number of the process that has ended is free again"


def test_the_actuator_of_each_process_answers_for_all(opened: Open, port: int) -> None:
    """A web framework that mounts it passes a request to any worker."""
    _, second = opened(), opened()

    document = json.loads(respond(second.get(Actuator), "GET", "/health").body)
    assert document["components"]["workers"]["components"].keys() == {"1", "2"}


def test_a_port_of_another_application_is_an_error(opened: Open, port: int) -> None:
    """The same port by mistake: it must not be taken for a worker of the other application."""
    opened()

    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} cannot be used: .*choose another port"):
        opened(name="stock")


def test_a_folder_that_cannot_be_used_leaves_the_process_alone(
    opened: Open, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mqtemplate.console.group.private_folder", lambda: None)

    opened()

    assert fetch(port, "health")[0] == 200
    assert any("management.not_shared" in record.getMessage() for record in caplog.records)


def test_nothing_is_left_in_the_folder(opened: Open, runtime: Path) -> None:
    first, second = opened(), opened()
    second.stop()
    first.stop()

    assert list(next(runtime.iterdir()).iterdir()) == []


# --- processes ----------------------------------------------------------------------------------


def test_a_broker_with_a_name_is_alone_until_an_application_starts(tmp_path: Path) -> None:
    """`mqtemplate broker` and an application may read the same ``application.yml``."""
    broker = group(tmp_path, "broker")
    broker.start()
    was_alone = broker.is_alone
    app = group(tmp_path)
    app.start()

    assert (was_alone, broker.is_alone, broker.names()) == (True, False, ["1", "broker"])
    app.stop()
    assert not broker.is_alone, "its series keep their labels"
    broker.stop()


def group(folder: Path, name: str | None = None, **more: Any) -> ProcessGroup:
    return ProcessGroup(Actuator(ActuatorSources(health=HealthChecks({}, is_virtual=True))), folder, name, 3.0, **more)


def test_a_process_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    """Its file stays, and its lock ends with it."""
    one, two = group(tmp_path), group(tmp_path)
    one.start()
    two.start()
    assert one.names() == ["1", "2"]
    left = (tmp_path / "2.json").read_bytes()
    two.stop()
    (tmp_path / "2.json").write_bytes(left)

    assert one.names() == ["1"]
    assert not (tmp_path / "2.json").exists()
    one.stop()


def test_an_expected_process_that_does_not_run_has_an_answer(tmp_path: Path) -> None:
    parent = group(tmp_path, "parent", expected=lambda: {"1": None, "2": 4302})
    parent.start()

    answers = parent.ask(ActuatorCall("GET", "health"))

    assert [(each.worker, each.status) for each in answers] == [("1", NO_PROCESS), ("2", NO_PROCESS), ("parent", 200)]
    assert answers[0].error == "the process does not run, or has not started yet"
    parent.stop()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """The folder of an application whose worker 2, process 4302, takes connections and does not answer."""
    _, lock = take_name(tmp_path, "2")
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        document = {"process": 4302, "port": stopped.getsockname()[1], "key": "x" * 32}
        (tmp_path / "2.json").write_text(json.dumps(document))
        yield tmp_path
    lock.release()


@pytest.mark.parametrize("timeout", ["0.5", "0.25"])
def test_a_worker_that_hangs_is_named_before_the_scrape_of_prometheus_ends(hanging: Path, timeout: str) -> None:
    """So the scrape succeeds, and the alert says which worker hangs, not that the whole application is gone."""
    pytest.importorskip("prometheus_client")
    own = Actuator(ActuatorSources(health=HealthChecks({}, is_virtual=True), metrics=Metrics()), token=TOKEN)
    parent = ProcessGroup(own, hanging, "1", 3.0)
    parent.start()
    own.documents = MergedDocuments(own, parent)

    response = respond(own, "GET", "/prometheus", scrape_timeout=timeout)
    [_, answer] = parent.ask(ActuatorCall("GET", SAMPLES, wait_s=0.8 * float(timeout)))

    assert isinstance(response.body, bytes)
    values = {line for line in response.body.decode().splitlines() if line.startswith("mqtemplate_worker_up_ratio")}
    assert response.status == 200
    assert values == {
        'mqtemplate_worker_up_ratio{mqtemplate_worker="1"} 1.0',
        'mqtemplate_worker_up_ratio{mqtemplate_worker="2"} 0.0',
    }
    assert answer.error == f"process 4302 does not answer within {0.8 * float(timeout):g} s"
    parent.stop()


@pytest.mark.parametrize(
    ("timeout", "wait_s"),
    [
        ("0.5", 0.4),
        ("2", 1.6),
        ("10", 2.0),
        ("60", 2.0),
        ("inf", 2.0),
        *((wrong, 8.0) for wrong in ("", "soon", "nan", "-3", "0")),
    ],
)
def test_a_scrape_waits_two_seconds_for_a_worker_or_less_if_its_own_timeout_is_shorter(
    tmp_path: Path, timeout: str, wait_s: float
) -> None:
    """A request that names no timeout is one of a person or a program, which waits for what is slow."""
    own = Actuator(ActuatorSources(health=HealthChecks({}, is_virtual=True), metrics=Metrics()), token=TOKEN)
    parent = ProcessGroup(own, tmp_path, "1", 3.0)
    asked: list[float] = []

    class Noted(ActuatorDocuments):
        endpoints = ("metrics",)

        def read(self, name: str, rest: str, query: Query, wait_s: float | None = None) -> HttpResponse:
            asked.append(parent._timeout_of(ActuatorCall("GET", SAMPLES, wait_s=wait_s)))
            return HttpResponse(200, b"")

        def change(self, kind: str, name: str, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

    own.documents = Noted()
    respond(own, "GET", "/metrics", scrape_timeout=timeout)
    parent.stop()

    assert asked == [pytest.approx(wait_s)]


def test_other_users_cannot_read_the_key_and_without_it_nothing_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = group(tmp_path)
    one.start()
    file = tmp_path / "1.json"
    url = f"http://127.0.0.1:{json.loads(file.read_bytes())['port']}/health"
    given = {"Authorization": "Bearer wrong-0123456789abcdef", "X-Mqtemplate-Remote": "10.0.0.7"}
    for headers in ({}, given):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30)

    refused = [record.getMessage() for record in caplog.records if "token_refused" in record.getMessage()]
    assert "10.0.0.7" not in str(refused), "only another process of the application says who has asked it"
    assert len(refused) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    one.stop()


def test_a_file_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    """Some systems delete old files of their temporary folder."""
    one = group(tmp_path)
    one.start()
    (tmp_path / "1.json").unlink()
    one.refresh()

    assert (tmp_path / "1.json").exists()
    one.stop()


def test_a_wanted_name_is_taken_and_otherwise_the_lowest_free_number(tmp_path: Path) -> None:
    names = [take_name(tmp_path, wanted) for wanted in (None, "3", None, None)]

    assert [name for name, _ in names] == ["1", "3", "2", "4"]
    names[0][1].release()
    assert take_name(tmp_path, None)[0] == "1"
    assert take_name(tmp_path, "3")[0] == "5"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = LockedFile.take(tmp_path / "1.lock")
    assert lock is not None
    lock.after_fork()  # the child's copy, in this process

    again = LockedFile.take(tmp_path / "1.lock")
    assert again is not None
    again.release()


def test_a_folder_that_others_may_use_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, other = tmp_path / "run", tmp_path / "tmp"
    for each in (runtime, other):
        each.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr("mqtemplate.console.group._temporary_folder", lambda: str(other))
    (runtime / f"mqtemplate-{os.getuid()}").mkdir()
    (runtime / f"mqtemplate-{os.getuid()}").chmod(0o777)

    assert private_folder() == other / f"mqtemplate-{os.getuid()}"


# --- service discovery --------------------------------------------------------------------------


def address(folder: Path, port: int) -> ManagementAddress:
    settings = ManagementSettings(enabled=True, port=port, targets_dir=str(folder))
    return ManagementAddress(Actuator(ActuatorSources(health=HealthChecks({}, is_virtual=True))), settings, {}, None)


def test_processes_on_their_own_write_their_addresses_for_prometheus(tmp_path: Path) -> None:
    both = [address(tmp_path / "targets", 0) for _ in range(2)]
    for each in both:
        each.start()
    files = {file.name: json.loads(file.read_text()) for file in (tmp_path / "targets").glob("*.json")}
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "targets").glob("*.json")}
    for each in both:
        each.stop()

    assert files["1.json"] == [{"targets": [files["1.json"][0]["targets"][0]], "labels": {"mqtemplate_worker": "1"}}]
    assert files["2.json"][0]["labels"] == {"mqtemplate_worker": "2"}
    assert len({file[0]["targets"][0] for file in files.values()}) == 2
    assert modes == {0o644}
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_shared_address_is_one_target(opened: Open, port: int, tmp_path: Path) -> None:
    opened(targets_dir=str(tmp_path / "targets"))
    opened(targets_dir=str(tmp_path / "targets"))

    [file] = (tmp_path / "targets").glob("*.json")
    assert json.loads(file.read_text()) == [{"targets": [f"127.0.0.1:{port}"], "labels": {}}]


def test_a_folder_of_targets_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "targets").write_text("")

    with pytest.raises(ConfigurationError, match=r"mqtemplate\.management\.targets-dir: .*/targets cannot be written"):
        address(tmp_path / "targets", 0).start()
