"""The test clients of FastAPI, Flask and Django, with the fixtures of the test kit."""

from __future__ import annotations

import asyncio
from asyncio import sleep as virtual_sleep
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Annotated

import django
import flask
import pytest
from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from httpx2 import ASGITransport
from httpx2 import AsyncClient as HttpxClient

from mqtemplate import MQApplication, RocketMQTemplate, VirtualClock, message_listener
from mqtemplate.testing import HandlerFailedError, Harness, RecordingTemplate
from tests.testing.test_assertions import run_pytest


@message_listener("orders", "billing")
class Billing:
    def __init__(self) -> None:
        self.bills: list[str] = []

    def on_message(self, order: str) -> None:
        if not order.isdigit():
            raise LookupError(f"no order {order}")
        self.bills.append(order)


@message_listener("prices", "pricing")
async def price(article: str) -> int:
    await virtual_sleep(2)
    return len(article)


# --- FastAPI -----------------------------------------------------------------------------------


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    """As docs/async.md shows it: nothing here knows of tests."""
    async with MQApplication(Billing, price, settings={"rocketmq.name-server": "mq.example.com:9876"}) as app:
        web.state.template = app.template
        yield


web = FastAPI(lifespan=lifespan)


def template_of(request: Request) -> RocketMQTemplate:
    template: RocketMQTemplate = request.app.state.template
    return template


Template = Annotated[RocketMQTemplate, Depends(template_of)]


@web.post("/orders/{order}")
async def place(order: str, template: Template) -> str:
    return (await template.async_send("orders:paid", order, delay="3h")).msg_id


@web.get("/prices/{article}")
async def price_of(article: str, template: Template) -> int:
    return await template.async_send_and_receive("prices", article, int, timeout="5s")


@web.get("/blocking/{article}")
def blocking_price_of(article: str, template: Template) -> int:
    return template.send_and_receive("prices", article, int, timeout="5s")


@pytest.fixture
def client(mqtemplate_applications: list[MQApplication]) -> Iterator[TestClient]:
    with TestClient(web) as client:
        yield client


def test_an_application_that_a_lifespan_starts_runs_on_the_broker_of_the_test(
    client: TestClient,
    mqtemplate_applications: list[MQApplication],
    mqtemplate_harness: Harness,
    mqtemplate_template: RecordingTemplate,
) -> None:
    """Its configuration names a cluster; the fixtures replace the broker, the clock and the template."""
    response = client.post("/orders/4466")
    mqtemplate_harness.advance("2h 59m 59s")
    [app] = mqtemplate_applications
    assert app.get(Billing).bills == []
    mqtemplate_harness.advance("1s")

    assert response.status_code == 200
    assert app.get(Billing).bills == ["4466"]
    [sent] = mqtemplate_harness.assert_sent("orders:paid", times=1)
    assert response.json() == sent.msg_id
    assert [call.destination for call in mqtemplate_template.sent] == ["orders:paid"]


def test_each_test_client_has_an_application_of_its_own(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness
) -> None:
    """The second one receives what was delayed when the first one was stopped."""
    with TestClient(web) as client:
        client.post("/orders/1")
    with TestClient(web):
        mqtemplate_harness.advance("3h")
        _, second = mqtemplate_applications
        assert second.get(Billing).bills == ["1"]
    mqtemplate_harness.assert_received(Billing, times=1)


@pytest.mark.parametrize("path", ["/prices/tea", "/blocking/tea"])
def test_an_endpoint_waits_for_a_reply_in_virtual_time(
    path: str, client: TestClient, mqtemplate_clock: VirtualClock
) -> None:
    started_ms = mqtemplate_clock.now_ms()

    assert client.get(path).json() == 3
    assert mqtemplate_clock.now_ms() == started_ms + 2_000


def test_a_handler_that_raises_fails_the_test_of_an_endpoint(client: TestClient, mqtemplate_harness: Harness) -> None:
    client.post("/orders/tea")

    with pytest.raises(HandlerFailedError, match="LookupError: no order tea"):
        mqtemplate_harness.advance("3h")


