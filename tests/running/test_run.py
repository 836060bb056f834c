"""``mqtemplate run`` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.brokers import EmbeddedBroker
from tests.running.program import Program
from tests.waiting import eventually

TOKEN = "open-sesame-0123456789"

APP = """
import os
import pathlib
import threading

from mqtemplate import MQApplication, RocketMQTemplate, message_listener, service

VERSION = 1

@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    print(f"billing {order} in {os.getpid()}", flush=True)
    while pathlib.Path("hold").exists():
        threading.Event().wait(0.01)
    print(f"billed {order}", flush=True)

@service
class Sender:
    def __init__(self, template: RocketMQTemplate) -> None:
        self.template = template

    def on_start(self) -> None:
        print(f"version {VERSION}", flush=True)
        self.template.sync_send("orders", f"from {os.getpid()}")

app = MQApplication(__name__)
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with a program, and the folder of its broker in the configuration."""
    (tmp_path / "shop.py").write_text(APP, "utf-8")
    (tmp_path / "application.yml").write_text("rocketmq: {name-server: 'embedded:./store'}", "utf-8")
    return tmp_path


def run(folder: Path, *options: str) -> Program:
    return Program(folder, "mqtemplate", "run", "shop:app", *options)


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_process_runs_the_application_until_sigterm(shop: Path) -> None:
    with run(shop) as program:
        program.wait_for(r"^shop:app is running \(process \d+\); press Ctrl-C to stop$")
        program.wait_for("^billed from")
        code = program.stop()

    assert code == 0
    assert program.output.splitlines()[-1] == "stopped"


def test_workers_share_a_store_directory_and_finish_their_messages_on_sigterm(shop: Path) -> None:
    """The supervisor serves the directory. A running handler ends before the worker does."""
    (shop / "hold").touch()
    with run(shop, "--workers", "2") as program:
        program.wait_for(r"^worker \d \(process \d+\) is ready$", 2)
        program.wait_for("^billing from")
        program.send(signal.SIGTERM)
        program.wait_for(r"^stopping \(SIGTERM\): 2 workers finish their messages$")
        (shop / "hold").unlink()
        code = program.end()

    assert code == 0
    begun, done = program.output.count("billing from"), program.output.count("billed from")
    assert (begun, program.output.splitlines()[-1]) == (done, "stopped")
    assert not (shop / "store" / "abort").exists()  # it exists until the store is closed


def test_a_worker_that_dies_is_started_again(shop: Path) -> None:
    with run(shop, "--workers", "2") as program:
        pids = program.wait_for(r"^worker \d \(process (\d+)\) is ready$", 2)
        os.kill(int(pids[0]), signal.SIGKILL)
        program.wait_for(rf"^worker \d \(process {pids[0]}\) was ended by SIGKILL; restart in 0.5 s$")
        started = program.wait_for(r"^worker \d \(process (\d+)\) is ready$", 3)
        code = program.stop()

    assert code == 0
    assert started[2] not in pids


@pytest.mark.thorough
def test_sighup_replaces_the_workers_one_after_the_other(shop: Path) -> None:
    with run(shop, "--workers", "2") as program:
        pids = program.wait_for(r"^worker \d \(process (\d+)\) is ready$", 2)
        (shop / "shop.py").write_text(APP.replace("VERSION = 1", "VERSION = 2"), "utf-8")
        program.send(signal.SIGHUP)
        program.wait_for(r"^reloading \(SIGHUP\)$")
        ready = program.wait_for(r"^worker \d \(process (\d+)\) is ready$", 4)
        program.stop()

    assert not set(ready[2:]) & set(pids)
    assert program.output.count("version 2") == 2


def test_a_changed_file_starts_the_new_code_and_a_broken_one_waits_for_the_next_change(shop: Path) -> None:
    with run(shop, "--reload") as program:
        program.wait_for(r"is ready$")
        (shop / "shop.py").write_text("this is not Python", "utf-8")
        program.wait_for(r"^reloading \(shop.py\)$")
        program.wait_for(r"ended with exit code 1 before it was ready; its next start is after a change of the files$")
        (shop / "shop.py").write_text(APP.replace("VERSION = 1", "VERSION = 2"), "utf-8")
        program.wait_for(r"^version 2$")
        program.wait_for(r"is ready$", 2)
        code = program.stop(signal.SIGINT)

    assert code == 0


def test_a_worker_stops_in_order_if_the_supervisor_is_killed(shop: Path) -> None:
    with run(shop, "--workers", "1") as program:
        [pid] = program.wait_for(r"^worker 1 \(process (\d+)\) is ready$")
        program.process.kill()
        eventually(lambda: not is_alive(int(pid)), "the worker ended")

    with EmbeddedBroker(shop / "store") as broker:  # nothing holds the directory
        assert broker.queues("orders")


def test_if_a_worker_cannot_start_in_the_beginning_all_stop(shop: Path) -> None:
    text = APP.replace(
        "def on_start(self) -> None:", 'def on_start(self) -> None:\n        raise OSError("no database")'
    )
    (shop / "shop.py").write_text(text, "utf-8")
    with run(shop, "--workers", "2") as program:
        code = program.end()

    assert code == 1
    assert "OSError: no database" in program.output
    assert "ended with exit code 1 before it was ready; see its report above" in program.output


def test_a_second_signal_kills_the_workers(shop: Path) -> None:
    (shop / "hold").touch()
    with run(shop, "--workers", "1") as program:
        program.wait_for("^billing from")
        program.send(signal.SIGTERM)
        program.wait_for(r"^stopping \(SIGTERM\): 1 worker finish")
        program.send(signal.SIGTERM)
        code = program.end()

    assert code == 0
    assert "killing 1 worker (SIGTERM)" in program.output
    assert "was ended by SIGKILL" in program.output


@pytest.mark.thorough
def test_a_worker_that_does_not_stop_in_time_is_killed(shop: Path) -> None:
    (shop / "hold").touch()
    with run(shop, "--workers", "1", "--stop-timeout", "200ms") as program:
        program.wait_for("^billing from")
        code = program.stop()

    assert code == 0
    assert "was ended by SIGKILL" in program.output


# --- one management address for all workers -----------------------------------------------------


def actuator(port: int, path: str, change: dict[str, str] | None = None) -> Any:
    """Return the document at the management address, also one with an error."""
    body = None if change is None else json.dumps(change).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/actuator/{path}", body, {"Authorization": f"Bearer {TOKEN}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
    except urllib.error.HTTPError as exc:
        with exc:
            text = exc.read()
    return text.decode() if path == "prometheus" else json.loads(text)


@pytest.mark.feature("14.3")
def test_workers_have_one_management_address_that_survives_a_kill(shop: Path) -> None:
    """Each worker listened on the port before, so the second one could not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (shop / "application.yml").write_text(
        "rocketmq: {name-server: 'embedded:./store'}\n"
        f"mqtemplate: {{management: {{enabled: true, port: {port}, token: {TOKEN}}}}}",
        "utf-8",
    )
    with Program(shop, "mqtemplate", "run", "shop:app", "--workers", "2", XDG_RUNTIME_DIR=str(shop)) as program:
        program.wait_for(rf"^management of all workers: http://127.0.0.1:{port}/actuator$")
        pids = dict(program.wait_for(r"^worker (\d) \(process (\d+)\) is ready$", 2))
        started = actuator(port, "health/readiness")
        metrics = actuator(port, "prometheus")
        paused = actuator(port, "listeners/shop.bill", {"action": "pause"})
        os.kill(int(pids["2"]), signal.SIGKILL)
        eventually(lambda: actuator(port, "health")["status"] != "UP", "the health shows that a worker has ended")
        eventually(lambda: actuator(port, "health/readiness")["status"] == "UP", "the new worker is ready")
        again = actuator(port, "info")
        code = program.stop()

    assert code == 0
    assert started["status"] == "UP"
    assert started["components"]["workers"]["components"].keys() == {"1", "2", "parent"}
    assert re.search(r'^messaging_client_sent_messages_total\{.*mqtemplate_worker="1"', metrics, re.MULTILINE)
    assert re.search(r'^mqtemplate_store_appended_total\{mqtemplate_worker="parent"\}', metrics, re.MULTILINE)
    assert [(each["worker"], each["state"]) for each in paused["workers"]] == [("1", "paused"), ("2", "paused")]
    assert {each["worker"]: each["pid"] for each in again["workers"]}["2"] != int(pids["2"])
    assert list((shop / f"mqtemplate-{os.getuid()}").iterdir()) == []


def test_the_supervisor_writes_its_lines_in_the_log_format_of_the_application(shop: Path) -> None:
    with (shop / "application.yml").open("a", encoding="utf-8") as file:
        file.write("\nmqtemplate: {logging: {format: json}}\n")
    with run(shop, "--workers", "1") as program:
        program.wait_for(r'^.*"text": "worker 1 \(process \d+\) is ready".*$')
        program.stop()

    events = [json.loads(line) for line in program.output.splitlines() if line.startswith("{")]
    own = [each for each in events if each["event"] == "supervisor.reported"]
    assert own[-1]["text"] == "stopped"
    assert {each["level"] for each in own} == {"info"}


def test_the_supervisor_shows_the_events_of_its_server(shop: Path) -> None:
    with run(shop, "--workers", "2") as program:
        program.wait_for(r"^worker \d \(process \d+\) is ready$", 2)
        program.wait_for(r"^.*server\.topic_created.*topic=orders.*$")
        program.stop()
