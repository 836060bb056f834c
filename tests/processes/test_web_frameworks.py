"""The starters of FastAPI, Flask and Django in their real servers, with several workers, preload and reload.

The workers share a broker that runs as a server, as docs/web describes it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from tests.processes.web_server import WebServer
from tests.running.program import Program
from tests.server.process import BrokerProcess
from tests.starters.test_django import LISTENERS, MANAGE, MODELS, SETTINGS
from tests.waiting import eventually

FASTAPI = """
import os

from fastapi import FastAPI

from mqtemplate import message_listener
from mqtemplate_starter_fastapi import MQTemplate, Template, health_router

VERSION = 1

@message_listener(topic="orders", consumer_group="billing")
async def bill(order: str) -> None:
    print("billed", order, flush=True)

web = FastAPI(lifespan=MQTemplate(bill).lifespan)
web.include_router(health_router())

@web.get("/")
async def place(template: Template) -> str:
    await template.async_send("orders", f"version {VERSION} from {os.getpid()}")
    return str(os.getpid())
"""

FLASK = """
import os

from flask import Flask, current_app

from mqtemplate import message_listener
from mqtemplate_starter_flask import MQTemplate

@message_listener(topic="orders", consumer_group="billing")
def bill(order: str) -> None:
    print("billed", order, "in", current_app.name, flush=True)

messages = MQTemplate(bill)

def create_app() -> Flask:
    web = Flask("shop")
    web.config["MQTEMPLATE_HEALTH_URL"] = "/health/ready"
    messages.init_app(web)

    @web.get("/")
    def place() -> str:
        messages.template.sync_send("orders", f"from {os.getpid()}")
        return str(os.getpid())

    return web
"""

VIEWS = """
import os

from django.db import transaction
from django.http import HttpResponse
from django.urls import path

from mqtemplate_starter_django import send_on_commit
from orders.models import Order

def place(request):
    with transaction.atomic():
        order = Order.objects.create()
        send_on_commit("orders", order.id)
    return HttpResponse(str(os.getpid()))