def test_an_async_test_client_works_as_well(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness
) -> None:
    """Such a client runs no lifespan; the test enters it."""

    async def order() -> None:
        async with lifespan(web), HttpxClient(transport=ASGITransport(web), base_url="http://test") as client:
            assert (await client.post("/orders/4466")).status_code == 200
            assert (await client.get("/prices/tea")).json() == 3
            mqtemplate_harness.advance("3h")

    asyncio.run(order())

    mqtemplate_harness.assert_received(Billing, times=1)


def test_in_other_tests_applications_have_the_broker_of_their_configuration(tmp_path: Path) -> None:
    with MQApplication(Billing, settings={"rocketmq.name-server": f"embedded:{tmp_path}"}) as app:
        assert not app.broker.clock.is_virtual


# --- Flask -------------------------------------------------------------------------------------


def create_app() -> flask.Flask:
    """Flask's application factory; the messages start with it."""
    web = flask.Flask("shop")
    app = MQApplication(Billing, price, settings={"rocketmq.name-server": "mq.example.com:9876"})
    app.start()
    web.extensions["mqtemplate"] = app

    @web.post("/orders/<order>")
    def place(order: str) -> str:
        return app.template.sync_send("orders:paid", order, delay="3h").msg_id

    @web.get("/prices/<article>")
    async def price_of(article: str) -> dict[str, int]:
        return {"cents": await app.template.async_send_and_receive("prices", article, int)}

    return web


def test_the_test_client_of_flask(mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness) -> None:
    client = create_app().test_client()

    response = client.post("/orders/4466")
    mqtemplate_harness.advance("3h")

    assert response.status_code == 200
    mqtemplate_harness.assert_received(Billing, times=1)
    assert mqtemplate_applications[0].get(Billing).bills == ["4466"]


def test_the_applications_of_a_test_are_stopped_at_its_end(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
        from mqtemplate import MQApplication, service

        stopped = []

        @service
        class Pool:
            def close(self):
                stopped.append(self)

        def test_one(mqtemplate_applications):
            MQApplication(Pool).start()

        def test_two():
            assert len(stopped) == 1
        """,
    )

    assert "2 passed" in output


# --- Django ------------------------------------------------------------------------------------


@cache
def started() -> MQApplication:
    """Return the started application of this process; a project has it in a module of its own."""
    app = MQApplication(Billing, price, settings={"rocketmq.name-server": "mq.example.com:9876"})
    app.start()
    return app


def place_order(request: HttpRequest, order: str) -> HttpResponse:
    result = started().template.sync_send("orders:paid", order, delay="3h")
    return JsonResponse({"msg_id": result.msg_id})


async def async_price_of(request: HttpRequest, article: str) -> HttpResponse:
    return JsonResponse({"cents": await started().template.async_send_and_receive("prices", article, int)})


urlpatterns = [path("orders/<order>", place_order), path("prices/<article>", async_price_of)]


@pytest.fixture
def django_client(mqtemplate_applications: list[MQApplication]) -> Iterator[Client]:
    started.cache_clear()
    if not django_settings.configured:
        django_settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"], DEBUG=False, LOGGING_CONFIG=None)
        django.setup()
    yield Client()
    started.cache_clear()


def test_the_test_client_of_django(django_client: Client, mqtemplate_harness: Harness) -> None:
    response = django_client.post("/orders/4466")
    mqtemplate_harness.advance("3h")

    assert response.status_code == 200
    mqtemplate_harness.assert_received(Billing, times=1)


def test_an_async_view_of_django_waits_for_a_reply_in_virtual_time(
    django_client: Client, mqtemplate_clock: VirtualClock
) -> None:
    started_ms = mqtemplate_clock.now_ms()

    plain = django_client.get("/prices/tea")
    asynchronous = asyncio.run(AsyncClient().get("/prices/tea"))

    assert (plain.json(), asynchronous.json()) == ({"cents": 3}, {"cents": 3})
    assert mqtemplate_clock.now_ms() == started_ms + 4_000
