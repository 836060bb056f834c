"""The dashboard of an application: its settings, the management port, and web frameworks."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from mqtemplate import MQApplication
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Actuator, Dashboard, dashboard_asgi_app, dashboard_wsgi_app
from mqtemplate.console.dashboard import managed_dashboard
from mqtemplate.errors import ConfigurationError, UnsupportedError
from tests.console.pages import COMPLETE, KEYS, MANAGEMENT_TOKEN, bill

pytestmark = pytest.mark.feature("14.2")
DASHBOARD: dict[str, Any] = KEYS | {"mqtemplate.management.dashboard.enabled": True}


def application(**more: Any) -> MQApplication:
    keys = {f"mqtemplate.management.{name.replace('__', '.').replace('_', '-')}": value for name, value in more.items()}
    return MQApplication(bill, settings=DASHBOARD | keys, clock=VirtualClock())


def fetch(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def test_the_management_port_serves_it_beside_the_actuator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with application(port=0):
        [started] = [vars(each) for each in caplog.records if "management.started" in each.msg]
        base = f"http://{started['address']}"
        health = fetch(f"{base}/actuator/health")
        page = fetch(f"{base}/dashboard/topics")
        elsewhere = fetch(f"{base}/other")

    assert health[0] == 200
    assert page[0] == 401
    assert 'action="/dashboard/sign-in"' in page[1]
    assert elsewhere == (404, "there is: /actuator, /dashboard\n")


def test_accounts_of_the_configuration_sign_in_to_the_dashboard_of_an_application() -> None:
    account = {"access-key": "night-shift", "secret-key": "s3cret-of-all", "role": "operator"}
    acl = {"mqtemplate.server.acl.enabled": True, "mqtemplate.server.acl.accounts": [account]}
    with MQApplication(bill, settings=DASHBOARD | acl, clock=VirtualClock()) as app:
        client = TestClient(dashboard_asgi_app(app.get(Dashboard)), base_url="http://localhost")
        keys = {"access_key": "night-shift", "secret_key": "s3cret-of-all"}

        signed_in = client.post("/sign-in", data=COMPLETE | keys)
        refused = client.post("/sign-in", data=COMPLETE | keys | {"secret_key": "guess"})

    assert "night-shift" in signed_in.text
    assert "operator" in signed_in.text
    assert "The access key is unknown, or the secret key is wrong." in refused.text


def test_fastapi_mounts_it(tmp_path: Path) -> None:
    log = str(tmp_path / "audit.jsonl")
    with application(dashboard__allow_changes=True, audit_log=log) as app:
        web = FastAPI()
        web.mount("/operations", dashboard_asgi_app(app.get(Dashboard)))
        client = TestClient(web, base_url="http://localhost")

        closed = client.get("/operations/listeners")
        client.post("/operations/sign-in", data={"token": MANAGEMENT_TOKEN})
        opened = client.get("/operations/listeners")
        token = opened.text.partition('name="form_token" value="')[2].partition('"')[0]
        form = COMPLETE | {"form_token": token, "listener": "bill", "action": "pause"}
        changed = client.post("/operations/listeners/change", data=form)

    assert closed.status_code == 401
    assert "bill" in opened.text
    assert 'href="/operations/topics"' in opened.text
    assert "paused" in changed.text


def test_flask_mounts_it() -> None:
    with application() as app:
        web = Flask("shop")
        web.wsgi_app = DispatcherMiddleware(  # type: ignore[method-assign]
            web.wsgi_app, {"/dashboard": dashboard_wsgi_app(app.get(Dashboard))}
        )
        client = web.test_client()
        client.post("/dashboard/sign-in", data={"token": MANAGEMENT_TOKEN})
        page = client.get("/dashboard/groups")
        head = client.head("/dashboard/groups")

    assert page.status_code == 200
    assert "billing" in page.text
    assert (head.status_code, head.data) == (200, b"")


def test_a_name_of_the_web_application_must_be_allowed() -> None:
    with application(dashboard__allowed_hosts="shop.example.com") as app:
        web = FastAPI()
        web.mount("/dashboard", dashboard_asgi_app(app.get(Dashboard)))

        own = TestClient(web, base_url="http://shop.example.com").get("/dashboard/sign-in")
        foreign = TestClient(web, base_url="http://evil.example").get("/dashboard/sign-in")

    assert (own.status_code, foreign.status_code) == (200, 421)
    assert "mqtemplate.management.dashboard.allowed-hosts" in foreign.text


def test_without_the_setting_there_is_no_dashboard() -> None:
    with MQApplication(bill, settings=KEYS, clock=VirtualClock()) as app, pytest.raises(Exception, match="Dashboard"):
        app.get(Dashboard)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"mqtemplate.management.token": None}, "is on, but there is no 'token'; set it, or turn the dashboard off"),
        ({"mqtemplate.management.enabled": False}, "is on, but 'enabled' is not true; set it"),
    ],
)
def test_a_dashboard_without_what_it_needs_is_an_error(keys: dict[str, Any], text: str) -> None:
    settings = {name: value for name, value in (DASHBOARD | keys).items() if value is not None}

    with pytest.raises(ConfigurationError, match=text), MQApplication(bill, settings=settings):
        pass


def test_a_broker_of_the_user_without_administration_is_an_error() -> None:
    with application() as app:
        actuator, settings = app.get(Actuator), app.settings.mqtemplate.management

        class Other(EmbeddedBroker):
            admin = Broker.admin

        with pytest.raises(UnsupportedError, match="broker 'broker-a', a Other, does not list its topics and groups"):
            managed_dashboard(Other(), actuator, settings, "shop")


def test_without_jinja_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.console.server.find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match=r'the dashboard needs jinja2: pip install "jinja2>=3\.1"'):
        application().start()
