"""Starter of Flask, with the test client of the framework."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flask import Flask, current_app, g

from mqtemplate import MQApplication, MQTemplateError, message_listener, service
from mqtemplate.errors import ConfigurationError, DependencyError
from mqtemplate.running.target import import_application
from mqtemplate.testing import Harness
from mqtemplate_starter_flask import MQTemplate

received: list[str] = []


@service
class Audit:
    name = "audit"


@message_listener(topic="reminders", consumer_group="mailer")
def remind(text: str) -> None:
    g.text = text
    received.append(f"{current_app.name}: {text}")


@message_listener(topic="reminders", consumer_group="archive")
async def archive(text: str) -> None:
    g.text = text


messages = MQTemplate(remind, archive, Audit)


def create_app(name: str = "shop") -> Flask:
    web = Flask(name)
    web.config["MQTEMPLATE_HEALTH_URL"] = "/health"
    messages.init_app(web)

    @web.post("/orders/<order>")
    def place(order: str) -> str:
        messages.template.sync_send("reminders", f"please pay {order}", delay="3h")
        return messages.get(Audit).name

    @web.teardown_appcontext
    def end(_error: BaseException | None) -> None:
        if "text" in g:
            received.append(f"end of {g.text}")

    return web


@pytest.fixture(autouse=True)
def nothing_received() -> Iterator[None]:
    received.clear()
    yield
    messages._apps.clear()


def test_a_view_sends_and_a_handler_has_an_application_context(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness
) -> None:
    """Each call of a handler has a context of its own, and its teardown functions run; async handlers too."""
    response = create_app().test_client().post("/orders/A1")
    mqtemplate_harness.advance("3h")

    assert (response.status_code, response.text) == (200, "audit")
    assert sorted(received) == ["end of please pay A1", "end of please pay A1", "shop: please pay A1"]


def test_nothing_is_started_before_the_first_use(mqtemplate_applications: list[MQApplication]) -> None:
    """A server may import the program in one process and fork others."""
    client = create_app().test_client()
    before = len(mqtemplate_applications)

    client.post("/orders/A1")
    client.post("/orders/A2")

    assert (before, len(mqtemplate_applications)) == (0, 1)


def test_each_flask_application_has_messages_of_its_own(
    mqtemplate_applications: list[MQApplication], mqtemplate_harness: Harness
) -> None:
    for name in ("shop", "bank"):
        create_app(name).test_client().post("/orders/A1")

    assert len(mqtemplate_applications) == 2


def test_the_configuration_of_flask_has_keys(mqtemplate_applications: list[MQApplication]) -> None:
    web = Flask("shop")
    web.config["MQTEMPLATE"] = {"rocketmq": {"producer": {"group": "from flask"}}}
    extension = MQTemplate(app=web)

    assert extension.application.settings.rocketmq.producer.group == "from flask"


def test_the_configuration_must_be_a_mapping() -> None:
    web = Flask("shop")
    web.config["MQTEMPLATE"] = "embedded:memory"

    with pytest.raises(
        ConfigurationError, match="MQTEMPLATE in the configuration of Flask must be a mapping of keys, got"
    ):
        MQTemplate(app=web)


def test_the_route_for_probes_shows_the_readiness(mqtemplate_applications: list[MQApplication]) -> None:
    client = create_app().test_client()
    ready = client.get("/health")
    mqtemplate_applications[0].is_ready.clear()
    not_ready = client.get("/health")

    assert (ready.status_code, ready.json) == (200, {"status": "UP", "broker": "broker-a"})
    assert (not_ready.status_code, not_ready.json["status"]) == (503, "DOWN")


def test_a_start_that_fails_is_shown_to_probes_and_tried_again() -> None:
    web = Flask("shop")
    web.config |= {"MQTEMPLATE_HEALTH_URL": "/health", "MQTEMPLATE": {"rocketmq.name-server": "nowhere"}}
    extension = MQTemplate(app=web)

    response = web.test_client().get("/health")

    assert response.status_code == 503
    assert "rocketmq.name-server: allowed are 'embedded'" in response.json["reason"]
    with pytest.raises(MQTemplateError):
        extension.application.start()


def test_outside_of_flask_there_is_no_template() -> None:
    with pytest.raises(DependencyError, match="there is no Flask application here for which init_app was called"):
        MQTemplate().template.sync_send("orders", "A1")
    with Flask("other").app_context(), pytest.raises(DependencyError, match="init_app"):
        messages.template.sync_send("orders", "A1")


def test_mqtemplate_run_finds_the_messages_of_a_flask_application() -> None:
    """``mqtemplate run shop.web:create_app`` runs the listeners inside of the application context."""
    app = import_application(f"{__name__}:create_app")

    assert app.context.components == (remind, archive, Audit)
    assert len(app.context.handler_scopes) == 1
