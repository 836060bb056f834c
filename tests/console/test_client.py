"""The client of an actuator of another process: where it sends its token, and what it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mqtemplate.console.client import ActuatorClient
from mqtemplate.errors import BrokerError, ConfigurationError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.http import HttpRequest, HttpResponse
from mqtemplate.http.server import HttpServer

TOKEN = "t-0123456789abcde"


class Site:
    """A server that notes its requests."""

    def __init__(self, answer: Callable[[HttpRequest], HttpResponse]) -> None:
        self.requests: list[HttpRequest] = []
        self._answer = answer
        log = get_logger("mqtemplate.tests")
        self.server = HttpServer(
            self._handle, "127.0.0.1", 0, thread_name="t", events=log, event="t", max_connections=4, max_body_bytes=1000
        )

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    def _handle(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(request)
        return self._answer(request)


@contextmanager
def site(answer: Callable[[HttpRequest], HttpResponse]) -> Iterator[Site]:
    found = Site(answer)
    found.server.start()
    try:
        yield found
    finally:
        found.server.stop()


def document(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, json.dumps({"listeners": []}).encode(), "application/json")


def test_the_token_is_sent_with_reads_and_changes() -> None:
    with site(document) as actuator:
        client = ActuatorClient(actuator.url, TOKEN)
        client.get("listeners")
        client.post("listeners/bill", {"action": "pause"})

    assert [each.headers["authorization"] for each in actuator.requests] == [f"Bearer {TOKEN}"] * 2
    assert [each.path for each in actuator.requests] == ["/actuator/listeners", "/actuator/listeners/bill"]
    assert json.loads(actuator.requests[1].body) == {"action": "pause"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """The token would be sent to an address that the server chooses."""
    with site(document) as other:

        def redirect(request: HttpRequest) -> HttpResponse:
            return HttpResponse(status, b"", headers=(("Location", f"{other.url}{request.path}"),))

        with site(redirect) as actuator:
            client = ActuatorClient(actuator.url, TOKEN)
            for call in (lambda: client.get("listeners"), lambda: client.post("listeners/bill", {"action": "pause"})):
                with pytest.raises(
                    BrokerError, match=r"redirects to 'http://.*', which is not followed.*give the addr"
                ):
                    call()

    assert other.requests == []


def test_a_proxy_of_the_environment_does_not_get_requests_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with site(document) as proxy, site(document) as actuator:
        monkeypatch.setenv("http_proxy", proxy.url)
        ActuatorClient(actuator.url, TOKEN).get("listeners")

    assert (len(proxy.requests), len(actuator.requests)) == (0, 1)


def test_a_token_for_another_machine_without_encryption_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    ActuatorClient("http://127.0.0.1:9", TOKEN)
    ActuatorClient("http://[::1]:9", TOKEN)
    ActuatorClient("http://localhost:9", TOKEN)
    ActuatorClient("https://shop.example.com", TOKEN)
    ActuatorClient("http://shop.example.com")
    quiet = caplog.text
    ActuatorClient("http://shop.example.com", TOKEN)

    assert quiet == ""
    assert "actuator.token_unencrypted address=http://shop.example.com/actuator" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://bob:hunter2@shop:9090",
        "file:///etc/passwd",
        "ftp://shop",
        "shop:9090",
        "http://",
        "http://shop:99999",
        "http://shop?password=hunter2",
        "http://[::1",
    ],
)
def test_an_url_that_is_no_actuator_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"the actuator must be http://host:port, without a user, got"
    ) as refused:
        ActuatorClient(url, TOKEN)

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"[" * 100_000, "nested too deeply"), (b"<html>", "Expecting value"), (b"\xff\xff\xff", "invalid start byte")],
)
def test_a_document_that_cannot_be_read_is_an_error(body: bytes, text: str) -> None:
    with (
        site(lambda _: HttpResponse(200, body)) as actuator,
        pytest.raises(BrokerError, match=f"no actuator answers at .*{text}"),
    ):
        ActuatorClient(actuator.url).get("listeners")


def test_a_document_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtemplate.console.client._MAX_DOCUMENT_BYTES", 1 << 20)

    def endless(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, iter(lambda: b"a" * 65_536, b""))

    with site(endless) as actuator, pytest.raises(BrokerError, match="has more than 1 MiB, or takes longer than 30 s"):
        ActuatorClient(actuator.url).get("listeners")


def test_errors_of_the_actuator_keep_their_texts() -> None:
    def refuse(request: HttpRequest) -> HttpResponse:
        status = 404 if request.path.endswith("nothing") else 401
        return HttpResponse(status, json.dumps({"error": f"the text of {status}"}).encode())

    with site(refuse) as actuator:
        with pytest.raises(UnknownNameError, match="the text of 404"):
            ActuatorClient(actuator.url).get("nothing")
        with pytest.raises(BrokerError, match="the text of 401"):
            ActuatorClient(actuator.url).get("listeners")
