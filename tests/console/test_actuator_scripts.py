"""Golden scripts of an actuator: documents, and changes of listeners and schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate import MQApplication, VirtualClock, message_listener
from mqtemplate.console import Actuator
from mqtemplate.scheduling import scheduled
from mqtemplate.testing import Harness
from tests.console.actuators import BEARER, KEYS, respond
from tests.golden import check_script, scripts_in

pytestmark = [pytest.mark.feature("14.1"), pytest.mark.feature("14.3")]

runs: list[str] = []


@message_listener(topic="orders", consumer_group="billing", id="bill")
def bill(order: str) -> None: ...


@scheduled(every="1h", name="report")
def report() -> None:
    runs.append("report")


class Requests:
    """The commands of a script: requests to the actuator of an application, on a virtual clock."""

    def __init__(self, app: MQApplication, caplog: pytest.LogCaptureFixture) -> None:
        self._app = app
        self._harness = Harness(app)
        self._caplog = caplog
        self._handled = 0

    def get(self, path: str, *fields: str, tag: str | None = None) -> list[str]:
        """Read a document: its status, and fields such as ``a/0/b``; without fields all of it."""
        return self._answer("GET", path, fields, query=[] if tag is None else [("tag", tag)])

    def post(self, path: str, change: str, *fields: str, token: str = BEARER) -> list[str]:
        """Send a change: the status, and fields of the document after it."""
        queues = [queue.queue_id for queue, at in self._listener.positions().items() if at]
        return self._answer("POST", path, fields, token, change.replace("@queue", f"{queues[0] if queues else ''}"))

    def delete(self, path: str, *fields: str) -> list[str]:
        return self._answer("DELETE", path, fields)

    def _answer(
        self,
        method: str,
        path: str,
        fields: tuple[str, ...],
        token: str = BEARER,
        change: str = "",
        query: list[tuple[str, str]] | None = None,
    ) -> list[str]:
        response = respond(self._app.get(Actuator), method, path, token, change.encode(), query)
        assert isinstance(response.body, bytes)
        document = json.loads(response.body)
        found = [_field(document, field) for field in fields] or [document]
        return [
            f"{response.status} {' | '.join(each if isinstance(each, str) else json.dumps(each) for each in found)}"
        ]

    @property
    def _listener(self) -> Any:
        return next(each for each in self._app.containers if each.endpoint.id == "bill")

    def send(self, topic: str, count: str, delay: str | None = None) -> None:
        for _ in range(int(count)):
            options: dict[str, Any] = {} if delay is None else {"delay": delay}
            self._app.template.sync_send(topic, "x", hash_key="same", **options)

    def advance(self, span: str) -> None:
        self._harness.advance(span)

    def not_ready(self) -> None:
        self._app.is_ready.clear()

    def stop_listener(self) -> None:
        self._listener.stop()

    def handled(self) -> list[str]:
        """Return the number of messages that were handled since the last call."""
        before, self._handled = self._handled, len(self._harness.assert_received("bill"))
        return [str(self._handled - before)]

    def runs(self) -> list[str]:
        """Return the number of runs of the schedule."""
        return [str(len(runs))]

    def events(self) -> list[str]:
        """Return the log events of changes since the last call."""
        found = [str(each.msg) for each in self._caplog.records if ".change" in str(each.msg)]
        self._caplog.clear()
        return found


def _field(document: Any, field: str) -> Any:
    for name in field.split("/"):
        document = document[int(name) if isinstance(document, list) else name]
    return document


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Iterator[Requests]:
    runs.clear()
    with MQApplication(bill, report, settings=KEYS, clock=VirtualClock()) as app:
        yield Requests(app, caplog)


@pytest.mark.parametrize("script", scripts_in(Path(__file__).parent / "scripts"), ids=lambda path: path.stem)
def test_the_actuator_answers_what_the_script_says(requests: Requests, script: Path) -> None:
    check_script(script, requests)