urlpatterns = [path("", place)]
"""

WSGI = """
import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
application = get_wsgi_application()
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that runs as a server; ``application.yml`` names it."""
    with BrokerProcess(tmp_path) as broker:
        (tmp_path / "application.yml").write_text(f"rocketmq: {{name-server: '{broker.name_server}'}}", "utf-8")
        yield broker
        broker.stop()


def both_workers(get: Callable[[], str]) -> set[str]:
    """Send requests until two workers have answered. Return their process ids."""
    answers: set[str] = set()

    def two() -> bool:
        answers.add(get().strip('"'))
        return len(answers) == 2

    eventually(two, "both workers answered")
    return answers


def wait_until_all_are_billed(server: WebServer, workers: set[str]) -> None:
    eventually(lambda: set(re.findall(r"billed .*from (\d+)", server.output)) >= workers, "all messages were handled")


# --- FastAPI in uvicorn -------------------------------------------------------------------------------


@pytest.mark.usefixtures("broker")
def test_two_workers_of_uvicorn_share_the_server(tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(FASTAPI, "utf-8")

    with WebServer(tmp_path, "uvicorn", "--workers", "2", "--port", "0", "web:web") as server:
        eventually(lambda: server.output.count("Application startup complete") == 2, "both workers run")
        workers = both_workers(server.get)
        wait_until_all_are_billed(server, workers)
        code = server.stop()

    assert code == 0


def test_two_workers_of_uvicorn_share_the_management_address(tmp_path: Path, broker: BrokerProcess) -> None:
    """No process of ours is their parent. The first one serves the address, and the other one when that is killed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "web.py").write_text(FASTAPI, "utf-8")
    (tmp_path / "application.yml").write_text(
        f"rocketmq: {{name-server: '{broker.name_server}'}}\n"
        f"mqtemplate: {{management: {{enabled: true, port: {port}}}}}",
        "utf-8",
    )

    def processes() -> dict[str, int]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/actuator/info", timeout=30) as answer:
                return {each["worker"]: each["pid"] for each in json.loads(answer.read())["workers"]}
        except (OSError, KeyError):  # the process that serves was killed, or is alone still
            return {}

    command = ("uvicorn", "--workers", "2", "--port", "0", "web:web")
    with WebServer(tmp_path, *command, environment={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        first = eventually(lambda: len(found := processes()) == 2 and found, "both workers are shown")
        os.kill(first["1"], signal.SIGKILL)
        eventually(lambda: len(found := processes()) == 2 and found["2"] == first["2"], "a new worker is shown")
        code = server.stop()

    assert code == 0
    assert first["1"] != first["2"]
    assert "cannot be used" not in server.output


def test_reload_of_uvicorn_opens_the_store_directory_again(tmp_path: Path) -> None:
    """One process at a time: the new one starts after the end of the old one, and reads what that has stored."""
    (tmp_path / "web.py").write_text(FASTAPI, "utf-8")
    (tmp_path / "application.yml").write_text("rocketmq: {name-server: 'embedded:./store'}", "utf-8")

    with WebServer(tmp_path, "uvicorn", "--reload", "--port", "0", "web:web") as server:
        eventually(lambda: "Application startup complete" in server.output, "the application runs")
        first = server.get()
        # Not of the same length: Python takes compiled code for current if size and second of its source are the same.
        (tmp_path / "web.py").write_text(FASTAPI.replace("VERSION = 1", "VERSION = 20"), "utf-8")
        eventually(lambda: server.output.count("Application startup complete") == 2, "the new code runs")
        second = server.get()
        eventually(lambda: re.search("billed version 20", server.output), "a message of the new code is handled")
        server.stop()

    assert first != second
    with EmbeddedBroker(tmp_path / "store") as broker:  # nothing holds the directory
        assert sum(broker.reader.max_offset(queue) for queue in broker.queues("orders")) == 2


# --- Flask in gunicorn --------------------------------------------------------------------------------


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize(
    "preload", [pytest.param([], marks=pytest.mark.thorough), ["--preload"]], ids=["each", "preload"]
)
def test_two_workers_of_gunicorn_share_the_server(tmp_path: Path, preload: list[str]) -> None:
    """The hooks start the messages with each worker: listeners work before the first request."""
    (tmp_path / "web.py").write_text(FLASK, "utf-8")
    command = ("gunicorn", "-w", "2", "--bind", "127.0.0.1:0", "-c", "python:mqtemplate.running.gunicorn")

    with WebServer(tmp_path, *command, *preload, "web:create_app()") as server:
        workers = both_workers(server.get)
        wait_until_all_are_billed(server, workers)
        code = server.stop()

    assert code == 0
    assert "Error" not in server.output


@pytest.mark.usefixtures("broker")
def test_gunicorn_sends_and_mqtemplate_run_handles_in_the_application_context(tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(FLASK, "utf-8")
    command = ("gunicorn", "-w", "2", "--bind", "127.0.0.1:0", "web:create_app()")

    with Program(tmp_path, "mqtemplate", "run", "web:create_app") as listeners:
        with WebServer(tmp_path, *command, environment={"MQTEMPLATE_LISTENER_ENABLED": "false"}) as server:
            workers = both_workers(server.get)
            server.stop()
        for worker in workers:
            listeners.wait_for(rf"^billed from {worker} in shop$")
        code = listeners.stop()

    assert code == 0
    assert "billed" not in server.output


# --- Django -------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, broker: BrokerProcess) -> Path:
    """A Django project whose processes use the server."""
    (tmp_path / "orders").mkdir()
    settings = SETTINGS.replace("embedded:./store", str(broker.name_server))
    files = {"settings": settings, "urls": VIEWS, "manage": MANAGE, "wsgi": WSGI}
    files |= {"orders/__init__": "", "orders/models": MODELS, "orders/listeners": LISTENERS}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    with Program(tmp_path, "manage", "migrate", "--run-syncdb") as migration:
        assert migration.end() == 0
    return tmp_path


def test_runserver_sends_and_the_command_handles(project: Path) -> None:
    """runserver with its reloader: two processes import the project, and one serves."""
    with Program(project, "manage", "mqtemplate", "run") as listeners:
        with WebServer(project, "manage", "runserver", "127.0.0.1:0", environment={"PYTHONUNBUFFERED": "1"}) as server:
            server.get()
            listeners.wait_for("^billed 1$")
            listeners.wait_for("^shipped 1$")
            server.stop()
        code = listeners.stop()

    assert code == 0


@pytest.mark.parametrize("preload", [[], ["--preload"]], ids=["each", "preload"])
@pytest.mark.thorough
def test_two_workers_of_gunicorn_send_for_django(project: Path, preload: list[str]) -> None:
    command = ("gunicorn", "-w", "2", "--bind", "127.0.0.1:0", *preload, "wsgi:application")

    with Program(project, "manage", "mqtemplate", "run") as listeners:
        with WebServer(project, *command) as server:
            both_workers(server.get)
            server.stop()
        listeners.wait_for(r"^billed \d+$", 2)
        listeners.stop()


def test_an_asgi_server_starts_the_listeners_of_django_before_the_first_request(project: Path) -> None:
    """``asgi(get_asgi_application())`` adds the lifespan that Django does not have."""
    settings = (project / "settings.py").read_text("utf-8")
    settings = settings.replace('"CONFIG_FOLDER"', '"mqtemplate.listener.enabled": True, "CONFIG_FOLDER"')
    (project / "settings.py").write_text(settings, "utf-8")
    text = (
        WSGI.replace("wsgi", "asgi") + "\nfrom mqtemplate_starter_django import asgi\napplication = asgi(application)\n"
    )
    (project / "asgi.py").write_text(text, "utf-8")

    with WebServer(project, "uvicorn", "--port", "0", "asgi:application") as server:
        eventually(lambda: "Application startup complete" in server.output, "the messages work")
        server.get()
        eventually(lambda: "billed 1" in server.output and "shipped 1" in server.output, "the message was handled")
        server.stop()

    assert "Application shutdown complete" in server.output


# --- probes -------------------------------------------------------------------------------------------


def test_a_probe_of_a_real_server_sees_the_readiness(tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(FASTAPI, "utf-8")
    (tmp_path / "application.yml").write_text("rocketmq: {name-server: 'embedded:memory'}", "utf-8")

    with WebServer(tmp_path, "uvicorn", "--port", "0", "web:web") as server:
        with urllib.request.urlopen(f"{server.url}health/ready", timeout=60) as response:
            answer = json.load(response)
        server.stop()

    assert answer == {"status": "UP", "broker": "broker-a"}
