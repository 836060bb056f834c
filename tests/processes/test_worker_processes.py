"""Applications in the processes of web servers and of multiprocessing."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.errors import ForkedError, StoreLockedError
from mqtemplate.message import Message
from tests.processes.web_server import WebServer
from tests.server.process import BrokerProcess
from tests.waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

STARTED_IN_THE_MASTER = """
import os
from mqtemplate import MQApplication

mq = MQApplication(settings={"rocketmq.name-server": "embedded:./store"}, environment={})
mq.start()  # in the master process, because of --preload
mq.template.sync_send("orders", "from the master")

def application(environ, start_response):
    try:
        mq.template.sync_send("orders", "from a worker")
        text = "sent"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {text}".encode()]
"""

STARTED_IN_THE_WORKER = """
import os
from mqtemplate import MQApplication

mq = MQApplication(settings={"rocketmq.name-server": "NAME_SERVER"}, environment={})

def application(environ, start_response):
    mq.template.sync_send("orders", f"from {os.getpid()}")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
"""

HOOKS_OF_GUNICORN = """
import web

def post_fork(server, worker):
    web.mq.start()

def worker_exit(server, worker):
    web.mq.stop()
"""

STARTED_IN_A_LIFESPAN = """
import asyncio
from mqtemplate import MQApplication

mq = MQApplication(settings={"rocketmq.name-server": "embedded:./store"}, environment={})

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        try:
            await asyncio.to_thread(mq.start)
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(mq.stop)
        await send({"type": "lifespan.shutdown.complete"})
        return
    await asyncio.to_thread(mq.template.sync_send, "orders", "from a worker")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"sent"})
"""


def bodies(folder: Path) -> list[bytes]:
    """Return the bodies of all messages of the topic in a folder that no process uses any more."""
    with EmbeddedBroker(folder) as broker:
        return [
            message.body
            for queue in broker.queues("orders")
            for message in broker.reader.pull(queue, broker.reader.min_offset(queue), 1_000).messages
        ]


# --- web servers --------------------------------------------------------------------------------------


def test_the_workers_of_gunicorn_preload_get_an_error_and_harm_no_message(tmp_path: Path) -> None:
    (tmp_path / "web.py").write_text(STARTED_IN_THE_MASTER, encoding="utf-8")

    with WebServer(tmp_path, "gunicorn", "--preload", "-w", "2", "--bind", "127.0.0.1:0", "web:application") as server:
        answers: dict[str, str] = {}

        def both_workers() -> bool:
            process_id, _, text = server.get().partition(" ")
            answers[process_id] = text
            return len(answers) == 2

        eventually(both_workers, "both workers answered")
        server.stop()

    for text in answers.values():
        assert text.startswith("ForkedError: this application was started by process ")
        assert "gunicorn: post_fork" in text
    assert bodies(tmp_path / "store") == [b"from the master"]


def test_workers_of_gunicorn_share_a_server_as_the_error_advises(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        text = STARTED_IN_THE_WORKER.replace("NAME_SERVER", str(broker.name_server))
        (tmp_path / "web.py").write_text(text, encoding="utf-8")
        (tmp_path / "gunicorn.conf.py").write_text(HOOKS_OF_GUNICORN, encoding="utf-8")
        command = ("gunicorn", "--preload", "-w", "2", "--bind", "127.0.0.1:0", "web:application")
        with WebServer(tmp_path, *command) as server:
            answers: list[str] = []

            def both_workers() -> bool:
                answers.append(server.get())
                return len(set(answers)) == 2

            eventually(both_workers, "both workers answered")
            server.stop()
        broker.stop()

    assert sorted(bodies(tmp_path / "store")) == sorted(f"from {process_id}".encode() for process_id in answers)


def test_of_two_workers_of_uvicorn_one_owns_the_folder(tmp_path: Path) -> None:
    """Its workers are not forked but started anew. The second one is refused, and told who owns the folder."""
    (tmp_path / "web.py").write_text(STARTED_IN_A_LIFESPAN, encoding="utf-8")

    with WebServer(tmp_path, "uvicorn", "--workers", "2", "--port", "0", "web:app") as server:
        eventually(lambda: "Application startup complete" in server.output, "one worker works")
        refused = eventually(lambda: re.search(r"StoreLockedError: .*", server.output), "the other one is refused")[0]
        assert server.get() == "sent"
        server.stop()

    assert re.search(r"store is in use by process \d+; one process owns a store folder", refused)
    assert "run it as a server and point rocketmq.name-server at it" in refused
    assert bodies(tmp_path / "store") == [b"from a worker"]


# --- multiprocessing ----------------------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.sends.send(Message("orders", b"from the parent"))
        yield broker


def send_with(broker: EmbeddedBroker, answers: multiprocessing.SimpleQueue[str]) -> None:
    """Send with a broker of the parent. The process then ends as multiprocessing ends it."""
    try:
        broker.sends.send(Message("orders", b"from the child"))
    except ForkedError as error:
        answers.put(str(error))


def open_folder(folder: Path, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        with EmbeddedBroker(folder) as broker:
            broker.sends.send(Message("orders", b"from the child"))
    except StoreLockedError as error:
        answers.put(str(error))


def test_a_process_that_multiprocessing_forked_gets_an_error(broker: EmbeddedBroker, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=send_with, args=(broker, answers))

    child.start()
    child.join()

    assert child.exitcode == 0
    assert "multiprocessing: start method spawn" in answers.get()
    broker.sends.send(Message("orders", b"from the parent again"))
    broker.close()
    assert sorted(bodies(tmp_path / "store")) == [b"from the parent", b"from the parent again"]


def test_a_process_that_multiprocessing_spawned_is_told_who_owns_the_folder(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=open_folder, args=(tmp_path / "store", answers))

    child.start()
    child.join()

    assert child.exitcode == 0
    assert "one process owns a store folder" in answers.get()
    broker.close()
    assert bodies(tmp_path / "store") == [b"from the parent"]
