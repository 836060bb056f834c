"""A dashboard without sockets: an application and its broker on a virtual clock, and requests as calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from mqtemplate import MQApplication, message_listener
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.console import Access, Actuator, Dashboard, OpenSource, dashboard_audit
from mqtemplate.console.client import LocalActuator
from mqtemplate.console.site import FORM_END
from mqtemplate.http.exchange import HttpRequest, HttpResponse
from mqtemplate.message import Message, Property
from mqtemplate.operations import BrokerAccess
from mqtemplate.scheduling import scheduled
from mqtemplate.testing import Harness

TOKEN = "open-sesame-0123456789"
MANAGEMENT_TOKEN = "management-0123456789"
HOST = "127.0.0.1:8090"
KEYS = {
    "rocketmq.name-server": "embedded:memory",
    "mqtemplate.management.enabled": True,
    "mqtemplate.management.token": MANAGEMENT_TOKEN,
    "mqtemplate.management.name": "shop",
}
HOUR_MS = 3_600_000
COMPLETE = dict([FORM_END])
SCRIPT = "<script>alert(1)</script>"


class CardRefusedError(Exception):
    """A failure of the handler `bill`."""


@message_listener(topic="orders", consumer_group="billing", id="bill", max_reconsume_times=1)
def bill(order: str) -> None:
    if "refused" in order:
        raise CardRefusedError(f"card of {order}")


@scheduled(every="1d", name="report")
def report() -> None: ...


@dataclass
class Answer:
    """A response, with its text as a reader sees it."""

    response: HttpResponse

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def html(self) -> str:
        assert isinstance(self.response.body, bytes)
        return self.response.body.decode()

    @property
    def text(self) -> str:
        """The text without tags, each run of spaces as one."""
        html = self.html.replace("<wbr>", "")
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split()).replace(" ,", ",")

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.response.all_headers)

    def form(self, action: str, button: str | None = None) -> dict[str, list[str]]:
        """Return the fields of the form that posts to *action*, as a browser sends them."""
        forms = re.findall(r"<form[^>]*action=\"([^\"]*)\"[^>]*>(.*?)</form>", self.html, re.DOTALL)
        found = [body for address, body in forms if address.endswith(action) and (button is None or button in body)]
        assert found, f"no form for {action} with {button}"
        fields: dict[str, list[str]] = {}
        for attributes in re.findall(r"<input([^>]*)>", found[0]):
            name = re.search(r'name="([^"]*)"', attributes)
            value = re.search(r'value="([^"]*)"', attributes)
            if name is not None and 'type="checkbox"' not in attributes:
                fields.setdefault(unescape(name[1]), []).append(unescape(value[1]) if value else "")
        return fields

    def link(self, text: str) -> str:
        """Return the address of the link with this text."""
        [found] = [
            unescape(address)
            for address, inner in re.findall(r'<a[^>]*href="([^"]*)"[^>]*>(.*?)</a>', self.html, re.DOTALL)
            if text in re.sub(r"<[^>]+>", "", inner)
        ][:1]
        return found


@dataclass
class Shop:
    """An application with listeners, its broker, and its dashboard."""

    app: MQApplication
    broker: EmbeddedBroker
    dashboard: Dashboard
    audit_path: Path
    harness: Harness = None  # type: ignore[assignment]  # a dashboard without an application has none
    cookies: dict[str, str] = field(default_factory=dict)
    remote: str = "10.0.0.7"

    def send(self, topic: str, body: bytes = b"x", key: str = "", tag: str = "", **properties: str) -> Any:
        given = {Property.KEYS: key, Property.TAGS: tag} | properties
        return self.broker.sends.send(Message(topic, body, {name: value for name, value in given.items() if value}))

    def send_due(
        self,
        hours: float,
        key: str = "",
        topic: str = "reminders",
        tag: str = "",
        body: bytes = b"x",
        **properties: str,
    ) -> Any:
        due = {Property.TIMER_DELAY_MS: str(round(hours * HOUR_MS))} | properties
        return self.send(topic, body, key, tag, **due)

    def pending_keys(self) -> list[str | None]:
        from mqtemplate.pending import PendingQuery

        return [each.keys for each in self.broker.delayed.pending(PendingQuery(), 1_000).messages]

    # --- requests ------------------------------------------------------------------------------

    def request(self, method: str, address: str, body: bytes = b"", **headers: str) -> Answer:
        parts = urlsplit(address)
        given = {"host": HOST, "cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        request = HttpRequest(
            method=method,
            path=parts.path,
            query=parse_qsl(parts.query, keep_blank_values=True),
            headers=given | {name.replace("_", "-"): value for name, value in headers.items()},
            body=body,
            remote=self.remote,
        )
        answer = Answer(self.dashboard.handle(request))
        if cookie := answer.headers.get("Set-Cookie"):
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer

    def get(self, path: str, **query: object) -> Answer:
        return self.request("GET", f"{path}?{urlencode(query)}" if query else path)

    def page(self, path: str, **query: object) -> Answer:
        answer = self.get(path, **query)
        assert answer.status == 200, answer.text
        return answer

    def post(self, path: str, fields: Mapping[str, object] | Sequence[tuple[str, str]], **headers: str) -> Answer:
        body = urlencode(fields, doseq=True).encode()
        content_type = {"content_type": "application/x-www-form-urlencoded"}
        return self.request("POST", path, body, **content_type | headers)

    def sign_in(self) -> None:
        assert self.get("/sign-in", token=TOKEN).status == 303

    def form_token(self) -> str:
        """Return the token of the forms of this session."""
        return self.page("/levels").form("/sign-in")["form_token"][0]

    def change(self, path: str, fields: Mapping[str, object]) -> Answer:
        """Send a change, and follow its redirect."""
        answer = self.post(path, fields)
        assert answer.status == 303, answer.text
        return self.get(answer.headers["Location"])


@contextmanager
def open_shop(
    folder: Path,
    *,
    allow_changes: bool = True,
    components: Sequence[Any] = (bill,),
    store: Path | str = "memory",
    **access: Any,
) -> Iterator[Shop]:
    """Run the application on a virtual clock, with its messages in memory or in a store directory."""
    clock = VirtualClock()
    keys = KEYS | {"rocketmq.name-server": f"embedded:{store}"}
    with MQApplication(*components, settings=keys, clock=clock) as app:
        broker = app.broker
        assert isinstance(broker, EmbeddedBroker)
        audit_path = folder / "audit" / "changes.jsonl"
        dashboard = Dashboard(
            OpenSource(BrokerAccess(broker), "shop"),
            LocalActuator(app.get(Actuator), MANAGEMENT_TOKEN),
            access=Access(TOKEN, allow_changes=allow_changes, clock=clock, **access),
            audit=dashboard_audit(audit_path, clock),
            clock=clock,
        )
        yield Shop(app, broker, dashboard, audit_path, Harness(app, raise_handler_errors=False))
        dashboard.close()
