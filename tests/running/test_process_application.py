"""One application for each process of a web server; ASGI and WSGI applications with one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest

from mqtemplate.context import MQApplication
from mqtemplate.errors import ConfigurationError
from mqtemplate.running import MQTemplateASGI, MQTemplateWSGI
from mqtemplate.running.gunicorn import post_worker_init, worker_exit
from mqtemplate.running.hosting import ProcessApplication, health_of
from mqtemplate.running.target import import_application
from mqtemplate.template import RocketMQTemplate
from tests.forking import in_child

IN_MEMORY = {"rocketmq.name-server": "embedded:memory"}


@pytest.fixture
def messages() -> Any:
    process = ProcessApplication(settings=IN_MEMORY, environment={})
    yield process
    process.stop()


# --- processes ----------------------------------------------------------------------------------------


def test_the_first_use_starts_the_application_and_the_next_ones_get_it(messages: ProcessApplication) -> None:
    assert not messages.is_started

    first = messages.application

    assert messages.is_started
    assert messages.application is first
    assert messages.template is messages.get(RocketMQTemplate)


def test_an_application_that_something_else_runs_is_the_one_of_the_process() -> None:
    """``mqtemplate run`` starts and stops it, and a handler that uses the object must not start a second one."""
    messages = ProcessApplication(settings=IN_MEMORY, environment={})

    with messages.application_to_run() as app:
        assert messages.application is app
        assert messages.is_started

    assert not messages.is_started


def test_threads_that_use_it_at_the_same_time_get_one_application(messages: ProcessApplication) -> None:
    found: list[MQApplication] = []
    threads = [threading.Thread(target=lambda: found.append(messages.start())) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(map(id, found))) == 1
    assert found[0].is_ready.is_set()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_has_an_application_of_its_own(messages: ProcessApplication) -> None:
    """As the workers of gunicorn with --preload."""
    messages.template.sync_send("orders", "from the parent")

    def send() -> str:
        before = messages.is_started
        status = messages.template.sync_send("orders", "from the child").send_status.value
        messages.stop()
        return f"{before} {status}"

    assert in_child(send) == "False SEND_OK"
    assert messages.template.sync_send("orders", "from the parent again").send_status.value == "SEND_OK"


def test_after_a_stop_the_next_use_starts_a_new_application(messages: ProcessApplication) -> None:
    first = messages.application

    messages.stop()

    assert not first.is_ready.is_set()
    assert messages.application is not first


def test_a_start_that_failed_is_tried_again() -> None:
    process = ProcessApplication(settings={"rocketmq.name-server": "nowhere"}, environment={})

    for _ in range(2):
        with pytest.raises(ConfigurationError):
            process.start()
        with pytest.raises(ConfigurationError):
            asyncio.run(process.start_async())
    assert not process.is_started


def test_hooks_of_gunicorn_start_and_stop_the_messages_of_a_worker(messages: ProcessApplication) -> None:
    worker = SimpleNamespace(wsgi=MQTemplateWSGI(lambda *_: [], messages), notify=lambda: None)

    post_worker_init(worker)
    was_started = messages.is_started
    worker_exit(None, worker)

    assert (was_started, messages.is_started) == (True, False)


def test_gunicorn_hears_of_a_worker_while_it_starts(messages: ProcessApplication) -> None:
    """It kills a worker that is silent for 30 seconds, and the start of a large store may take longer."""
    heard = threading.Event()
    worker = SimpleNamespace(wsgi=MQTemplateWSGI(lambda *_: [], messages), notify=heard.set)
    messages.prepare(lambda app: heard.wait(60))

    post_worker_init(worker)

    assert heard.is_set()
    assert not [each for each in threading.enumerate() if each.name == "mqtemplate-start"]


def test_health_needs_a_started_application(messages: ProcessApplication) -> None:
    started = health_of(messages.start())

    assert health_of(None).status_code == 503
    assert (started.status_code, started.body["status"]) == (200, "UP")


module_messages = ProcessApplication(settings=IN_MEMORY, environment={})


@pytest.mark.parametrize("target", ["module_messages", "asgi_application"])
def test_mqtemplate_run_finds_the_messages_of_a_web_application(target: str) -> None:
    """It gets an application of its own, which is not started."""
    app = import_application(f"{__name__}:{target}")

    assert not app.is_ready.is_set()
    assert not module_messages.is_started


# --- ASGI and WSGI ------------------------------------------------------------------------------------


class Server:
    """The messages of a server to an ASGI application, and its answers."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self.sent: list[str] = []

    async def live(self, during: Callable[[], object]) -> None:
        """Run a lifespan; call a function between its start and its end."""
        steps = iter(("lifespan.startup", "lifespan.shutdown"))
        started = asyncio.Event()

        async def receive() -> MutableMapping[str, Any]:
            step = next(steps)
            if step == "lifespan.shutdown":
                await started.wait()
                during()
            return {"type": step}

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message["type"].removeprefix("lifespan."))
            started.set()

        await self._app({"type": "lifespan"}, receive, send)


async def inner_with_lifespan(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "lifespan"
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def inner_without_lifespan(scope: Any, receive: Any, send: Any) -> None:
    raise ValueError("Django can only handle ASGI/HTTP connections, not lifespan.")


asgi_application = MQTemplateASGI(inner_without_lifespan, module_messages)


@pytest.mark.parametrize("inner", [inner_with_lifespan, inner_without_lifespan])
def test_an_asgi_application_starts_and_stops_with_the_server(messages: ProcessApplication, inner: Any) -> None:
    states: list[bool] = []
    server = Server(MQTemplateASGI(inner, messages))

    asyncio.run(server.live(lambda: states.append(messages.is_started)))

    assert (states, messages.is_started) == ([True], False)
    assert server.sent == ["startup.complete", "shutdown.complete"]


def test_a_failed_start_is_reported_to_the_server() -> None:
    process = ProcessApplication(settings={"rocketmq.name-server": "nowhere"}, environment={})
    server = Server(MQTemplateASGI(inner_without_lifespan, process))

    asyncio.run(server.live(lambda: None))

    assert server.sent == ["startup.failed"]


def test_a_request_of_an_asgi_application_has_the_messages(messages: ProcessApplication) -> None:
    """A server without a lifespan starts them with its first request."""
    seen: list[MQApplication] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["mqtemplate"])

    async def request() -> None:
        await MQTemplateASGI(inner, messages)({"type": "http"}, None, None)  # type: ignore[arg-type]
        await messages.stop_async()

    asyncio.run(request())

    assert isinstance(seen[0], MQApplication)


def test_a_request_of_a_wsgi_application_has_the_messages(messages: ProcessApplication) -> None:
    def inner(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        return [environ["mqtemplate"].broker.name.encode()]

    app = MQTemplateWSGI(inner, messages)
    before = messages.is_started

    assert (before, app({}, lambda *_: None)) == (False, [b"broker-a"])
