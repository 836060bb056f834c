"""Golden scripts: the options of a send and the message that the broker gets; and sessions with a template."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from mqtemplate import (
    EmbeddedBroker,
    Message,
    MessageExt,
    MessageModel,
    Outgoing,
    RocketMQTemplate,
    SelectorType,
    TransactionState,
    VirtualClock,
)
from mqtemplate.errors import MessageDroppedError, MessageError, MQTemplateError
from mqtemplate.message import MessageQueue
from mqtemplate.testing import Harness, RecordingTemplate, messages_in
from tests.golden import check_script, scripts_in
from tests.hostile import FIRST, ZONES, Silent, Zone
from tests.template.ledger import Ledger


class Order(BaseModel):
    id: int


NOW_MS = VirtualClock().now_ms()
CLASSES = (
    *(Ledger, Message, MessageExt, MessageModel, MessageQueue, Order, SelectorType, Silent, Zone, datetime, timedelta),
)
NAMES: dict[str, Any] = {each.__name__: each for each in CLASSES} | {
    **TransactionState.__members__,
    "FIRST": FIRST,
    "NOW": datetime.fromtimestamp(NOW_MS / 1_000, UTC),
    "NOW_MS": NOW_MS,
    "ZONES": ZONES,
    "messages_in": messages_in,
    "utc_minus_7": timezone(timedelta(hours=-7)),
}
SCRIPTS = scripts_in(Path(__file__).parent / "scripts")
SESSIONS = scripts_in(Path(__file__).parent / "exchanges")


class Catching:
    """Middleware that catches each message and sends nothing."""

    def __init__(self) -> None:
        self.caught: list[Message] = []

    def send(self, outgoing: Outgoing) -> Generator[Outgoing, object, None]:
        self.caught.append(outgoing.message)
        yield from ()


class Commands:
    """``send``: a destination, and options as expressions of Python. It prints properties and flag, or the error."""

    def __init__(self, template: RocketMQTemplate, caught: list[Message]) -> None:
        self._template = template
        self._caught = caught

    def send(self, destination: str, payload: str = 'b"body"', **options: str) -> list[str]:
        given = {name: _value(text) for name, text in options.items()}
        try:
            self._template.sync_send(destination, _value(payload), **given)
        except MessageDroppedError:
            message = self._caught.pop()
            flag = f" flag={message.flag}" if message.flag else ""
            return [f"{dict(sorted(message.properties.items()))}{flag}"]
        except MessageError as error:
            return [f"{type(error).__name__}: {error}"]
        raise AssertionError("the middleware let the message pass")


def _value(text: str) -> object:
    return eval(text, dict(NAMES))


@pytest.mark.feature("A18", "B12", "B13", "G2", "G4", "G9")
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_the_options_of_a_send_do_as_the_script_says(script: Path, mqtemplate_broker: EmbeddedBroker) -> None:
    catching = Catching()

    check_script(script, Commands(RocketMQTemplate(mqtemplate_broker, middlewares=[catching]), catching.caught))


class Session:
    """Lines of Python over a template ``t``, its ``broker`` in memory and a ``harness``; values are shown, not None."""

    def __init__(self, undo: contextlib.ExitStack, logs: list[Any]) -> None:
        self._undo = undo
        self._logs = logs
        self._names = dict(NAMES)

    def template(self, **settings: str) -> None:
        """Open a broker and a template with a consumer and a producer group; the ones before are closed."""
        self._undo.close()
        self._broker = self._undo.enter_context(EmbeddedBroker(None, clock=VirtualClock()))
        given = {name: _value(text) for name, text in settings.items()}
        self._names = NAMES | {"broker": self._broker, "harness": Harness(self._broker), "another": self._another}
        self._names["t"] = self._another(**given)
        self._logs.clear()

    def _another(self, **settings: Any) -> RecordingTemplate:
        groups = {"producer_group": "shop", "consumer_group": "billing", "consumer_topic": "orders"}
        return self._undo.enter_context(RecordingTemplate(self._broker, **groups | settings))

    def show(self, text: str) -> Iterator[str]:
        """Run lines, and print what they return or raise."""
        for line in text.splitlines():
            try:
                exec(compile(f"shown = {line}", "script", "exec") if _is_expression(line) else line, self._names)
            except (MQTemplateError, TypeError, KeyboardInterrupt) as error:
                yield f"{type(error).__name__}: {error}"
            else:
                if _is_expression(line) and self._names["shown"] is not None:
                    yield f"{self._names['shown']!r}"

    def stored(self, topic: str, *fields: str) -> list[str]:
        """Print the bodies of a topic, with these fields of each message."""
        messages = messages_in(self._broker, topic)
        return [
            " ".join([message.body.decode(), *(f"{name}={getattr(message, name)}" for name in fields)])
            for message in messages
        ] or ["nothing"]

    def logs(self, *fields: str) -> list[str]:
        """Print the errors in the log, with these fields."""
        events = [each for each in self._logs if each["log_level"] == "error"]
        return [
            " ".join([each["event"], *(f"{name}={each[name]}" for name in fields if name in each)]) for each in events
        ]


def _is_expression(line: str) -> bool:
    try:
        compile(line, "script", "eval")
    except SyntaxError:
        return False
    return True


@pytest.mark.feature("A3", "A5", "A6", "A8", "A17", "A19", "C1", "G1", "G9", "U9")
@pytest.mark.parametrize("script", SESSIONS, ids=[path.stem for path in SESSIONS])
def test_a_template_does_as_the_script_says(script: Path) -> None:
    with contextlib.ExitStack() as undo, capture_logs() as logs:
        check_script(script, Session(undo, logs))
