"""The actuator of an application: documents in Spring's shapes, and changes of listeners behind a token."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from mqtemplate import MQApplication, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.calls.handling import Observation
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Actuator, ActuatorSources, ManagementServer, asgi_app, wsgi_app
from mqtemplate.console.client import LocalActuator
from mqtemplate.context import AutoConfiguration, load_settings
from mqtemplate.errors import ConfigurationError
from mqtemplate.observability import HealthChecks
from mqtemplate.testing import Harness
from tests.console.actuators import BEARER, KEYS, TOKEN, respond


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


class Shop:
    """An application with an actuator, on a virtual clock."""

    def __init__(self, app: MQApplication) -> None:
        self.app = app
        self.harness = Harness(app)
        self.actuator = app.get(Actuator)

    def get(self, path: str, *tags: str) -> Any:
        status, document = self.answer("GET", path, [("tag", tag) for tag in tags])
        assert status == 200, document
        return document

    def answer(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        change: object = None,
        token: str = BEARER,
    ) -> tuple[int, Any]:
        body = b"" if change is None else json.dumps(change).encode()
        response = respond(self.actuator, method, path, token, body, query)
        return response.status, json.loads(response.body)

    def change(self, **change: object) -> tuple[int, Any]:
        return self.answer("POST", "/listeners/bill", change=change, token=BEARER)


@pytest.fixture
def shop() -> Iterator[Shop]:
    with MQApplication(bill, settings=KEYS, clock=VirtualClock()) as app:
        yield Shop(app)


# --- documents ----------------------------------------------------------------------------------


def test_info_has_versions(shop: Shop) -> None:
    info = shop.get("/info")

    assert info["app"] == {"name": "shop"}
    assert info["mqtemplate"]["version"]
    assert info["process"]["pid"] > 0


def test_prometheus_scrapes_it(shop: Shop) -> None:
    response = respond(shop.actuator, "GET", "/prometheus")

    assert response.content_type.startswith("text/plain; version=0.0.4")
    assert b"mqtemplate_store_appended_total" in response.body


def test_conditions_have_the_shape_of_springs(shop: Shop) -> None:
    found = shop.get("/conditions")["contexts"]["application"]

    assert {"embedded", "observability"} <= found["positiveMatches"].keys()
    assert (
        found["negativeMatches"]["rocketmq"]["notMatched"][0]["message"]
        == "rocketmq.name-server names no cluster, and rocketmq.endpoints no proxy"
    )


@pytest.mark.feature("14.3")
def test_configprops_have_values_and_origins_and_no_secrets(shop: Shop) -> None:
    beans = shop.get("/configprops")["contexts"]["application"]["beans"]
    management = beans["mqtemplate.management"]

    assert management["properties"]["name"] == "shop"
    assert management["inputs"]["name"] == {"value": "shop", "origin": "argument settings"}
    assert management["properties"]["token"] == "********"
    assert TOKEN not in json.dumps(beans)


def test_only_chosen_endpoints_are_exposed() -> None:
    keys = KEYS | {"mqtemplate.management.endpoints": "health,info"}
    with MQApplication(bill, settings=keys, clock=VirtualClock()) as app:
        shop = Shop(app)
        assert set(shop.get("/")["_links"]) == {"self", "health", "info"}
        assert shop.answer("GET", "/configprops")[0] == 404
        assert shop.change(action="pause")[0] == 405


# --- changes ------------------------------------------------------------------------------------


def test_without_a_token_changes_are_off() -> None:
    keys = {key: value for key, value in KEYS.items() if not key.endswith("token")}
    with MQApplication(bill, settings=keys, clock=VirtualClock()) as app:
        status, error = Shop(app).change(action="pause")

    assert status == 403
    assert "set mqtemplate.management.token" in error["error"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"action": "pause", "action": "resume"}', "the body has the field 'action' twice, allowed is once"),
        (json.dumps({"action": "seek", "to": "9" * 5_000}).encode(), "to must be first, latest, epoch milliseconds"),
        (b'{"action": "seek", "to": 1' + b"0" * 400 + b"}", "got a larger number"),
        (b'{"action": "concurrency", "number": 1' + b"0" * 400 + b"}", "got a larger number"),
        (b"[" * 100_000, 'the body must be a JSON object, such as {"action": "pause"}'),
        (b'{"action": "pause"', "the body must be a JSON object"),
        (b"\xff", "the body must be a JSON object"),
        (b'{"action": "seek", "to": ' + b"9" * 5_000 + b"}", "the body must be a JSON object"),
    ],
)
def test_a_body_that_is_no_single_object_is_refused(shop: Shop, body: bytes, text: str) -> None:
    response = respond(shop.actuator, "POST", "/listeners/bill", BEARER, body)

    assert response.status == 400
    assert text in json.loads(response.body)["error"]
    assert shop.app.containers[0].state.value == "running"


# --- who may read -------------------------------------------------------------------------------

OPEN = ("health", "info", "metrics", "prometheus")
CLOSED = ("listeners", "listeners/bill", "schedules", "changes", "lateness", "conditions", "configprops")


@pytest.mark.parametrize("path", CLOSED)
def test_what_tells_the_configuration_needs_the_token(shop: Shop, path: str) -> None:
    """Every local user can connect to a loopback port."""
    without = shop.answer("GET", f"/{path}", token="")
    wrong = shop.answer("HEAD", f"/{path}", token="Bearer wrong")

    assert (without[0], wrong[0]) == (401, 401)
    assert "needs the header 'Authorization: Bearer <mqtemplate.management.token>'" in without[1]["error"]
    assert shop.answer("GET", f"/{path}")[0] == 200


def test_probes_and_scrapers_need_no_token(shop: Shop) -> None:
    assert [respond(shop.actuator, "GET", f"/{path}").status for path in OPEN] == [200] * 4


def test_without_a_token_what_needs_it_is_off() -> None:
    keys = {key: value for key, value in KEYS.items() if not key.endswith("token")}
    with MQApplication(bill, settings=keys, clock=VirtualClock()) as app:
        answers = [respond(app.get(Actuator), "GET", f"/{path}", BEARER) for path in CLOSED]

        assert {answer.status for answer in answers} == {403}
        assert b"reading configprops is off; set mqtemplate.management.token, and send it" in answers[-1].body


def test_the_open_endpoints_can_be_chosen() -> None:
    keys = KEYS | {"mqtemplate.management.open-endpoints": "health"}
    with MQApplication(bill, settings=keys, clock=VirtualClock()) as app:
        found = {path: respond(app.get(Actuator), "GET", f"/{path}").status for path in OPEN}

    assert found == {"health": 200, "info": 401, "metrics": 401, "prometheus": 401}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (None, 200),
        ("127.0.0.1:9090", 200),
        ("[::1]:9090", 200),
        ("10.1.2.3:9090", 200),
        ("shop:9090", 200),
        ("shop.default.svc", 200),
        ("shop.default.svc.cluster.local:9090", 200),
        ("host.docker.internal", 200),
        ("shop.example.com", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example:9090", 421),
        ("a b", 421),
        ("", 421),
    ],
)
def test_a_public_name_is_allowed_for_the_health_only(shop: Shop, host: str | None, status: int) -> None:
    """The page of another site can point its own name to this address (DNS rebinding), but only a public name."""
    for path in ("info", "metrics", "configprops", ""):
        answer = respond(shop.actuator, "GET", f"/{path}", BEARER, host=host)
        assert answer.status == status, path
    change = respond(shop.actuator, "POST", "/listeners/bill", BEARER, b'{"action": "resume"}', host=host)

    assert change.status == status
    assert respond(shop.actuator, "GET", "/health/liveness", host=host).status == 200
    if status == 421:
        assert b"name it in mqtemplate.management.allowed-hosts" in change.body


def test_a_public_name_can_be_allowed() -> None:
    keys = KEYS | {"mqtemplate.management.allowed-hosts": "Shop.example.com"}
    with MQApplication(bill, settings=keys, clock=VirtualClock()) as app:
        actuator = app.get(Actuator)

        assert respond(actuator, "GET", "/info", host="shop.example.com:443").status == 200
        assert respond(actuator, "GET", "/info", host="other.example.com").status == 421


def test_wrong_tokens_are_limited_and_the_right_one_always_passes(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    def status(token: str, remote: str = "10.0.0.7") -> int:
        return respond(shop.actuator, "GET", "/configprops", f"Bearer {token}", remote=remote).status

    statuses = [status(f"guess {number}") for number in range(20)]
    right, elsewhere = status(TOKEN), status("guess", "10.0.0.8")

    assert statuses == [401] * 10 + [429] * 10
    assert (right, elsewhere) == (200, 401)
    assert caplog.text.count("management.token_refused") == 11
    assert "guess" not in caplog.text


@pytest.mark.parametrize("token", ["t-1", "a" * 30, "line\n0123456789abcdef", "ä0123456789abcdefgh"])
def test_a_token_that_can_be_guessed_or_not_sent_is_refused_at_the_start(token: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mqtemplate\.management\.token.* must ") as refused:
        load_settings(None, (), {}, KEYS | {"mqtemplate.management.token": token})
    with pytest.raises(ConfigurationError, match=r"mqtemplate\.management\.token must "):
        Actuator(ActuatorSources(health=HealthChecks({})), token=token)

    assert token not in str(refused.value)


# --- over HTTP ----------------------------------------------------------------------------------


def fetch(url: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, {"Authorization": BEARER})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read()


@pytest.fixture
def served(shop: Shop) -> Iterator[str]:
    server = ManagementServer(shop.actuator, 0)
    server.start()
    yield f"http://{server.address}/actuator"
    server.stop()


def test_the_management_port_serves_documents_and_takes_changes(shop: Shop, served: str) -> None:
    assert json.loads(fetch(f"{served}/health")[1])["status"] == "UP"
    assert fetch(served)[0] == 200
    assert fetch(f"{served}/metrics/mqtemplate.store.appended?tag=a:b")[0] == 404
    status, body = fetch(f"{served}/listeners/bill", b'{"action": "pause"}')
    assert (status, json.loads(body)["state"]) == (200, "paused")
    assert fetch(f"{served}/listeners/bill", b"x" * 70_000)[0] == 413
    assert fetch(served.replace("/actuator", "/"))[0] == 404


def test_a_port_in_use_is_an_error_that_names_it(shop: Shop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} cannot be used: .*choose another port"):
            ManagementServer(shop.actuator, port).start()


def test_clients_that_send_nothing_do_not_keep_out_a_probe(served: str) -> None:
    """All places are taken by connections that never finish a request; the oldest of them is closed."""
    address = ("127.0.0.1", int(served.split(":")[2].split("/", maxsplit=1)[0]))
    held = [socket.create_connection(address, timeout=30) for _ in range(40)]
    try:
        for each in held:
            with suppress(OSError):
                each.sendall(b"GET /actuator/health HTTP/1.1\r\nX-Drip: ")
        assert fetch(f"{served}/health/liveness")[0] == 200
        assert held[0].recv(1) == b""
    finally:
        for each in held:
            each.close()


def test_a_wsgi_framework_mounts_it(shop: Shop) -> None:
    app = wsgi_app(shop.actuator)
    answers: list[str] = []

    def call(method: str, path: str, body: bytes = b"", length: int | None = None) -> bytes:
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method, "PATH_INFO": path, "wsgi.input": io.BytesIO(body),
            "CONTENT_LENGTH": str(len(body) if length is None else length), "HTTP_AUTHORIZATION": BEARER,
        }  # fmt: skip
        setup_testing_defaults(environ)
        return b"".join(app(environ, lambda status, headers: answers.append(status)))

    assert json.loads(call("GET", "/actuator/health"))["status"] == "UP"
    assert json.loads(call("GET", "/health"))["status"] == "UP"
    assert json.loads(call("POST", "/listeners/bill", b'{"action": "pause"}'))["state"] == "paused"
    assert call("HEAD", "/health") == b""
    call("POST", "/listeners/bill", b"", 100_000)
    assert answers == ["200 OK"] * 4 + [f"413 {HTTPStatus(413).phrase}"]  # it depends on the version of Python


def test_an_asgi_framework_mounts_it(shop: Shop) -> None:
    sent: list[dict[str, Any]] = []

    async def call(method: str, path: str, body: bytes = b"", **scope: object) -> None:
        chunks = [{"body": body[:5], "more_body": True}, {"body": body[5:]}]

        async def receive() -> dict[str, Any]:
            return chunks.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"Authorization", BEARER.encode())]
        await asgi_app(shop.actuator)(
            {"type": "http", "method": method, "path": path, "headers": headers, **scope}, receive, send
        )

    asyncio.run(call("GET", "/actuator/health", root_path="/actuator"))
    asyncio.run(call("POST", "/listeners/bill", b'{"action": "pause"}', client=("10.0.0.7", 1)))
    asyncio.run(call("POST", "/listeners/bill", b"x" * 70_000))

    assert [message["status"] for message in sent[::2]] == [200, 200, 413]
    assert json.loads(sent[1]["body"])["status"] == "UP"
    assert json.loads(sent[3]["body"])["state"] == "paused"


# --- in an application --------------------------------------------------------------------------


@pytest.mark.feature("14.3")
def test_an_application_serves_its_actuator_on_the_management_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with MQApplication(bill, settings=KEYS | {"mqtemplate.management.port": port}) as app:
        app.template.sync_send("orders", "x")
        assert json.loads(fetch(f"http://127.0.0.1:{port}/actuator/health/readiness")[1])["status"] == "UP"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/actuator", timeout=5)


def test_nothing_is_observed_unless_it_is_enabled() -> None:
    with MQApplication(bill, settings={"rocketmq.name-server": "embedded:memory"}, clock=VirtualClock()) as app:
        broker = app.broker
        assert isinstance(broker, EmbeddedBroker)
        app.template.sync_send("orders", "x")
        Harness(app).advance("1s")

        assert [name for name in broker.metrics.snapshot() if name.startswith(("client.", "listener."))] == []
        outcome = next(each for each in app.context.conditions if each.starter == "observability")
        assert outcome.reason == "mqtemplate.management.enabled is not true"
        assert type(app.context.built_in.observation()) is Observation  # it observes nothing


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"port": 9090}, "'enabled' is not true"),
        ({"enabled": True, "address": "localhost"}, "must be a numeric address"),
        ({"enabled": True, "endpoints": "health,beans"}, "there is no beans"),
        ({"enabled": True, "tracing.sampling-probability": 2}, "less than or equal to 1"),
        ({"enabled": True, "metrics.max-series": 1}, "greater than or equal to 10"),
        ({"enabled": True, "lateness.threshold-ms": "soon"}, "must be a duration"),
    ],
)
def test_invalid_settings_are_refused(keys: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_settings(None, (), {}, {f"mqtemplate.management.{key}": value for key, value in keys.items()})


def test_the_starter_is_installed() -> None:
    from importlib.metadata import entry_points

    [found] = [each for each in entry_points(group="mqtemplate.autoconfigure") if each.name == "observability"]
    assert issubclass(found.load(), AutoConfiguration)


def test_an_unknown_endpoint_is_refused_in_code(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="there is no endpoint 'beans'; there is: health, info"):
        Actuator(shop.actuator.sources, endpoints=["beans"])


def test_a_path_is_decoded_once(shop: Shop) -> None:
    """By the server, or by the caller in this process: an id may have a percent sign."""
    assert respond(shop.actuator, "GET", "/listeners/b%69ll", BEARER).status == 404
    assert LocalActuator(shop.actuator, TOKEN).get("listeners/b%69ll")["id"] == "bill"
