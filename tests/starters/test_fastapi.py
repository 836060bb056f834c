"""Starter of FastAPI and Starlette, with the test client of the framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.applications import Starlette

from mqtemplate import MQApplication, message_listener, service
from mqtemplate.errors import DependencyError
from mqtemplate.testing import Harness
from mqtemplate_starter_fastapi import MQTemplate, Template, depends, health_route, health_router
from tests.waiting import eventually

received: list[str] = []
loops: list[asyncio.AbstractEventLoop] = []


@service
class Audit:
    name = "audit"


@message_listener(topic="reminders", consumer_group="mailer")
async def remind(text: str) -> None:
    received.append(text)
    loops.append(asyncio.get_running_loop())


def web_application(messages: MQTemplate) -> FastAPI:
    web = FastAPI(lifespan=messages.lifespan)
    web.include_router(health_router())

    @web.post("/orders/{order}")
    async def place(order: str, template: Template, audit: Annotated[Audit, depends(Audit)]) -> str:
        await template.async_send("reminders", f"please pay {order}", delay="3h")
        return audit.name

    @web.websocket("/feed")
    async def feed(socket: WebSocket, template: Template) -> None:
        await socket.accept()
        await socket.send_text(type(template).__name__)
        await socket.close()

    @web.get("/loop")
    async def loop() -> bool:
        return loops[-1] is asyncio.get_running_loop()

    return web


@pytest.fixture(autouse=True)
def nothing_received() -> None:
    received.clear()
    loops.clear()


@pytest.fixture
def web() -> FastAPI:
    return web_application(MQTemplate(remind, Audit))


def test_a_path_operation_gets_the_template_and_objects(
    web: FastAPI, mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness
) -> None:
    with TestClient(web) as client:
        response = client.post("/orders/A1")
        assert received == []
        mqtemplate_harness.advance("3h")

    assert (response.status_code, response.json()) == (200, "audit")
    assert received == ["please pay A1"]


def test_a_websocket_gets_the_template(web: FastAPI, mqtemplate_applications: list[MQApplication]) -> None:
    with TestClient(web) as client, client.websocket_connect("/feed") as socket:
        assert socket.receive_text() == "RecordingTemplate"


def test_each_lifespan_has_an_application_of_its_own(
    web: FastAPI, mqtemplate_applications: list[MQApplication]
) -> None:
    for _ in range(2):
        with TestClient(web) as client:
            assert client.get("/health/ready").status_code == 200

    assert len(mqtemplate_applications) == 2
    assert not any(app.is_ready.is_set() for app in mqtemplate_applications)


def test_async_handlers_run_on_the_loop_of_the_web_application() -> None:
    """On a real clock: clients and sessions of the web application can be used in handlers."""
    web = web_application(MQTemplate(remind, Audit, settings={"rocketmq.name-server": "embedded:memory"}))
    with TestClient(web) as client:
        web.state.mqtemplate.template.sync_send("reminders", "now")
        eventually(lambda: received == ["now"], "the handler ran")
        assert client.get("/loop").json() is True


def test_a_lifespan_may_be_around_another_one(mqtemplate_applications: list[MQApplication]) -> None:
    """The inner one may use the messages at its start and at its end."""
    steps: list[str] = []

    @asynccontextmanager
    async def inner(web: FastAPI) -> AsyncIterator[dict[str, str]]:
        steps.append(f"ready: {web.state.mqtemplate.is_ready.is_set()}")
        yield {"shop": "open"}
        steps.append(f"ready: {web.state.mqtemplate.is_ready.is_set()}")

    web = FastAPI(lifespan=MQTemplate(remind).around(inner))
    with TestClient(web) as client:
        assert client.app_state["shop"] == "open"

    assert steps == ["ready: True", "ready: True"]


def test_the_routes_for_probes_show_the_readiness(web: FastAPI, mqtemplate_applications: list[MQApplication]) -> None:
    with TestClient(web) as client:
        ready = client.get("/health/ready")
        mqtemplate_applications[0].is_ready.clear()
        not_ready, live = client.get("/health/ready"), client.get("/health/live")

    assert (ready.status_code, ready.json()) == (200, {"status": "UP", "broker": "broker-a"})
    assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "the application is not ready")
    assert (live.status_code, live.json()) == (200, {"status": "UP"})


def test_starlette_has_the_same_lifespan_and_route(mqtemplate_applications: list[MQApplication]) -> None:
    web = Starlette(lifespan=MQTemplate(remind).lifespan, routes=[health_route()])

    with TestClient(web) as client:
        assert client.get("/health/ready").status_code == 200


def test_without_its_lifespan_a_web_application_has_no_template(web: FastAPI) -> None:
    with pytest.raises(DependencyError, match="this web application has no started MQApplication; create it with"):
        TestClient(web).post("/orders/A1")
